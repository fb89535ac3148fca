"""State of a thread for the duration of a block: its current trace, its current scope."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadLocal(threading.local, Generic[T]):
    """A variable of which each thread has a value of its own.

    These are thread-locals rather than `contextvars`: a notebook runs each cell in a context of its
    own, and what one cell sets to last (`experimental_set_strategy`) must hold in the next.

    Args:
        default: The value in a thread that has not set one.
        default_factory: Makes that value instead, for each thread another one.

    Attributes:
        value: The value of the calling thread.

    Examples:
        >>> depth = ThreadLocal(0)
        >>> with depth.bound_to(1):
        ...     depth.value
        1
        >>> depth.value
        0
    """

    value: T

    def __init__(
        self, default: T | None = None, *, default_factory: Callable[[], T] | None = None
    ) -> None:
        # Python calls this in every thread that uses the object.
        self.value = default if default_factory is None else default_factory()  # type: ignore[assignment]
        #: The thread's blocks that have not ended, the outermost first.
        self._blocks: list[object] = []

    @contextlib.contextmanager
    def bound_to(self, value: T) -> Iterator[T]:
        """Inside, the calling thread has `value`; after it, the value that it had before.

        A block of which a signal handler has interrupted the end may end after those around it.
        The value is then theirs.
        """
        outer, block = self.value, object()
        try:
            self._blocks.append(block)
            self.value = value
            yield value
        finally:
            if block in self._blocks:
                self.value = outer
                del self._blocks[self._blocks.index(block) :]
