"""Orbax's checkpoint format behind fsspec: a tree of arrays, each chunk of which is an object.

fsspec knows more file systems than TensorStore, and writers of Orbax's database share a disk. So
each process writes its chunks as Zarr 2 lays them out, and reads those that it needs. One process
then writes the descriptions, which TensorStore and Orbax make in a local folder.

Sources: `orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)`; the Zarr storage
specification, version 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from unison.storage.file_systems import file_system, named_errors
from unison.storage.names import path_inside
from unison.storage.temporary_folders import temporary_folder
from unison.thread_pool import ThreadPool
from unison.train.chunk_plan import ChunkGrid, Region
from unison.train.orbax_format import OwnChunks, TreePath, describe_tree, name_of, require_orbax

#: The objects that are written, or read, at a time; they bound the memory beside the state.
_AT_ONCE = 8


class RemoteTreeWriter:
    """Writes a tree of arrays into a folder behind fsspec; see `TreeWriter`.

    Args:
        folder: The folder, which all processes that write have in common.
        process: The number of this process among JAX's.

    Raises:
        ImportError: Orbax is not installed.
    """

    def __init__(self, folder: str, process: int):
        require_orbax()
        self._folder = folder
        self._process = process

    def write(self, arrays: Mapping[TreePath, OwnChunks]) -> None:
        """Writes this process's chunks.

        Raises:
            OpError: They cannot be written.
        """
        self._put(
            (_object_of(name_of(path), own.grid, own.grid.region(number)), chunk.tobytes)
            for path, own in arrays.items()
            for number, chunk in own.chunks.items()
        )

    def complete(self, grids: Mapping[TreePath, ChunkGrid]) -> None:
        """Describes the tree, after all processes have written their chunks.

        Args:
            grids: The chunks of each array in the tree.
        """
        import tensorstore

        with temporary_folder("checkpoint") as local:
            opening = [
                tensorstore.open(
                    {
                        "driver": "zarr",
                        "kvstore": {"driver": "file", "path": f"{local}/{name_of(path)}/"},
                        "metadata": grid.zarr_metadata,
                        "dtype": grid.dtype.name,
                        "create": True,
                    }
                )
                for path, grid in grids.items()
            ]
            for opened in opening:
                opened.result()
            describe_tree(local, grids, self._process, is_database=False)
            found = [
                os.path.join(folder, name) for folder, _, names in os.walk(local) for name in names
            ]
            self._put((os.path.relpath(path, local), _reader_of(path)) for path in found)

    def _put(self, objects: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
        """Writes objects, each with what a function returns."""
        system, _ = file_system(self._folder)

        def put(named: tuple[str, Callable[[], bytes]]) -> None:
            name, content = named
            _, path = file_system(path_inside(self._folder, *name.split("/")))
            system.makedirs(system._parent(path), exist_ok=True)
            system.pipe_file(path, content())

        with named_errors(self._folder), ThreadPool(_AT_ONCE) as pool:
            for _ in pool.map(put, objects):
                pass


def _reader_of(path: str) -> Callable[[], bytes]:
    def read() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    return read


class RemoteTreeReader:
    """The arrays of a tree that `RemoteTreeWriter` has written.

    Args:
        folder: The folder behind fsspec.
        grids: The chunks of each array, by its path in the tree.
    """

    def __init__(self, folder: str, grids: Mapping[TreePath, ChunkGrid]):
        self._folder = folder
        self._grids = grids
        self._system, _ = file_system(folder)
        self._pool = ThreadPool(_AT_ONCE)

    def start_reading(self, path: TreePath, region: Region) -> Future[np.ndarray]:
        """Returns the future of a chunk of an array, by its region."""
        return self._pool.submit(self._read, path, region)

    def _read(self, path: TreePath, region: Region) -> np.ndarray:
        grid = self._grids[path]
        name = _object_of(name_of(path), grid, region)
        _, place = file_system(path_inside(self._folder, *name.split("/")))
        try:
            found = self._system.cat_file(place, start=0, end=grid.chunk_bytes + 1)
        except FileNotFoundError:
            raise ValueError(f"chunk {name!r} is missing") from None
        if len(found) != grid.chunk_bytes:
            raise ValueError(f"chunk {name!r} has other than {grid.chunk_bytes} bytes")
        return np.frombuffer(found, grid.dtype).reshape(grid.chunk)


def _object_of(array: str, grid: ChunkGrid, region: Region) -> str:
    """Returns the name of a chunk's object, as Zarr 2 names it."""
    places = [begin // part for (begin, _), part in zip(region, grid.chunk, strict=True)]
    return f"{array}/{'.'.join(map(str, places)) or '0'}"
