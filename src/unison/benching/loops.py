"""`Loop`: the steps of one kind, which are measured in three ways.

1. The pace at which they follow each other, as the program runs them. The end of a step is noticed
   by a thread that waits for its result, so that the loop continues meanwhile.
2. The time of a step that starts when the previous one has ended.
3. The time in which the replicas compute their parts of it alone: at the same time, and without
   exchanging anything (see `unison.program.single_replica`).

The difference of the second and the third is communication, and waiting for other replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from unison.benching.records import Record
from unison.data import waited_seconds
from unison.interrupts import is_of_a_signal_handler
from unison.runtime.placement import Placement
from unison.runtime.process_group import all_gather_json
from unison.thread_pool import ThreadPool

#: The minimum number of launches for the pace: Keras runs several small steps in one.
_LEAST_LAUNCHES = 20

#: The number of launches that are timed one by one.
_SINGLE_LAUNCHES = 8

#: The minimum seconds, and the minimum number of times, for which replicas compute alone.
_ALONE_SECONDS = 0.3
_ALONE_RUNS = 5

_LIBRARIES = ("jax", "jaxlib", "keras", "numpy", "unison")


@dataclasses.dataclass
class Launch:
    """Steps that ran as one program.

    Attributes:
        steps: Their number.
        waited: The seconds for which the loop had waited for its input by then.
        resumed: The time at which the loop resumed after other steps, and its waiting by then; None
            if there were none since the previous launch.
        done: The time of their end; None before.
    """

    steps: int
    waited: float
    resumed: tuple[float, float] | None = None
    done: float | None = None


class Loop:
    """The steps of one kind.

    Args:
        name: Their name.
        placement: The replicas.
        warmup: The number of steps before measuring begins.
        steps: The minimum number of steps for the pace.
        watch: Records the time at which a launch's result is ready.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        warmup: int,
        steps: int,
        watch: Callable[[Launch, Any], None],
    ):
        #: The number of steps so far.
        self.steps = 0
        #: The number of examples in the latest step; None if it is unknown.
        self.examples: int | None = None
        #: Whether enough steps have run to determine their pace.
        self.has_pace = False
        #: Whether everything is measured.
        self.is_known = False
        self._name = name
        self._placement = placement
        self._warmup = warmup
        self._enough = warmup + steps
        self._watch = watch
        self._launches: list[Launch] = []  # beginning with the last one of the warm-up
        self._single: list[float] = []
        self._alone: float | None = None
        self._why_not: str | None = None
        self._memory: int | None = None
        self._last: Any = None
        self._begin: float | None = None
        self._is_interrupted = False
        self._resumed: tuple[float, float] | None = None

    def interrupt(self) -> None:
        """Records that a step of another loop runs: its time is not part of this loop's."""
        self._is_interrupted = True

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Inside, the program makes a call that may launch steps."""
        if self.has_pace:
            jax.block_until_ready(self._last)
        self._begin = perf_counter()
        if self._is_interrupted:
            self._resumed = (self._begin, waited_seconds())
            self._is_interrupted = False
        try:
            yield
        finally:
            self._begin = None

    def launched(self, steps: int, arrays: Any) -> None:
        """Records a launch; it may be later than the calls that made its steps.

        Args:
            steps: The number of launched steps.
            arrays: Arrays that are ready when the steps have ended, and do not change.
        """
        self.steps += steps
        self._last = arrays
        if self.has_pace:
            jax.block_until_ready(arrays)
            if self._begin is not None:
                self._single.append((perf_counter() - self._begin) / steps)
        elif self.steps >= self._warmup:
            launch = Launch(steps, waited_seconds(), self._resumed)
            self._resumed = None
            self._launches.append(launch)
            self._watch(launch, arrays)
            if len(self._launches) == 1:  # those queued while compiling do not count
                jax.block_until_ready(arrays)
            if len(self._launches) > _LEAST_LAUNCHES and self.steps >= self._enough:
                self.has_pace = True
                self._memory = peak_memory()

    @property
    def is_measured_alone_next(self) -> bool:
        """Whether everything is measured except the replicas alone."""
        return len(self._single) >= _SINGLE_LAUNCHES and not self.is_known

    def measure_alone(self, parts: Callable[[], Sequence[Callable[[], Any]]]) -> None:
        """Measures the time of the replicas without each other. All workers must call this.

        Args:
            parts: Returns for each of this process's replicas a function that computes its part of
                a step, alone, and waits for it.
        """
        mine: Sequence[Callable[[], Any]] = ()
        try:
            mine = parts()
            for part in mine:
                part()  # compiles
        except Exception as error:  # in case a step only works with the other replicas
            if is_of_a_signal_handler(error):
                raise
            self._why_not = f"{type(error).__name__}: {error}"
        # Then all workers compute at the same time.
        told = all_gather_json(self._why_not, "what replicas compute alone is measured")
        self._why_not = next(filter(None, told), None)
        if self._why_not is None:
            with ThreadPool(len(mine)) as threads:
                own = max(threads.map(_median_seconds, mine))
            self._alone = max(all_gather_json(own, "how long replicas compute alone"))
        self.is_known = True

    def record(self) -> Record:
        """Returns the measurements; to be called when the launches have been recorded."""
        launches: list[tuple[int, float]] = []
        waited = 0.0
        for before, launch in itertools.pairwise(self._launches):
            begin, waited_before = launch.resumed or (before.done, before.waited)
            if begin is not None and launch.done is not None:
                launches.append((launch.steps, round(launch.done - begin, 7)))
                waited += launch.waited - waited_before
        devices = self._placement.local_devices
        return Record(
            loop=self._name,
            replicas=self._placement.num_replicas,
            device=f"{devices[0].platform} ({devices[0].device_kind})",
            steps=self.steps,
            examples=self.examples,
            launches=launches,
            waited=waited,
            single=self._single[1:],  # steps that ran together before are compiled once more
            alone=self._alone,
            why_not=self._why_not,
            memory=self._memory or peak_memory(),
            device_memory=peak_device_memory(devices),
            versions={name: metadata.version(name) for name in _LIBRARIES},
        )


def peak_memory() -> int | None:
    """Returns the maximum resident memory of this process in bytes; None if this is not Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    # Unlike the result of `getrusage`, it starts at zero with the program.
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else None


def peak_device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the maximum memory in use of the device with the most; None if it is not reported."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def _median_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while len(seconds) < _ALONE_RUNS or sum(seconds) < _ALONE_SECONDS:
        begin = perf_counter()
        call()
        seconds.append(perf_counter() - begin)
    return statistics.median(seconds)
