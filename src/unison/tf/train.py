"""`tf.train`: checkpoints, cluster descriptions and moving averages."""

from __future__ import annotations

import dataclasses
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.tf.missing import names_missing_from
from unison.train import (
    Checkpoint,
    CheckpointManager,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from unison.train.moving_average import ExponentialMovingAverage

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "ClusterSpec",
    "ExponentialMovingAverage",
    "checkpoints_iterator",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]


@dataclasses.dataclass
class CheckpointOptions:
    """How TensorFlow moves a checkpoint's values; without effect.

    Files are read and written by the process that asks for it, before the call returns.

    TF: `tf.train.CheckpointOptions`.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    enable_async: bool = False


#: Protocol buffers, which are made when the first one is asked for.
_MESSAGES = (
    "BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List "
    "SequenceExample"
).split()


def __getattr__(name: str) -> Any:
    if name in _MESSAGES:
        from unison.data.examples import message

        return message(name)
    return _missing(name)


_missing = names_missing_from(
    __name__,
    {
        "Coordinator": "threads are joined by threading.Thread.join, and stopped by an Event",
        "experimental": "an object with get_state and set_state is saved as PythonState is",
    },
)
