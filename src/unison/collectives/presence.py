"""Values that some replicas have and others lack, in operations of all replicas.

The result of a function for zero examples may not depend on a variable at all: `jnp.where` and
`jnp.take` return one of their arguments if they are empty. A replica without examples then has no
gradient where the others have one, and would sum different values than they do. While the classes
of replicas are traced one after the other, a `Presence` records which values any of them has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from unison.thread_local import ThreadLocal

T = TypeVar("T")


class Presence:
    """Records which values of each collective operation the classes of replicas have."""

    def __init__(self) -> None:
        #: Whether a class had a value that those before it lacked.
        self._has_grown = False
        self._of_operations: list[list[bool]] = []
        self._next = 0

    def of_all(self, trace_all: Callable[[], T]) -> T:
        """Returns `trace_all()`, repeated until no class lacks what those after it have.

        Args:
            trace_all: Traces every class from its beginning (`from_the_first_operation`).
        """
        while True:
            self._has_grown = False
            with _current.bound_to(self):
                traces = trace_all()
            if not self._has_grown:
                return traces

    def restart(self) -> None:
        """Resets the count of operations: a class is traced from its first operation on."""
        self._next = 0

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
