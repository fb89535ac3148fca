"""Options for writing checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from unison.unsupported import UnsupportedMember


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """Options for writing a checkpoint.

    Attributes:
        experimental_io_device: Ignored: the calling process reads and writes.
        experimental_enable_async_checkpoint: The same as `enable_async`.
        experimental_write_callbacks: Functions that are called when a checkpoint has been written,
            with its path.
        enable_async: Whether `save` and `write` return immediately, and a thread copies and writes
            the current values. A program that overwrites a value waits until it is copied.
            `Checkpoint.sync()` waits until all is written; errors are raised there, or
            by the next save. The memory of the copies is reused by the next save.

    TF: `tf.train.CheckpointOptions`.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[[str], Any]] = ()
    enable_async: bool = False

    experimental_sharding_callback = UnsupportedMember("each worker writes the shards that it has")
    experimental_skip_slot_variables = UnsupportedMember(
        "leave the optimizer out of the checkpoint: tf.train.Checkpoint(model=model)"
    )

    @property
    def is_async(self) -> bool:
        """Whether a thread writes."""
        return self.enable_async or self.experimental_enable_async_checkpoint
