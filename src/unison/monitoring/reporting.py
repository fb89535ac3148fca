"""Tells those who watch the job what this worker does, once a second.

A worker of a job that may change says it to the register (`ElasticGroup.report`); any other one
writes it to the process that has started it, by a pipe (`unison.runtime.launching.workers`), or,
where something else than Unison has, tells the first worker (`first_worker`). So nothing has to be
reached that is not reached already, wherever the worker runs.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from unison.monitoring import first_worker
from unison.monitoring.meter import Meter
from unison.monitoring.process import SentBytes, device_bytes, resident_bytes
from unison.runtime.launching.workers import REPORTS_VARIABLE
from unison.strategies import observing
from unison.strategies.default import DefaultStrategy

#: The variable that tells a worker of a job that may change whether to report.
ELASTIC_VARIABLE: Final = "UNISON_ELASTIC_REPORTS"

#: Seconds between two reports.
EVERY = 1.0

#: Seconds that the last report may keep a program from ending.
_LAST_WORD = 0.5

#: Takes a report; raises `OSError` where nobody will take any more.
Send = Callable[[Mapping[str, Any]], None]

_reporter: Reporter | None = None
_answerer: Reporter | None = None


def report(loss: Any = None, *, step: int | None = None, examples: int | None = None) -> None:
    """Says for `unison top` what only the program knows. Does nothing where nobody watches.

    Keras' `fit` says all of this by itself. The call waits for nothing: an array is read when it
    has been computed, and left out when another one is reported before that.

    Args:
        loss: The present loss, a number or an array of one; not one that is donated.
        step: How many steps there were. Default: as counted.
        examples: How many examples there were so far. Default: as counted, where the batches are
            distributed over several replicas.

    Examples:
        >>> import unison
        >>> for step in range(3):
        ...     unison.monitoring.report(loss=1 / (1 + step))
    """
    start_if_asked()
    if _reporter is None:
        return
    meter = _reporter.meter
    if step is not None:
        meter.count_to(step)
    if examples is not None:
        meter.examples = examples
    if loss is not None:
        meter.note_loss(loss)


def gathered() -> dict[str, Any]:
    """Returns a report of this process, for who asks it: of one that runs no steps of its own."""
    global _answerer
    if _answerer is None:
        _answerer = Reporter(lambda told: None)
    return _answerer.gathered()


def start_if_asked(strategy: Any = None) -> None:
    """Starts to report, if this process has been told to; called with each strategy that is made.

    The variables that tell it go then: processes that this one starts are no workers. If somebody
    else looks at the steps, they are not counted.

    Args:
        strategy: The strategy, whose group takes the reports in a job that may change, and whose
            workers know each other by now.
    """
    global _reporter
    if _reporter is not None:
        return
    send = _send(strategy)
    if send is None:
        return
    _reporter = Reporter(send)
    if observing.step_observer is None:
        observing.observe_steps(_reporter.meter)
    _reporter.start()
    atexit.register(_reporter.end)


def _send(strategy: Any) -> Send | None:
    """Returns what takes the reports of this process; None: nobody does."""
    # Before the program has made a strategy, it is not known which other workers there are.
    is_known = strategy is not None and not isinstance(strategy, DefaultStrategy)
    is_asked = is_known and first_worker.is_asked()
    group = getattr(strategy, "group", None)
    if group is not None:
        return _to_the_register(group)
    send = _to_who_has_started_it()
    return first_worker.tell_first_worker(strategy) if send is None and is_asked else send


def _to_the_register(group: Any) -> Send | None:
    """Returns what sends reports to the register of a job that may change."""
    is_asked = os.environ.pop(ELASTIC_VARIABLE, None) is not None
    return group.report if is_asked else None


def _to_who_has_started_it() -> Send | None:
    """Returns what writes reports to the pipe of this process; None if it has got none."""
    told = os.environ.pop(REPORTS_VARIABLE, "")
    number, _, inode = told.partition(":")
    try:
        pipe = int(number)
        if os.fstat(pipe).st_ino != int(inode):  # it was another process's, or is closed
            return None
        os.set_inheritable(pipe, False)
    except (ValueError, OSError):  # a look at a job is not worth its end
        return None

    def send(told: Mapping[str, Any]) -> None:
        left = json.dumps(told).encode() + b"\n"
        while left:
            left = left[os.write(pipe, left) :]

    return send


class Reporter:
    """Reports what a meter counts, from a thread of its own.

    Whoever takes no more reports is left in peace; the program never notices.

    Args:
        send: Takes a report.
    """

    def __init__(self, send: Send):
        self.meter = Meter()
        self._send = send
        self._sent = SentBytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unison-monitor", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Reports a last time, and ends the thread."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(EVERY)
            try:
                self._send(self.gathered(has_ended=is_last))
            except OSError:  # nobody listens any more
                return
            except Exception:  # of something that the program has changed meanwhile
                continue

    def gathered(self, has_ended: bool = False) -> dict[str, Any]:
        """Returns what is to be told now."""
        meter = self.meter
        marks = meter.take_marks()
        group = meter.group
        return {
            "process": os.getpid(),
            "now": time.time(),
            "has_ended": has_ended,
            "steps": meter.steps,
            "position": None if group is None else group.step,
            "examples": meter.examples,
            "waited": meter.waited,
            "marks": marks,
            "loss": meter.loss(),
            "memory": resident_bytes(),
            "device_memory": device_bytes(meter.devices),
            "sent": self._sent.count(),
        }
