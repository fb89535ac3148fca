"""Checkpoints in the memory of each host, from which a job that starts again resumes.

Every k steps, all workers keep their state in memory that the process which has started them owns
(`HostMemory`), while the training continues. So a checkpoint needs no disk, and a job that loses a
worker loses k steps at most. The idea is that of GEMINI (Wang et al., SOSP 2023).

The workers keep states of the same steps, and none begins a further one before all have completed
the last. So, whenever a worker is lost, there is a step of which each has a record. What it costs
is measured on each worker, and k is the number of steps of which that is the wanted share.

If the job goes on with another number of workers, each reads the records of all of the former ones,
and takes what its replicas need.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from unison.cells import Cell
from unison.interrupts import signals_held
from unison.runtime import liveness, process_group
from unison.runtime.agreement import Talk
from unison.runtime.elastic.group import Entry
from unison.runtime.host_memory import (
    PROCESS,
    WorkerMemory,
    about_process,
    take_part,
    worker_memory,
)
from unison.train.background import BackgroundWriter
from unison.train.found_states import FoundState, latest_state
from unison.train.loop_state import LoopState
from unison.train.memory_record import RecordWriter, size_of_record

logger = logging.getLogger("unison")

#: The number of steps before the memory is allocated, and of those before each of the first two
#: checkpoints, whose costs are measured.
_BEFORE_ALLOCATION = 1
_FIRST_INTERVAL = 8

#: The number of checkpoints whose measurements are used.
_REMEMBERED = 3

_MOST_STEPS = 10**6

#: Seconds within which another machine gets a copy, and between two looks.
_SECONDS_TO_COPY = 60.0
_SECONDS_BETWEEN_LOOKS = 0.005

#: Before all steps.
_NOTHING = -1

#: An interval that differs by this factor from the one that was logged is logged.
_NEWS = 2.5


class Cost(NamedTuple):
    """The cost of this worker's checkpoints.

    Attributes:
        age: The number of steps since the latest one that all workers have completed.
        interval: The number of steps from one to the next.
        share: The part of the time that they take.
    """

    age: int
    interval: int
    share: float


class InMemoryCheckpoints:
    """The checkpoints of a worker in its host's memory.

    Args:
        memory: The memory.

    Attributes:
        steps: The number of steps that the state has taken part in, since the job's beginning.
    """

    def __init__(self, memory: WorkerMemory):
        self._memory = memory
        self.steps = 0
        #: The step of the latest checkpoint, its cost and the time of a step, in seconds.
        self._latest: tuple[int, float, float] | None = None
        #: The number of steps from the last checkpoint that was begun to the next.
        self._every = _BEFORE_ALLOCATION
        self._due = _BEFORE_ALLOCATION
        self._writer = BackgroundWriter()
        self._talk: Talk | None = None
        self._has_allocated = False
        self._has_looked = False
        #: The number of loops that have begun, without inner ones, and of those that are running.
        self._loops = 0
        self._depth = 0
        #: The time at which the last checkpoint was begun, and its step.
        self._last = 0.0, 0
        #: The seconds that the last checkpoints have cost on each worker, and those of a step.
        self._measured: deque[Sequence[Sequence[float]]] = deque(maxlen=_REMEMBERED)
        self._logged = 0
        #: As text, which is written faster than what it says.
        self._about_process = ""

    @property
    def workers_at_start(self) -> int:
        """The number of workers with which the job began."""
        return self._memory.at_start or process_group.count()

    @property
    def is_due(self) -> bool:
        """Whether the next step is one before which the state is kept."""
        return self._has_looked and self.steps >= self._due

    @contextlib.contextmanager
    def loop(self) -> Iterator[bool]:
        """Inside, a loop of the program runs; yields whether its state is kept.

        That of an inner loop is not: it runs again with the step of the outer one.
        """
        self._depth += 1
        self._loops += self._depth == 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1

    def enter(
        self, state: LoopState, is_later: Callable[[Any], bool] = lambda position: False
    ) -> Entry:
        """Restores the state of the loop that has begun, if there is one; all workers call this.

        Earlier loops than that of the state run again: what they lead to is not in it.

        Args:
            state: The loop's state.
            is_later: Whether the program has restored a later state than that of a position;
                see `keep`.

        Raises:
            DataLossError: It is corrupt.
            ValueError: It is the state of another program.
        """
        if self._has_looked:
            return Entry.NEW
        with latest_state(self._memory) as found:
            if found is not None and found.about["loop"] > self._loops:
                if process_group.is_first():
                    logger.info(
                        "Loop %d of the program runs again: the state in memory is that of loop "
                        "%d.",
                        self._loops,
                        found.about["loop"],
                    )
                return Entry.NEW
            self._has_looked = True
            take_part()
            if found is None or is_later(found.about["position"]):
                self._memory.discard_after(_NOTHING)
                self._memory.forget_former()
                return Entry.NEW
            self._memory.discard_after(found.step)  # those that not all workers have
            with signals_held:
                _restore(state, found)
        self._memory.forget_former()
        self._resume_after(found)
        return Entry.RESUMED

    def _resume_after(self, found: FoundState) -> None:
        self.steps = found.step
        self._due = found.step + _BEFORE_ALLOCATION
        if not process_group.is_first():
            return
        logger.info("Training resumes after step %d, from the memory of its hosts.", found.step)
        if found.workers != process_group.count():
            logger.info(
                "It goes on with %d workers; at that step there were %d.",
                process_group.count(),
                found.workers,
            )

    def keep(self, state: LoopState, position: Any = None) -> None:
        """Begins to keep the state; all workers call this before the same step.

        Args:
            state: The state.
            position: Its position in the loop, which JSON can express; see `enter`.

        Raises:
            UnavailableError: A worker is lost.
            ResourceExhaustedError: The host has no more memory.
        """
        begun = time.perf_counter()
        self._writer.wait()
        if not self._has_allocated:
            self._allocate(state)
            return
        if len(self._measured) < _REMEMBERED:
            self._about_process = json.dumps(about_process())
        about = {
            "workers": process_group.count(),
            "worker": process_group.index(),
            "first": process_group.index() - self._memory.place,
            "loop": self._loops,
            "position": position,
            PROCESS: self._about_process,
        }
        last, last_step = self._last
        pace = (begun - last) / (self.steps - last_step)
        with signals_held:  # a record that was begun is finished
            record = RecordWriter(state, self._memory.own, self._memory.place == 0)
            stall = time.perf_counter() - begun
            self._writer.start(
                functools.partial(self._finish, record, self.steps, about, stall, pace)
            )
        # It grows slowly: the first ones are measured while programs are still being compiled.
        self._begin_interval(min(self._interval(), 2 * (self.steps - last_step)))

    def _allocate(self, state: LoopState) -> None:
        """Allocates the memory, in the background."""
        self._has_allocated = True
        size = size_of_record(state, self._memory.place == 0)
        self._writer.start(functools.partial(self._memory.allocate_own, size))
        self._begin_interval(_FIRST_INTERVAL)

    def cost(self) -> Cost | None:
        """Returns what they cost now; None if there is none yet. Any thread may call this."""
        if self._latest is None:
            return None
        step, cost, pace = self._latest
        return Cost(self.steps - step, self._every, cost / (self._every * pace))

    def _begin_interval(self, steps: int) -> None:
        self._last = time.perf_counter(), self.steps
        self._every = steps
        self._due = self.steps + steps

    def _interval(self) -> int:
        """Returns the number of steps until the next checkpoint: the same on all workers."""
        if not self._measured:
            return _FIRST_INTERVAL
        wanted = max(cost / pace for cost, pace in self._costs()) / self._memory.overhead
        return min(max(math.ceil(wanted), 1), _MOST_STEPS)

    def _costs(self) -> list[tuple[float, float]]:
        """Returns the cost of a checkpoint on each worker, and the shortest mean time of a step.

        That is the time of steps in which nothing was compiled.
        """
        of_workers = zip(*self._measured, strict=True)
        return [
            (statistics.median(cost for cost, _ in own), min(pace for _, pace in own))
            for own in of_workers
        ]

    def _finish(
        self, record: RecordWriter, step: int, about: dict[str, Any], stall: float, pace: float
    ) -> None:
        """Completes a checkpoint on all workers, and tells them what it has cost here."""
        try:
            cpu = time.thread_time()
            cost = stall + record.finish(step, {**about, "step": step})
            if record.is_on_host:
                cost += time.thread_time() - cpu
        except BaseException:
            record.forget()
            raise
        self._await_copy(step)
        if self._talk is None:
            self._talk = process_group.talk_of_its_own("in-memory checkpoints")
        self._take_in(step, self._talk.ask([cost, pace]))

    def _await_copy(self, step: int) -> None:
        """Waits until another machine has a copy of this worker's record, if one is to get it.

        Raises:
            UnavailableError: A worker is lost.
        """
        deadline = time.monotonic() + _SECONDS_TO_COPY
        while self._memory.is_copied and self._memory.own.copied < step:
            liveness.check()
            if time.monotonic() > deadline:
                logger.warning(
                    "The state at step %d was not copied to another machine within %g s. Training "
                    "continues: if a machine is lost before a later state is copied, so may be the "
                    "state of the job.",
                    step,
                    _SECONDS_TO_COPY,
                )
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _take_in(self, step: int, measured: Sequence[Sequence[float]]) -> None:
        """Takes note of what all workers have measured for a checkpoint."""
        self._measured.append(measured)
        interval = self._interval()
        costs = self._costs()
        self._latest = step, *costs[process_group.index()]
        is_news = not self._logged / _NEWS <= interval <= self._logged * _NEWS
        if is_news and len(self._measured) == _REMEMBERED and process_group.is_first():
            self._logged = interval
            cost, pace = max(costs, key=lambda own: own[0] / own[1])
            logger.info(
                "In-memory checkpoints: every %d steps (%.2g s), each %.2g ms, which is %.2g %% of "
                "the time.",
                interval,
                interval * pace,
                1000 * cost,
                100 * cost / (interval * pace),
            )


def _restore(state: LoopState, found: FoundState) -> None:
    """Restores a state; after that, nothing reads the memory of its records."""
    try:
        state.take(found.archive())
    finally:  # other threads copy
        cells = [cell for cell in state.followed_cells() if type(cell) is Cell and cell.has_value]
        jax.block_until_ready([cell.stored() for cell in cells])


_own: InMemoryCheckpoints | None = None


def in_memory_checkpoints() -> InMemoryCheckpoints | None:
    """Returns this worker's; None if the job does not keep its state in memory.

    The thread that trains calls this; others look at what there is, by `cost_of_checkpoints`.
    """
    global _own
    if _own is None and (memory := worker_memory()) is not None:
        _own = InMemoryCheckpoints(memory)
    return _own


def cost_of_checkpoints() -> Cost | None:
    """Returns what this worker's checkpoints cost; None if there are none. For any thread."""
    return None if _own is None else _own.cost()
