"""Reports what this worker does once per second, for monitoring.

A worker of an elastic job reports to the register (`ElasticGroup.report`); any other worker writes
its reports to a pipe of the process that has started it (`unison.runtime.launching.workers`), or,
if Unison has not started it, sends them to the first worker (`first_worker`). So no additional
connections are needed, wherever the worker runs.
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
from unison.monitoring.process import (
    SentBytes,
    device_bytes,
    peak_operations,
    resident_bytes,
)
from unison.monitoring.utilization import Utilization
from unison.runtime.launching.workers import REPORTS_VARIABLE
from unison.strategies import observing
from unison.strategies.default import DefaultStrategy
from unison.train.in_memory import cost_of_checkpoints

#: The variable that makes a worker of an elastic job report.
ELASTIC_VARIABLE: Final = "UNISON_ELASTIC_REPORTS"

#: Seconds between two reports.
EVERY = 1.0

#: Seconds for which the last report may delay the exit of the program.
_LAST_WORD = 0.5

#: Sends a report; raises `OSError` if reports are no longer received.
Send = Callable[[Mapping[str, Any]], None]

_reporter: Reporter | None = None
_answerer: Reporter | None = None


def report(loss: Any = None, *, step: int | None = None, examples: int | None = None) -> None:
    """Reports values that only the program knows to `unison top`; no-op without monitoring.

    Keras' `fit` reports all of this by itself. The call does not block: an array is read once it
    has been computed, and dropped if another one is reported before that.

    Args:
        loss: The current loss, a number or an array with one element, which must not be donated.
        step: The number of steps so far. Default: as counted.
        examples: The number of examples so far. Default: as counted, if the batches are distributed
            over several replicas.

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
    """Returns a report of this process on request, for one that runs no steps of its own."""
    global _answerer
    if _answerer is None:
        _answerer = Reporter(lambda told: None)
    return _answerer.gathered()


def start_if_asked(strategy: Any = None) -> None:
    """Starts reporting, if it is enabled; called whenever a strategy is created.

    The environment variables that enable it are removed: processes that this one starts are not
    workers. If there is another step observer, steps are not counted.

    Args:
        strategy: The strategy, whose group receives the reports in an elastic job, and whose
            workers are connected.
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
    """Returns the sink for the reports of this process; None if there is none."""
    # Before the program has created a strategy, the other workers are not known.
    is_known = strategy is not None and not isinstance(strategy, DefaultStrategy)
    is_asked = is_known and first_worker.is_asked()
    group = getattr(strategy, "group", None)
    if group is not None:
        return _to_the_register(group)
    send = _to_who_has_started_it()
    return first_worker.tell_first_worker(strategy) if send is None and is_asked else send


def _to_the_register(group: Any) -> Send | None:
    """Returns the function that sends reports to the register of an elastic job."""
    is_asked = os.environ.pop(ELASTIC_VARIABLE, None) is not None
    return group.report if is_asked else None


def _to_who_has_started_it() -> Send | None:
    """Returns the function that writes reports to this process's pipe; None if it has none."""
    told = os.environ.pop(REPORTS_VARIABLE, "")
    number, _, inode = told.partition(":")
    try:
        pipe = int(number)
        if os.fstat(pipe).st_ino != int(inode):  # the pipe of another process, or closed
            return None
        os.set_inheritable(pipe, False)
    except (ValueError, OSError):  # monitoring must not end a job
        return None

    def send(told: Mapping[str, Any]) -> None:
        left = json.dumps(told).encode() + b"\n"
        while left:
            left = left[os.write(pipe, left) :]

    return send


class Reporter:
    """Reports a meter's counts, from a separate thread.

    If reports are no longer received, it stops; the program is never affected.

    Args:
        send: Sends a report.
    """

    def __init__(self, send: Send):
        self.meter = Meter()
        self._send = send
        self._sent = SentBytes()
        self._utilization = Utilization()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unison-monitor", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Sends a last report, and ends the thread."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(EVERY)
            try:
                self._send(self.gathered(has_ended=is_last))
            except OSError:  # reports are no longer received
                return
            except Exception:  # the program may have changed something concurrently
                continue

    def gathered(self, has_ended: bool = False) -> dict[str, Any]:
        """Returns the current report."""
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
            "operations": meter.operations,
            "peak_operations": _times(meter.cores_per_replica, peak_operations(meter.devices)),
            "sent": self._sent.count(),
            "utilization": self._utilization.of(meter.devices),
            "checkpoint": cost_of_checkpoints(),
        }


def _times(number: int, value: float | None) -> float | None:
    return None if value is None else number * value
