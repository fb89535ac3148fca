"""The time for which a program waits for its input, and the stage of a pipeline that causes it.

Every iterator measures its waiting, always (`iterator.statistics()`). The time of each stage is
measured on request (`timing()`): every stream and every access by index that is opened then
is wrapped, and the time that a stage spends in its inputs is not counted as its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from unison.data import plan as plans
from unison.data.leaves import count_rows
from unison.data.plan import Plan, Rows, Stream
from unison.data.state import State
from unison.data.structure import Leaves
from unison.thread_local import ThreadLocal

Result = TypeVar("Result")


# -- waiting -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InputStatistics:
    """The time for which a loop has waited for its input.

    Attributes:
        elements: The number of elements (of a batched dataset, batches) that it received.
        waiting: The seconds for which it waited for them.
        seconds: The total seconds, from the first request until the last element was received.
    """

    elements: int
    waiting: float
    seconds: float

    @property
    def waiting_share(self) -> float:
        """The fraction of the time that was spent waiting: 0 if the pipeline is fast enough."""
        return self.waiting / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.elements} elements in {self.seconds:.3f} s, of which {self.waiting:.3f} s "
            f"({self.waiting_share:.1%}) waiting for input"
        )


_waited_seconds = ThreadLocal(0.0)


def waited_seconds() -> float:
    """Returns the seconds for which this thread has waited for elements of datasets so far.

    The waiting time of a loop is the difference between two calls.
    """
    return _waited_seconds.value


class Meter:
    """Measures the time for which a loop waits for its elements."""

    __slots__ = ("_begin", "_elements", "_end", "_waiting")

    def __init__(self) -> None:
        self._elements = 0
        self._waiting = 0.0
        self._begin: float | None = None
        self._end = 0.0

    def next(self, elements: Iterator[Result]) -> Result:
        """Returns the next element; raises what `next(elements)` raises."""
        before = _waited_seconds.value
        begin = perf_counter()
        try:
            element = next(elements)
            self._elements += 1
            return element
        finally:
            end = self._end = perf_counter()
            if self._begin is None:
                self._begin = begin
            self._waiting += end - begin
            # Iterators that were called for this element have counted the same seconds.
            _waited_seconds.value = before + end - begin

    def statistics(self) -> InputStatistics:
        """Returns the measurements so far."""
        seconds = 0.0 if self._begin is None else self._end - self._begin
        return InputStatistics(self._elements, self._waiting, seconds)


def metered(elements: Iterator[Result]) -> Iterator[Result]:
    """Yields the elements, and counts their time as waiting time of the thread."""
    meter = Meter()
    while True:
        try:
            element = meter.next(elements)
        except StopIteration:
            return
        yield element


# -- stages ------------------------------------------------------------------------------------


class Stage:
    """A plan of a pipeline, and its measurements so far.

    Attributes:
        name: The plan's name.
        elements: The number of elements that it returned.
        seconds: Its time, in all threads, without its inputs.
        inputs: The stages that it reads.
        ready: The mean number of elements that were ready when one was requested; None for a stage
            that computes nothing ahead.
        only_waits: Whether its time is spent waiting for a thread that runs its inputs, and counts
            as theirs.
    """

    def __init__(self, plan: Plan, is_made: bool = False):
        self.name = plan.name
        self.elements = 0
        self.seconds = 0.0
        self.ready: float | None = None
        self.only_waits = False
        #: The plan; if a function creates several, the first one.
        self.plan = plan
        #: Whether its plans are created by a function of elements, or are inputs of such plans.
        self.is_made = is_made
        #: The stages that it reads, by their index in the plan's inputs, or by name.
        self.stages: dict[int | str, Stage] = {}
        self._asked = 0
        self._lock = threading.Lock()

    @property
    def inputs(self) -> list[Stage]:
        return list(self.stages.values())

    def add(self, seconds: float, elements: int) -> None:
        """Adds the duration and the elements of a call."""
        with self._lock:
            self.seconds += seconds
            self.elements += elements

    def note_ready(self, count: int) -> None:
        """Records the number of elements that are ready when one is requested."""
        with self._lock:
            self.ready = ((self.ready or 0.0) * self._asked + count) / (self._asked + 1)
            self._asked += 1


@dataclasses.dataclass
class _Current:
    """The current computation of a thread.

    Attributes:
        stage: The stage; None outside of all stages.
        plan: Its plan.
        inside: The seconds that its current call has spent in other stages so far.
    """

    stage: Stage | None = None
    plan: Plan | None = None
    inside: float = 0.0


_current = ThreadLocal(default_factory=_Current)


class _Timed:
    """Base of the measurements of a stage."""

    def __init__(self, plan: Plan, stage: Stage):
        self._plan = plan
        self._stage = stage

    def run(self, function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
        """Calls a function; returns its result, and the stage's own seconds."""
        current = _current.value
        outer = current.stage, current.plan, current.inside
        current.stage, current.plan, current.inside = self._stage, self._plan, 0.0
        begin = perf_counter()
        try:
            result = function(*args)
        finally:
            elapsed = perf_counter() - begin
            own = elapsed - current.inside
            current.stage, current.plan, inside = outer
            current.inside = inside + elapsed
        return result, own


class _TimedStream(_Timed, Stream):
    """A stream whose calls are measured for a stage."""

    def __init__(self, plan: Plan, stage: Stage, open_stream: Callable[[], Stream]):
        super().__init__(plan, stage)
        self._stream, seconds = self.run(open_stream)
        stage.add(seconds, 0)
        stage.only_waits = getattr(self._stream, "only_waits", False)

    def state(self) -> State:
        return self._stream.state()

    def restore(self, state: State) -> None:
        self.run(self._stream.restore, state)

    def next(self) -> Leaves | None:
        self._note_ready()
        element, seconds = self.run(self._stream.next)
        self._stage.add(seconds, element is not None)
        return element

    def next_block(self, count: int) -> Leaves | None:
        self._note_ready()
        block, seconds = self.run(self._stream.next_block, count)
        self._stage.add(seconds, 0 if block is None else count_rows(block))
        return block

    def skip(self, count: int) -> int:
        skipped, seconds = self.run(self._stream.skip, count)
        self._stage.add(seconds, 0)
        return skipped

    def _note_ready(self) -> None:
        ready = getattr(self._stream, "num_ready", None)
        if ready is not None:
            self._stage.note_ready(ready)


class _TimedRows(_Timed, Rows):
    """Access by index that is measured for a stage."""

    def __init__(self, plan: Plan, stage: Stage, rows: Rows):
        super().__init__(plan, stage)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return self._timed(len(indices), self._rows.take, indices)

    def slice(self, start: int, stop: int) -> Leaves:
        return self._timed(stop - start, self._rows.slice, start, stop)

    def element(self, index: int) -> Leaves:
        return self._timed(1, self._rows.element, index)

    def _timed(self, count: int, function: Callable[..., Leaves], *args: Any) -> Leaves:
        # A stage that reads its own rows returns them as a stream, in which they are counted.
        is_own = _current.value.plan is self._plan
        leaves, seconds = self.run(function, *args)
        self._stage.add(seconds, 0 if is_own else count)
        return leaves


class StageTimes:
    """The time of the stages of all pipelines that are opened inside a `with` block.

    Examples:
        >>> import time
        >>> from unison.data import Dataset, timing
        >>> with timing() as stages:
        ...     for batch in Dataset.range(20).map(lambda x: time.sleep(1e-3) or x).batch(5):
        ...         pass
        >>> stages.slowest.name, stages.slowest.elements
        ('Map', 20)
    """

    def __init__(self) -> None:
        #: The stages of plans that are not created by functions, by the plan's identity.
        self._stages: dict[int, Stage] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if plans.observer is not None:
            raise RuntimeError("Stages are being timed already: leave that `with` block first.")
        plans.observer = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        plans.observer = None

    @property
    def pipelines(self) -> list[Stage]:
        """The last stage of every pipeline, in the order in which they were opened."""
        read = {id(source) for stage in self._stages.values() for source in stage.inputs}
        return [stage for stage in self._stages.values() if id(stage) not in read]

    @property
    def slowest(self) -> Stage | None:
        """The stage that took the most time; None if there is none."""
        working = [stage for stage in self._all() if not stage.only_waits]
        return max(working, key=lambda stage: stage.seconds, default=None)

    def share(self, stage: Stage) -> float:
        """Returns the fraction of the time of all stages that one stage took."""
        total = sum(stage.seconds for stage in self._all() if not stage.only_waits)
        return stage.seconds / total if total else 0.0

    def __str__(self) -> str:
        slowest = self.slowest
        lines = [("stage", "elements", "seconds", "share", "")]
        for depth, stage in self._indented():
            share = "waits" if stage.only_waits else f"{self.share(stage):.1%}"
            notes = [] if stage.ready is None else [f"{stage.ready:.1f} ready"]
            note = "  ".join([*notes, *(["<- the slowest"] if stage is slowest else [])])
            name = "  " * depth + stage.name
            lines.append((name, str(stage.elements), f"{stage.seconds:.3f}", share, note))
        width = max(len(name) for name, *_ in lines)
        return "\n".join(
            f"{name:<{width}}  {elements:>9}  {seconds:>8}  {share:>6}  {note}".rstrip()
            for name, elements, seconds, share, note in lines
        )

    def stream(self, plan: Plan, open_stream: Callable[[], Stream]) -> Stream:
        """Opens a stream of `plan`; it is measured from then on."""
        return _TimedStream(plan, self._stage_of(plan), open_stream)

    def rows(self, plan: Plan, open_rows: Callable[[], Rows | None]) -> Rows | None:
        """Opens access by index to `plan`; it is measured from then on."""
        stage = self._stage_of(plan)
        rows, seconds = _Timed(plan, stage).run(open_rows)
        stage.add(seconds, 0)
        return None if rows is None else _TimedRows(plan, stage, rows)

    def _stage_of(self, plan: Plan) -> Stage:
        reader, reading = _current.value.stage, _current.value.plan
        with self._lock:
            if reader is None or reading is None:
                return self._stages.setdefault(id(plan), Stage(plan))
            if reading is plan:
                return reader
            places = [n for n, source in enumerate(reading.inputs) if source is plan]
            # The datasets that a function creates are one stage, whatever their number.
            key = places[0] if places else plan.name
            if key not in reader.stages:
                if reader.is_made or not places:
                    reader.stages[key] = Stage(plan, is_made=True)
                else:
                    reader.stages[key] = self._stages.setdefault(id(plan), Stage(plan))
            return reader.stages[key]

    def _all(self) -> list[Stage]:
        return list({id(stage): stage for _, stage in self._indented()}.values())

    def _indented(self) -> Iterator[tuple[int, Stage]]:
        def below(stage: Stage, depth: int) -> Iterator[tuple[int, Stage]]:
            yield depth, stage
            for source in stage.inputs:
                yield from below(source, depth + 1)

        for root in self.pipelines:
            yield from below(root, 0)


def timing() -> StageTimes:
    """Returns a context manager that measures the time of every stage of every pipeline.

    Pipelines that were opened before (existing iterators) are not measured. Measuring
    takes about a microsecond per element and stage.

    Examples:
        with unison.data.timing() as stages:
            model.fit(dataset)
        print(stages)
    """
    return StageTimes()
