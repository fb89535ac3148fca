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
        #: The results so far, by operation, of the class that is being traced.
        self.combined: list[list[Any]] = []
        #: The operations that gradients go back through in every class; see `combined_so_far`.
        self.reached: set[int] = set()

    def of_all(self, trace_all: Callable[[], T], differing: Callable[[T], set[int]]) -> T:
        """Returns `trace_all()`, repeated until no class lacks what those after it have.

        Args:
            trace_all: Traces every class from its beginning (`from_the_first_operation`).
            differing: Returns the numbers of the operations that classes perform differently, by
                the names of their scopes (see `combined_by`): in some, gradients go back through
                them.
        """
        traces = self._with_equal_values(trace_all)
        self.reached = differing(traces)
        return self._with_equal_values(trace_all) if self.reached else traces

    def _with_equal_values(self, trace_all: Callable[[], T]) -> T:
        while True:
            self._has_grown = False
            with _current.bound_to(self):
                traces = trace_all()
            if not self._has_grown:
                return traces

    def combined_of(self, number: int) -> list[Any]:
        """Returns the results of an operation; none if it has not been performed yet."""
        return self.combined[number] if number < len(self.combined) else []

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


#: The beginning of the name of an operation's scope; its number follows.
SCOPE_OF_OPERATION = "unison_operation_"


def combined_by(operation: Callable[[Any], Any], value: Any) -> Any:
    """Returns `operation(value)`, a collective operation of all replicas.

    While classes of replicas are traced, it is in a scope that is named by its number.
    """
    current = _current.value
    if current is None:
        return operation(value)
    with jax.named_scope(f"{SCOPE_OF_OPERATION}{len(current.combined)}"):
        combined = operation(value)
    current.combined.append(jax.tree.leaves(combined))
    return combined


def combined_so_far() -> list[Any]:
    """Returns the values through which gradients must go back, if only as zeros.

    The loss of no examples may not depend on what the replicas combined before (`array[:, columns]`
    of no rows is a constant on JAX). Such a replica would not combine the gradients that the others
    do. These are the values, since the function began, of which that is so.
    """
    current = _current.value
    if current is None:
        return []
    return [leaf for number in current.reached for leaf in current.combined_of(number)]


def with_gradient_through_combined(loss: T) -> T:
    """Returns a loss of which gradients are taken, so that they go back through `combined_so_far`.

    It is called in the function that is differentiated. What functions inside of it combined (a
    branch, a rematerialized block, a function under `jax.jit`) is left out.
    """
    values = list(filter(TraceLevel().has, combined_so_far()))
    # Its derivative makes arrays of zeros of what JAX knows to be zero.
    return lax.optimization_barrier((loss, values))[0] if values else loss
