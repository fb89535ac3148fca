"""The weights of a Keras model as a checkpoint: `save_weights` to a path without an extension."""

from __future__ import annotations

import os
from typing import Any

from unison.train.checkpoint import Checkpoint
from unison.train.latest import update_checkpoint_state
from unison.train.status import CheckpointLoadStatus


def save_weights(model: Any, path: str | os.PathLike) -> str:
    """Writes a model's state and its optimizer's as a checkpoint, its folder's latest one.

    Args:
        model: A Keras model.
        path: The checkpoint's path, without an extension.

    Returns:
        The path, which `latest_checkpoint` finds.

    TF: `tf.keras.Model.save_weights` in TensorFlow's format.
    """
    written = Checkpoint(model).write(path)
    update_checkpoint_state(os.path.dirname(written), written)
    return written


def load_weights(model: Any, path: str | os.PathLike) -> CheckpointLoadStatus:
    """Restores what `save_weights` wrote; a model that is not built gets it when it is.

    Args:
        model: A Keras model.
        path: The checkpoint's path.

    Raises:
        NotFoundError: There is no checkpoint.
        DataLossError: It is damaged.
        ValueError: A weight has another shape, or nothing in the checkpoint is the model's.

    TF: `tf.keras.Model.load_weights` in TensorFlow's format.
    """
    status = Checkpoint(model).read(path).expect_partial()
    if model.built and len(status.restoration.bound) == 1:
        names = ", ".join(status.restoration.archive.nodes[0].children)
        raise ValueError(
            f"Checkpoint {os.fspath(path)} was not saved from a model of this kind: its parts are "
            f"{names}. If a Checkpoint with the model in an attribute saved it, restore it so."
        )
    return status
