"""The position in Keras' `fit`: a backup restores it, and a joining worker enters it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from unison.cells import has_cell
from unison.data import Dataset, DistributedDataset
from unison.data.plan import Plan, memories_of, recall
from unison.data.state import decode, encode
from unison.errors import DataLossError
from unison.keras.feeding import track_position
from unison.keras.own_rows import begin_at_epoch, skip_batches
from unison.runtime import process_group
from unison.runtime.process_group import all_gather_json
from unison.storage.decoding import corrupt, decoding
from unison.train.fit_state import REMEDY, SOURCE, checked_position
from unison.train.keras_callbacks import give_states, states_of
from unison.train.random_state import numpy_and_python, set_numpy_and_python

import keras  # isort: skip

logger = logging.getLogger("unison")


def catch_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Has `take` called with the batches of the loop that begins: Keras' `EpochIterator`.

    Keras uses it to build the model, after a callback got the model and before it is called.
    """
    build = vars(model)["_symbolic_build"]

    def building(iterator: Any = None, **kwargs: Any) -> Any:
        vars(model)["_symbolic_build"] = build
        if iterator is not None:
            take(iterator)
        return build(iterator=iterator, **kwargs)

    vars(model)["_symbolic_build"] = building


class FollowsFit(Protocol):
    """An object that is told of the progress of `fit`."""

    def begin(self, epochs: int) -> None:
        """Notes that `fit` begins, with this number of epochs."""

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins."""

    def end_epoch(self, epoch: int) -> None:
        """Notes that an epoch has ended."""


class FitReporter(keras.callbacks.Callback):
    """Tells an object of the progress of `fit`.

    Args:
        follower: The object.
    """

    def __init__(self, follower: FollowsFit):
        super().__init__()
        self._follower = follower

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self._follower.begin(self.params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._follower.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._follower.end_epoch(epoch)


class FitPosition:
    """The position of a `fit`, whose state a checkpoint saves.

    Args:
        model: The model.

    Attributes:
        epoch: The epoch.
        batch: The number of its batches that have been run.
        batches: The batches of `fit`; None before they exist.
        data: Their position; see `Batches.state`.
        others: The callbacks of `fit` that have state.
        callbacks: Their state; see `states_of`.
        has_stopped: Whether a callback has stopped the training.
        source: What holds the state that is restored, for messages.
        undone: The number of batches that were taken and counted, and are not in the state.
    """

    def __init__(self, model: Any):
        self._model = model
        self.epoch = 0
        self.batch = 0
        self.batches: Batches | None = None
        self.data: Any = None
        self.others: list[Any] = []
        self.callbacks: dict[str, Any] = {}
        self.has_stopped = False
        self.source = SOURCE
        self.undone = 0
        #: The stored arrays of the metrics' variables that were restored, or their values.
        self._restored_metrics: list[Any] = []

    def take(self, epochs: Any) -> None:
        """Tracks the batches of a `fit`: Keras' `EpochIterator`."""
        self.batches = Batches(epochs)

    def resume(self, epochs: int) -> None:
        """Makes `fit`, with this number of epochs, begin at this position."""
        first = epochs if self.has_stopped else self.epoch
        if self.batches is not None and self.data is not None:
            if first < epochs:
                self.batches.require_reach(self, epochs)
            self.batches.resume(self)
        self._model._initial_epoch = first

    def give_states(self) -> None:
        """Restores the callbacks' state."""
        give_states(self.others, self.callbacks, self.source)

    def hold_metrics(self) -> None:
        """Stores the metrics' values for the epoch that is resumed, which begins with a reset."""
        self._restored_metrics = [
            v.cell.stored() if has_cell(v) else v.numpy() for v in self._model.metrics_variables
        ]

    def begin_epoch(self, epoch: int) -> None:
        """Records that an epoch begins, or resumes after some of its batches."""
        self.epoch = epoch
        restored, self._restored_metrics = self._restored_metrics, []
        if self.batch and restored:
            for variable, value in zip(self._model.metrics_variables, restored, strict=True):
                if has_cell(variable):
                    variable.cell.put(value)
                else:
                    variable.assign(value)

    def end_epoch(self, epoch: int) -> None:
        """Records that an epoch has ended."""
        self.epoch, self.batch = epoch + 1, 0
        if self.batches is not None:
            self.batches.end_epoch()

    def forget(self) -> None:
        """Begins with the next batch, and discards the position of `resume`."""
        self._restored_metrics = []
        self.batch = 0
        if self.batches is not None:
            self.batches.forget()

    def leave(self) -> None:
        """Makes the model's next `fit` begin with its first epoch."""
        self._model._initial_epoch = None

    def get_state(self) -> dict[str, Any]:
        data = None if self.batches is None else self.batches.state()
        if data is not None and self.undone:
            data["taken"] = max(data["taken"] - self.undone, 0)
            # The batches that follow are those of the pass.
            data["now"] = None if data["taken"] else data["begun"]
        return {
            "epoch": self.epoch,
            "batch": self.batch - self.undone,
            "data": data,
            "callbacks": states_of(self.others),
            "has_stopped": bool(self._model.stop_training),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        with decoding(self.source, REMEDY):
            given = checked_position(state)
        self.epoch, self.batch, self.data = given["epoch"], given["batch"], given["data"]
        self.callbacks, self.has_stopped = given["callbacks"], given["has_stopped"]


class Batches:
    """The batches of `fit`, which can resume where another run was stopped.

    Args:
        epochs: Keras' `EpochIterator`.
    """

    def __init__(self, epochs: Any):
        self._epochs = epochs
        self._make, self._enumerate = epochs._get_iterator, epochs._enumerate_iterator
        vars(epochs).update(_get_iterator=self._new_pass, _enumerate_iterator=self._steps)
        track_position(epochs)
        self._dataset = dataset = getattr(epochs.data_adapter, "_dataset", None)
        self._plan = _plan_of(dataset)
        self._num_parts = dataset.num_parts if isinstance(dataset, DistributedDataset) else 1
        #: The state of each worker's passes, where each reads a part of its own.
        self._of_workers: list[Any] | None = None
        self._gather_memories()
        self._begun = self._now()
        self._taken = 0
        #: Whether a batch is fetched before it is requested, to know which one is the last.
        self._looks_ahead = False
        self._is_over = False
        #: The pass that has begun, of which no batch was requested, and the batch fetched ahead.
        self._unentered: Iterator[Any] | None = None
        self._following: Any = _NONE
        #: The positions for the next epoch and the next pass, and what holds them.
        self._resumed: dict[str, Any] | None = None
        self._resumed_batch = 0
        self._source = SOURCE

    def state(self) -> dict[str, Any]:
        """Returns the position of the batches: after those that were taken."""
        return {
            "begun": self._begun,
            "taken": self._taken,
            "looks_ahead": self._looks_ahead,
            "now": self._now(in_a_pass=self._taken > 0),
        }

    def require_reach(self, position: FitPosition, epochs: int) -> None:
        """Checks that `fit`, with this number of epochs, comes to a position at all.

        Raises:
            DataLossError: It takes fewer batches: without this, it would skip them forever.
        """
        steps, taken = self._epochs.steps_per_epoch, position.data["taken"]
        # Keras takes the batches of the last execution in full.
        if steps is not None and taken > epochs * (steps + self._epochs.steps_per_execution):
            raise _too_far(taken, position.source)

    def resume(self, position: FitPosition) -> None:
        """Resumes at another position.

        Without `now` in its data, the state that determines the batches is the one after the
        batches that were taken.

        Raises:
            ValueError: Within a pass, of which each of another number of workers has read a part.
            DataLossError: The state of earlier passes is corrupt.
        """
        self._source = position.source
        parts, shares = (position.data["begun"].get(name) for name in ("num_parts", "shares"))
        is_divided = max(parts or 1, self._num_parts) > 1
        divided, now = (parts or 1, shares), (self._num_parts, self._shares())
        if position.data["taken"] and is_divided and divided != now:
            raise ValueError(
                f"The state was saved in the middle of an epoch, of which {divided[0]} worker(s) "
                "read one part each, by AutoShardPolicy.FILE or a dataset of a function, with the "
                f"batch shares {shares}. Received: {now[0]} worker(s), with the batch shares "
                f"{now[1]}. Start as many workers with the same shares, distribute the dataset "
                "under AutoShardPolicy.DATA from the beginning, or go on from a state that was "
                "saved at the end of an epoch."
            )
        self._resumed, self._resumed_batch = position.data, position.batch
        begin_at_epoch(self._epochs, position.epoch)
        if not position.data["taken"]:
            self._enter(position.data["now"])

    def forget(self) -> None:
        """Begins with the next batch, and discards the position of `resume`."""
        self._resumed, self._resumed_batch = None, 0

    def has_ended(self, batch: int) -> bool:
        """Whether `batch` is the last one of the epoch."""
        count = self._epochs.num_batches
        return self._is_over if count is None else batch + 1 >= count

    def end_epoch(self) -> None:
        """Records that an epoch has ended: the next one begins a pass, or continues this one."""
        if self._epochs.steps_per_epoch is None:
            self._begin_pass()
        self._gather_memories()

    def _begin_pass(self) -> None:
        self._taken = 0
        self._looks_ahead = self._is_over = False

    def _steps(self) -> Iterator[Any]:
        """Keras' numbers of an epoch's steps, without those that are already done.

        Raises:
            DataLossError: All of them are.
        """
        done, self._resumed_batch = self._resumed_batch, 0
        is_left = False
        for begin, end, iterator in self._enumerate():
            if begin == 0 and self._resumed is not None:
                taken = self._resumed["taken"]
                # In a pass over several epochs, earlier epochs took some.
                self._epochs._steps_seen += taken - done
                if done and self._epochs.num_batches is None:
                    self._enter_pass()  # which fails where the numbers of steps would not end
                    if done > taken:
                        raise _too_far(done, self._source)
            if begin >= done:
                is_left = True
                yield begin, end, iterator
        if done and not is_left:
            raise _too_far(done, self._source)

    def _new_pass(self) -> Iterator[Any]:
        self._begin_pass()
        self._unentered = batches = self._make()
        return self._counted(batches)

    def _enter_pass(self) -> None:
        """Enters the pass, at the position to resume at; when its first batch is requested.

        Not earlier, since Keras shuffles then.
        """
        batches, self._unentered = self._unentered, None
        if batches is None:
            return
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None else resumed["taken"]
        if resumed is not None and done:
            self._enter(resumed["begun"])
        self._gather_memories()
        self._begun = self._now()
        self._looks_ahead = self._epochs.num_batches is None
        if resumed is not None and done:
            self._looks_ahead = resumed["looks_ahead"]
        try:
            skip_batches(batches, done)
        except StopIteration:
            raise _too_far(done, self._source) from None
        self._following = next(batches, _NONE) if self._looks_ahead else _NONE
        self._taken = done
        if resumed is not None and done and resumed["now"] is not None:
            self._enter(resumed["now"])

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._enter_pass()
        done = self._taken
        while True:
            if self._looks_ahead:
                batch = self._following
                if batch is not _NONE:
                    self._following = next(batches, _NONE)
                self._is_over = self._following is _NONE
            else:
                batch = next(batches, _NONE)
            if batch is _NONE:
                if done and self._taken == done:
                    raise _too_far(done, self._source)
                return
            self._taken += 1
            yield batch

    def _now(self, in_a_pass: bool = False) -> dict[str, Any]:
        """Returns the state that determines the batches.

        Args:
            in_a_pass: Whether it is that of a pass that has begun. Each worker that reads a part of
                its own then comes to it by skipping batches.
        """
        memories: Any = None
        if self._of_workers is not None:
            memories = None if in_a_pass else self._of_workers
        elif self._plan is not None:
            memories = list(encode(memories_of(self._plan)))
        return {
            **numpy_and_python(),
            "memories": memories,
            "num_parts": self._num_parts,
            "shares": self._shares(),
        }

    def _shares(self) -> list[float] | None:
        """Returns the proportions by which the pass divides batches, if they are not equal."""
        if not isinstance(self._dataset, DistributedDataset):
            return None
        proportions = self._dataset.shares.proportions
        return None if proportions is None else list(proportions)

    def _gather_memories(self) -> None:
        """Takes note of the state of each worker's plan, which may have seeds of its own.

        All workers call this, when a pass begins and when an epoch has ended.
        """
        if self._plan is not None and self._num_parts > 1:
            text, data = encode(memories_of(self._plan, of_all_workers=True))
            own = [text, data.tobytes().hex()]
            self._of_workers = all_gather_json(own, "The state of the passes over a dataset")

    def _enter(self, then: dict[str, Any]) -> None:
        """Restores the state that determines the batches."""
        with decoding(self._source, REMEDY):
            self._recall(then)

    def _recall(self, then: dict[str, Any]) -> None:
        set_numpy_and_python(then)
        memories, parts = then["memories"], then.get("num_parts", 1)
        if self._plan is None or memories is None:
            return
        if parts > 1:
            # A dataset that the workers share now has the same state on all of them.
            text, data = memories[
                process_group.index() % len(memories) if self._num_parts > 1 else 0
            ]
            memories = text, np.frombuffer(bytes.fromhex(data), np.uint8)
        try:
            recall(self._plan, decode(*memories), of_all_workers=max(parts, self._num_parts) > 1)
        except ValueError as error:
            if parts == self._num_parts:
                raise
            logger.warning(
                "The passes over the dataset begin anew: their state was saved for %d part(s) of "
                "it, of which there are now %d. %s",
                parts,
                self._num_parts,
                error,
            )


_NONE = object()


def _too_far(count: int, source: str) -> DataLossError:
    """Returns the error of a position behind the last batch."""
    reason = f"it was saved after {count} batches, and there is none after them"
    return corrupt(source, reason, REMEDY)


def _plan_of(dataset: Any) -> Plan | None:
    """Returns the plan of the dataset that Keras iterates over; None if it is not a dataset."""
    if isinstance(dataset, DistributedDataset):
        return getattr(dataset._source, "_plan", None)
    return dataset.plan if isinstance(dataset, Dataset) else None
