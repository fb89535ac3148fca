"""Checkpoints of state that several processes have in parts: a folder in Orbax's format.

Each process writes its parts, in chunks (`chunk_plan`), and a CRC-32 of each chunk: Orbax restores
flipped bits without an error. `unison.index` is the archive of the graph, of what is not an array
in the tree, and of all checksums; a folder without it is not a checkpoint. Whoever reads a region
of an array reads, and verifies, the chunks with elements of it.

Behind fsspec, the tree is in a folder beside the index, which names it (`remote_tree`): so the
index replaces that of an earlier checkpoint, with its tree, in one moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from unison.cells import Cell, Layout
from unison.errors import DataLossError, FailedPreconditionError, NotFoundError
from unison.runtime import process_group
from unison.storage import atomic, files
from unison.storage.decoding import (
    bytes_of,
    dtype_named,
    name_of_dtype,
    plain_dict,
    plain_list,
    plain_text,
    shape_of,
    whole_number,
)
from unison.storage.file_systems import is_remote, local_path_of
from unison.storage.names import checked_name, path_inside, require_files_inside
from unison.thread_pool import ThreadPool
from unison.train.archive import SUFFIX, Archive, ArrayDescription, Node, write_archive_to
from unison.train.chunk_plan import (
    ChunkGrid,
    ChunkPlan,
    Region,
    Spread,
    grid_of,
    slices_of,
    spread_of,
    spread_on,
    whole_region,
)
from unison.train.counter import with_wide_counter
from unison.train.orbax_format import (
    DTYPES,
    INLINE_BYTES,
    METADATA,
    OwnChunks,
    TreePath,
    TreeReader,
    TreeWriter,
)
from unison.train.remote_tree import RemoteTreeReader, RemoteTreeWriter
from unison.train.snapshot import Snapshot
from unison.train.tensor_bundle import remove_data_files

#: The file without which a folder is not a checkpoint.
INDEX = "unison.index"

#: The names of the folders that have the tree of a remote checkpoint.
_TREE = re.compile(r"tree-[0-9a-f]{16}")

#: The names of files and folders in the folder of a checkpoint.
_OWN_NAME = re.compile(
    rf"d|manifest\.ocdbt|{METADATA}|ocdbt\.process_\d+|checksums\.\d+\.json"
    rf"|{re.escape(INDEX)}|{_TREE.pattern}"
)

#: The chunks that are read before they are needed; they bound the memory beside the result.
_READ_AHEAD = 8

#: The most bytes of an array that is read before others are.
_SMALL = 1 << 20

_MOST_CRC = 2**32 - 1

#: The end of the keys of variables' values (see `key_of`), which the tree's names are without.
_OF_VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"


class ShardedContent:
    """The part of a process in a checkpoint, as it is written.

    Its `value_of` is passed to `describe`, by all processes with the same objects, and `take` takes
    what that returns.

    Args:
        writers: The processes that write; this one is among them.
        snapshot: Copies the values.
        record: Called when all parts are written: records them in other files of the folder.
    """

    last = INDEX

    def __init__(self, writers: Sequence[int], snapshot: Snapshot, record: Callable[[], None]):
        self._writers = tuple(writers)
        self._process = jax.process_index()
        self._snapshot = snapshot
        self._record = record
        self._plan = ChunkPlan(self._writers)
        #: The chunks of cells, by the identity of the arrays that stand for their values.
        self._of_cells: dict[int, OwnChunks] = {}
        self._nodes: Sequence[Node] = ()
        self._arrays: Mapping[str, np.ndarray] = {}
        #: The chunks of all arrays in the tree, by key, once `write` has written them.
        self._grids: dict[str, ChunkGrid] = {}
        #: The name of the folder that has the tree, if it is a remote one, once it is complete.
        self._tree: str | None = None

    def value_of(self, cell: Cell) -> np.ndarray:
        """Returns the value of a cell, or an array that stands for it if it is written in parts.

        Raises:
            FailedPreconditionError: The processes that write do not have all parts of it.
        """
        is_array = type(cell) is Cell and cell.layout is not Layout.LOCAL and cell.aval.shape
        if not is_array or not _is_in_tree(cell.aval):
            return self._snapshot.value_of(cell)
        stored = cell.stored()
        grid, own = self._own_chunks(spread_of(stored), not stored.is_fully_addressable)
        copies = self._snapshot.regions_of(cell, [grid.region(number) for number in own])
        stand_in = np.empty(())
        self._of_cells[id(stand_in)] = OwnChunks(grid, dict(zip(own, copies, strict=True)))
        return stand_in

    def _own_chunks(self, spread: Spread, is_common: bool) -> tuple[ChunkGrid, list[int]]:
        """Returns the chunks of an array, and the numbers of those that this process writes.

        Args:
            spread: The distribution of the array.
            is_common: Whether it is one array of all processes. Otherwise each may have another
                one, even of another shape: the first one's is saved, and the plan does not depend
                on it.
        """
        if not is_common:
            grid = grid_of(spread)
            return grid, list(range(len(grid))) if self._process == self._writers[0] else []
        grid, writers = self._plan.add(spread)
        return grid, [number for number, writer in enumerate(writers) if writer == self._process]

    def take(self, nodes: Sequence[Node], arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the graph; `write` writes its arrays as they are then."""
        self._nodes, self._arrays = nodes, arrays

    def _in_tree(self) -> dict[str, OwnChunks]:
        """Returns the chunks of the arrays that are in Orbax's tree, by key."""
        found = {}
        for key, array in with_wide_counter(self._arrays).items():
            if id(array) in self._of_cells:
                found[key] = self._of_cells[id(array)]
            elif key.endswith(_OF_VARIABLE) and _is_in_tree(array):
                spread = spread_on(self._writers, array.shape, array.dtype)
                grid, own = self._own_chunks(spread, is_common=False)
                regions = {number: slices_of(grid.region(number)) for number in own}
                found[key] = OwnChunks(
                    grid, {number: np.array(array[index]) for number, index in regions.items()}
                )
        return found

    def remote_folder(self, path: str) -> str:
        """Returns the new folder for the tree of a remote checkpoint."""
        return f"{path}/tree-{secrets.token_hex(8)}"

    def _writer(self, folder: str) -> TreeWriter | RemoteTreeWriter:
        return (RemoteTreeWriter if is_remote(folder) else TreeWriter)(folder, self._process)

    def write(self, folder: str) -> None:
        """Writes this process's chunks and their checksums.

        Raises:
            ImportError: Orbax is not installed.
        """
        self._snapshot.finish()
        chunks_by_key = self._in_tree()
        with ThreadPool(1) as pool:
            checksums = pool.submit(_checksums, chunks_by_key)
            self._writer(folder).write({_path_of(key): own for key, own in chunks_by_key.items()})
            with atomic.replacing(_checksums_path(folder, self._process)) as file:
                file.write(json.dumps(checksums.result()).encode())
        self._grids = {key: own.grid for key, own in chunks_by_key.items()}

    def complete(self, folder: str) -> None:
        """Completes the tree, and writes the index with the checksums of all processes."""
        checksums: dict[str, list[int | None]] = {
            key: [None] * len(grid) for key, grid in self._grids.items()
        }
        for process in self._writers:
            path = _checksums_path(folder, process)
            with files.open_to_read(path) as file:
                for key, of_chunks in json.load(file).items():
                    for number, checksum in of_chunks.items():
                        _require_equal_state(key, checksums, int(number))
                        checksums[key][int(number)] = checksum
            files.remove(path)
        for key, of_chunks in checksums.items():
            if None in of_chunks:
                raise _unequal_state(key)
        if self._grids:
            self._writer(folder).complete(
                {_path_of(key): grid for key, grid in self._grids.items()}
            )
        further: dict[str, Any] = {}
        place = folder
        if is_remote(folder):
            place, self._tree = os.path.split(folder)
            further["tree"] = self._tree
        further["elsewhere"] = {
            key: {
                "shape": list(grid.shape),
                "dtype": name_of_dtype(grid.dtype),
                "chunk": list(grid.chunk),
                "crc32": checksums[key],
            }
            for key, grid in self._grids.items()
        }
        others = {key: array for key, array in self._arrays.items() if key not in self._grids}
        with atomic.replacing(os.path.join(place, INDEX)) as file:
            write_archive_to(file, self._nodes, others, further)

    def check(self, path: str) -> None:
        """Checks that the folder would replace nothing but another checkpoint.

        Raises:
            FailedPreconditionError: There is a folder with other files.
        """
        others = [name for name in files.names_in(path) if not _OWN_NAME.fullmatch(name)]
        if others:
            raise FailedPreconditionError(
                message="A checkpoint in Orbax's format is a folder. Expected no folder, or one "
                f"with a checkpoint of Unison, at {path}. Received: a folder that has "
                f"{others[0]!r}. Save to another path, such as one inside of it."
            )

    def published(self, path: str) -> None:
        """Records it, and removes what it replaces: in other formats, or unfinished."""
        files.remove(path + SUFFIX)
        remove_data_files(path)
        self._record()
        if self._tree is not None:
            for name in files.names_in(path):
                if name not in (INDEX, self._tree) and _OWN_NAME.fullmatch(name):
                    files.remove_folder(os.path.join(path, name))

    @property
    def num_arrays(self) -> int:
        return len(self._arrays)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays that are written, by this process and others."""
        in_tree = sum(len(grid) * grid.chunk_bytes for grid in self._grids.values())
        others = (array for key, array in self._arrays.items() if key not in self._grids)
        return in_tree + sum(array.nbytes for array in others)


def _require_equal_state(
    key: str, checksums: Mapping[str, Sequence[int | None]], number: int
) -> None:
    """Checks that a chunk is one of those that are expected, and that nobody else wrote it."""
    expected = checksums.get(key, ())
    if number >= len(expected) or expected[number] is not None:
        raise _unequal_state(key)


def _unequal_state(key: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        message="The workers save different objects: expected each chunk of an array from one of "
        f"them. Received none, or several, of {key!r}. Let all workers save a Checkpoint of the "
        "same objects."
    )


def _is_in_tree(array: Any) -> bool:
    """Whether Orbax's tree can hold an array: not an empty one, and not one of text."""
    return 0 not in array.shape and np.dtype(array.dtype).name in DTYPES


def _path_of(key: str) -> TreePath:
    """Returns the path in the tree of the array with a key.

    Examples:
        >>> _path_of("model/layers[0]/kernel/.ATTRIBUTES/VARIABLE_VALUE")
        ('model', 'layers[0]', 'kernel')
    """
    return tuple(key.removesuffix(_OF_VARIABLE).split("/"))


def _checksums_path(folder: str, process: int) -> str:
    return os.path.join(folder, f"checksums.{process}.json")


def _checksums(chunks_by_key: Mapping[str, OwnChunks]) -> dict[str, dict[int, int]]:
    return {
        key: {number: _crc32(chunk) for number, chunk in own.chunks.items()}
        for key, own in chunks_by_key.items()
    }


def _crc32(chunk: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)


class ShardedArchive(Archive):
    """A checkpoint in parts that is open for reading; see `Archive`.

    Args:
        prefix: Its path.
        folder: The folder with its files.

    Attributes:
        is_remote_database: Whether its arrays cannot be read there, but in a local copy.

    Raises:
        DataLossError: It is corrupt, or a link in it leads out of it.
    """

    def __init__(self, prefix: str, folder: str):
        local = local_path_of(folder)
        if local is not None:
            require_files_inside(local)
        self._folder = folder
        self._index = os.path.join(folder, INDEX)
        self._identity = files.identity_of(self._index)
        self._reader: TreeReader | RemoteTreeReader | None = None
        self._grids: dict[str, ChunkGrid] = {}
        self._checksums: dict[str, list[int]] = {}
        #: The chunks that are being read before anybody asks for them, by key and number.
        self._ahead: dict[tuple[str, int], Any] = {}
        super().__init__(prefix, files.open_to_read(self._index))

    def _arrays_elsewhere(self, index: Mapping[str, Any]) -> dict[str, ArrayDescription]:
        has_folder = "tree" in index
        self.is_remote_database = is_remote(self._folder) and not has_folder
        if has_folder:
            self._folder = path_inside(
                self._folder, checked_name(index["tree"], _TREE, self._index)
            )
        for key, described in plain_dict(index["elsewhere"]).items():
            grid = _grid_of(plain_dict(described))
            checksums = plain_list(described["crc32"], len(grid))
            self._checksums[key] = [whole_number(each, most=_MOST_CRC) for each in checksums]
            self._grids[plain_text(key)] = grid
        # Smaller ones are inside of a database's compressed nodes, as many as there are checksums.
        smallest = 0 if has_folder else INLINE_BYTES
        large = [grid for grid in self._grids.values() if grid.chunk_bytes > smallest]
        expected = sum(bytes_of(grid.shape, grid.dtype) for grid in large)
        there = files.size_of_folder(self._folder)
        if expected > there and not self.is_remote_database:
            raise ValueError(f"its arrays have {expected} bytes, and their files {there}")
        return {key: ArrayDescription(grid.shape, grid.dtype) for key, grid in self._grids.items()}

    def _own_keys(self) -> Iterable[str]:
        return self.arrays.keys() - self._grids.keys()

    def read(self, key: str) -> np.ndarray:
        if key not in self._grids:
            return super().read(key)
        (whole,) = self.read_regions(key, [whole_region(self._grids[key].shape)])
        return whole

    def read_regions(self, key: str, regions: Sequence[Region]) -> list[np.ndarray]:
        """Returns regions of an array.

        Raises:
            DataLossError: A chunk with elements of them is corrupt.
        """
        if key not in self._grids:
            whole = self.read(key)
            return [whole[slices_of(region)] for region in regions]
        grid = self._grids[key]
        found = [np.empty([end - begin for begin, end in region], grid.dtype) for region in regions]
        wanted: dict[int, list[tuple[np.ndarray, Region]]] = {}
        for target, region in zip(found, regions, strict=True):
            for number in grid.overlapping(region):
                wanted.setdefault(number, []).append((target, region))
        chunks = self._chunks((key, number) for number in wanted)
        for (number, targets), chunk in zip(wanted.items(), chunks, strict=True):
            for target, region in targets:
                inside, of_chunk = _common(region, grid.region(number))
                target[inside] = chunk[of_chunk]
        return found

    def verify(self) -> None:
        """Verifies the checksums; see `Archive.verify`.

        In a job of several processes, only the index, and that the files are as large as their
        arrays: each would read what no host can hold. Chunks are verified when they are read.
        """
        if process_group.is_of_several():
            super().verify()
        else:
            self.verify_share(0, 1)

    def verify_share(self, share: int, count: int) -> None:
        """Verifies the index and a share of the chunks.

        Args:
            share: The number of the share.
            count: The number of shares.
        """
        super().verify()
        numbered = (
            (key, number) for key, grid in self._grids.items() for number in range(len(grid))
        )
        for _ in self._chunks(each for n, each in enumerate(numbered) if n % count == share):
            pass

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Starts reading small arrays, which would take a request each, one after the other."""
        for key in keys:
            grid = self._grids.get(key)
            if grid is not None and len(grid) == 1 and grid.chunk_bytes <= _SMALL:
                self._ahead[key, 0] = self._start_reading(key, 0)

    def _start_reading(self, key: str, number: int) -> Any:
        with self._reading():
            region = self._grids[key].region(number)
            return self._tree().start_reading(_path_of(key), region)

    def _chunks(self, wanted: Iterable[tuple[str, int]]) -> Iterator[np.ndarray]:
        """Yields verified chunks, and reads some ahead."""
        pending: list[tuple[str, int, Any]] = []
        for key, number in wanted:
            future = self._ahead.pop((key, number), None) or self._start_reading(key, number)
            pending.append((key, number, future))
            if len(pending) > _READ_AHEAD:
                yield self._verified(*pending.pop(0))
        for each in pending:
            yield self._verified(*each)

    def _verified(self, key: str, number: int, future: Any) -> np.ndarray:
        with self._reading():
            chunk: np.ndarray = future.result()
            if _crc32(chunk) != self._checksums[key][number]:
                raise ValueError(f"checksum mismatch in array {key!r}")
            return chunk

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Inside, errors are those of a corrupt file, or of one that is another one by now."""
        try:
            with self._decoding():
                yield
        except DataLossError as error:
            if files.identity_of(self._index) == self._identity:
                raise
            raise NotFoundError(
                message=f"Checkpoint {self.prefix} was deleted or replaced while values of it were "
                "still to be restored, which their objects get when they are created. Create them "
                "before, or keep more checkpoints."
            ) from error

    def _tree(self) -> TreeReader | RemoteTreeReader:
        """Returns the arrays' reader."""
        if self._reader is None and is_remote(self._folder):
            grids = {_path_of(key): grid for key, grid in self._grids.items()}
            self._reader = RemoteTreeReader(self._folder, grids)
        if self._reader is None:
            reader = TreeReader(self._folder)
            for key, grid in self._grids.items():
                if reader.arrays.get(_path_of(key)) != (grid.shape, grid.dtype):
                    raise ValueError(f"array {key!r} differs from its description")
            self._reader = reader
        return self._reader


def remove_parts(prefix: str) -> None:
    """Deletes a checkpoint in parts, if it exists."""
    index = os.path.join(prefix, INDEX)
    if files.exists(index):
        files.remove(index)  # first: what is left without it is no checkpoint
        files.remove_folder(prefix)
    elif is_remote(prefix) and any(map(_TREE.fullmatch, files.names_in(prefix))):
        files.remove_folder(prefix)  # which a killed writer, or remover, has left


def _grid_of(described: Mapping[str, Any]) -> ChunkGrid:
    grid = ChunkGrid(
        shape_of(described["shape"]),
        dtype_named(described["dtype"]),
        shape_of(described["chunk"]),
    )
    fits = len(grid.shape) == len(grid.chunk) and all(
        part and size % part == 0 for size, part in zip(grid.shape, grid.chunk, strict=False)
    )
    if not fits:
        raise ValueError(f"chunks of shape {grid.chunk} do not divide the shape {grid.shape}")
    return grid


def _common(region: Region, other: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Returns what two overlapping regions have in common, as an index into each."""
    common = [
        (max(begin, first), min(end, last))
        for (begin, end), (first, last) in zip(region, other, strict=True)
    ]
    inside, of_other = (
        tuple(
            slice(begin - start, end - start)
            for (begin, end), (start, _) in zip(common, each, strict=True)
        )
        for each in (region, other)
    )
    return inside, of_other
