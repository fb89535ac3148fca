"""Reading checkpoints without restoring them."""

from __future__ import annotations

import os

import numpy as np

from unison.errors import NotFoundError
from unison.train.checkpoint_formats import open_checkpoint
from unison.train.latest import get_checkpoint_state, latest_checkpoint


class CheckpointReader:
    """Reads the arrays of a checkpoint by their keys.

    Args:
        path: The checkpoint.

    TF: the result of `tf.train.load_checkpoint`.
    """

    def __init__(self, path: str | os.PathLike):
        self._archive = open_checkpoint(os.fspath(path))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of every array, by key."""
        return {key: list(array.shape) for key, array in self._archive.arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype]:
        """Returns the dtype of every array, by key."""
        return {key: array.dtype for key, array in self._archive.arrays.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Whether there is an array with that key."""
        return tensor_str in self._archive.arrays

    def get_tensor(self, tensor_str: str) -> np.ndarray:
        """Returns an array.

        Raises:
            NotFoundError: There is no such key.
            DataLossError: The checkpoint is corrupt.
        """
        return self._archive.read(tensor_str)


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike) -> CheckpointReader:
    """Returns a reader of a checkpoint, or of the latest one of a folder.

    Raises:
        NotFoundError: There is no checkpoint.
        DataLossError: It is corrupt.

    TF: `tf.train.load_checkpoint`.
    """
    path = os.fspath(ckpt_dir_or_file)
    if get_checkpoint_state(path) is not None:
        latest = latest_checkpoint(path)
        if latest is None:
            raise NotFoundError(message=f"No checkpoint in folder {path} is whole.")
        path = latest
    return CheckpointReader(path)


def load_variable(ckpt_dir_or_file: str | os.PathLike, name: str) -> np.ndarray:
    """Returns an array of a checkpoint, or of the latest one of a folder.

    TF: `tf.train.load_variable`.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike) -> list[tuple[str, list[int]]]:
    """Returns the key and the shape of every array of a checkpoint, ordered by key.

    Args:
        ckpt_dir_or_file: A checkpoint, or a folder, for its latest checkpoint.

    Examples:
        >>> import tempfile, unison
        >>> path = f"{tempfile.mkdtemp()}/ckpt"
        >>> _ = unison.train.Checkpoint(weight=unison.Variable([1.0, 2.0])).write(path)
        >>> list_variables(path)
        [('weight/.ATTRIBUTES/VARIABLE_VALUE', [2])]

    TF: `tf.train.list_variables`.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
