"""Options for writing checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from unison.unsupported import refuse_option


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """Options for writing a checkpoint.

    Attributes:
        experimental_io_device: Ignored: the calling process reads and writes.
        experimental_enable_async_checkpoint: The same as `enable_async`.
        experimental_write_callbacks: Functions that are called when a checkpoint has been written,
            with its path.
        experimental_skip_slot_variables: Refused.
        experimental_sharding_callback: Refused.
        enable_async: Whether `save` and `write` return immediately, and a thread copies and writes
            the current values. A program that overwrites a value waits until it is copied.
            `Checkpoint.sync()` waits until all is written; errors are raised there, or
            by the next save. The memory of the copies is reused by the next save.

    Raises:
        ValueError: An option is refused.

    TF: `tf.train.CheckpointOptions`.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[[str], Any]] = ()
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: Any = None

    def __post_init__(self) -> None:
        refuse_option(
            "experimental_skip_slot_variables",
            self.experimental_skip_slot_variables,
            "leave the optimizer out of the checkpoint: tf.train.Checkpoint(model=model)",
        )
        refuse_option(
            "experimental_sharding_callback",
            self.experimental_sharding_callback,
            "each worker writes the shards that it has",
        )

    @property
    def is_async(self) -> bool:
        """Whether a thread writes."""
        return self.enable_async or self.experimental_enable_async_checkpoint
