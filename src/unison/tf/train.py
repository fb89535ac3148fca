"""`tf.train`: checkpoints, cluster descriptions and moving averages."""

from __future__ import annotations

from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.tf.missing import names_missing_from
from unison.train import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
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


#: Protocol buffers, which are created at first use.
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
