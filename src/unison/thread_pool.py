"""A pool of threads that a signal handler cannot keep from ending with the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from unison.interrupts import signals_held

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose `submit` holds signal handlers.

    `submit` starts threads, and then notes that they are to end with the interpreter. What a
    handler raises in between (Ctrl-C, an alarm) would leave a thread for which the interpreter
    waits forever when it exits.

    Examples:
        >>> with ThreadPool(2) as pool:
        ...     [*pool.map(abs, [-1, 2])]
        [1, 2]
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with signals_held:
            return super().submit(fn, *args, **kwargs)
