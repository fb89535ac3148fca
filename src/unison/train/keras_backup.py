"""Keras' `BackupAndRestore` for a model of a strategy: training goes on where it was stopped.

Each backup is a checkpoint of all that decides how `fit` goes on: the model, its optimizer, seeds
and metrics, the place in the epoch and in the data, and what the other callbacks remember. With
`save_freq=N`, the interrupted epoch is resumed behind its last saved batch, on the batches that it
would have seen.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from unison.data import Dataset, DistributedDataset
from unison.data.plan import Plan, memories_of, recall
from unison.data.state import decode, encode
from unison.keras.trainer import ReplicaTrainer, trainer_of
from unison.runtime.process_group import all_gather_json
from unison.train.checkpoint import Checkpoint
from unison.train.keras_callbacks import give_states, states_of
from unison.train.keras_others import others_of
from unison.train.manager import CheckpointManager
from unison.train.random_state import LibraryGenerators, numpy_and_python, set_numpy_and_python

import keras  # isort: skip
from keras.src.utils import file_utils  # isort: skip

#: The last backup, and the one before for where that is damaged.
_KEPT = 2

#: The attribute of a callback with its `_Backup`, while it serves a model of a strategy.
_BACKUP = "_unison_backup"

_METHODS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
)


def _teach_backups() -> None:
    """Lets `keras.callbacks.BackupAndRestore` back up models of strategies; others as before."""
    callback = keras.callbacks.BackupAndRestore
    setattr(callback, _BACKUP, None)
    callback.set_model = _taking_model(callback.set_model)
    for name in _METHODS:
        setattr(callback, name, _dispatching(name, getattr(callback, name)))
    of_all = keras.callbacks.CallbackList
    of_all.set_model = _introducing(of_all.set_model)


def _introducing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        original(self, model)
        callbacks = [each for each in self.callbacks if getattr(each, _BACKUP, None) is not None]
        if not callbacks:
            return
        backups = [getattr(callback, _BACKUP) for callback in callbacks]
        for backup in backups:
            # A history is, as in Keras, that of the epochs that are run.
            backup.others = [
                each
                for each in self.callbacks
                if each not in callbacks and not isinstance(each, keras.callbacks.History)
            ]
        for name in ("on_train_begin", "on_train_batch_end", "on_epoch_end"):
            vars(self)[name] = _backups_last(getattr(type(self), name).__get__(self), backups)

    return set_model


def _backups_last(method: Callable[..., Any], backups: Sequence[_Backup]) -> Callable[..., Any]:
    """Returns a method of a list of callbacks in which backups act after the other callbacks.

    A backup holds what the others make of the batch or epoch, and gives them their states after
    they have begun. If one raises, the backups that stand before it in the list are saved all the
    same, as in Keras.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for backup in backups:
            backup.postpones = True
        try:
            return method(*args, **kwargs)
        finally:
            for backup in backups:
                backup.postpones = False
                backup.do_postponed()

    return call


def _taking_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        original(self, model)
        trainer = trainer_of(model)
        vars(self)[_BACKUP] = None if trainer is None else _Backup(self, trainer)
        if trainer is not None and self.save_freq == "epoch":
            # Keras would fetch the logs of every batch for it.
            vars(self)["on_train_batch_end"] = _nothing
        else:
            vars(self).pop("on_train_batch_end", None)

    return set_model


def _nothing(batch: int, logs: Any = None) -> None:
    """What the callback does for a batch when it saves by epochs."""


_nothing._is_default = True  # type: ignore[attr-defined]  # Keras skips such methods


def _dispatching(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        backup = getattr(self, _BACKUP)
        if backup is None:
            return original(self, *args, **kwargs)
        return getattr(backup, name)(*args, **kwargs)

    return method


def forget_backups(callbacks: Iterable[Any]) -> None:
    """Makes what backups have brought back void, because the state comes from elsewhere."""
    for each in callbacks:
        backup = getattr(each, _BACKUP, None)
        if backup is not None:
            backup.forget()


def catch_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Has `take` called with the batches of the loop that begins: Keras' `EpochIterator`.

    Keras builds the model by it, after a callback was given the model and before it is asked.
    """
    build = vars(model)["_symbolic_build"]

    def building(iterator: Any = None, **kwargs: Any) -> Any:
        vars(model)["_symbolic_build"] = build
        if iterator is not None:
            take(iterator)
        return build(iterator=iterator, **kwargs)

    vars(model)["_symbolic_build"] = building


class _Backup:
    """What a `BackupAndRestore` does for a model of a strategy.

    Args:
        callback: The callback, for what it was told.
        trainer: The model's trainer.
    """

    def __init__(self, callback: Any, trainer: ReplicaTrainer):
        self._callback = callback
        self._trainer = trainer
        self._model = trainer.model
        self._strategy = trainer.strategy
        #: The other callbacks of `fit`.
        self.others: list[Any] = []
        self._place = _Place(self)
        self._is_due = False
        #: Whether the callbacks behind this one come first.
        self.postpones = False
        self._postponed: Callable[[], object] | None = None
        self._restored_metrics: list[np.ndarray] = []
        catch_batches(self._model, self._take_batches)

    def _take_batches(self, epochs: Any) -> None:
        self._place.batches = Batches(epochs)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        parts = {
            "model": self._model,
            "metrics": list(self._model.metrics),
            "place": self._place,
            "others": others_of(self._trainer),
            "generators": LibraryGenerators(self._strategy.placement),
        }
        self._manager = CheckpointManager(
            Checkpoint(**parts), self._callback.backup_dir, _KEPT, checkpoint_name="backup"
        )
        if self._manager.restore_or_initialize() is None:
            return
        place = self._place
        self._model._initial_epoch = place.epoch
        self._callback._current_epoch = place.epoch
        self._callback._last_batch_seen = max(place.batch - 1, 0)
        self._do(lambda: give_states(self.others, place.callbacks))
        if place.has_stopped:
            self._model._initial_epoch = self._callback.params["epochs"]
        # An epoch begins by forgetting the metrics of the last one.
        self._restored_metrics = [v.numpy() for v in self._model.metrics_variables]
        if place.batches is not None:
            place.batches.resume(place)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        is_resumed = bool(self._restored_metrics) and self._place.batch > 0
        if is_resumed:
            values = zip(self._model.metrics_variables, self._restored_metrics, strict=True)
            for variable, value in values:
                variable.assign(value)
        self._restored_metrics = []
        self._place.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        if not self._callback._should_save_on_batch(batch):
            return
        batches = self._place.batches
        if batches is not None and batches.has_ended(batch):
            self._is_due = True  # with what comes behind the last batch: the end of the epoch
        else:
            self._place.batch = batch + 1
            self._do(self._manager.save)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        callback, place = self._callback, self._place
        callback._current_epoch = place.epoch = epoch + 1
        callback._last_batch_seen = place.batch = 0
        if place.batches is not None:
            place.batches.end_epoch()
        if callback.save_freq == "epoch" or self._is_due:
            self._is_due = False
            self._do(self._manager.save)

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self._model._initial_epoch = None
        if not self._callback.delete_checkpoint:
            return
        if self._strategy.placement.spans_processes:
            all_gather_json(None, "The end of fit")  # nobody looks for a backup any more
        folder = self._callback.backup_dir
        if "://" in str(folder):
            file_utils.rmtree(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self) -> None:
        """Does not go on where a backup was made."""
        self._restored_metrics = []
        self._place.batch = 0
        if self._place.batches is not None:
            self._place.batches.forget()

    @property
    def has_stopped(self) -> bool:
        """Whether a callback has ended the training."""
        return bool(self._model.stop_training)

    def _do(self, action: Callable[[], object]) -> None:
        if self.postpones:
            self._postponed = action
        else:
            action()

    def do_postponed(self) -> None:
        """Does what waits for the callbacks behind this one."""
        action, self._postponed = self._postponed, None
        if action is not None:
            action()


class _Place:
    """Where in `fit` a backup was made.

    Attributes:
        epoch: The epoch that is resumed.
        batch: How many of its batches are done.
        batches: The batches of `fit`.
        data: Where these are; see `Batches.state`.
        callbacks: What the other callbacks remember; see `states_of`.
        has_stopped: Whether one of them has ended the training.

    Args:
        backup: What knows the others.
    """

    def __init__(self, backup: _Backup) -> None:
        self._backup = backup
        self.epoch = 0
        self.batch = 0
        self.batches: Batches | None = None
        self.data: Any = None
        self.callbacks: dict[str, Any] = {}
        self.has_stopped = False

    def get_state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "data": None if self.batches is None else self.batches.state(),
            "callbacks": states_of(self._backup.others),
            "has_stopped": self._backup.has_stopped,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch, self.data = state["epoch"], state["batch"], state["data"]
        self.callbacks, self.has_stopped = state["callbacks"], state["has_stopped"]


class Place(Protocol):
    """Where in `fit` somebody was: how many batches of the epoch are done, and `Batches.state`."""

    batch: int
    data: Any


class Batches:
    """The batches of `fit`, which can be entered where another run was stopped.

    Args:
        epochs: Keras' `EpochIterator`.
    """

    def __init__(self, epochs: Any):
        self._epochs = epochs
        self._make, self._enumerate = epochs._get_iterator, epochs._enumerate_iterator
        vars(epochs).update(_get_iterator=self._new_pass, _enumerate_iterator=self._steps)
        self._plan = _plan_of(epochs.data_adapter)
        self._begun = self._now()
        self._taken = 0
        #: Whether a batch is fetched before it is asked for, to know which one is the last.
        self._looks_ahead = False
        self._is_over = False
        #: What is entered by the next epoch and the next pass.
        self._resumed: dict[str, Any] | None = None
        self._resumed_batch = 0

    def state(self) -> dict[str, Any]:
        """Returns where the batches are: behind those that were taken."""
        return {
            "begun": self._begun,
            "taken": self._taken,
            "looks_ahead": self._looks_ahead,
            "now": self._now(),
        }

    def resume(self, place: Place) -> None:
        """Goes to where others were.

        Without a `now` in its data, what decides about the batches is as it is after those that
        they had taken.
        """
        self._resumed, self._resumed_batch = place.data, place.batch
        if not place.data["taken"]:
            self._enter(place.data["now"])

    def forget(self) -> None:
        """Begins with the next batch, wherever `resume` was to go."""
        self._resumed, self._resumed_batch = None, 0

    def has_ended(self, batch: int) -> bool:
        """Whether `batch` is the last one of the epoch."""
        count = self._epochs.num_batches
        return self._is_over if count is None else batch + 1 >= count

    def end_epoch(self) -> None:
        """Takes note that an epoch is over: the next one begins a pass, or goes on in this one."""
        if self._epochs.steps_per_epoch is None:
            self._begin_pass()

    def _begin_pass(self) -> None:
        self._taken = 0
        self._looks_ahead = self._is_over = False

    def _steps(self) -> Iterator[Any]:
        """Keras' numbers of an epoch's steps; those that are done already are left out."""
        done, self._resumed_batch = self._resumed_batch, 0
        for begin, end, iterator in self._enumerate():
            if begin == 0 and self._resumed is not None:
                # Of a pass that goes over several epochs, earlier ones took some.
                self._epochs._steps_seen += self._resumed["taken"] - done
            if begin >= done:
                yield begin, end, iterator

    def _new_pass(self) -> Iterator[Any]:
        self._begin_pass()
        return self._counted(self._make())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        # All of this when the first batch is asked for, as Keras shuffles then.
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None else resumed["taken"]
        if resumed is not None and done:
            self._enter(resumed["begun"])
        self._begun = self._now()
        self._looks_ahead = self._epochs.num_batches is None
        if resumed is not None and done:
            self._looks_ahead = resumed["looks_ahead"]
        for _ in range(done):
            next(batches)
        following = next(batches, _NONE) if self._looks_ahead else _NONE
        self._taken = done
        if resumed is not None and done and resumed["now"] is not None:
            self._enter(resumed["now"])
        while True:
            if self._looks_ahead:
                batch, following = (
                    following,
                    next(batches, _NONE) if following is not _NONE else _NONE,
                )
                self._is_over = following is _NONE
            else:
                batch = next(batches, _NONE)
            if batch is _NONE:
                return
            self._taken += 1
            yield batch

    def _now(self) -> dict[str, Any]:
        """Returns what decides which batches come."""
        memories = None if self._plan is None else list(encode(memories_of(self._plan)))
        return {**numpy_and_python(), "memories": memories}

    def _enter(self, then: dict[str, Any]) -> None:
        """Makes what decides about the batches as it was."""
        set_numpy_and_python(then)
        if self._plan is not None and then["memories"] is not None:
            recall(self._plan, decode(*then["memories"]))


_NONE = object()


def _plan_of(adapter: Any) -> Plan | None:
    """Returns the plan of the dataset that Keras iterates over; None if it is no dataset."""
    dataset = getattr(adapter, "_dataset", None)
    if isinstance(dataset, DistributedDataset):
        return getattr(dataset._source, "_plan", None)
    return dataset.plan if isinstance(dataset, Dataset) else None


_teach_backups()
