"""Keras' loops in a group of workers that may change: training continues with the current workers.

When the group changes, the steps that have not taken effect are run again, by the workers of the
next group: Keras' loop and the callbacks do not notice. Each worker takes its part of the same
global batches, so no example is left out or used twice. A worker that joins a running job enters
`fit` at the position of the others, with all that a backup contains (see
`keras_backup`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unison.captured import StateCapturedError
from unison.cells import Cell, Layout, VariableAggregation
from unison.data import count_examples
from unison.errors import InternalError
from unison.interrupts import is_of_a_signal_handler, without_signals
from unison.keras.running_loop import Running
from unison.keras.step import CompiledStep
from unison.keras.trainer import ReplicaTrainer, trainer_made
from unison.runtime.elastic import ElasticGroup, Entry, GroupChanged
from unison.runtime.elastic.options import PER_REPLICA_BATCH
from unison.train.fit_position import FitReporter, catch_batches
from unison.train.handover import Handover
from unison.train.keras_backup import forget_backups
from unison.train.keras_others import others_of
from unison.train.resized_fit import ResizedPosition, require_a_rate, scale_learning_rate

#: The batches that are already divided when the group changes: those of a group of steps in flight,
#: one that waits, and one ahead.
_SETTLED_AFTER = 40


def _attach(trainer: ReplicaTrainer) -> None:
    group = trainer.strategy.group
    if group is not None:
        ElasticLoops(trainer, group)


class ElasticLoops:
    """Runs the steps of a model's loops in a group that may change.

    Args:
        trainer: The model's trainer.
        group: The group.
    """

    def __init__(self, trainer: ReplicaTrainer, group: ElasticGroup):
        self._trainer = trainer
        self._model = trainer.model
        self._group = group
        self._place: _Place | None = None
        self._latest_step: CompiledStep | None = None
        #: The metrics' arrays at the last check, to detect whether the program has set them.
        self._seen_metrics: list[jax.Array] = []
        self._seen_running: Any = None
        #: The prepared and current steps, by the size of the group.
        self._prepared: set[tuple[CompiledStep, int, bool]] = set()
        trainer.run_step = self._run
        trainer.settle = self._settle
        trainer.callbacks.append(FitReporter(self))
        vars(self._model)["fit"] = self._in_place(self._model.fit)

    def _in_place(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `model.fit`, which tracks its position."""

        @functools.wraps(fit)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self._place = self._place, _Place(self._model)
            loops = self._group.loops
            catch_batches(self._model, functools.partial(self._take_batches, self._place))
            self._group.recover = self.recover
            try:
                return fit(*args, **kwargs)
            except BaseException as error:
                if is_of_a_signal_handler(error):
                    self._step_aside(loops)
                raise
            finally:
                self._place.leave()
                self._place = before

        return wrapped

    @without_signals
    def _step_aside(self, loops: int) -> None:
        """Leaves the state after the last whole step; the others continue without this worker.

        Steps that wait, or have not taken effect, are left to them.
        """
        self._group.settle_all()
        running = self._trainer.running
        step = self._latest_step if running is None else running.step
        if step is not None:
            step.take_back()
        self._trainer.put_back()
        self._collect_metrics(step)
        self._group.recover = self._group.regroup_alone
        self._group.open(False)
        self._group.step_aside(loops)

    def _take_batches(self, place: _Place, epochs: Any) -> None:
        """Takes over the batches of a `fit`."""
        if self._group.options.keep == PER_REPLICA_BATCH:
            place.cut_anew(epochs, functools.partial(place.begin_sizes, self._group))
        place.take(epochs)

    def _scale_learning_rate(self, before: int) -> None:
        """Rescales the learning rate from `before` replicas to the current number."""
        group = self._group
        now = group.placement.num_replicas
        scale_learning_rate(self._model, group.options, before, now, group.replicas_at_start)

    # -- notifications of the callback of `fit` -------------------------------------------

    def begin(self, epochs: int) -> None:
        """Enters the group, or restores the state of an earlier run of the job."""
        place = self._place
        if place is None:
            return
        require_a_rate(self._model, self._group.options)
        place.others = self._trainer.callbacks_of_fit
        entry = self._group.enter(self)
        if entry is Entry.EARLY:
            self._model._initial_epoch = epochs
        elif entry is Entry.RESUMED:
            place.hold_metrics()
        if entry in (Entry.NEW, Entry.EARLY):
            return
        forget_backups(place.others)
        self._scale_learning_rate(place.num_replicas)
        place.resume(epochs)

    def begin_epoch(self, epoch: int) -> None:
        """Records the epoch; one that others have begun resumes at their position."""
        if self._place is not None:
            self._place.begin_epoch(epoch)

    def end_epoch(self, epoch: int) -> None:
        """Records that an epoch has ended."""
        self._group.open(False)
        if self._place is not None:
            self._place.end_epoch(epoch)

    # -- what is sent to another worker -----------------------------------------------------

    @property
    def can_be_resumed(self) -> bool:
        return self._place is not None

    def pack(self) -> bytes:
        return self._handover().pack()

    def pack_part(self) -> bytes:
        return self._handover().pack_part()

    def unpack(self, held: bytes, keeps_part: bool) -> None:
        self._handover().unpack(held, keeps_part)
        self._give_states()

    def resume(self, held: bytes, parts: Sequence[bytes]) -> None:
        self._handover().resume(held, parts)
        self._give_states()

    def _give_states(self) -> None:
        if self._place is not None:
            self._place.give_states()

    def _handover(self) -> Handover:
        parts: dict[str, Any] = {
            "model": self._model,
            "metrics": list(self._model.metrics),
            "others": others_of(self._trainer),
        }
        if self._place is not None:
            parts["place"] = self._place
        # Between two groups, each worker has the combined counts (`_collect_metrics`).
        placement = self._trainer.strategy.placement
        return Handover(self._trainer.metrics_cells, placement, **parts)

    # -- steps -----------------------------------------------------------------------------

    def _run(self, step: CompiledStep, batch: Any, may_wait: bool) -> int:
        place = self._place
        self._latest_step = step
        if place is not None and step.trains:
            place.batch += 1
        self._group.open(place is not None and step.trains)
        self._look_at_metrics(step)
        self._latest_step = step
        if not step.trains:
            self._group.tell("evaluate")
        try:
            count = self._trainer.run_once(step, batch, may_wait)
            self._group.settle(1)
            self._prepare(step, batch, may_wait)
            return count
        except StateCapturedError:  # it has not begun: another step runs on the batch
            if place is not None and step.trains:
                place.batch -= 1
            raise
        except GroupChanged:
            self._recover(step)
            return count_examples(jax.tree.leaves(batch))

    def _prepare(self, step: CompiledStep, batch: Any, may_wait: bool) -> None:
        """Has a step compiled, in the background, for the group without one of its workers."""
        placement = self._group.placement
        fewer = placement.num_without_a_worker
        key = step, placement.num_replicas, may_wait
        if not fewer or key in self._prepared or not self._group.launched:
            return
        self._prepared.add(key)
        running = self._trainer.running
        assert running is not None
        compile_it = step.prepare(running.state, batch, may_wait, fewer)
        if compile_it is not None:
            self._group.compile_ahead(compile_it)

    def _settle(self) -> None:
        while True:
            running = self._trainer.running
            if running is None or running.step is None:
                return
            try:
                running.step.finish(running.state)
                self._group.settle(0)
                break
            except GroupChanged:
                self._recover(running.step)
        self._seen_metrics = self._metrics_arrays()
        self._tell_state(self._trainer.running)

    def recover(self) -> None:
        """Continues in the next group, wherever in a loop this worker is."""
        running = self._trainer.running
        if running is not None and running.step is not None:
            self._recover(running.step)
            return
        self._group.settle_all()
        at_rest = self._trainer.state_at_rest if running is not None else contextlib.nullcontext
        with at_rest():
            self._enter_next_group(self._latest_step, is_open=False)

    def _recover(self, step: CompiledStep) -> None:
        """Continues in the next group, with the steps that had no effect in this one."""
        again: collections.deque[Any] = collections.deque()
        while True:
            again.extendleft(reversed(self._regroup(step, len(again))))
            try:
                while again:
                    self._trainer.run_once(step, again.popleft(), self._trainer.steps_may_wait)
                self._group.settle(1)
                return
            except GroupChanged:
                continue

    def _regroup(self, step: CompiledStep, more: int) -> list[Any]:
        """Enters the next group; returns the batches of the steps that had no effect.

        Args:
            step: The step that runs.
            more: The number of batches to be run again after those.
        """
        place = self._place
        self._group.settle_all()
        batches = step.take_back()
        is_open = False
        if place is not None and step.trains:
            place.undone = more + len(batches)
            is_open = place.can_be_entered and not self._group.was_cut
        self._tell_state(self._trainer.running)
        with self._trainer.state_at_rest():
            passed = self._enter_next_group(step, is_open)
        self._seen_running = self._trainer.running
        self._tell_state(self._trainer.running)
        if passed > len(batches):
            raise InternalError(
                message=f"The others are ahead by {passed} steps, of which this worker has the "
                f"batches of {len(batches)} only."
            )
        if place is not None:
            # Another worker's position does not count the steps that are run again here.
            place.batch += place.undone - passed if passed and step.trains else 0
            place.undone = 0
        return batches[passed:]

    def _enter_next_group(self, step: CompiledStep | None, is_open: bool) -> int:
        """Enters the next group with the state at rest; returns the steps that others are ahead."""
        place, group = self._place, self._group
        replicas, before = group.placement.num_replicas, group.step
        if place is not None:
            place.num_replicas = replicas
        self._collect_metrics(step)
        outcome = group.regroup(self, is_open)
        if outcome.has_taken_over and step is not None:
            step.know_metrics([_of_all(cell) for cell in self._trainer.metrics_cells()])
            replicas = replicas if place is None else place.num_replicas
        self._scale_learning_rate(replicas)
        if outcome.place:
            self._clear_sums()
        if place is not None:
            place.change_sizes(group)
        return group.step - before if outcome.has_taken_over else 0

    def _tell_state(self, running: Running | None) -> None:
        """Reports the state that is equal on all workers to observers."""
        if running is not None:
            pairs = [*zip(running.cells, running.state, strict=True)]
            arrays = [array for cell, array in pairs if cell.layout is Layout.MIRRORED]
            self._group.tell("state", digest=functools.partial(_digest, arrays), of=len(pairs))

    # -- metrics ---------------------------------------------------------------------------

    def _metrics_arrays(self) -> list[jax.Array]:
        """Returns the metrics' arrays in the state of the running loop."""
        running = self._trainer.running
        count = len(self._trainer.metrics_cells())
        return [] if running is None or not count else running.state[-count:]

    def _look_at_metrics(self, step: CompiledStep) -> None:
        """Forgets the combined value of the metrics if the program has set them since."""
        running = self._trainer.running
        if running is self._seen_running:
            return
        self._seen_running = running
        pairs = zip(self._metrics_arrays(), self._seen_metrics, strict=False)
        if not self._seen_metrics or any(now is not then for now, then in pairs):
            step.forget_metrics()

    def _collect_metrics(self, step: CompiledStep | None) -> None:
        """Sets the metrics on this worker to the combined counts.

        A lost worker's counts are in the results of the last step.
        """
        num_replicas = self._group.placement.num_replicas
        if step is not None:
            step.settled()
        for place, cell in enumerate(self._trainer.metrics_cells()):
            if cell.layout is not Layout.LOCAL:
                continue
            copies = np.stack(cell.copies())
            if step is not None and step.known_metrics is not None:
                total = np.asarray(step.known_metrics[place].addressable_data(0))
            else:  # nothing was counted since they were set, so all copies are equal
                total = copies[0] * num_replicas if _is_sum(cell) else copies[0]
            copies[:] = total
            if _is_sum(cell):
                copies[1:] = 0
            cell.put(cell.placement.spread(copies))

    def _clear_sums(self) -> None:
        """Leaves the combined counts to the first member."""
        for cell in self._trainer.metrics_cells():
            if cell.layout is Layout.LOCAL and _is_sum(cell):
                cell.put(cell.placement.spread(np.zeros_like(np.stack(cell.copies()))))


class _Place(ResizedPosition):
    """The position of a worker in `fit`."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        #: The step at which the group changed last, and the factor before.
        self._changed: tuple[int, float] | None = None

    def begin_sizes(self, group: ElasticGroup) -> None:
        """A pass begins: its batches are those of the group, or, soon, of the next."""
        now = _factor(group)
        self.sizes.clear()
        if self._changed is not None and self._changed[0] == group.step:
            self.sizes += [(0, self._changed[1]), (_SETTLED_AFTER, now)]
        else:
            self.sizes.append((0, now))

    def change_sizes(self, group: ElasticGroup) -> None:
        """The group has changed: so will the batches that are not divided yet."""
        if not self.sizes:
            return
        self._changed = group.step, self.sizes[-1][1]
        taken = 0 if self.batches is None else self.batches.state()["taken"]
        self.sizes.append((taken - self.undone + _SETTLED_AFTER, _factor(group)))

    @property
    def can_be_entered(self) -> bool:
        """Whether a joining worker can reach the next batch."""
        return self.batches is not None and self.batches.state()["taken"] >= self.undone

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        data, batch = state["data"], state["batch"]
        if data is not None:
            data["now"] = None if data["taken"] else data["begun"]
        if self.batches is not None and batch and self.batches.has_ended(batch - 1):
            # Keras would raise an error for an epoch without a remaining batch.
            data = self.batches.state() | {"taken": 0, "looks_ahead": False}
            state |= {"epoch": self.epoch + 1, "batch": 0, "data": data}
        return state


def _digest(arrays: Sequence[jax.Array]) -> str:
    own = hashlib.sha256()
    for array in arrays:
        own.update(np.asarray(array.addressable_data(0)).tobytes())
    return own.hexdigest()[:16]


def _of_all(cell: Cell) -> np.ndarray:
    """Returns the combined counts, on a worker that has them in its own copies."""
    copies = np.stack(cell.copies())
    return np.sum(copies, axis=0, dtype=copies.dtype) if _is_sum(cell) else copies[0]


def _factor(group: ElasticGroup) -> float:
    """Returns the relative size of a batch, if each replica's size stays the same."""
    return group.placement.num_replicas / group.replicas_at_start


def _is_sum(cell: Cell) -> bool:
    return cell.reading_aggregation is VariableAggregation.SUM


# Lets the models of strategies whose workers may change continue training when they do.
trainer_made.append(_attach)
