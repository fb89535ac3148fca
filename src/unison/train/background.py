"""Writing in a thread, while the program continues."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  whose exit handler runs after the later one
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

from unison.interrupts import wait_until

logger = logging.getLogger("unison")

#: The timeout in seconds for unfinished writes at the end of the program.
_SECONDS_AT_EXIT = 600.0

#: Seconds between two checks, of a waiting thread, whether the writing thread still exists.
_LOOK_AFTER = 1.0

_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


class BackgroundWriter:
    """A thread that runs one write at a time; it ends with this object.

    It waits for further writes: starting a thread takes milliseconds.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: The number of writes that are running or queued.
        self._count = 0
        self._error: BaseException | None = None
        #: Guards the last two; notified at the end of a write.
        self._changed = threading.Condition()
        weakref.finalize(self, self._queue.put, None)
        _writers.add(self)
        _wait_at_exit()

    def start(self, write: Callable[[], None]) -> None:
        """Queues `write`, which is called after the current write.

        Raises:
            Exception: The error of the previous call.
        """
        self.wait()
        with self._changed:
            if not self._is_alive:  # not started yet, or this is a forked process
                self._count = 0
                self._thread = threading.Thread(
                    target=_call_each, args=(self._queue,), name="unison checkpoint", daemon=True
                )
                self._thread.start()
            self._count += 1
        self._queue.put(functools.partial(self._run, write))

    @property
    def is_busy(self) -> bool:
        """Whether a write is running in a thread other than the caller's."""
        return self._count > 0 and self._is_alive and not self._is_called_by_what_writes()

    def wait(self) -> None:
        """Waits until no write is running; a call from within a write does not wait.

        Raises:
            Exception: The error of the last call; raised once.
        """
        if self._is_called_by_what_writes():
            return
        error = wait_until(self._changed, self._is_at_rest, self._taken_error)
        if error is not None:
            raise error

    def _is_at_rest(self) -> bool:
        return not (self._count and self._is_alive)

    def _taken_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    def wait_at_exit(self, deadline: float) -> None:
        """Waits for the current write, and logs errors that can no longer be raised."""
        with self._changed:
            while self._count and self._is_alive and time.monotonic() < deadline:
                self._changed.wait(_LOOK_AFTER)
            if self._count and self._is_alive:
                logger.error("The program exits before a checkpoint was written: it is lost.")
        if self._error is not None:
            logger.error("A checkpoint was not written: %s", self._error)

    def _run(self, write: Callable[[], None]) -> None:
        error = None
        try:
            write()
        except BaseException as raised:  # raised by the next caller that waits
            error = raised
        with self._changed:
            self._error = error or self._error
            self._count -= 1
            self._changed.notify_all()

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_called_by_what_writes(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()


def _call_each(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # which references the writer


_registered = threading.Event()


def _wait_at_exit() -> None:
    # Registered with the first writer: it runs before the exit handlers of JAX and of the cluster.
    if not _registered.is_set():
        atexit.register(_wait_for_all)
        # Also when the main thread ends, and other threads go on: before the exit handler of the
        # thread pools, which a write uses, too. Not if that has begun.
        with contextlib.suppress(AttributeError, RuntimeError):
            threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
        _registered.set()


def _wait_for_all() -> None:
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    for writer in list(_writers):
        writer.wait_at_exit(deadline)
