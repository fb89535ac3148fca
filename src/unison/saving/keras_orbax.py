"""Keras' callback `OrbaxCheckpoint` in a job of several workers: the first one writes.

Orbax has all processes write together, takes only arrays that span them, and waits for them in
barriers. Keras' arrays are those of one process, and the workers of a job agree on their writes as
for Keras' other files (`shared_path`). So Keras gets an Orbax that is confined to its process:
the first worker writes the values, gathered, as NumPy arrays, which jobs of any size load.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.errors import FailedPreconditionError
from unison.runtime import process_group
from unison.saving.keras_files import cells_of_model, held_values
from unison.storage.file_systems import is_remote
from unison.train.background import BackgroundWriter
from unison.train.orbax_format import require_orbax
from unison.train.shared_path import begin_writing, is_seen

import keras  # isort: skip
from keras.src.callbacks import orbax_checkpoint  # isort: skip
from keras.src.saving import orbax_util, saving_api  # isort: skip

logger = logging.getLogger("unison")

#: The modules of Keras that use Orbax, each by this name.
_USERS = (orbax_checkpoint, orbax_util, saving_api)
_NAME = "ocp"

#: The arrays of a model in what Keras saves.
_ARRAYS = "pytree"

#: Orbax as Keras has it.
_orbax = orbax_checkpoint.ocp


def _teach_orbax() -> None:
    """Lets Keras use Orbax in jobs of several workers; in one process, nothing changes."""
    for module in _USERS:
        setattr(module, _NAME, _OrbaxForKeras())
    callback = keras.callbacks.OrbaxCheckpoint
    callback.set_model = _confining(callback.set_model)
    callback._save_checkpoint = _saving_once(callback._save_checkpoint)
    callback._sync_processes = _without_barrier(callback._sync_processes)


def _confining(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        original(self, model)
        if _is_confined() and not isinstance(self.checkpointer, _Checkpointer):
            # The callback was created before the first scope, in which Unison adds to Keras.
            made = keras.callbacks.OrbaxCheckpoint(self.directory, max_to_keep=self.max_to_keep)
            self.checkpointer = made.checkpointer

    return set_model


def _saving_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: Any, step: int, logs: Any = None) -> None:
        if isinstance(self.checkpointer, _Checkpointer):
            take = functools.partial(original, self, step, logs)
            self.checkpointer.save(self.model, step, take)
        else:
            original(self, step, logs)

    return save


def _without_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def synchronize(self: Any, key: str | None = None) -> None:
        # The others have waited for the first worker, which does not need them.
        if not isinstance(self.checkpointer, _Checkpointer):
            original(self, key)

    return synchronize


def _is_confined() -> bool:
    """Whether this process is one of a job's, and Keras distributes nothing itself."""
    is_of_job = process_group.is_elastic() or process_group.is_of_several()
    return is_of_job and keras.distribution.distribution() is None


class _OrbaxForKeras:
    """Orbax, confined to this process in a job of several workers."""

    def __getattr__(self, name: str) -> Any:
        own = _CONFINED.get(name) if _is_confined() else None
        return getattr(_orbax, name) if own is None else own


class _TrainingForKeras:
    """Orbax's module `training`, with the checkpointer of a job's worker."""

    @property
    def Checkpointer(self) -> type[_Checkpointer]:  # noqa: N802  (Orbax's name)
        return _Checkpointer

    def __getattr__(self, name: str) -> Any:
        return getattr(_orbax.training, name)


def _own_context() -> Any:
    """Returns a context of Orbax in which this process reads without the others."""
    context = _orbax.Context()
    for name, value in _own_process().items():
        setattr(context.multiprocessing, name, value)
    return context


def _own_process() -> dict[str, Any]:
    index = jax.process_index()
    return {
        "primary_host": index,
        "active_processes": {index},
        "barrier_sync_key_prefix": f"worker {index}",
    }


def _load_checkpointables(path: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parts of a checkpoint, its arrays as NumPy's.

    Orbax would put arrays that another process has saved on that process's devices.
    """
    requested = dict(names)
    with _own_context():
        if _ARRAYS in requested and requested[_ARRAYS] is None:
            saved = _orbax.checkpointables_metadata(path).metadata[_ARRAYS]
            requested[_ARRAYS] = jax.tree.map(_as_numpy, saved)
        loaded: dict[str, Any] = _orbax.load_checkpointables(path, requested)
    return loaded


def _as_numpy(saved: Any) -> Any:
    """Returns an array without memory of its own, as which Orbax loads one that is saved."""
    if not hasattr(saved, "shape"):
        return saved
    return np.broadcast_to(np.zeros((), saved.dtype), saved.shape)


class _Checkpointer:
    """Orbax's checkpointer of a directory, as far as Keras uses it, in one worker of a job.

    Args:
        directory: The directory that has a folder for each step.
        policies: Orbax's policies: which steps are saved, and which are kept.
    """

    def __init__(self, directory: Any, **policies: Any):
        self.directory = os.fspath(directory)
        self._policies = policies
        self._background = BackgroundWriter()
        self._open: Any = None
        #: The content that Keras saves, and whether in the background, until it is written.
        self._taken: tuple[dict[str, Any], bool] | None = None
        #: Whether the first worker writes for this one.
        self._is_written_elsewhere = False
        self._has_warned = False

    @property
    def latest(self) -> Any:
        """The latest step, with its number in `step`; None if there is none."""
        step = self._manager().latest_step()
        return None if step is None else SimpleNamespace(step=step)

    def checkpointables_metadata(self, step: int) -> Any:
        with _own_context():
            return _orbax.checkpointables_metadata(self._path(step))

    def load_checkpointables(self, step: int, names: Mapping[str, Any]) -> dict[str, Any]:
        return _load_checkpointables(self._path(step), names)

    def save_checkpointables(self, step: int, checkpointables: dict[str, Any]) -> None:
        """Takes what `save` writes."""
        del step
        self._taken = checkpointables, False

    def save_checkpointables_async(self, step: int, checkpointables: dict[str, Any]) -> Any:
        """Takes what `save` writes in the background; returns an object that waits for its end."""
        del step
        self._taken = checkpointables, True
        return SimpleNamespace(result=self.wait)

    def save(self, model: keras.Model, step: int, take: Callable[[], None]) -> None:
        """Saves a step of a model, which all workers do.

        Args:
            model: The model.
            step: The step.
            take: Calls `save_checkpointables`, or the other one, with the model's state.

        Raises:
            FailedPreconditionError: Each worker has a model of its own.
            OpError: The first worker could not write it, or an earlier step in the background.
        """
        self.wait()
        path = self._path(step)
        model.jax_state_sync()
        cells = cells_of_model(model)
        spans = any(cell.placement.spans_processes for cell in cells)
        if not spans and jax.process_count() > 1:
            raise FailedPreconditionError(
                message="OrbaxCheckpoint saves models of a strategy that spans the workers. "
                f"Received: model {model.name!r}, of which each worker has one of its own. Create "
                "it in the scope of such a strategy, or use ModelCheckpoint."
            )
        is_writer = process_group.is_first()
        writing = begin_writing(path, None, cells)
        with writing.reading():
            held = held_values(model)
            with held():
                take()
                assert self._taken is not None
                (content, is_async), self._taken = self._taken, None
                arrays = jax.device_get(content) if is_writer else {}

        def write() -> None:
            if is_writer:
                self._write(step, arrays)
            else:
                self._warn(path)

        def finish() -> None:
            self._is_written_elsewhere = not writing.finish(write)

        if is_async:
            self._background.start(finish)
        else:
            finish()

    def wait(self) -> None:
        """Waits until what is written in the background is complete.

        Raises:
            OpError: It could not be written.
        """
        self._background.wait()

    def close(self) -> None:
        """Waits as `wait` does, and until this worker sees the directory of the first one."""
        try:
            self._wait_at_last()
            # Workers of elastic jobs do not wait for the first one.
            looks = self._is_written_elsewhere and not process_group.is_elastic()
            if looks and not is_remote(self.directory) and not is_seen(self.directory):
                self._warn(self.directory)
        finally:
            manager, self._open = self._open, None
            if manager is not None:
                manager.close()

    def _wait_at_last(self) -> None:
        try:
            self.wait()
        except Exception as error:  # which Keras ignores at the end of training
            logger.error("The last step in %s is not saved: %s", self.directory, error)
            raise

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, str(step))

    def _manager(self) -> Any:
        """Returns Orbax's manager of the steps, confined to this process."""
        if self._open is None:
            from etils import epath  # of which Orbax takes paths

            orbax = require_orbax()
            epath.Path(self.directory).mkdir(parents=True, exist_ok=True)
            options = orbax.CheckpointManagerOptions(
                create=False,  # which Orbax does with all processes
                enable_background_delete=False,
                multiprocessing_options=orbax.options.MultiprocessingOptions(**_own_process()),
                **self._policies,
            )
            self._open = orbax.CheckpointManager(self.directory, options=options)
        return self._open

    def _write(self, step: int, content: dict[str, Any]) -> None:
        orbax: ModuleType = require_orbax()
        items = {name: orbax.args.PyTreeSave(tree) for name, tree in content.items()}
        manager = self._manager()
        if step in manager.all_steps():
            raise _orbax.training.errors.StepAlreadyExistsError(
                f"Step {step} already exists in {self.directory}. Give each OrbaxCheckpoint a "
                "directory of its own, or remove the steps of an earlier run."
            )
        manager.save(step, args=orbax.args.Composite(**items))
        manager.wait_until_finished()

    def _warn(self, path: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Worker %d does not write %s, nor see it: only the first worker writes what "
                "OrbaxCheckpoint saves, into the directory that it is given there. Give all "
                "workers the same directory, on a file system that they share.",
                process_group.index(),
                path,
            )


#: The names of Orbax that are others in a worker of a job.
_CONFINED: dict[str, Any] = {
    "Context": _own_context,
    "load_checkpointables": _load_checkpointables,
    "training": _TrainingForKeras(),
}

_teach_orbax()
