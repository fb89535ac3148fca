"""Writing in a thread, while the program goes on."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger("unison")

#: Seconds that the end of the program waits for what is being written.
_SECONDS_AT_EXIT = 600.0

_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


class BackgroundWriter:
    """A thread that writes one thing at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: The threads that call what `start` was given.
        self._writing: set[int] = set()
        _writers.add(self)
        _wait_at_exit()

    def start(self, write: Callable[[], None]) -> None:
        """Lets `write` be called, after what is being written.

        Raises:
            Exception: What the call before has raised.
        """
        self.wait()
        before = self._thread  # only that which calls this
        self._thread = threading.Thread(
            target=self._run, args=(write, before), name="unison checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, by another thread than that which asks."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._is_called_by_what_writes()

    def wait(self) -> None:
        """Waits until nothing is being written; what is called while it is written does not wait.

        Raises:
            Exception: What the last call has raised; once.
        """
        if self._is_called_by_what_writes():
            return
        thread = self._thread
        if thread is not None:
            thread.join()
            if self._thread is thread:  # nobody else has started another one
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_at_exit(self, deadline: float) -> None:
        """Waits for what is being written, and logs what cannot be raised any more."""
        thread = self._thread
        if thread is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.error("The program ends, and a checkpoint is not written yet: it is lost.")
        if self._error is not None:
            logger.error("A checkpoint was not written: %s", self._error)

    def _run(self, write: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._writing.add(threading.get_ident())
        try:
            write()
        except BaseException as error:  # raised where somebody waits
            self._error = error
        finally:
            self._writing.discard(threading.get_ident())

    def _is_called_by_what_writes(self) -> bool:
        return threading.get_ident() in self._writing


_registered = threading.Event()


def _wait_at_exit() -> None:
    # With the first writer: what is registered later runs earlier, before JAX and the cluster go.
    if not _registered.is_set():
        _registered.set()
        atexit.register(_wait_for_all)


def _wait_for_all() -> None:
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    for writer in list(_writers):
        writer.wait_at_exit(deadline)
