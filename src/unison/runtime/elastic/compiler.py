"""Background compilation of the programs that a worker may need after its group has changed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("unison")

#: Seconds that the exit of the process waits for a running compilation: if XLA is still running in
#: a thread when Python exits, the process is aborted (SIGABRT).
_SECONDS_TO_CLOSE = 600.0


class Compiler:
    """A thread that compiles one program at a time.

    Functions are called in the order in which they were added. If ahead-of-time compilation of a
    program fails, the program is compiled when it is needed, and raises its error there.

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
        """Enqueues a function that compiles a program."""
        self._waiting.put(compile_it)
        if self._thread is None:
            # A daemon thread: Python joins other threads before it calls the atexit handlers, and
            # these have to notify the other workers first.
            self._thread = threading.Thread(target=self._run, name="unison-compile", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Starts no further compilation, and waits for the running one."""
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
            del compile_it  # and the objects that it references
