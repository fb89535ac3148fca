"""The programs that all workers run together, as they are counted and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core as jex

from unison.equations import is_collective
from unison.runtime.liveness import watcher
from unison.runtime.liveness.verdict import Operation

#: What the calls of `unison.runtime.shared_memory`, which take a collective's place, are named.
_SHARED_MEMORY = "unison_exchange"

#: More of a program's description is not shown, only compared.
_MOST_SHOWN = 1500


def watched(compiled: Any, name: str) -> Callable[..., Any]:
    """Returns a jitted program of all processes as one that is counted and compared.

    A program in which the replicas do not talk is left alone: one worker may run it by itself.

    Args:
        compiled: What `jax.jit` has returned.
        name: What it is called in messages.
    """
    programs: dict[Any, _Program] = {}

    def call(*args: Any) -> Any:
        watching = watcher.current()
        if watching is None:
            return compiled(*args)
        # Programs of many arguments, in lists, are made for one signature.
        is_general = all(isinstance(argument, jax.Array) for argument in args)
        key = tuple((array.shape, array.dtype) for array in args) if is_general else None
        program = programs.get(key)
        is_new = program is None
        if program is None:
            program = programs[key] = _Program(compiled, name, args)
        if not program.talks:
            return compiled(*args)
        watching.begin(program.operation, is_new)
        return watching.launch(compiled, args, program.smallest)

    return call


class _Program:
    """A program for one signature.

    Attributes:
        talks: Whether the replicas talk in it.
        operation: What it is.
        smallest: Which leaf of its outputs takes the least memory.
    """

    def __init__(self, compiled: Any, name: str, args: Any):
        jaxpr = compiled.trace(*args).jaxpr
        collectives = list(_collectives(jaxpr.jaxpr))
        self.talks = bool(collectives)
        inputs = _counted(aval.str_short() for aval in jaxpr.in_avals)
        outputs = _counted(aval.str_short() for aval in jaxpr.out_avals)
        detail = f"takes {inputs}; talks by {_counted(collectives)}; gives {outputs}"
        if len(detail) > _MOST_SHOWN:
            detail = f"{detail[:_MOST_SHOWN]}... {Operation(name, detail).mark}"
        self.operation = Operation(name, detail)
        sizes = [aval.size * aval.dtype.itemsize for aval in jaxpr.out_avals]
        self.smallest = sizes.index(min(sizes)) if sizes else 0


def _counted(words: Iterable[str]) -> str:
    """Lists words, equal neighbours as one with their number."""
    groups: list[tuple[str, int]] = []
    for word in words:
        if groups and groups[-1][0] == word:
            groups[-1] = (word, groups[-1][1] + 1)
        else:
            groups.append((word, 1))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in groups)


def _collectives(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Names the operations by which replicas talk, in order, with what they take."""
    for equation in jaxpr.eqns:
        if is_collective(equation):
            taken = "+".join(variable.aval.str_short() for variable in equation.invars)
            yield f"{equation.primitive.name.removesuffix('_invariant')} of {taken}"
        elif str(equation.params.get("target_name", "")).startswith(_SHARED_MEMORY):
            yield str(dict(equation.params["attributes"])["words"])
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _collectives(inner)
