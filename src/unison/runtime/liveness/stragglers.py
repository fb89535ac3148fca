"""Who keeps the others waiting for longer than usual, and where in its program it is.

A worker that is late is asked for its Python stack by the first of those that wait for it, which
writes it to the log; in a job that may change, by the register (`unison.runtime.elastic.lateness`).
Nothing else happens: whether a worker is lost, `verdict` decides.
"""

from __future__ import annotations

import collections
import logging
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from unison.runtime.liveness.verdict import Late

logger = logging.getLogger("unison")

#: Nobody is asked who has not kept the others waiting for so many seconds, ...
_LEAST_SECONDS = 5.0

#: ... and for so many times as long as an operation usually takes.
_TIMES_AS_LONG = 10.0

#: How many of the latest beats tell what is usual.
_REMEMBERED_BEATS = 64

#: Seconds within which a worker answers that can.
_ANSWER_WITHIN = 2.0

#: How many of its innermost calls a worker shows.
_MOST_CALLS = 25


def _log(worker: int, is_late: bool, text: str) -> None:
    logger.log(logging.WARNING if is_late else logging.INFO, "%s", text)


class Stragglers:
    """What one worker knows of those that are late.

    Args:
        names: What each worker is called.
        say: Tells all others something.
        report: Called with a worker, whether it is late or goes on, and a text about it. By
            default, this is logged.
    """

    def __init__(
        self,
        names: Sequence[str],
        say: Callable[[dict[str, Any]], None],
        report: Callable[[int, bool, str], None] = _log,
    ):
        self._names = names
        self._say = say
        self._report = report
        self._seconds: collections.deque[float] = collections.deque(maxlen=_REMEMBERED_BEATS)
        self._last_count = 0
        self._counted_at = 0.0
        #: Who has been asked: when, and how it was late then.
        self._asked: dict[int, tuple[float, Late]] = {}
        #: Who has been reported, and since when it was late.
        self._reported: dict[int, Late] = {}

    @property
    def patience(self) -> float:
        """Seconds for which a worker may be late before it is asked where it is."""
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(_LEAST_SECONDS, _TIMES_AS_LONG * usual)

    def look(self, count: int, late: Sequence[Late], is_first: bool, now: float) -> None:
        """Asks those that are late, and reports those that do not answer.

        Args:
            count: How many operations this worker has begun.
            late: The workers that are behind it.
            is_first: Whether this one is the first of those that wait.
            now: The time, in seconds.
        """
        self._note_pace(count, now)
        self._welcome({each.worker: each.count for each in late}, now)
        for each in late if is_first else ():
            known = self._asked.get(each.worker)
            if known is None and each.worker not in self._reported:
                if now - each.since > self.patience:
                    self._asked[each.worker] = (now, each)
                    self._say({"is": "where", "worker": each.worker})
            elif known is not None and now - known[0] > _ANSWER_WITHIN:
                self.hear(each.worker, "It does not say where it is: it is stopped.", now)

    def hear(self, worker: int, stack: str, now: float) -> None:
        """Reports a worker that was asked where it is."""
        asked = self._asked.pop(worker, None)
        if asked is None:
            return
        late = asked[1]
        self._reported[worker] = late
        usual = f"{statistics.median(self._seconds):.2g} s" if self._seconds else "not known yet"
        self._report(
            worker,
            True,
            f"{self._names[worker]} has kept the others waiting for {now - late.since:.1f} s (an "
            f"operation usually takes: {usual}). Its last word: {late.doing}.\n{stack}",
        )

    def _note_pace(self, count: int, now: float) -> None:
        if count > self._last_count:
            if self._last_count:
                self._seconds.append((now - self._counted_at) / (count - self._last_count))
            self._last_count, self._counted_at = count, now

    def _welcome(self, counts: dict[int, int], now: float) -> None:
        """Forgets who has come on."""
        for worker, late in list(self._reported.items()):
            if counts.get(worker) != late.count:
                del self._reported[worker]
                about = f"{self._names[worker]} goes on after {now - late.since:.1f} s"
                self._report(worker, False, about)
        for worker, (_, late) in list(self._asked.items()):
            if counts.get(worker) != late.count:
                del self._asked[worker]


def where_the_program_is() -> str:
    """Returns the Python stack of this process's main thread."""
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    if frame is None:
        return "Its main thread has ended."
    calls = traceback.format_list(traceback.extract_stack(frame)[-_MOST_CALLS:])
    return "Its Python stack (the innermost call last):\n" + "".join(calls).rstrip()
