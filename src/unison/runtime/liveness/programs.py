"""Counting and comparison of the programs that all workers run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core as jex

from unison.jaxprs import is_collective
from unison.runtime.liveness import watcher
from unison.runtime.liveness.failure_detector import Operation

#: The prefix of the calls of `unison.runtime.shared_memory`, which replace collectives.
_SHARED_MEMORY = "unison_exchange"

#: The maximum length of a program's description in messages; the rest is only compared.
_MOST_SHOWN = 1500


def watched(compiled: Any, name: str) -> Callable[..., Any]:
    """Wraps a jitted program of all processes, so that its runs are counted and compared.

    A program without communication between replicas is neither: one worker may run it alone.

    Args:
        compiled: The result of `jax.jit`.
        name: Its name in messages.
    """
    programs: dict[Any, _Program] = {}

    def call(*args: Any) -> Any:
        watching = watcher.current()
        if watching is None:
            return compiled(*args)
        # Programs with many arguments, in lists, are created for one signature.
        is_general = all(isinstance(argument, jax.Array) for argument in args)
        key = tuple((array.shape, array.dtype) for array in args) if is_general else None
        program = programs.get(key)
        is_new = program is None
        if program is None:
            program = programs[key] = _Program(compiled, name, args)
        if not program.communicates:
            return compiled(*args)
        watching.begin(program.operation, is_new)
        return watching.launch(compiled, args, program.smallest)

    return call


class _Program:
    """A program for one signature.

    Attributes:
        communicates: Whether the replicas communicate in it.
        operation: Its description.
        smallest: The index of the smallest leaf of its outputs, in bytes.
    """

    def __init__(self, compiled: Any, name: str, args: Any):
        jaxpr = compiled.trace(*args).jaxpr
        collectives = list(_collectives(jaxpr.jaxpr))
        self.communicates = bool(collectives)
        inputs = _counted(aval.str_short() for aval in jaxpr.in_avals)
        outputs = _counted(aval.str_short() for aval in jaxpr.out_avals)
        detail = f"inputs {inputs}; collectives {_counted(collectives)}; outputs {outputs}"
        if len(detail) > _MOST_SHOWN:
            detail = f"{detail[:_MOST_SHOWN]}... {Operation(name, detail).mark}"
        self.operation = Operation(name, detail)
        sizes = [aval.size * aval.dtype.itemsize for aval in jaxpr.out_avals]
        self.smallest = sizes.index(min(sizes)) if sizes else 0


def _counted(words: Iterable[str]) -> str:
    """Lists words, with runs of equal words shown once with their count."""
    groups: list[tuple[str, int]] = []
    for word in words:
        if groups and groups[-1][0] == word:
            groups[-1] = (word, groups[-1][1] + 1)
        else:
            groups.append((word, 1))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in groups)


def _collectives(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yields descriptions of the collective operations, in order, with their operands."""
    for equation in jaxpr.eqns:
        if is_collective(equation):
            taken = "+".join(variable.aval.str_short() for variable in equation.invars)
            yield f"{equation.primitive.name.removesuffix('_invariant')} of {taken}"
        elif str(equation.params.get("target_name", "")).startswith(_SHARED_MEMORY):
            yield str(dict(equation.params["attributes"])["words"])
        for inner in jex.jaxprs_in_params(equation.params):
            yield from _collectives(inner)
