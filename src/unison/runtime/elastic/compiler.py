"""Compiles, in a thread, the programs that a worker may need when its group has changed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("unison")

#: Seconds that the end of the process waits for what is being compiled: a thread in which XLA is at
#: work when Python ends takes the process down by SIGABRT.
_SECONDS_TO_CLOSE = 600.0


class Compiler:
    """A thread that compiles one program after the other.

    What it is told is called in order. A program that cannot be compiled ahead is compiled when it
    is needed, and raises there what there is to raise.

    Examples:
        >>> compiler = Compiler()
        >>> compiled = threading.Event()
        >>> compiler.add(compiled.set)
        >>> compiled.wait(10.0)
        True
        >>> compiler.close()
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, compile_it: Callable[[], None]) -> None:
        """Has a function called that compiles something."""
        self._waiting.put(compile_it)
        if self._thread is None:
            # Not one that Python waits for before it calls what was registered for its end: the
            # others are to hear of that first.
            self._thread = threading.Thread(target=self._run, name="unison-compile", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Compiles nothing more, and waits for what is being compiled."""
        self._is_closing = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        while (compile_it := self._waiting.get()) is not None and not self._is_closing:
            try:
                compile_it()
            except Exception:
                logger.debug("A program was not compiled ahead.", exc_info=True)
            del compile_it  # and what it holds
