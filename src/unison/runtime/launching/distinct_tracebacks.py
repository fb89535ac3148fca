"""The tracebacks of a job's workers: one for each failure, in one piece."""

from __future__ import annotations

import threading

from unison.runtime.launching.workers import BETWEEN_ERRORS, MISSES_ANOTHER, TRACEBACK, OnLine
from unison.tracebacks import NOTE, is_filtering

#: The number of lines after which a traceback is shown though its error has not been printed.
_MOST_LINES = 1000

#: Follows the error of a worker whose traceback is shown already.
SAME = "(the traceback of another worker is the same)"


class DistinctTracebacks:
    """Passes on the workers' lines, but a traceback only once.

    All workers run the same program, so that a mistake in it fails on all of them. Of the second
    and later ones, whose frames are the same, only the error is shown. So it is for a worker whose
    error is that it has lost another one, once that one's traceback is shown. Until then its own is
    held: it may be the first that arrives. The lines of a traceback are passed on together, without
    those of other workers between them.

    `UNISON_LOG=debug` passes on all lines as they come.

    Args:
        show: Called with a worker and a line, in any thread.

    Examples:
        >>> output = DistinctTracebacks(print)
        >>> for worker in range(2):
        ...     output(worker, "Traceback (most recent call last):")
        ...     output(worker, '  File "train.py", line 3, in <module>')
        ...     output(worker, f"ValueError: {worker}")
        0 Traceback (most recent call last):
        0   File "train.py", line 3, in <module>
        0 ValueError: 0
        1 ValueError: 1 (the traceback of another worker is the same)
    """

    def __init__(self, show: OnLine):
        self._show = show
        self._is_on = is_filtering()
        #: The lines of the tracebacks that are being printed, by worker.
        self._begun: dict[int, list[str]] = {}
        #: The tracebacks, and the lines that follow them, of workers that have lost another one.
        self._held: dict[int, list[list[str]]] = {}
        #: The frames of the tracebacks that were shown.
        self._shown: set[tuple[str, ...]] = set()
        #: The workers whose last lines were of a traceback that was not shown.
        self._is_left_out: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, worker: int, line: str) -> None:
        """Passes on a line, or holds it until the traceback that it is part of is complete."""
        if not self._is_on:
            self._show(worker, line)
            return
        with self._lock:
            lines = self._begun.get(worker)
            if lines is not None:
                lines.append(line)
                if not line.startswith(" ") or len(lines) >= _MOST_LINES:
                    self._finish(worker)
            elif line == TRACEBACK:
                self._begun[worker] = [line]
            elif worker in self._held and _belongs_to_a_traceback(line):
                self._held[worker].append([line])
            else:
                self._release(worker)  # It goes on, and so may the others.
                self._pass_on(worker, line)

    def close(self) -> None:
        """Passes on the lines of tracebacks that were held or not completed.

        A worker that is ended with the others may have printed only the first lines of the
        traceback that is shown. They are left out.
        """
        with self._lock:
            for worker, lines in list(self._begun.items()):
                if self._is_beginning_of_shown(lines):
                    del self._begun[worker]
                else:
                    self._finish(worker)
            for worker in list(self._held):
                self._release(worker)

    def _is_beginning_of_shown(self, lines: list[str]) -> bool:
        return any(frames[: len(lines)] == tuple(lines) for frames in self._shown)

    def _finish(self, worker: int) -> None:
        lines = self._begun.pop(worker)
        if MISSES_ANOTHER.match(lines[-1]) and not self._shown:
            self._held.setdefault(worker, []).append(lines)
            return
        self._release(worker)
        self._pass_on_traceback(worker, lines)
        for other in list(self._held):
            self._release(other)

    def _release(self, worker: int) -> None:
        for lines in self._held.pop(worker, []):
            if lines[0] == TRACEBACK:
                self._pass_on_traceback(worker, lines)
            else:
                self._pass_on(worker, lines[0])

    def _pass_on_traceback(self, worker: int, lines: list[str]) -> None:
        *frames, error = lines
        is_same = tuple(frames) in self._shown
        if is_same or (self._shown and MISSES_ANOTHER.match(error)):
            self._is_left_out.add(worker)
            lines = [f"{error} {SAME}" if is_same else error]
        else:
            self._is_left_out.discard(worker)
            self._shown.add(tuple(frames))
        for line in lines:
            self._show(worker, line)

    def _pass_on(self, worker: int, line: str) -> None:
        if worker not in self._is_left_out or not _belongs_to_a_traceback(line):
            self._is_left_out.discard(worker)
            self._show(worker, line)


def _belongs_to_a_traceback(line: str) -> bool:
    """Whether a line that follows an error is Python's or Unison's about its traceback."""
    return line in ("", NOTE) or line.endswith(BETWEEN_ERRORS)
