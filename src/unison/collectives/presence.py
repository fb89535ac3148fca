"""Values that some replicas have and others lack, where all must take part.

What a function computes for no examples may not depend on a variable at all: `jnp.where` and
`jnp.take` return one of their arguments if they are empty. A replica without examples then has no
gradient where the others have one, and would sum other values than they do. While the classes of
replicas are traced one after the other, a `Presence` notes which values any of them has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

_thread = threading.local()


class Presence:
    """Which values of each collective operation the classes of replicas have.

    Attributes:
        has_grown: Whether a class had a value that those before it lacked: they are to be traced
            again.
    """

    def __init__(self) -> None:
        self.has_grown = False
        self._of_operations: list[list[bool]] = []
        self._next = 0

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Inside, a class is traced."""
        outer = getattr(_thread, "current", None)
        _thread.current = self
        try:
            yield
        finally:
            _thread.current = outer

    def restart(self) -> None:
        """Takes note that a class is traced from its first operation on."""
        self._next = 0

    def meet(self, present: Sequence[bool]) -> list[bool]:
        number, self._next = self._next, self._next + 1
        if number == len(self._of_operations):
            self._of_operations.append(list(present))
        known = self._of_operations[number]
        if len(known) != len(present):
            return list(present)  # which ends in an error of lockstep
        merged = [before or here for before, here in zip(known, present, strict=True)]
        self.has_grown = self.has_grown or merged != known
        self._of_operations[number] = merged
        return merged


@contextlib.contextmanager
def from_the_first_operation() -> Iterator[None]:
    """Inside, a function is traced from its beginning, perhaps again."""
    current: Presence | None = getattr(_thread, "current", None)
    if current is not None:
        current.restart()
    yield


def present_anywhere(present: Sequence[bool]) -> list[bool]:
    """Returns which values replicas of any class have, given which this one has.

    Outside the tracing of replicas that differ in shape, they are the same.
    """
    current: Presence | None = getattr(_thread, "current", None)
    return list(present) if current is None else current.meet(present)
