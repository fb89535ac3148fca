"""How checkpoints are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """How a checkpoint is written.

    Attributes:
        experimental_io_device: Without effect: the process that is asked reads and writes.
        experimental_enable_async_checkpoint: The same as `enable_async`.
        experimental_write_callbacks: Functions that are called when a checkpoint is written, with
            its path.
        enable_async: Whether `save` and `write` return at once, and a thread copies and writes the
            values of that instant. A program that overwrites a value waits until it is copied.
            `Checkpoint.sync()` waits until all is written; what could not be is raised there, or
            by the next save. As much memory as the values take is kept for the next copies.

    TF: `tf.train.CheckpointOptions`.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[[str], Any]] = ()
    enable_async: bool = False

    @property
    def is_async(self) -> bool:
        """Whether a thread writes."""
        return self.enable_async or self.experimental_enable_async_checkpoint
