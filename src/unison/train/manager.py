"""`CheckpointManager`: keeps the latest checkpoints of a folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from unison.storage import atomic
from unison.train.checkpoint import Checkpoint
from unison.train.checkpoint_formats import remove_checkpoint
from unison.train.latest import (
    agreed_checkpoint,
    get_checkpoint_state,
    latest_checkpoint,
    update_checkpoint_state,
)
from unison.train.options import CheckpointOptions

_SECONDS_AN_HOUR = 3600.0

#: The suffix of the names of checkpoints that `save` writes.
_NUMBERED = re.compile(r"-\d+$")


class CheckpointManager:
    """Saves checkpoints into a folder and deletes the old ones.

    Its state is in the folder's file `checkpoint`, so that another manager of the folder
    continues from there. Only one should use a folder at a time.

    Args:
        checkpoint: The checkpoint to save.
        directory: The folder.
        max_to_keep: The number of checkpoints to keep; None: all.
        keep_checkpoint_every_n_hours: A checkpoint that would be deleted is kept permanently if it
            is this much newer than the last permanent one.
        checkpoint_name: The prefix of the checkpoints' names.
        step_counter: A variable or a number: the step, for `checkpoint_interval`.
        checkpoint_interval: The minimum number of steps between two checkpoints.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        last_checkpoint_step: The step of the last checkpoint, for `checkpoint_interval`.

    Raises:
        ValueError: `max_to_keep` is not positive, or there is an interval and no `step_counter`.

    Examples:
        >>> import tempfile, unison
        >>> count = unison.Variable(0)
        >>> manager = CheckpointManager(Checkpoint(count=count), tempfile.mkdtemp(), max_to_keep=2)
        >>> for _ in range(3):
        ...     _ = manager.save()
        >>> [os.path.basename(path) for path in manager.checkpoints]
        ['ckpt-2', 'ckpt-3']

    TF: `tf.train.CheckpointManager`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
    ):
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(
                f"max_to_keep must be a positive number, or None. Received: {max_to_keep}"
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                "A checkpoint_interval is counted in steps: pass the variable that counts them as "
                "step_counter, too."
            )
        self._checkpoint = checkpoint
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._hours = keep_checkpoint_every_n_hours
        self._prefix = os.path.join(self._directory, checkpoint_name)
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._last_step = last_checkpoint_step
        self._init_fn = init_fn
        #: The time of each checkpoint that may be deleted, the oldest first.
        self._written: dict[str, float] = {}
        atomic.remove_abandoned(self._prefix)
        self._latest = latest_checkpoint(self._directory)
        self._take_over(time.time())

    def _take_over(self, now: float) -> None:
        """Continues from the state that the last manager of the folder has left."""
        state = get_checkpoint_state(self._directory)
        if state is None:
            # Slightly earlier, so that a checkpoint written immediately is later.
            self._last_preserved = now - 1.0
            return
        # If the clock was set back, checkpoints must not appear old.
        self._last_preserved = min(state.last_preserved_timestamp, now)
        paths = state.all_model_checkpoint_paths
        times = state.all_model_checkpoint_timestamps or [self._last_preserved] * len(paths)
        for path, written in zip(paths, times, strict=False):
            # No other file in the folder, and no file in other folders, may be deleted.
            is_own = os.path.join(self._directory, os.path.basename(path)) == path
            if is_own and _NUMBERED.search(path) and min(written, now) > self._last_preserved:
                self._written[path] = min(written, now)

    @property
    def directory(self) -> str:
        """The folder."""
        return self._directory

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """The minimum number of steps between two checkpoints."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest valid checkpoint; None if there is none."""
        return self._latest

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, the oldest first, without permanent ones."""
        return list(self._written)

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Writes a checkpoint, and deletes the oldest ones beyond `max_to_keep`.

        Args:
            checkpoint_number: A number, or a variable that holds it, for the name. Default: that of
                `checkpoint.save_counter`, which is incremented in any case.
            check_interval: Whether to save only if the interval has passed.
            options: See `Checkpoint.save`. An asynchronous checkpoint counts when it has been
                written.

        Returns:
            The path; None if the interval has not passed, or this step was saved already.
        """
        step = None if self._interval is None else int(self._step_counter)
        if step is not None and self._last_step is not None:
            is_due = step >= self._last_step + (self._interval or 0) or not check_interval
            if step == self._last_step or not is_due:
                return None
        number = None if checkpoint_number is None else int(checkpoint_number)
        path = self._checkpoint.write_numbered(self._prefix, number, options, self._take_in)
        self._last_step = step
        return path

    def sync(self) -> None:
        """Waits until asynchronous saves are written; see `Checkpoint.sync`."""
        self._checkpoint.sync()

    def _take_in(self, path: str, is_writer: bool) -> None:
        """Records a written checkpoint as the latest, and deletes the oldest ones."""
        self._written.pop(path, None)
        self._written[path] = time.time()
        self._latest = path
        if is_writer:
            # The new one is recorded before an old one is deleted, in case the program is stopped.
            self._record()
        if self._sweep(is_writer) and is_writer:
            self._record()

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint; without one, calls `init_fn` if there is one.

        All workers of a cluster must call this. They restore the same checkpoint: the newest
        that all of them see.

        Returns:
            The path of the checkpoint; None if there was none.

        Raises:
            DataLossError: Some workers see checkpoints, but there is none that all of them see.
        """
        self.sync()
        self._latest = agreed_checkpoint(self._latest)
        if self._latest is not None:
            self._checkpoint.restore(self._latest)
            if self._interval is not None:
                self._last_step = int(self._step_counter)
            return self._latest
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _record(self) -> None:
        assert self._latest is not None
        update_checkpoint_state(
            self._directory,
            self._latest,
            list(self._written),
            list(self._written.values()),
            self._last_preserved,
        )

    def _sweep(self, is_writer: bool) -> bool:
        """Removes the oldest checkpoints from the list; returns whether there were any.

        They are deleted, if this process manages the folder, otherwise they stay.
        """
        excess = max(0, len(self._written) - (self._max_to_keep or len(self._written)))
        for path in list(self._written)[:excess]:
            written = self._written.pop(path)
            if self._hours and written - self._hours * _SECONDS_AN_HOUR >= self._last_preserved:
                self._last_preserved = written
            elif is_writer:
                remove_checkpoint(path)
        return excess > 0
