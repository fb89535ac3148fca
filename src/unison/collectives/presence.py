"""Values that some replicas have and others lack, in operations of all replicas.

The result of a function for zero examples may not depend on a variable at all: `jnp.where` and
`jnp.take` return one of their arguments if they are empty. A replica without examples then has no
gradient where the others have one, and would sum different values than they do. While the classes
of replicas are traced one after the other, a `Presence` records which values any of them has, and
what gradients go back through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from unison.runtime.private_jax import TraceLevel
from unison.thread_local import ThreadLocal

T = TypeVar("T")


class Presence:
    """Records which values of each collective operation the classes of replicas have."""

    def __init__(self) -> None:
        #: Whether a class had a value that those before it lacked.
        self._has_grown = False
        self._of_operations: list[list[bool]] = []
        self._next = 0
        #: The results so far of the operations of the class that is being traced.
        self.combined: list[Any] = []
        #: Whether gradients go back through all of them; see `combined_so_far`.
        self.reaches_all = False

    def of_all(self, trace_all: Callable[[], T], are_in_lockstep: Callable[[T], bool]) -> T:
        """Returns `trace_all()`, repeated until no class lacks what those after it have.

        Args:
            trace_all: Traces every class from its beginning (`from_the_first_operation`).
            are_in_lockstep: Whether all classes perform the same collective operations.
        """
        traces = self._with_equal_values(trace_all)
        if are_in_lockstep(traces):
            return traces
        self.reaches_all = True
        return self._with_equal_values(trace_all)

    def _with_equal_values(self, trace_all: Callable[[], T]) -> T:
        while True:
            self._has_grown = False
            with _current.bound_to(self):
                traces = trace_all()
            if not self._has_grown:
                return traces

    def restart(self) -> None:
        """Forgets the operations: a class is traced from its first operation on."""
        self._next = 0
        self.combined = []

    def meet(self, present: Sequence[bool]) -> list[bool]:
        number, self._next = self._next, self._next + 1
        if number == len(self._of_operations):
            self._of_operations.append(list(present))
        known = self._of_operations[number]
        if len(known) != len(present):
            return list(present)  # which leads to a LockstepError
        merged = [before or here for before, here in zip(known, present, strict=True)]
        self._has_grown = self._has_grown or merged != known
        self._of_operations[number] = merged
        return merged


_current: ThreadLocal[Presence | None] = ThreadLocal(None)


@contextlib.contextmanager
def from_the_first_operation() -> Iterator[None]:
    """Context manager in which a function is traced from the beginning, possibly again."""
    current = _current.value
    if current is not None:
        current.restart()
    yield


def present_anywhere(present: Sequence[bool]) -> list[bool]:
    """Returns which values replicas of any class have, given which of them this one has.

    Unless replicas that differ in shape are being traced, this is `present` itself.
    """
    current = _current.value
    return list(present) if current is None else current.meet(present)


def note_combined(value: Any) -> None:
    """Notes what a collective operation has returned, while classes of replicas are traced."""
    current = _current.value
    if current is not None:
        current.combined += jax.tree.leaves(value)


def combined_so_far() -> list[Any]:
    """Returns the values through which gradients must go back, if only as zeros.

    The loss of no examples may not depend on what the replicas combined before (`array[:, columns]`
    of no rows is a constant on JAX). Such a replica would not combine the gradients that the others
    do. Where that is so, this is all that was combined since the function began; else nothing.
    """
    current = _current.value
    return list(current.combined) if current is not None and current.reaches_all else []


def with_gradient_through_combined(loss: T) -> T:
    """Returns a loss of which gradients are taken, so that they go back through `combined_so_far`.

    It is called in the function that is differentiated. What functions inside of it combined (a
    branch, a rematerialized block) is left out.
    """
    values = list(filter(TraceLevel().has, combined_so_far()))
    # Its derivative makes arrays of zeros of what JAX knows to be zero.
    return lax.optimization_barrier((loss, values))[0] if values else loss
