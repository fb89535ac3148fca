"""The output of a job's workers when Ctrl-C ends them, without a traceback of each."""

from __future__ import annotations

import threading

from unison.runtime.launching.workers import MISSES_ANOTHER, TRACEBACK, OnLine

#: The beginnings of what Python prints for an uncaught error, and for one that nobody can catch.
_BEGINNINGS = (TRACEBACK, "KeyboardInterrupt", "Exception ignored in")

#: In the last lines of a worker that was interrupted, or that lost an interrupted one. Where a
#: compiled module is being imported, an ImportError replaces the KeyboardInterrupt.
_ENDS_BY_INTERRUPT = (
    "KeyboardInterrupt",
    "ImportError: numpy._core.multiarray failed to import",
    "ImportError: Encountered an error while initializing the extension",
)


class InterruptedOutput:
    """Passes on the workers' lines; after an interrupt, without the resulting errors.

    Args:
        show: Called with a worker and a line, in any thread.

    Examples:
        >>> output = InterruptedOutput(print)
        >>> output(0, "step 1")
        0 step 1
        >>> output.interrupt()
        >>> for line in ("saved", "Traceback (most recent call last):", "KeyboardInterrupt", "bye"):
        ...     output(0, line)
        0 saved
        >>> output.end()
        0 bye
        >>> output(1, "UnavailableError: The connection to the coordinator is closed")
    """

    def __init__(self, show: OnLine):
        self._show = show
        self._is_interrupted = False
        self._held: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def __call__(self, worker: int, line: str) -> None:
        """Passes on a line, or holds it back until the end."""
        with self._lock:
            if self._is_interrupted and line.startswith(_BEGINNINGS):
                self._held.setdefault(worker, [])
            if worker in self._held:
                self._held[worker].append(line)
                return
            if self._is_interrupted and MISSES_ANOTHER.match(line):
                return  # it misses what Ctrl-C has ended, as is expected
        self._show(worker, line)

    def interrupt(self) -> None:
        """Notes that the workers are about to be interrupted; a signal handler may call it."""
        self._is_interrupted = True

    def end(self) -> None:
        """Passes on the held lines that are not part of the traceback of the interrupt."""
        for worker, lines in self._held.items():
            ends = [i for i, line in enumerate(lines) if any(s in line for s in _ENDS_BY_INTERRUPT)]
            for line in lines[ends[-1] + 1 if ends else 0 :]:
                self._show(worker, line)
        self._held.clear()
