"""`Meter`: counts the steps of this process as they begin."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from unison.captured import StateCapturedError
from unison.data import waited_seconds
from unison.program import ProgramCache
from unison.runtime.placement import Placement
from unison.runtime.transfers import copied, shards_of
from unison.strategies.batch_shares import examples_of

#: The minimum of seconds between two recorded step starts: for shorter steps, only the mean time of
#: those in between is known.
_MARK_EVERY = 0.02

#: The number of them that are kept until they are reported.
_MOST_MARKS = 512

#: In a custom training loop, the first function that is run this many times is the step.
_OFTEN = 3

#: Seconds between two readings of the loss.
_LOSS_EVERY = 1.0


class Meter:
    """Counts steps; a `unison.strategies.observing.StepObserver`.

    The cost per step is one or two microseconds. It never waits for a device: it takes an
    asynchronous copy of a loss, and reads it once it is available.

    Attributes:
        steps: The number of training steps that have begun.
        examples: The number of their examples, of all replicas; None if unknown.
        marks: The starts of steps: the number of steps before, the time, and whether something else
            has run since the previous mark.
        operations: The floating-point operations of the products in those steps, on this process's
            devices.
        group: The elastic group of this worker, if any.
        devices: The devices of this process that compute, one of each replica.
        cores_per_replica: How many of this process's devices compute a replica.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.examples: int | None = None
        self.marks: collections.deque[tuple[int, float, bool]] = collections.deque(
            maxlen=_MOST_MARKS
        )
        self.operations = 0
        self.group: Any = None
        self.devices: Sequence[Any] = ()
        self.cores_per_replica = 1
        #: The latest start of a step, recorded or not, and the last step that was reported.
        self._latest: tuple[int, float, bool] | None = None
        self._told = -1
        self._next_mark = 0.0
        self._has_paused = False
        self._waited: dict[int, float] = {}
        self._calls: dict[str, int] = {}
        self._step_name: str | None = None
        self._counted_steps = 0
        self._next_loss = 0.0
        #: A loss that is being computed: its step, its parts, and the epoch over which they go.
        self._loss: tuple[int, list[Any], object] | None = None
        #: The total and the count at the last look, and their epoch.
        self._sums: tuple[float, float, object] = (0.0, 0.0, None)

    # -- steps -----------------------------------------------------------------------------

    def running(self, programs: ProgramCache) -> Callable[..., Any]:
        """See `StepObserver`."""
        return functools.partial(self._run, programs)

    def _run(
        self, programs: ProgramCache, function: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        if not self._is_step(getattr(function, "__qualname__", type(function).__qualname__)):
            self._has_paused = True
            return programs(function, args, kwargs)
        if self._begin():
            self._note_devices(programs.placement)
            self._count_examples((args, kwargs), programs)
        result = programs(function, args, kwargs)
        self.operations += _here(programs.operations, programs.placement)
        return result

    def training(self, trainer: Any, trains: bool) -> Callable[..., int]:
        """See `StepObserver`."""
        if not trains:
            self._has_paused = True
            run: Callable[..., int] = trainer.run_step
            return run
        return functools.partial(self._train, trainer)

    def _train(self, trainer: Any, step: Any, batch: Any, may_wait: bool) -> int:
        is_marked = self._begin()
        try:
            examples: int = trainer.run_step(step, batch, may_wait)
        except StateCapturedError:  # it has not begun: another step runs on the batch
            self.steps -= 1
            raise
        self.examples = (self.examples or 0) + examples
        self.operations += _here(step.operations, trainer.strategy.placement)
        if is_marked:
            self.group = trainer.strategy.group
            self._note_devices(trainer.strategy.placement)
            if self._loss is None and time.monotonic() >= self._next_loss:
                self._next_loss = time.monotonic() + _LOSS_EVERY
                self._take_loss(trainer)
        return examples

    def _note_devices(self, placement: Placement) -> None:
        self.devices = placement.local_devices
        self.cores_per_replica = placement.local_cores_per_replica

    def _begin(self) -> bool:
        """Counts a step, and returns whether its start is recorded."""
        now = time.time()
        is_marked = now >= self._next_mark
        latest = (self.steps, now, self._has_paused)
        if is_marked:
            self._next_mark = now + _MARK_EVERY
            self.marks.append(latest)
            self._has_paused = False
            self._waited[threading.get_ident()] = waited_seconds()
        self._latest = latest
        self.steps += 1
        return is_marked

    def _is_step(self, name: str) -> bool:
        if self._step_name is not None:
            return name == self._step_name
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls == _OFTEN:
            self._step_name = name
            self.steps = self._counted_steps = max(self.steps, calls - 1)
        return calls == _OFTEN

    def _count_examples(self, arguments: Any, programs: ProgramCache) -> None:
        """Counts examples, as if each step since the last call had as many as this one."""
        try:
            of_step = examples_of(arguments, programs.placement)
        except ValueError:  # with one replica, or without a batch, it is unknown
            return
        self.examples = (self.examples or 0) + of_step * (self.steps - self._counted_steps)
        self._counted_steps = self.steps

    # -- reports ---------------------------------------------------------------------------

    def take_marks(self) -> list[tuple[int, float, bool]]:
        """Returns the marks since the last call, and the latest start even if it was not recorded:
        this is the step in which this worker may be waiting for the others.
        """
        latest = self._latest  # read before the marks: a concurrent start is reported next time
        taken = [self.marks.popleft() for _ in range(len(self.marks))]
        if taken:
            self._told = taken[-1][0]
        if latest is not None and latest[0] > self._told:
            taken.append(latest)
            self._told = latest[0]
        return taken

    @property
    def waited(self) -> float:
        """The seconds for which the steps' threads have waited for input."""
        return sum(self._waited.values())

    def loss(self) -> tuple[int, float] | None:
        """Returns the latest loss and its step, once, if it can be read without waiting."""
        taken = self._loss
        if taken is None or not all(map(_is_ready, taken[1])):
            return None
        self._loss = None
        step, arrays, epoch = taken
        try:
            values = [float(np.sum(np.asarray(array))) for array in arrays]
        except (RuntimeError, TypeError, ValueError):  # deleted in the meantime, or not a number
            return None
        if len(values) == 1:
            return step, values[0]
        half = len(values) // 2
        total, count = sum(values[:half]), sum(values[half:])
        before, self._sums = self._sums, (total, count, epoch)
        if epoch is before[2]:  # only the values since the last call
            total, count = total - before[0], count - before[1]
        return None if not count else (step, total / count)

    def count_to(self, step: int) -> None:
        """Sets the number of steps, for a program that counts them itself."""
        if step > self.steps:
            self.steps = step - 1
            self._begin()

    def note_loss(self, value: Any) -> None:
        """Sets a loss that the program reports."""
        self._loss = (self.steps, [value], None)

    def _take_loss(self, trainer: Any) -> None:
        """Starts a copy of Keras' mean of the loss, for this process's replicas."""
        running, model = trainer.running, trainer.model
        tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
        own = list(getattr(tracker, "variables", ()))
        if running is None or len(own) != 2:  # those of a mean: total and count
            return
        variables = model.metrics_variables
        start = len(running.state) - len(variables)
        arrays = []
        for variable in own:
            place = next(i for i, known in enumerate(variables) if known is variable)
            shards = shards_of(running.state[start + place])
            arrays += [copied(shard.data) for shard in shards]
        self._loss = (self.steps, arrays, trainer.epoch_of_metrics)


def _here(operations: int, placement: Placement) -> int:
    """Returns the part of this process's devices, of the operations of each replica."""
    return operations * len(placement.local_cores) // placement.cores_per_replica


def _is_ready(value: Any) -> bool:
    """Returns whether a value can be read without waiting; a deleted one never can."""
    if not isinstance(value, jax.Array):
        return True
    array: Any = value  # JAX's type declarations lack a method
    return not array.is_deleted() and bool(array.is_ready())
