"""Orbax's checkpoint format behind fsspec: a tree of arrays, each chunk of which is an object.

fsspec knows more file systems than TensorStore, and writers of Orbax's database share a disk. So
each process writes its chunks as Zarr 2 lays them out, and reads those that it needs. One process
then writes the descriptions, which TensorStore and Orbax make in a local folder.

Sources: `orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=False)`; the Zarr storage
specification, version 2.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from unison.storage.remote_folder import RemoteFolder
from unison.storage.temporary_folders import temporary_folder
from unison.thread_pool import ThreadPool
from unison.train.chunk_plan import ChunkGrid, Region
from unison.train.orbax_format import (
    METADATA,
    OwnChunks,
    TreePath,
    describe_tree,
    name_of,
    require_orbax,
    zarr_spec,
)

#: The objects that are written, or read, at a time; they bound the memory beside the state.
_AT_ONCE = 16

#: The characters that not every file system takes in names; `_stored` replaces them.
_ODD = re.compile(r"[\x00-\x1f\x7f%./\\?#*]")

#: The most bytes of an array's name. Local file systems take 255, object stores more.
_MOST_BYTES = 200


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
        self._folder = RemoteFolder(folder)
        self._process = process

    def write(self, arrays: Mapping[TreePath, OwnChunks]) -> None:
        """Writes this process's chunks.

        Raises:
            OpError: They cannot be written.
        """
        self._write_all(
            (_object_of(path, own.grid, own.grid.region(number)), chunk.tobytes)
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
            opening = []
            for path, grid in grids.items():
                place = f"{local}/{name_of(_stored(path))}/"
                opening.append(tensorstore.open(zarr_spec(grid, driver="file", path=place)))
            for opened in opening:
                opened.result()
            describe_tree(local, map(_stored, grids), self._process, is_database=False)
            found = [
                os.path.join(folder, name) for folder, _, names in os.walk(local) for name in names
            ]
            self._write_all((os.path.relpath(path, local), _reader_of(path)) for path in found)

    def _write_all(self, objects: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
        """Writes objects, each with what a function returns."""

        def write(named: tuple[str, Callable[[], bytes]]) -> None:
            name, content = named
            self._folder.write(name, content())

        with ThreadPool(_AT_ONCE) as pool:
            for _ in pool.map(write, objects):
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
        self._folder = RemoteFolder(folder)
        self._grids = grids
        self._pool = ThreadPool(_AT_ONCE)

    def start_reading(self, path: TreePath, region: Region) -> Future[np.ndarray]:
        """Returns the future of a chunk of an array, by its region."""
        return self._pool.submit(self._read, path, region)

    def _read(self, path: TreePath, region: Region) -> np.ndarray:
        grid = self._grids[path]
        found = self._folder.read(_object_of(path, grid, region), grid.chunk_bytes)
        return np.frombuffer(found, grid.dtype).reshape(grid.chunk)


def _object_of(path: TreePath, grid: ChunkGrid, region: Region) -> str:
    """Returns the name of a chunk's object, as Zarr 2 names it."""
    places = [begin // part for (begin, _), part in zip(region, grid.chunk, strict=True)]
    return f"{name_of(_stored(path))}/{'.'.join(map(str, places)) or '0'}"


def _stored(path: TreePath) -> TreePath:
    """Returns the path of an array in the stored tree: with names that any file system takes.

    Examples:
        >>> _stored(("model", "layers[0]", "kernel"))
        ('model', 'layers[0]', 'kernel')
        >>> _stored(("a.b", "c/d"))
        ('a%2Eb', 'c%2Fd')
    """
    parts = tuple(_ODD.sub(lambda odd: f"%{ord(odd[0]):02X}", part) or "%" for part in path)
    name = name_of(parts)
    if name == METADATA:
        return (f"%{name}",)
    if len(name.encode(errors="surrogatepass")) <= _MOST_BYTES:
        return parts
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
    return (f"{name[: _MOST_BYTES // 8]}-%{digest}",)
