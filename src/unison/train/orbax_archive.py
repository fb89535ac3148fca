"""Checkpoints of other programs in Orbax's format, read as checkpoints are.

Every level of the tree is an object, and every array a variable: `Checkpoint(params={"w": weight})`
restores the array at `params`, `w`. A step that Orbax's `CheckpointManager`, Flax or MaxText has
written is a folder of such trees, one for each item; it is a tree with the items' names on top,
unless its only item has Orbax's own name for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from unison.errors import ResourceExhaustedError
from unison.storage import files
from unison.storage.decoding import bytes_of, decoding
from unison.storage.memory_left import memory_in_words, memory_left
from unison.storage.names import require_files_inside
from unison.train.archive import ArrayDescription, Node, no_such_array, node_at
from unison.train.chunk_plan import ChunkGrid, Region, chunk_shape, whole_region
from unison.train.orbax_format import METADATA, TreeReader
from unison.train.sharded_archive import INDEX

#: The name of the only item that a program saves with Orbax's `CheckpointManager`.
_DEFAULT_ITEM = "default"

#: More than the bytes that Zstandard decompresses one byte to: blocks of 128 KiB in 4 bytes.
_MOST_OF_ZSTD = 2**17


def is_orbax_folder(folder: str) -> bool:
    """Whether a local folder is a tree in Orbax's format, or a step of such trees."""
    return next(_trees_in(folder), None) is not None


def _trees_in(folder: str) -> Iterator[str]:
    """Yields the names of the folders with trees: the folder itself, or those in it."""
    if os.path.isfile(os.path.join(folder, METADATA)):
        yield ""
    elif os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            if os.path.isfile(os.path.join(folder, name, METADATA)):
                yield name


def _require_plausible(reader: TreeReader, folder: str) -> None:
    """Raises a ValueError if the files cannot hold as much as their arrays."""
    claimed = sum(bytes_of(shape, dtype) for shape, dtype in reader.arrays.values())
    there = files.size_of_folder(folder)
    if claimed > _MOST_OF_ZSTD * there and not reader.may_lack_zeros:
        raise ValueError(f"its arrays have {claimed} bytes, and their files {there}")


class OrbaxArchive:
    """A checkpoint of another program, with the interface of `Archive`.

    Its bytes have no checksums.

    Args:
        prefix: The path of its folder, which is local.

    Raises:
        DataLossError: It is corrupt.
        ImportError: Orbax is not installed.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.nodes = [Node()]
        self.arrays: dict[str, ArrayDescription] = {}
        self._places: dict[str, tuple[TreeReader, tuple[str, ...]]] = {}
        with self._decoding():
            require_files_inside(prefix)
            names = list(_trees_in(prefix))
            for name in names:
                reader = TreeReader(os.path.join(prefix, name) if name else prefix)
                if not reader.is_foreign:
                    raise ValueError(f"its index, {INDEX}, is missing")
                above = () if names == [name] and name in ("", _DEFAULT_ITEM) else (name,)
                _require_plausible(reader, os.path.join(prefix, name))
                for path, description in reader.arrays.items():
                    key = "/".join((*above, *path))
                    node_at(self.nodes, (*above, *path)).variable = key
                    self.arrays[key] = description
                    self._places[key] = reader, path

    def read(self, key: str) -> np.ndarray:
        """Returns an array; see `Archive.read`."""
        if key not in self.arrays:
            raise no_such_array(self.prefix, key, self.arrays)
        (whole,) = self.read_regions(key, [whole_region(self.arrays[key].shape)])
        return whole

    def read_regions(self, key: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Returns regions of an array.

        Raises:
            DataLossError: It is corrupt.
            ResourceExhaustedError: There is too little memory for them.
        """
        reader, path = self._places[key]
        dtype, left = self.arrays[key].dtype, memory_left()
        wanted = sum(bytes_of([end - begin for begin, end in each], dtype) for each in regions)
        if left is not None and wanted > left[0]:
            raise ResourceExhaustedError(
                message=f"{wanted:,} bytes of array {key!r} of {self.prefix} do not fit into "
                f"memory. {memory_in_words()}"
            )
        with self._decoding():
            reading = [reader.start_reading(path, region) for region in regions]
            return [future.result() for future in reading]

    def verify(self) -> None:
        """Reads everything, a part at a time: there are no checksums to be verified."""
        for key, (shape, dtype) in self.arrays.items():
            grid = ChunkGrid(shape, dtype, chunk_shape(shape, dtype.itemsize))
            for number in range(len(grid)):
                self.read_regions(key, [grid.region(number)])

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        return decoding(f"Checkpoint {self.prefix} of Orbax", "Restore another one.")
