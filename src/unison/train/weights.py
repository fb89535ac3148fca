"""The weights of a Keras model as a checkpoint: `save_weights` to a path without an extension."""

from __future__ import annotations

import os
from typing import Any

from unison.train.checkpoint import Checkpoint
from unison.train.latest import update_checkpoint_state
from unison.train.status import CheckpointLoadStatus


def save_weights(model: Any, path: str | os.PathLike) -> str:
    """Writes the state of a model and its optimizer as a checkpoint, the latest of its folder.

    Args:
        model: A Keras model.
        path: The checkpoint's path, without an extension.

    Returns:
        The path, for `latest_checkpoint`.

    TF: `tf.keras.Model.save_weights` in TensorFlow's format.
    """
    written = Checkpoint(model).write(path)
    update_checkpoint_state(os.path.dirname(written), written)
    return written


def load_weights(model: Any, path: str | os.PathLike) -> CheckpointLoadStatus:
    """Restores a checkpoint of `save_weights`; a model that is not built is restored when it is.

    Args:
        model: A Keras model.
        path: The checkpoint's path.

    Raises:
        NotFoundError: The checkpoint does not exist.
        DataLossError: It is corrupt.
        ValueError: The shape of a weight differs, or nothing in the checkpoint belongs to the
            model.

    TF: `tf.keras.Model.load_weights` in TensorFlow's format.
    """
    status = Checkpoint(model).read(path).expect_partial()
    if model.built and len(status.restoration.bound) == 1:
        names = ", ".join(status.restoration.archive.nodes[0].children)
        raise ValueError(
            f"Checkpoint {os.fspath(path)} was not saved from a model of this kind: its parts are "
            f"{names}. If a Checkpoint(model=model) saved it, restore it through one."
        )
    return status
