"""The functions that a coordinator schedules, and their programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison.conversion import called
from unison.interrupts import signals_held
from unison.parameter_server.calls import RemoteValue
from unison.parameter_server.cells import RemotePlacement
from unison.parameter_server.per_worker import IteratorOfCall, PerWorkerIterator
from unison.parameter_server.programs import (
    BatchSpec,
    ServerProgram,
    Tracer,
    WantsBatchError,
    WorkerProgram,
)
from unison.program.arguments import Static, describe
from unison.program.identity import identity
from unison.runtime.precision import array_type


@dataclasses.dataclass
class ScheduledFunction:
    """A scheduled function, for one structure, shape and dtype of its arguments.

    Attributes:
        call: Calls it with the arrays among its arguments.
        arguments: The shapes and dtypes of these arrays.
        keeps: Objects that must live as long as the function, since its number is looked up by
            identity.
        takes: The number of batches that it takes from each of its iterators, as far as is known.
    """

    call: Callable[[list[Any]], Any]
    arguments: list[Any]
    keeps: Any = None
    takes: dict[int, int] = dataclasses.field(default_factory=dict)


class FunctionTable:
    """Numbers scheduled functions, and creates the programs that workers request.

    Args:
        placement: The placement of the variables.
        scope: Enters the strategy's scope.
        install: Sends a program to the servers that run it.
    """

    def __init__(
        self,
        placement: RemotePlacement,
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
        install: Callable[[ServerProgram], None],
    ):
        self._placement = placement
        self._functions: list[ScheduledFunction] = []
        self._numbers: dict[Any, int] = {}
        self._programs: dict[str, WorkerProgram] = {}
        self._by_number: dict[int, WorkerProgram] = {}
        self._tracing = threading.RLock()
        self._tracer = Tracer(placement, scope, install)

    @property
    def trace_count(self) -> int:
        """The number of programs created so far."""
        return self._tracer.trace_count

    @property
    def programs(self) -> list[WorkerProgram]:
        """All programs."""
        return list(self._programs.values())

    def numbered(self, number: int) -> WorkerProgram:
        """Returns the program with a number."""
        return self._by_number[number]

    def describe(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[int, list[np.ndarray], list[PerWorkerIterator]]:
        """Returns the number of a function for these arguments, and their arrays and iterators."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        iterators: list[PerWorkerIterator] = []
        described_leaves = [_described_leaf(leaf, self._placement, iterators) for leaf in leaves]
        descriptions = tuple(description for description, _ in described_leaves)
        key = (identity(fn), structure, descriptions)
        if key not in self._numbers:

            def call(arrays: list[Any]) -> Any:
                left = iter(arrays)
                filled = [d.value if isinstance(d, Static) else next(left) for d in descriptions]
                own_args, own_kwargs = jax.tree.unflatten(structure, filled)
                return called(fn, *own_args, **own_kwargs)

            arguments = [d.aval(0) for d in descriptions if not isinstance(d, Static)]
            arguments = [array_type(aval.shape, aval.dtype) for aval in arguments]
            with signals_held:
                self._functions.append(ScheduledFunction(call, arguments, keeps=key))
                self._numbers[key] = len(self._functions) - 1
        number = self._numbers[key]
        varying = [
            operand
            for description, operand in described_leaves
            if not isinstance(description, Static)
        ]
        arrays = [
            np.asarray(operand, aval.dtype)
            for operand, aval in zip(varying, self._functions[number].arguments, strict=True)
        ]
        return number, arrays, iterators

    def program(self, function: int, specs: list[Any]) -> WorkerProgram:
        """Returns the program of a function for batches; creates it if it is new."""
        key = json.dumps([function, specs])
        with self._tracing:
            if key not in self._programs:
                batches: dict[int, list[BatchSpec]] = {}
                for iterator, structure, kinds in specs:
                    spec = BatchSpec(
                        structure, tuple((name, tuple(shape)) for name, shape in kinds)
                    )
                    batches.setdefault(iterator, []).append(spec)
                known = self._functions[function]
                if any(n > len(batches.get(own, ())) for own, n in known.takes.items()):
                    raise WantsBatchError(known.takes)
                try:
                    program = self._tracer.make(known.call, known.arguments, batches)
                except WantsBatchError as wants:
                    known.takes = wants.counts
                    raise
                self._programs[key] = program
                self._by_number[program.number] = program
            return self._programs[key]


def _described_leaf(
    leaf: Any, placement: Any, iterators: list[PerWorkerIterator]
) -> tuple[Any, Any]:
    """Returns a leaf's description and its operand; adds a new iterator to `iterators`."""
    if isinstance(leaf, RemoteValue):
        raise ValueError(
            "The result of a scheduled function cannot be the argument of another one: it may "
            "not have been computed yet. Fetch it first: coordinator.fetch(value)."
        )
    if isinstance(leaf, PerWorkerIterator):
        if leaf not in iterators:
            iterators.append(leaf)
        place = iterators.index(leaf)
        return Static((PerWorkerIterator, place), IteratorOfCall(place)), None
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "SU":
        raise TypeError(
            "A scheduled function is a compiled program: an array of text has no place in it. "
            "Pass a str, which becomes a part of the program, or turn text into numbers where "
            f"the dataset is made. Received: an array of dtype {leaf.dtype}."
        )
    return describe(leaf, placement)
