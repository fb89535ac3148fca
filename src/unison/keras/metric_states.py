"""The way in which a step updates the states of metrics: by adding, as Keras assumes, or otherwise.

Each replica updates its own copy of a metric's state, and reading sums the copies, unless the
metric has created it with another `aggregation`. This is right for states to which every batch adds
something. Keras' metrics only have such states; a custom metric may keep a maximum, or
the value of the last batch. The traced step shows which.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from unison.jaxprs import inlined_body


class Update(enum.Enum):
    """The dependence of a new state on the old one.

    Attributes:
        NONE: It equals the old one.
        SUM: It is the old one plus something that does not depend on it.
        MAX: It is the maximum of the old one and something that does not depend on it.
        MIN: The minimum.
        OTHER: It depends in another way, or does not depend on the old one.
    """

    NONE = "none"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    OTHER = "other"


#: The old states on which a value depends, by their indices, and the kind of dependence.
_Origins = Mapping[int, Update]
_INDEPENDENT: _Origins = {}

#: The operations that only change the form of a value.
_FORMS = frozenset("broadcast_in_dim convert_element_type copy reshape squeeze".split())

_OPERATIONS = {
    "add": Update.SUM,
    "add_any": Update.SUM,
    "sub": Update.SUM,
    "scatter-add": Update.SUM,
    "max": Update.MAX,
    "min": Update.MIN,
}


def updates_of(traced: jex.Jaxpr, states: Mapping[int, int]) -> dict[int, Update]:
    """Returns the kinds of updates in a traced step.

    Args:
        traced: The step.
        states: The indices of the outputs with the new states, by those of the inputs with the old.

    Returns:
        The updates, by the indices of the inputs.
    """
    inputs = [
        {index: Update.NONE} if index in states else _INDEPENDENT
        for index in range(len(traced.invars))
    ]
    outputs = _follow(traced, inputs)
    return {
        old: origins[old] if set(origins := outputs[new]) == {old} else Update.OTHER
        for old, new in states.items()
    }


def _follow(traced: jex.Jaxpr, inputs: Sequence[_Origins]) -> list[_Origins]:
    """Returns the origins of a function's outputs, given those of its inputs."""
    known: dict[Any, _Origins] = dict(zip(traced.invars, inputs, strict=True))

    def origins_of(atom: Any) -> _Origins:
        return _INDEPENDENT if isinstance(atom, jex.Literal) else known.get(atom, _INDEPENDENT)

    for equation in traced.eqns:
        operands = [origins_of(atom) for atom in equation.invars]
        if any(operands):
            known.update(zip(equation.outvars, _of_results(equation, operands), strict=True))
    return [origins_of(atom) for atom in traced.outvars]


def _of_results(equation: jex.JaxprEqn, operands: list[_Origins]) -> list[_Origins]:
    name = equation.primitive.name
    body = inlined_body(equation)
    if body is not None:
        return _follow(body.jaxpr, operands)
    if name in _FORMS:
        return [operands[0]]
    if name == "cond" and not operands[0]:
        branches = [_follow(b.jaxpr, operands[1:]) for b in equation.params["branches"]]
        return [_one_of(results) for results in zip(*branches, strict=True)]
    if name == "select_n" and not operands[0]:
        return [_one_of(operands[1:])]
    if name in _OPERATIONS:
        first, *others = operands
        is_commutative = name in ("add", "add_any", "max", "min")
        if is_commutative and not first:
            first, *others = reversed(operands)
        if first and not any(others):
            return [{i: _after(update, _OPERATIONS[name]) for i, update in first.items()}]
    concerned = set().union(*operands)
    return [dict.fromkeys(concerned, Update.OTHER) for _ in equation.outvars]


def _after(first: Update, second: Update) -> Update:
    return second if first in (Update.NONE, second) else Update.OTHER


def _one_of(choices: Sequence[_Origins]) -> _Origins:
    """Returns the origins of the result of selecting one of several values."""
    concerned = set().union(*choices)
    if any(set(choice) != concerned for choice in choices):
        return dict.fromkeys(concerned, Update.OTHER)
    return {index: _common([choice[index] for choice in choices]) for index in concerned}


def _common(updates: Sequence[Update]) -> Update:
    found = set(updates) - {Update.NONE}
    if not found:
        return Update.NONE
    return found.pop() if len(found) == 1 else Update.OTHER
