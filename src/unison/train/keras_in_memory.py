"""Keras' `fit` in a job that keeps its state in the memory of its hosts; see `in_memory`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unison.captured import StateCapturedError
from unison.keras.step import CompiledStep
from unison.keras.trainer import ReplicaTrainer, trainer_made
from unison.runtime import process_group
from unison.runtime.elastic import ElasticOptions, Entry
from unison.runtime.elastic.options import PER_REPLICA_BATCH
from unison.runtime.host_memory import may_regroup
from unison.train.fit_position import FitReporter, catch_batches
from unison.train.in_memory import InMemoryCheckpoints, in_memory_checkpoints
from unison.train.keras_backup import forget_backups, restored_by_backups
from unison.train.keras_others import others_of
from unison.train.loop_state import LoopState
from unison.train.resized_fit import ResizedPosition, require_a_rate, scale_learning_rate


def _attach(trainer: ReplicaTrainer) -> None:
    checkpoints = in_memory_checkpoints()
    if checkpoints is not None and trainer.strategy.group is None:
        _Loops(trainer, checkpoints)


class _Loops:
    """Keeps the state of a model's `fit`.

    Args:
        trainer: The model's trainer.
        checkpoints: Where it is kept.
    """

    def __init__(self, trainer: ReplicaTrainer, checkpoints: InMemoryCheckpoints):
        self._trainer = trainer
        self._model = trainer.model
        self._checkpoints = checkpoints
        self._position: ResizedPosition | None = None
        #: The optimizer whose learning rate is that of the present number of replicas.
        self._scaled: Any = None
        self._run_step, trainer.run_step = trainer.run_step, self._run
        trainer.callbacks.append(FitReporter(self))
        vars(self._model)["fit"] = self._following(self._model.fit)

    def _following(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `model.fit`, whose position is followed."""

        @functools.wraps(fit)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._checkpoints.loop() as is_outermost:
                before, self._position = self._position, None
                if is_outermost and self._concerns_all_workers():
                    self._position = ResizedPosition(self._model)
                    catch_batches(self._model, self._take_batches)
                try:
                    return fit(*args, **kwargs)
                finally:
                    if self._position is not None:
                        self._position.leave()
                    self._position = before

        return wrapped

    def _take_batches(self, epochs: Any) -> None:
        """Takes over the batches of a `fit`."""
        position = self._position
        assert position is not None
        if may_regroup() and self._options.keep == PER_REPLICA_BATCH:
            position.cut_anew(epochs, self._begin_sizes)
        position.take(epochs)

    def _begin_sizes(self) -> None:
        """A pass begins, whose batches are as large as the number of replicas makes them."""
        assert self._position is not None
        self._position.sizes[:] = [(0, self._replicas / self._replicas_at_start)]

    @property
    def _options(self) -> ElasticOptions:
        return self._trainer.strategy.elastic_options

    @property
    def _replicas(self) -> int:
        return self._trainer.strategy.num_replicas_now

    @property
    def _replicas_at_start(self) -> int:
        workers = self._checkpoints.workers_at_start
        return self._replicas * workers // process_group.count()

    def _concerns_all_workers(self) -> bool:
        """Whether all workers of the job run `fit` together."""
        return self._trainer.strategy.placement.spans_processes or process_group.count() == 1

    def _run(self, step: CompiledStep, batch: Any, may_wait: bool) -> int:
        position = self._position
        if position is not None and step.trains:
            is_first = position.batch % self._model.steps_per_execution == 0
            position.batch += 1
            if is_first and self._checkpoints.is_due:
                self._keep(position, step)
            self._checkpoints.steps += 1
        try:
            return self._run_step(step, batch, may_wait)
        except StateCapturedError:  # it has not begun: another step runs on the batch
            if position is not None and step.trains:
                position.batch -= 1
                self._checkpoints.steps -= 1
            raise

    def _keep(self, position: ResizedPosition, step: CompiledStep) -> None:
        """Keeps the state before the step whose batch was taken last."""
        running = self._trainer.running
        assert running is not None
        step.finish(running.state)
        position.undone = 1
        try:
            with self._trainer.state_at_rest():
                self._checkpoints.keep(self._state(position), [position.epoch, position.batch - 1])
        finally:
            position.undone = 0

    def _state(self, position: ResizedPosition) -> LoopState:
        return LoopState(
            self._trainer.strategy.placement,
            model=self._model,
            metrics=list(self._model.metrics),
            others=others_of(self._trainer),
            place=position,
        )

    # -- notifications of the callback of `fit` -------------------------------------------

    def begin(self, epochs: int) -> None:
        """Restores the state that the last start of the job has kept."""
        position = self._position
        if position is None:
            return
        if may_regroup():
            require_a_rate(self._model, self._options)
        others = position.others = self._trainer.callbacks_of_fit
        position.num_replicas = self._replicas

        def is_later(kept: Any) -> bool:
            return [*restored_by_backups(others)] > kept

        if self._checkpoints.enter(self._state(position), is_later) is Entry.RESUMED:
            forget_backups(others)
            position.hold_metrics()
            self._resize(position)
            position.resume(epochs)
            position.give_states()
        elif may_regroup() and not any(restored_by_backups(others)):
            self._scale_learning_rate(self._replicas_at_start)

    def _scale_learning_rate(self, before: int) -> None:
        """Rescales the learning rate from `before` replicas to the present number, once."""
        optimizer = self._model.optimizer
        now, at_start = self._replicas, self._replicas_at_start
        if self._scaled is not optimizer:
            scale_learning_rate(self._model, self._options, before, now, at_start)
            self._scaled = optimizer

    def _resize(self, position: ResizedPosition) -> None:
        """Adapts what was restored from another number of replicas to the present one."""
        now, at_start = self._replicas, self._replicas_at_start
        self._scaled = None  # what was restored is that of the former number
        self._scale_learning_rate(position.num_replicas)
        if position.sizes and position.num_replicas != now:
            taken = 0 if position.data is None else position.data["taken"]
            position.sizes.append((taken, now / at_start))
        position.num_replicas = now

    def begin_epoch(self, epoch: int) -> None:
        """Records the epoch; one that was begun resumes where it was."""
        if self._position is not None:
            self._position.begin_epoch(epoch)

    def end_epoch(self, epoch: int) -> None:
        """Records that an epoch has ended."""
        if self._position is not None:
            self._position.end_epoch(epoch)


trainer_made.append(_attach)
