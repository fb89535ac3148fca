"""The content of a checkpoint in one file, as it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from unison.cells import Cell
from unison.train.archive import Node, write_archive
from unison.train.counter import with_wide_counter
from unison.train.sharded_archive import remove_parts
from unison.train.snapshot import Snapshot
from unison.train.tensor_bundle import remove_data_files, write_tensor_bundle


class ArchiveContent:
    """The graph and the arrays of a checkpoint in one file.

    Its `value_of` is passed to `describe`, and `take` takes what that returns.

    Args:
        path: The checkpoint's path.
        snapshot: Copies the values.
        is_tensorflows: Whether it is to be one of TensorFlow's.
        record: Called when it is written: records it in other files of the folder.
    """

    def __init__(
        self, path: str, snapshot: Snapshot, is_tensorflows: bool, record: Callable[[], None]
    ):
        self._path = path
        self._snapshot = snapshot
        self._write_file = write_tensor_bundle if is_tensorflows else write_archive
        self._record = record
        self._nodes: Sequence[Node] = ()
        self._arrays: Mapping[str, np.ndarray] = {}

    def value_of(self, cell: Cell) -> np.ndarray:
        """Returns the array with the value of a cell; see `Snapshot.value_of`."""
        return self._snapshot.value_of(cell)

    def take(self, nodes: Sequence[Node], arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the graph; `write` writes its arrays as they are then."""
        self._nodes, self._arrays = nodes, arrays

    def write(self) -> None:
        """Writes the file, and records it."""
        self._snapshot.finish()
        self._write_file(self._path, self._nodes, with_wide_counter(self._arrays))
        remove_parts(self._path)  # of a checkpoint in another format that this one replaces
        if self._write_file is not write_tensor_bundle:
            remove_data_files(self._path)
        self._record()

    @property
    def num_arrays(self) -> int:
        return len(self._arrays)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())
