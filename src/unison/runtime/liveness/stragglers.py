"""Detection of workers that keep the others waiting unusually long, and of where they are.

The first of the waiting workers requests the Python stack of a late worker, and logs it; in an
elastic job, the register does (`unison.runtime.elastic.lateness`). This has no other effect:
`failure_detector` decides whether a worker is lost.
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

from unison.runtime.liveness.failure_detector import Late

logger = logging.getLogger("unison")

#: A worker is queried only if it has kept the others waiting for this many seconds, ...
_LEAST_SECONDS = 5.0

#: ... and for this many times the usual duration of an operation.
_TIMES_AS_LONG = 10.0

#: The number of recent measurements from which the usual duration is computed.
_REMEMBERED_BEATS = 64

#: Seconds within which a worker that is not stopped replies.
_ANSWER_WITHIN = 2.0

#: The number of innermost calls in a worker's stack.
_MOST_CALLS = 25


def _log(worker: int, is_late: bool, text: str) -> None:
    logger.log(logging.WARNING if is_late else logging.INFO, "%s", text)


class Stragglers:
    """One worker's record of late workers.

    Args:
        names: The workers' names.
        say: Sends a message to all others.
        report: Called with a worker, whether it is late or continues, and a text about it. By
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
        #: The workers that have been queried: when, and how late they were then.
        self._asked: dict[int, tuple[float, Late]] = {}
        #: The workers that have been reported, and how late they were.
        self._reported: dict[int, Late] = {}

    @property
    def patience(self) -> float:
        """Seconds for which a worker may be late before it is queried."""
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(_LEAST_SECONDS, _TIMES_AS_LONG * usual)

    def look(self, count: int, late: Sequence[Late], is_first: bool, now: float) -> None:
        """Queries late workers, and reports those that do not reply.

        Args:
            count: The number of operations that this worker has begun.
            late: The workers that are behind it.
            is_first: Whether this worker is the first of those that wait.
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
                self.hear(each.worker, "It has not sent its stack: it is stopped.", now)

    def hear(self, worker: int, stack: str, now: float) -> None:
        """Reports a worker that was queried, with its stack."""
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
            f"operation usually takes: {usual}). Last reported: {late.doing}.\n{stack}",
        )

    def _note_pace(self, count: int, now: float) -> None:
        if count > self._last_count:
            if self._last_count:
                self._seconds.append((now - self._counted_at) / (count - self._last_count))
            self._last_count, self._counted_at = count, now

    def _welcome(self, counts: dict[int, int], now: float) -> None:
        """Forgets the workers that have made progress."""
        for worker, late in list(self._reported.items()):
            if counts.get(worker) != late.count:
                del self._reported[worker]
                about = f"{self._names[worker]} has resumed after {now - late.since:.1f} s"
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
