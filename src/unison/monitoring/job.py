"""`WatchedJob`: the state of a running job, from its workers' reports."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: The seconds over which rates are computed.
WINDOW = 10.0

#: Seconds of silence after which a worker may be stuck or lost.
_SILENCE = 5.0

#: A worker is a straggler if it keeps the others waiting for this fraction of the time, ...
_STRAGGLES = 0.1

#: ... or for this many seconds in one step.
_STUCK = 5.0

#: The number of a worker's step starts that are kept, and of its reports.
_MOST_MARKS = 1024
_MOST_REPORTS = 64

#: The maximum number of points of a curve, and the number of events that are kept.
MOST_POINTS = 512
_MOST_EVENTS = 50

#: The maximum number of workers, as their names come from reports.
_MOST_WORKERS = 4096

#: The maximum length of external text, in characters.
_MOST_TEXT = 500


class Curve:
    """Points over time, thinned out as their number grows.

    Examples:
        >>> curve = Curve(4)
        >>> for x in range(9):
        ...     curve.add(x, x * x)
        >>> curve.points
        [(0, 0), (4, 16), (8, 64)]
    """

    def __init__(self, most: int = MOST_POINTS):
        self.points: list[tuple[float, float]] = []
        self._most = most
        self._keeps_each = 1
        self._seen = 0

    def add(self, x: float, y: float) -> None:
        """Adds a point; whether it is kept depends on the number of earlier ones."""
        if self._seen % self._keeps_each == 0:
            self.points.append((x, y))
            if len(self.points) > self._most:
                self.points = self.points[::2]
                self._keeps_each *= 2
        self._seen += 1


class WatchedWorker:
    """The state of one worker.

    Args:
        name: Its name.
        trains: Whether it runs training steps; otherwise it serves a process that does.
    """

    def __init__(self, name: str, trains: bool = True):
        self.name = name
        self._trains = trains
        #: Its latest report, and when that was received, by this process's monotonic clock.
        self.latest: Mapping[str, Any] | None = None
        self.heard_at = 0.0
        #: Its state according to the launcher: "lost", ...; None if unknown.
        self.said: str | None = None
        #: Whether the register of an elastic job reports that it keeps the others waiting.
        self.is_late = False
        #: Its latest loss that is a number, and whether the latest one is.
        self.loss: float | None = None
        self.loss_is_finite: bool | None = None
        self._reports: collections.deque[Mapping[str, Any]] = collections.deque(
            maxlen=_MOST_REPORTS
        )
        #: The starts of its steps: the step, the time, and whether something else ran before.
        self._marks: collections.deque[tuple[int, float, bool]] = collections.deque(
            maxlen=_MOST_MARKS
        )

    def restart(self) -> None:
        """Takes note that its process is started again."""
        self.latest = self.said = self.loss = self.loss_is_finite = None
        self.is_late = False
        self._reports.clear()
        self._marks.clear()

    def hear(self, told: Mapping[str, Any], now: float) -> None:
        """Adds a report."""
        if self.latest is not None and told["process"] != self.latest["process"]:
            self.restart()  # its counts start from 0
        self.latest, self.heard_at = told, now
        self.said = None
        self._reports.append(told)
        for step, at, has_paused in told["marks"]:
            self._marks.append((int(step), float(at), bool(has_paused)))
        self.loss_is_finite = told.get("loss_is_finite", self.loss_is_finite)
        if told["loss"] is not None:
            self.loss = told["loss"][1]

    def state(self, now: float) -> str:
        """Returns its state in one word.

        Examples:
            >>> WatchedWorker("worker 0").state(0.0)
            'starting'
        """
        if self.said is not None:
            return self.said
        if self.latest is None:
            return "starting"
        if self.latest["has_ended"]:
            return "ended"
        if now - self.heard_at > _SILENCE:
            return "silent"
        return "running" if self.latest["steps"] or not self._trains else "starting"

    @property
    def step(self) -> int:
        """The number of steps begun; in an elastic group, of those that all members have done."""
        if self.latest is None:
            return 0
        position = self.latest["position"]
        return int(self.latest["steps"] if position is None else position)

    def rate(self, about: str) -> float | None:
        """Returns the growth of a count per second."""
        reports = self._in_window()
        if len(reports) < 2:
            return None
        first, last = reports[0], reports[-1]
        if first[about] is None or last[about] is None or last["now"] <= first["now"]:
            return None
        return float(last[about] - first[about]) / (last["now"] - first["now"])

    @property
    def mfu(self) -> float | None:
        """The products that its devices compute, as a part of those that they could at most."""
        rate = self.rate("operations")
        peak = None if self.latest is None else self.latest["peak_operations"]
        return rate / peak if rate is not None and peak else None

    @property
    def input_share(self) -> float | None:
        """The fraction of the time for which it waits for its input."""
        share = self.rate("waited")
        return None if share is None else min(max(share, 0.0), 1.0)

    def marks(self, since: float) -> list[tuple[int, float, bool]]:
        """Returns the starts of steps after a time."""
        return [mark for mark in self._marks if mark[1] >= since]

    def step_seconds(self) -> dict[str, float] | None:
        """Returns the median and the 90th and 99th percentiles of its step times."""
        if not self._marks:
            return None
        marks = self.marks(self._marks[-1][1] - 6 * WINDOW)
        timed = [
            ((end - begin) / (after - before), after - before)
            for (before, begin, _), (after, end, has_paused) in itertools.pairwise(marks)
            if after > before and not has_paused
        ]
        if not timed:
            return None
        return {f"p{part}": quantile(timed, part / 100) for part in (50, 90, 99)}

    def begin_of(self, step: int) -> float | None:
        """Returns when a step began, interpolated between marks; None if that is not known."""
        marks = self._marks
        place = bisect.bisect_left(marks, step, key=lambda mark: mark[0])
        if place == len(marks) or (place == 0 and marks[0][0] != step):
            return None
        after, end, has_paused = marks[place]
        if after == step:
            return end
        before, begin, _ = marks[place - 1]
        if has_paused:
            return None
        return begin + (end - begin) * (step - before) / (after - before)

    def _in_window(self) -> list[Mapping[str, Any]]:
        if not self._reports:
            return []
        last = self._reports[-1]["now"]
        return [told for told in self._reports if told["now"] >= last - WINDOW]


class WatchedJob:
    """The state of a job; all methods are thread-safe.

    Args:
        program: The workers' program, as in the user's command.
        kind: "workers", "elastic", or "parameter servers".
        workers: The names of the initial workers.

    Examples:
        >>> job = WatchedJob("train.py", "workers", ["worker 0"])
        >>> told = job.as_dict()
        >>> told["workers"][0]["state"], told["ended"]
        ('starting', None)
    """

    def __init__(self, program: str, kind: str, workers: Iterable[str]):
        self._program = program
        self._kind = kind
        self._began = time.time()
        self._lock = threading.Lock()
        self._workers: dict[str, WatchedWorker] = {}
        for name in workers:
            self._worker(name)
        self._losses = Curve()
        self._rates = Curve()
        self._rated_at = 0.0
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_EVENTS)
        self._interrupted_at: float | None = None
        self._runs = False
        self._recoveries = 0
        self._restarts = 0
        self._last_recovery: float | None = None
        self._ended: str | None = None

    # -- reports ---------------------------------------------------------------------------

    def hear(self, told: Mapping[str, Any]) -> None:
        """Handles a worker's report.

        Raises:
            KeyError, TypeError, ValueError: The report is invalid.
        """
        told = checked(told)
        now = time.monotonic()
        with self._lock:
            worker = self._worker(told["worker"])
            worker.hear(told, now)
            if told["loss"] is not None and worker is self._of_losses():
                step, loss = told["loss"]
                self._losses.add(worker.step - told["steps"] + step, loss)
            if now - self._rated_at >= 1.0:
                self._rated_at = now
                rate = self._examples_per_second(now)
                if rate is not None:
                    self._rates.add(time.time() - self._began, rate)

    def happened(self, event: Mapping[str, Any], line: str | None = None) -> None:
        """Handles an event of an elastic job; `line` describes it."""
        what, name = event["event"], event.get("worker")
        with self._lock:
            if line is not None:
                text = line.partition("\n")[0]  # the rest, a stack, is in the log
                self._events.append({"time": time.time(), "text": text[:_MOST_TEXT]})
            if isinstance(name, int):
                name = f"worker {name}"
            if name is not None and what in ("process lost", "lost", "leaving", "refused"):
                self._worker(str(name)).said = "lost" if "lost" in what else what
            elif name is not None and what in ("process started", "came"):
                self._worker(str(name)).said = None
            elif name is not None and what in ("late", "goes on"):
                self._worker(str(name)).is_late = what == "late"
            if what == "all start again":
                self._restarts += 1
                self._workers = {
                    name: self._workers[name] for name in event["workers"] if name in self._workers
                }
                for name in event["workers"]:
                    self._worker(name).restart()
            elif what == "process lost" and "restart" in event:
                self._restarts += 1
            if what == "interrupted":
                for worker in self._workers.values():
                    worker.is_late = False
                if self._runs and self._interrupted_at is None:
                    self._interrupted_at = time.monotonic()
            elif what == "started":
                self._runs = True
                if self._interrupted_at is not None:
                    self._last_recovery = time.monotonic() - self._interrupted_at
                    self._recoveries += 1
                    self._interrupted_at = None

    def end(self, how: str) -> None:
        """Notes that the job is over."""
        with self._lock:
            self._ended = how

    # -- state -----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole state, for JSON: numbers and strings, with None for unknown values."""
        now = time.monotonic()
        with self._lock:
            workers = list(self._workers.values())
            waiting = self._waiting(workers, now)
            told = [self._told(worker, waiting, now) for worker in workers]
            stragglers = [(w["name"], w["straggles"]) for w in told if w["straggles"]]
            leader = max(workers, key=lambda worker: worker.step, default=None)
            return {
                "program": self._program,
                "kind": self._kind,
                "now": time.time(),
                "seconds": time.time() - self._began,
                "ended": self._ended,
                "step": 0 if leader is None else leader.step,
                "steps_per_second": None if leader is None else leader.rate("steps"),
                "examples_per_second": self._examples_per_second(now),
                "step_seconds": _slowest(worker["step_seconds"] for worker in told),
                "loss": self._losses.points[-1][1] if self._losses.points else None,
                "stragglers": [f"{name} {how}" for name, how in stragglers],
                "recoveries": self._recoveries,
                "last_recovery_seconds": self._last_recovery,
                "restarts": self._restarts,
                "workers": told,
                "losses": self._losses.points,
                "rates": self._rates.points,
                "events": list(self._events),
            }

    def _worker(self, name: str) -> WatchedWorker:
        if name not in self._workers:
            if len(self._workers) >= _MOST_WORKERS:
                raise ValueError(f"more than {_MOST_WORKERS} workers")
            trains = self._kind != "parameter servers" or name == "chief"
            self._workers[name] = WatchedWorker(name, trains)
        return self._workers[name]

    def _of_losses(self) -> WatchedWorker | None:
        """Returns the worker whose losses are shown: the first one that has any."""
        return next((w for w in self._workers.values() if w.loss is not None), None)

    def _examples_per_second(self, now: float) -> float | None:
        """Returns the rate of all replicas together, which every training worker counts."""
        rates = [
            worker.rate("examples")
            for worker in self._workers.values()
            if worker.state(now) == "running"
        ]
        return max((rate for rate in rates if rate is not None), default=None)

    def _told(
        self, worker: WatchedWorker, waiting: Mapping[str, _Waiting], now: float
    ) -> dict[str, Any]:
        latest = worker.latest or {}
        is_running = worker.state(now) == "running"
        own = waiting.get(worker.name)
        straggles = own.words() if own is not None else None
        if worker.is_late:
            straggles = "has kept the others waiting"
        phases = None
        if is_running and (share := worker.input_share) is not None:
            others = None if own is None else own.share
            phases = {
                "input": share,
                "others": others,
                "computing": 1.0 - share - (others or 0.0),
            }
        age, interval, share = latest.get("checkpoint") or (None, None, None)
        return {
            "name": worker.name,
            "process": latest.get("process"),
            "state": worker.state(now),
            "step": worker.step,
            "steps_per_second": worker.rate("steps") if is_running else None,
            "step_seconds": worker.step_seconds(),
            "phases": phases,
            "straggles": straggles if is_running else None,
            "memory_bytes": latest.get("memory"),
            "device_bytes": latest.get("device_memory"),
            "utilization": latest.get("utilization") if is_running else None,
            "mfu": worker.mfu if is_running else None,
            "sent_bytes": latest.get("sent"),
            "sent_bytes_per_second": worker.rate("sent") if is_running else None,
            "loss": worker.loss,
            "loss_is_finite": worker.loss_is_finite,
            "checkpoint_age": age,
            "checkpoint_interval": interval,
            "checkpoint_share": share,
            "silent_seconds": now - worker.heard_at if latest else None,
        }

    def _waiting(self, workers: Sequence[WatchedWorker], now: float) -> dict[str, _Waiting]:
        """Returns how workers wait for each other, if all run the same steps together.

        A step ends when the last worker to begin it has done its part; so a worker that begins it
        earlier waits at least for the difference.
        """
        workers = [w for w in workers if w.latest is not None and w.latest["steps"]]
        if self._kind != "workers" or len(workers) < 2:
            return {}
        since = min(float((w.latest or {})["now"]) for w in workers) - WINDOW
        after: dict[str, list[float]] = {worker.name: [] for worker in workers}
        before: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for step, _, _ in workers[0].marks(since):
            begins = [worker.begin_of(step) for worker in workers]
            known = [begin for begin in begins if begin is not None]
            if len(known) < len(workers):
                continue
            second, last = sorted(known)[-2:]
            for worker, begin in zip(workers, known, strict=True):
                before[worker.name].append(last - begin)
                after[worker.name].append(last - second if begin == last else 0.0)
        found = {}
        for worker in workers:
            name = worker.name
            others = [other for other in workers if other is not worker]
            found[name] = _Waiting(
                _mean(before[name]),
                _mean(after[name]),
                _late(worker, others),
                worker.rate("steps") or 0.0,
                worker.input_share or 0.0,
            )
        # The worker that begins a step last does not wait for others, and all compute for as long.
        work = 1.0 - min(found.values(), key=lambda each: each.before).input
        for each in found.values():
            each.share = min(each.before * each.pace, max(0.0, 1.0 - each.input - work))
        return found


@dataclasses.dataclass
class _Waiting:
    """The time for which a worker waits for others, and for which others wait for it.

    Attributes:
        before: The mean number of seconds by which it begins a step before the last worker.
        after: The mean number of seconds by which it begins a step after all others.
        late: The seconds for which the others have been in a step that it has not begun.
        pace: The number of steps that it begins per second.
        input: The fraction of the time for which it waits for its input.
        share: The approximate fraction of the time for which it waits for others.
    """

    before: float
    after: float
    late: float
    pace: float
    input: float
    share: float = 0.0

    def words(self) -> str | None:
        """Describes how it keeps the others waiting; None if it does not.

        Examples:
            >>> _Waiting(0.0, 0.02, 0.0, pace=20.0, input=0.01).words()
            'keeps the others waiting: it begins a step 20 ms after them, and computes'
        """
        if self.late > _STUCK:
            return f"has kept the others waiting for {self.late:.0f} s"
        if self.after * self.pace < _STRAGGLES or self.after < self.before:
            return None
        is_input = self.input > _STRAGGLES
        does = f"waits for its input for {self.input:.0%} of its time" if is_input else "computes"
        return (
            f"keeps the others waiting: it begins a step {1e3 * self.after:.3g} ms after them, and "
            f"{does}"
        )


def _slowest(times: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    """Returns the times of the worker with the longest steps: the others may run ahead of their
    devices, and then wait for several steps together.
    """
    known = [each for each in times if each is not None]
    return max(known, key=lambda each: each["p50"], default=None)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _late(worker: WatchedWorker, others: Sequence[WatchedWorker]) -> float:
    """Returns the seconds for which all others have been in a step that a worker has not begun."""
    told = worker.latest or {}
    if told.get("has_ended"):
        return 0.0
    begins = [other.begin_of(told["steps"]) for other in others]
    known = [begin for begin in begins if begin is not None]
    if len(known) < len(others):
        return 0.0
    return max(0.0, max(float((w.latest or {})["now"]) for w in [worker, *others]) - max(known))


def quantile(weighted: Iterable[tuple[float, float]], part: float) -> float:
    """Returns a weighted quantile.

    Args:
        weighted: Pairs of a value and its weight; at least one.
        part: The quantile's probability, from 0 to 1.

    Examples:
        >>> quantile([(1.0, 98), (5.0, 2)], 0.5), quantile([(1.0, 98), (5.0, 2)], 0.99)
        (1.0, 5.0)
    """
    ordered = sorted(weighted)
    left = part * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


#: The fields of a report: their types, and whether they may be None.
_FIELDS: Mapping[str, tuple[type | tuple[type, ...], bool]] = {
    "worker": (str, False),
    "process": (int, False),
    "now": ((int, float), False),
    "has_ended": (bool, False),
    "steps": (int, False),
    "position": (int, True),
    "examples": (int, True),
    "waited": ((int, float), False),
    "marks": (list, False),
    "loss": (list, True),
    "memory": (int, True),
    "device_memory": (int, True),
    "sent": (int, True),
    "operations": (int, False),
    "peak_operations": ((int, float), True),
    "utilization": ((int, float), True),
    "checkpoint": (list, True),
}


def checked(told: Mapping[str, Any]) -> dict[str, Any]:
    """Validates a report, and returns it with normalized values.

    Raises:
        KeyError, TypeError, ValueError: The report is invalid.
    """
    found: dict[str, Any] = {}
    for name, (kind, may_be_none) in _FIELDS.items():
        value = found[name] = told.get(name) if may_be_none else told[name]
        if not (isinstance(value, kind) or (value is None and may_be_none)):
            raise TypeError(f"Expected {name} to be {kind}. Received: {value!r}")
    found["worker"] = found["worker"][:_MOST_TEXT]
    found["marks"] = [
        (int(step), _finite(at), bool(has_paused))
        for step, at, has_paused in found["marks"][:_MOST_MARKS]
    ]
    _finite(found["now"]), _finite(found["waited"])
    if (checkpoint := found["checkpoint"]) is not None:
        age, interval, share = checkpoint
        found["checkpoint"] = (int(age), int(interval), _finite(share))
    if found["loss"] is not None:
        step, loss = found["loss"]
        found["loss_is_finite"] = math.isfinite(float(loss))
        found["loss"] = (int(step), float(loss)) if found["loss_is_finite"] else None
    return found


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"Expected a number. Received: {value!r}")
    return number
