"""Tells the process that has started this worker what it does, once a second."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import threading
import time
from typing import Any, Final

from unison.monitoring.meter import Meter
from unison.monitoring.process import SentBytes, device_bytes, resident_bytes
from unison.strategies import observing

#: The variables by which a worker is told whom to tell: a JSON object with `address` and `worker`,
#: and a secret that lets it do so.
VARIABLE: Final = "UNISON_MONITOR"
TOKEN_VARIABLE: Final = "UNISON_MONITOR_TOKEN"

#: Seconds between two reports, and for which one may take.
EVERY = 1.0
_PATIENCE = 2.0

#: After so many reports in a row that nobody has taken, no more are sent.
_MOST_FAILURES = 30

#: Seconds that the last report may keep a program from ending.
_LAST_WORD = 0.5

_reporter: Reporter | None = None


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
    if _reporter is None:
        return
    meter = _reporter.meter
    if step is not None:
        meter.count_to(step)
    if examples is not None:
        meter.examples = examples
    if loss is not None:
        meter.note_loss(loss)


def start_if_asked() -> None:
    """Starts to report, if this process has been told whom to.

    The variables go: processes that this one starts are no workers. If somebody else looks at the
    steps, they are not counted.
    """
    global _reporter
    told, token = os.environ.pop(VARIABLE, None), os.environ.pop(TOKEN_VARIABLE, None)
    if told is None or token is None or _reporter is not None:
        return
    try:
        about = json.loads(told)
        _reporter = Reporter(str(about["address"]), token, str(about["worker"]))
    except (ValueError, KeyError, TypeError):  # a look at a job is not worth its end
        return
    if observing.step_observer is None:
        observing.observe_steps(_reporter.meter)
    _reporter.start()
    atexit.register(_reporter.end)


class Reporter:
    """Reports what a meter counts, from a thread of its own.

    Whoever does not answer is left in peace after a while; the program never notices.

    Args:
        address: Where the reports go, as host:port.
        token: What lets them in.
        worker: What this worker is called.
    """

    def __init__(self, address: str, token: str, worker: str):
        self.meter = Meter()
        self._address = address
        self._token = token
        self._worker = worker
        self._sent = SentBytes()
        self._connection: http.client.HTTPConnection | None = None
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
        failures = 0
        while failures < _MOST_FAILURES:
            is_last = self._ends.wait(EVERY)
            try:
                self._send(self.gathered(has_ended=is_last))
                failures = 0
            except Exception:  # whatever it is, it is not the program's
                failures += 1
                self._disconnect()
            if is_last:
                break
        self._disconnect()

    def gathered(self, has_ended: bool = False) -> dict[str, Any]:
        """Returns what is to be told now."""
        meter = self.meter
        marks = [meter.marks.popleft() for _ in range(len(meter.marks))]
        group = meter.group
        return {
            "worker": self._worker,
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

    def _send(self, told: dict[str, Any]) -> None:
        if self._connection is None:
            patience = _LAST_WORD if told["has_ended"] else _PATIENCE
            self._connection = http.client.HTTPConnection(self._address, timeout=patience)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        self._connection.request("POST", "/report", json.dumps(told).encode(), headers)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 204:
            raise ConnectionError(f"the report was not taken: {answer.status}")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
