"""Keras' `BackupAndRestore` for a model of a strategy: training resumes where it was stopped.

Each backup is a checkpoint of all that determines how `fit` continues: the model, its optimizer,
seeds and metrics, the position in the epoch and in the data, and the state of the other callbacks.
With `save_freq=N`, the interrupted epoch is resumed after its last saved batch, with the remaining
batches.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unison.keras.trainer import ReplicaTrainer, trainer_of
from unison.runtime.process_group import all_gather_json
from unison.train.checkpoint import Checkpoint
from unison.train.fit_position import FitPosition, catch_batches
from unison.train.keras_others import others_of
from unison.train.manager import CheckpointManager
from unison.train.random_state import LibraryGenerators

import keras  # isort: skip
from keras.src.utils import file_utils  # isort: skip

#: The last backup, and the previous one in case it is corrupt.
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
    """Lets `keras.callbacks.BackupAndRestore` back up models of strategies, too."""
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
            # As in Keras, a history contains the epochs of its own run.
            backup.position.others = [
                each
                for each in self.callbacks
                if each not in callbacks and not isinstance(each, keras.callbacks.History)
            ]
        for name in ("on_train_begin", "on_train_batch_end", "on_epoch_end"):
            vars(self)[name] = _backups_last(getattr(type(self), name).__get__(self), backups)

    return set_model


def _backups_last(method: Callable[..., Any], backups: Sequence[_Backup]) -> Callable[..., Any]:
    """Returns a method of a list of callbacks that calls backups after the other callbacks.

    A backup contains the other callbacks' state after the batch or epoch, and restores it after
    they have begun. If one raises, the backups before it in the list are still saved,
    as in Keras.
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
    """The callback's work for a batch when it saves by epochs."""


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
    """Discards what backups have restored, because the state comes from elsewhere."""
    for each in callbacks:
        backup = getattr(each, _BACKUP, None)
        if backup is not None:
            backup.forget()


def restored_by_backups(callbacks: Iterable[Any]) -> tuple[int, int]:
    """Returns the epoch and the batch of the latest state that backups have restored."""
    backups = [getattr(each, _BACKUP, None) for each in callbacks]
    restored = [each.position for each in backups if each is not None]
    return max(((each.epoch, each.batch) for each in restored), default=(0, 0))


class _Backup:
    """The implementation of a `BackupAndRestore` for a model of a strategy.

    Args:
        callback: The callback, with its arguments.
        trainer: The model's trainer.
    """

    def __init__(self, callback: Any, trainer: ReplicaTrainer):
        self._callback = callback
        self._trainer = trainer
        self._model = trainer.model
        self._strategy = trainer.strategy
        #: The position in `fit`, with its other callbacks.
        self.position = FitPosition(self._model)
        self._is_due = False
        #: Whether the callbacks after this one come first.
        self.postpones = False
        self._postponed: Callable[[], object] | None = None
        catch_batches(self._model, self.position.take)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        parts = {
            "model": self._model,
            "metrics": list(self._model.metrics),
            "place": self.position,
            "others": others_of(self._trainer),
            "generators": LibraryGenerators(self._strategy.placement),
        }
        self._manager = CheckpointManager(
            Checkpoint(**parts), self._callback.backup_dir, _KEPT, checkpoint_name="backup"
        )
        path = self._manager.restore_or_initialize()
        if path is None:
            return
        position = self.position
        position.source = f"Checkpoint {path}"
        position.resume(self._callback.params["epochs"])
        position.hold_metrics()
        self._callback._current_epoch = position.epoch
        self._callback._last_batch_seen = max(position.batch - 1, 0)
        self._do(self._give_states)

    def _give_states(self) -> None:
        try:
            self.position.give_states()
        except BaseException:
            self.position.leave()
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self.position.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        if not self._callback._should_save_on_batch(batch):
            return
        batches = self.position.batches
        if batches is not None and batches.has_ended(batch):
            self._is_due = True  # with what follows the last batch: the end of the epoch
        else:
            self.position.batch = batch + 1
            self._do(self._manager.save)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        callback = self._callback
        self.position.end_epoch(epoch)
        callback._current_epoch, callback._last_batch_seen = self.position.epoch, 0
        if callback.save_freq == "epoch" or self._is_due:
            self._is_due = False
            self._do(self._manager.save)

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self.position.leave()
        if not self._callback.delete_checkpoint:
            return
        if self._strategy.placement.spans_processes:
            all_gather_json(None, "The end of fit")  # the backup is no longer needed
        folder = self._callback.backup_dir
        if "://" in str(folder):
            file_utils.rmtree(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self) -> None:
        """Does not resume from an existing backup."""
        self.position.forget()

    def _do(self, action: Callable[[], object]) -> None:
        if self.postpones:
            self._postponed = action
        else:
            action()

    def do_postponed(self) -> None:
        """Does the work that waits for the callbacks after this one."""
        action, self._postponed = self._postponed, None
        if action is not None:
            action()


_teach_backups()
