"""`Checkpoint`: saves and restores the state of a graph of objects."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from unison.cells import Cell
from unison.data.dataset import Dataset
from unison.data.files.checksums import crc32c
from unison.eager_fallback import needs_python
from unison.lifting import current_lift
from unison.module import Tracked, tell_waiting
from unison.runtime.placement import scoped_placement
from unison.storage import files
from unison.strategies.default import default_strategy
from unison.train.archive import SUFFIX
from unison.train.archive_content import ArchiveContent
from unison.train.background import BackgroundWriter
from unison.train.checkpoint_formats import AnyArchive, open_checkpoint
from unison.train.counter import COUNTER
from unison.train.graph import (
    cells_of,
    describe,
    is_tracked,
    parts_as_tensorflow_names,
    parts_of,
)
from unison.train.journal import Arrival
from unison.train.latest import update_checkpoint_state
from unison.train.options import CheckpointOptions
from unison.train.orbax_format import is_orbax_installed, require_orbax
from unison.train.restoration import Restoration
from unison.train.sharded_archive import ShardedContent
from unison.train.shared_path import begin_writing
from unison.train.snapshot import Snapshot
from unison.train.status import CheckpointLoadStatus, InitializationOnlyStatus
from unison.train.tensor_bundle import TensorBundle
from unison.variables import Variable

logger = logging.getLogger("unison")

#: The path of the variables in the folder of a saved model; it can be restored, too.
_OF_A_SAVED_MODEL = os.path.join("variables", "variables")

_ARCHIVE, _ORBAX, _TENSORFLOW = _FORMATS = "archive", "orbax", "tensorflow"


class Checkpoint(Tracked):
    """Saves and restores variables, and the objects that contain them.

    A checkpoint follows attributes, lists, tuples and dictionaries of its objects: variables
    (Unison's and Keras'), modules, Keras models, layers, optimizers and metrics, other checkpoints,
    iterators over datasets, and other objects with `get_state` and `set_state` (Grain's iterators).
    Values are those outside of replicas, so that they can be restored under another strategy.

    Args:
        root: An object whose parts become the checkpoint's own: `Checkpoint(model)` can be restored
            into `Checkpoint(other_model)`, and into any object with attributes of the same names.
        format: The format of what is written: `"archive"`, one file that `numpy.load` opens and one
            process writes; `"orbax"`, a folder in Orbax's format into which each process writes its
            part of the state; or `"tensorflow"`, which TensorFlow restores and one process writes.
            Default: `"orbax"` if the workers have variables in parts and Orbax is installed, else
            `"archive"`. All formats can be restored, whatever this says.
        objects: The objects to follow, by name.

    Raises:
        ValueError: An object has no state that a checkpoint can follow, or there is no such format.
        ImportError: The format needs a package that is not installed.

    Examples:
        >>> import tempfile, unison
        >>> folder = tempfile.mkdtemp()
        >>> weight = unison.Variable(3.0)
        >>> checkpoint = Checkpoint(weight=weight)
        >>> path = checkpoint.save(f"{folder}/ckpt")
        >>> os.path.basename(path)
        'ckpt-1'
        >>> _ = weight.assign(0.0)
        >>> _ = checkpoint.restore(path).assert_consumed()
        >>> float(weight)
        3.0

    TF: `tf.train.Checkpoint`.
    """

    def __init__(self, root: Any = None, format: str | None = None, **objects: Any):
        if format is not None and not isinstance(format, str):
            objects["format"], format = format, None  # an object of that name
        if format not in (None, *_FORMATS):
            raise ValueError(
                f"A checkpoint's format is one of {', '.join(map(repr, _FORMATS))}, or None. "
                f"Received: {format!r}"
            )
        if format == _ORBAX:
            require_orbax()
        if format == _TENSORFLOW:
            crc32c()
        self._format = format
        #: A save counts, writes and records its path: only one at a time.
        self._saving = threading.RLock()
        self._background: BackgroundWriter | None = None
        #: The copies of the values of the last asynchronous save, which the next one reuses.
        self._copies: weakref.WeakKeyDictionary[Cell, list[np.ndarray]] = (
            weakref.WeakKeyDictionary()
        )
        if COUNTER in objects:
            raise AttributeError(
                f"A Checkpoint has a {COUNTER} of its own: give yours another name."
            )
        named = {} if root is None else {"root": root}
        for name, value in (named | dict(sorted(objects.items()))).items():
            if not (is_tracked(value) or isinstance(value, list | tuple | dict | Dataset)):
                raise ValueError(
                    "A Checkpoint follows variables, modules, Keras objects, iterators over "
                    "datasets, lists and dictionaries of them, and objects with get_state and "
                    "set_state. Received: "
                    f"{name}={value!r} of type {type(value).__name__}"
                )
            setattr(self, name, value)

    @property
    def save_counter(self) -> Variable:
        """The number of calls of `save`; it numbers the checkpoints, and is saved in them."""
        if COUNTER not in vars(self):
            with scoped_placement(default_strategy().placement):
                counter = Variable(0, trainable=False, name=COUNTER, dtype=np.int64)
            vars(self)[COUNTER] = counter
            tell_waiting(self)
        return vars(self)[COUNTER]

    def save(self, file_prefix: str | os.PathLike, options: CheckpointOptions | None = None) -> str:
        """Writes a checkpoint and records it as the latest in its folder.

        Several workers with the same path write it once; see `docs/saving.md`.

        Args:
            file_prefix: Its path, to which a hyphen and the number of the checkpoint are added.
            options: Options for writing.

        Returns:
            The path, for `restore`.

        Raises:
            PermissionDeniedError: The folder cannot be written.
            ResourceExhaustedError: The disk is full.
            ValueError: An `ON_READ` variable without aggregation has no common value.
            RuntimeError: Inside a replica program.
            DeadlineExceededError: The values are distributed over several workers, not all of which
                save.
        """

        def record(path: str, is_writer: bool) -> None:
            if is_writer:
                update_checkpoint_state(os.path.dirname(path), path)

        return self.write_numbered(file_prefix, options=options, then=record)

    def write_numbered(
        self,
        file_prefix: str | os.PathLike,
        number: int | None = None,
        options: CheckpointOptions | None = None,
        then: Callable[[str, bool], None] | None = None,
    ) -> str:
        """Counts, and writes a checkpoint, without recording it as its folder's latest; see `save`.

        Args:
            file_prefix: Its path without the number.
            number: The number; default: the next one of the counter.
            options: See `save`.
            then: Called when the checkpoint has been written, with its path, and whether this
                process has written it.
        """
        _require_known_values()
        with self._saving_alone():
            before = int(self.save_counter)
            self.save_counter.assign(before + 1)
            try:
                number = before + 1 if number is None else number
                return self._write(f"{os.fspath(file_prefix)}-{number}", options, then)
            except BaseException:
                self.save_counter.assign(before)  # nothing was saved
                raise

    def write(
        self, file_prefix: str | os.PathLike, options: CheckpointOptions | None = None
    ) -> str:
        """Writes a checkpoint, without a number and without counting; see `save`.

        Returns:
            The path, for `read` or `restore`.
        """
        return self._write(os.fspath(file_prefix), options)

    def sync(self) -> None:
        """Waits until asynchronous saves are written.

        The callback of a save does not wait for that save.

        Raises:
            OpError: It could not be written.

        TF: `tf.train.Checkpoint.sync`.
        """
        if self._background is not None:
            self._background.wait()

    @contextlib.contextmanager
    def _saving_alone(self) -> Iterator[None]:
        """Inside, no other thread saves, and no write is running."""
        while True:
            self.sync()  # outside of the lock, since the callback of a write may need it
            with self._saving:
                if self._background is None or not self._background.is_busy:
                    yield
                    return

    def _write(
        self,
        path: str,
        options: CheckpointOptions | None,
        then: Callable[[str, bool], None] | None = None,
    ) -> str:
        _require_known_values()
        options = options or CheckpointOptions()
        begun = time.monotonic()
        with self._saving_alone():
            cells = cells_of(self._root, self._parts)
            is_sharded = self._is_sharded(cells)
            writing = begin_writing(path, path + SUFFIX, cells, is_sharded)
            if writing.arrival is Arrival.APART and self._format is None:
                is_sharded = False  # each worker writes all, to a path of its own
            snapshot = Snapshot(self._copies if options.is_async else {})
            is_tensorflows = self._format == _TENSORFLOW
            parts = parts_as_tensorflow_names(self._parts) if is_tensorflows else self._parts

            def record() -> None:
                # The other processes, which look for it next, do not see it as written before.
                if then is not None:
                    then(path, True)

            content: ShardedContent | ArchiveContent
            if is_sharded:
                content = ShardedContent(writing.writers, snapshot, record)
            else:
                content = ArchiveContent(path, snapshot, is_tensorflows, record)
            with snapshot, writing.reading():
                content.take(*describe(self._root, parts, content.value_of))

            def finish() -> None:
                try:
                    if isinstance(content, ShardedContent):
                        is_writer = writing.finish_in_parts(path, content)
                    else:
                        is_writer = writing.finish(content.write)
                finally:
                    snapshot.forget()
                if is_writer:
                    _log_written(path, content, time.monotonic() - begun)
                elif then is not None:
                    then(path, False)
                for call in options.experimental_write_callbacks or ():
                    call(path)

            if options.is_async:
                self._background = self._background or BackgroundWriter()
                self._background.start(finish)
            else:
                finish()
        return path

    def read(self, save_path: str | os.PathLike, options: Any = None) -> CheckpointLoadStatus:
        """Restores a checkpoint of `write` or `save`.

        Objects that exist get their values now. Variables that are created later (by a Keras model
        that is not built, as an optimizer's slots, as attributes that are set later) get theirs
        when they are created.

        Args:
            save_path: The path that `write` or `save` returned, or a saved model's folder. It may
                be a checkpoint of TensorFlow.
            options: Accepted for compatibility with TensorFlow.

        Returns:
            The status, with assertions about what was restored.

        Raises:
            NotFoundError: The checkpoint does not exist.
            DataLossError: It is corrupt. Nothing was changed.
            ValueError: A variable has another shape. Nothing was changed.
            InvalidArgumentError: A variable has another dtype. Nothing was changed.
        """
        del options
        self.sync()
        path = os.fspath(save_path)
        if files.exists(os.path.join(path, _OF_A_SAVED_MODEL + SUFFIX)):
            path = os.path.join(path, _OF_A_SAVED_MODEL)
        status = self._read_archive(open_checkpoint(path))
        logger.info("checkpoint %s is restored", path)
        return status

    def _read_archive(self, archive: AnyArchive) -> CheckpointLoadStatus:
        """Restores the content of an archive; see `read`."""
        others = () if self._root is self else (self,)
        is_tensorflows = isinstance(archive, TensorBundle)
        parts = parts_as_tensorflow_names(self._parts) if is_tensorflows else self._parts
        return CheckpointLoadStatus(Restoration(archive, self._root, parts, others))

    def restore(
        self, save_path: str | os.PathLike | None, options: Any = None
    ) -> CheckpointLoadStatus | InitializationOnlyStatus:
        """Restores a checkpoint of `save`, with the number of checkpoints; see `read`.

        Args:
            save_path: The path; None, which `latest_checkpoint` returns for a folder without
                checkpoints, restores nothing.
            options: Accepted for compatibility with TensorFlow.
        """
        if save_path is None:
            return InitializationOnlyStatus()
        _ = self.save_counter  # which is restored with the others
        return self.read(save_path, options)

    def _is_sharded(self, cells: Sequence[Cell]) -> bool:
        """Whether the workers write a checkpoint of these cells in parts."""
        if self._format is not None:
            return self._format == _ORBAX
        is_divided = any(cell.is_divided for cell in cells if cell.placement.spans_processes)
        return is_divided and is_orbax_installed()

    @property
    def _root(self) -> Any:
        """The object of the checkpoint's first node."""
        return vars(self).get("root", self)

    def _parts(self, owner: Any) -> dict[str, Any]:
        if owner is not self._root:
            return parts_of(owner)
        own = {name: part for name, part in parts_of(self).items() if name != "root"}
        return own if owner is self else parts_of(owner) | own


def _log_written(path: str, content: ShardedContent | ArchiveContent, seconds: float) -> None:
    logger.info(
        "checkpoint %s is written: %d variables, %.1f MiB, %.2f s after it was asked for",
        path,
        content.num_arrays,
        content.num_bytes / 2**20,
        seconds,
    )


def _require_known_values() -> None:
    if current_lift() is not None:
        needs_python("Saving a checkpoint")
        raise RuntimeError(
            "A checkpoint cannot be saved inside a function that strategy.run is tracing, where "
            "values are not known yet. Save it outside run."
        )
