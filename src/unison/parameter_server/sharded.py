"""Access to the single shards of a variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.cells import has_cell
from unison.parameter_server.cells import RemoteCell
from unison.parameter_server.store import Shard, Wanted


class VariableShard:
    """Rows of a variable that are on one server.

    Attributes:
        name: The variable's name, with the index of the shard.
        shape: The shape of the rows.
        dtype: The dtype of the variable.
        offset: The first row.
        device: The server's device, in TensorFlow's format.
    """

    def __init__(self, cell: RemoteCell, part: int):
        self._cell = cell
        self._shard: Shard = cell.shards[part]
        self.name = f"{cell.name}/part_{part}"
        self.shape = (self._shard.rows, *cell.aval.shape[1:])
        self.dtype = cell.aval.dtype
        self.offset = self._shard.start
        self.device = f"/job:ps/replica:0/task:{self._shard.server}/device:CPU:0"

    def numpy(self) -> np.ndarray:
        """Returns the rows."""
        return np.array(self._cell.store.read([[self._shard]])[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> VariableShard:
        """Replaces the rows.

        Raises:
            ValueError: `value` has another shape.
        """
        array = np.asarray(value, self.dtype)
        if array.shape != self.shape:
            raise ValueError(
                f"Expected shape {self.shape} for {self.name!r}. Received: shape {array.shape}"
            )
        self._cell.store.assign([self._shard], array)
        return self

    def __repr__(self) -> str:
        return f"<VariableShard {self.name!r} shape={self.shape} dtype={self.dtype}>"


def shards_of(variable: Any) -> list[VariableShard]:
    """Returns the shards of a variable of a `ParameterServerStrategy`, one if it is not divided.

    Args:
        variable: A `unison.Variable` or Keras variable.

    Raises:
        ValueError: It is not on parameter servers.

    TF: `ShardedVariable.variables`.
    """
    cell = _remote_cell(variable)
    return [VariableShard(cell, part) for part in range(len(cell.shards))]


def read_rows(variable: Any, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns rows of a variable; only these rows are fetched.

    Args:
        variable: A variable of a `ParameterServerStrategy`.
        indices: Integers of any shape.

    Returns:
        An array of shape `indices.shape + variable.shape[1:]`.

    Raises:
        ValueError: It is not on parameter servers, or an index is out of bounds.

    TF: `ShardedVariable.sparse_read`.
    """
    cell = _remote_cell(variable)
    wanted = np.asarray(indices, np.int64)
    rows = cell.aval.shape[0]
    if wanted.size and (wanted.min() < 0 or wanted.max() >= rows):
        raise ValueError(
            f"Expected indices from 0 to {rows - 1} for {cell.name!r}. Received: {indices!r}"
        )
    unique, where = np.unique(wanted, return_inverse=True)
    (found,) = cell.store.pull(Wanted([], [(cell.shards, unique)]))[1]
    taken: np.ndarray = found[where.reshape(wanted.shape)]
    return taken


def is_sharded(variable: Any) -> bool:
    """Returns whether a variable is divided between servers."""
    cell = variable.cell if has_cell(variable) else None
    return isinstance(cell, RemoteCell) and len(cell.shards) > 1


def _remote_cell(variable: Any) -> RemoteCell:
    cell = variable.cell if has_cell(variable) else None
    if not isinstance(cell, RemoteCell):
        raise ValueError(
            f"Expected a variable of a ParameterServerStrategy. Received: {variable!r}"
        )
    return cell
