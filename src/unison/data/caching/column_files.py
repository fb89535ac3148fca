"""Elements in files, column by column: a table has one file for every leaf.

Elements are written in consecutive blocks of about a megabyte. A block of a leaf has up
to three parts, each in a file of its own:

    leafN.values     the numbers, or the bytes of all texts
    leafN.lengths    int64, the number of bytes of each text; for text only
    leafN.sizes      int64, the sizes of each array; only in blocks in which they differ

The description of a table (`TableWriter.finish`) is plain data, for JSON, with the length and
the CRC-32 of every part. Uncompressed blocks are contiguous, like one array, and are
memory-mapped. Every part is checked when it is first read. Nothing is
unpickled.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np

from unison.data.caching.columns import Column
from unison.data.caching.table_index import LENGTH, TableIndex, checked_lengths, checked_sizes
from unison.data.files.paths import open_file
from unison.data.leaves import concatenate, count_rows, gathered, stack
from unison.data.plan import Rows
from unison.data.sources.memory_maps import MappedRows
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError
from unison.storage.decoding import corrupt, decoding
from unison.storage.file_systems import file_system, is_remote, named_errors
from unison.storage.inflating import inflated
from unison.storage.names import path_inside
from unison.storage.patience import attempted

#: The minimum number of bytes of a block, except the last one and those before a pause.
BLOCK_BYTES = 1 << 20

#: The number of blocks that stay in memory after they have been read.
_BLOCKS_AT_HAND = 16


class Codec(NamedTuple):
    """Compresses parts; `decompress` gets the length of the result, too."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes, int], bytes]


def codec_of(compression: str | None) -> Codec | None:
    """Returns the codec with one of TensorFlow's names; None for no compression.

    Raises:
        InvalidArgumentError: Unknown compression.
        ImportError: SNAPPY is requested, and pyarrow is not installed.
    """
    if compression in (None, "", "NONE"):
        return None
    if compression == "GZIP":
        return Codec(lambda data: zlib.compress(data, 1), inflated)
    if compression == "SNAPPY":
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError(
                'SNAPPY needs pyarrow: pip install "unison[parquet]". GZIP needs nothing.'
            ) from error
        return Codec(
            lambda data: pyarrow.compress(data, "snappy", asbytes=True),
            lambda data, size: pyarrow.decompress(data, size, "snappy", asbytes=True),
        )
    raise InvalidArgumentError(
        message=f"Expected a compression of None, 'GZIP' or 'SNAPPY'. Received: {compression!r}"
    )


class TableWriter:
    """Writes elements to the files of a table.

    Args:
        folder: The folder of the files. It is created with the first block.
        compression: See `codec_of`.
        before_files: Called before the first file is created.
    """

    def __init__(self, folder: str, compression: str | None, before_files: Callable[[], None]):
        self._folder = folder
        self._codec = codec_of(compression)
        self._before_files = before_files
        self._files: dict[str, IO[bytes]] = {}
        self._dtypes: list[np.dtype] | None = None
        self._blocks: list[dict[str, Any]] = []
        self._waiting: list[Leaves] = []
        self._bytes_waiting = 0

    def add(self, block: Leaves) -> None:
        """Writes stacked elements.

        Raises:
            InvalidArgumentError: Their dtypes differ from those of the previous elements.
        """
        self._check(block)
        rows = count_rows(block)
        rows_at_once = max(1, BLOCK_BYTES * rows // max(1, sum(map(_bytes_of, block))))
        for start in range(0, rows, rows_at_once):
            part = tuple(leaf[start : start + rows_at_once] for leaf in block)
            if self._waiting and _axes_of(self._waiting[-1]) != _axes_of(part):
                self._write_block()
            self._waiting.append(part)
            self._bytes_waiting += sum(map(_bytes_of, part))
            if self._bytes_waiting >= BLOCK_BYTES:
                self._write_block()

    def finish(self) -> dict[str, Any]:
        """Writes the rest, closes the files, and returns the description that `Table` reads."""
        if self._waiting:
            self._write_block()
        self.close()
        dtypes = [dtype.name for dtype in self._dtypes or ()]
        return {"dtypes": dtypes, "blocks": self._blocks}

    def close(self) -> None:
        """Closes the files without writing the rest."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _check(self, block: Leaves) -> None:
        dtypes = [leaf.dtype.newbyteorder("=") for leaf in block]
        if self._dtypes is None:
            self._dtypes = dtypes
        if dtypes != self._dtypes:
            raise InvalidArgumentError(
                message="Elements that are kept in files must have the same dtypes. The first one "
                f"has {[dtype.name for dtype in self._dtypes]}. Received: "
                f"{[dtype.name for dtype in dtypes]}"
            )

    def _write_block(self) -> None:
        blocks, self._waiting, self._bytes_waiting = self._waiting, [], 0
        leaves = [
            self._write_leaf(number, [block[number] for block in blocks])
            for number in range(len(blocks[0]))
        ]
        self._blocks.append({"rows": sum(map(count_rows, blocks)), "leaves": leaves})

    def _write_leaf(self, number: int, leaves: list[np.ndarray]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        shapes = {leaf.shape[1:] for leaf in leaves}
        if len(shapes) > 1:
            sizes = [size for leaf in leaves for size in [leaf.shape[1:]] * len(leaf)]
            parts["sizes"] = self._write(number, "sizes", np.array(sizes, LENGTH).tobytes())
        items = np.concatenate([leaf.ravel() for leaf in leaves])
        if items.dtype.kind == "O":
            texts = items.tolist()
            lengths = np.fromiter(map(len, texts), LENGTH, len(texts))
            parts["lengths"] = self._write(number, "lengths", lengths.tobytes())
            values = b"".join(texts)
        else:
            values = items.astype(items.dtype.newbyteorder("="), copy=False).tobytes()
        parts["values"] = self._write(number, "values", values)
        return {"shape": None if len(shapes) > 1 else list(shapes.pop()), "parts": parts}

    def _write(self, number: int, part: str, data: bytes) -> list[int]:
        """Writes a part; returns its length in the file and in memory, and its checksum."""
        stored = data if self._codec is None else self._codec.compress(data)
        name = f"leaf{number}.{part}"
        if name not in self._files:
            self._before_files()
            if not is_remote(self._folder):
                os.makedirs(self._folder, exist_ok=True)
            self._files[name] = open_file(f"{self._folder}/{name}", "wb")
        self._files[name].write(stored)
        return [len(stored), len(data), zlib.crc32(stored)]


def read_part(path: str, start: int, size: int) -> bytes:
    """Returns `size` bytes of a file, beginning at `start`."""
    if not is_remote(path):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)
    with named_errors(path):
        system, inside = file_system(path)
        return attempted(path, lambda: system.cat_file(inside, start=start, end=start + size))


def _axes_of(block: Leaves) -> list[int]:
    return [leaf.ndim for leaf in block]


def _bytes_of(leaf: np.ndarray) -> int:
    return sum(map(len, leaf.ravel())) if leaf.dtype.kind == "O" else leaf.nbytes


class _Texts:
    """Concatenated texts, which are cut out when they are requested."""

    def __init__(self, whole: np.ndarray, lengths: np.ndarray):
        self._whole = whole
        self._ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()

    def __getitem__(self, part: slice) -> np.ndarray:
        ends = self._ends[part.start : part.stop + 1]
        texts = np.empty(len(ends) - 1, object)
        whole = self._whole[ends[0] : ends[-1]].tobytes()
        begin = ends[0]
        texts[:] = [whole[start - begin : end - begin] for start, end in itertools.pairwise(ends)]
        return texts


class Table:
    """Elements that a `TableWriter` has written.

    Args:
        folder: The folder of its files.
        index: The description that the writer's `finish` has returned.
        compression: The writer's compression.

    Raises:
        DataLossError: Files are missing, or their size is wrong.
    """

    def __init__(self, folder: str, index: TableIndex, compression: str | None):
        self._folder = folder
        self._codec = codec_of(compression)
        self._blocks = index.blocks
        self._dtypes = index.dtypes
        #: The first row of each block, and the number of rows.
        self.starts = np.cumsum([0, *(block.rows for block in self._blocks)])
        self._offsets = self._offsets_of_parts()
        self._has_been_read: set[tuple[str, int]] = set()
        #: Whether any element can be read without reading others.
        self.is_mapped = not is_remote(folder) and self._codec is None
        self._mapped: dict[str, np.ndarray] = {}
        if not is_remote(folder):
            for name in self._offsets:
                self._check_size(name)
        if self.is_mapped:
            self._mapped = {name: self._map(name) for name in self._offsets}
        self.column = functools.lru_cache(_BLOCKS_AT_HAND * len(self._dtypes))(self._column)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def num_leaves(self) -> int:
        return len(self._dtypes)

    def whole(self, leaf: int) -> np.ndarray | None:
        """Returns the rows of a leaf as one array, unchecked; None if they are not contiguous."""
        if not self.is_mapped or not self._blocks or self._dtypes[leaf].kind == "O":
            return None
        shape = self._blocks[0].leaves[leaf].shape
        if shape is None or any(block.leaves[leaf].shape != shape for block in self._blocks):
            return None
        items = self._mapped[f"leaf{leaf}.values"].view(self._dtypes[leaf])
        return items.reshape(len(self), *shape)

    def check(self, block: int, leaf: int) -> None:
        """Compares the checksum of the values of a block, unless this has already been done.

        Raises:
            DataLossError: Checksum mismatch.
        """
        self._part(block, leaf, "values")

    def _offsets_of_parts(self) -> dict[str, list[int]]:
        """Returns for every file the offset of each block's part, and the file's end."""
        offsets: dict[str, list[int]] = {}
        for number, block in enumerate(self._blocks):
            for leaf, described in enumerate(block.leaves):
                for name, part in described.parts.items():
                    ends = offsets.setdefault(f"leaf{leaf}.{name}", [])
                    # A block without this part has no bytes in the file.
                    ends.extend([ends[-1] if ends else 0] * (number + 1 - len(ends)))
                    ends.append(ends[-1] + part.stored)
        return offsets

    def _path(self, name: str) -> str:
        return path_inside(self._folder, name)

    def _check_size(self, name: str) -> None:
        path = self._path(name)
        expected = self._offsets[name][-1]
        try:
            size = os.path.getsize(path)
        except OSError as error:
            raise corrupt(path, f"it cannot be read: {error}") from error
        if size != expected:
            raise corrupt(path, f"it should have {expected} bytes, and has {size}")

    def _map(self, name: str) -> np.ndarray:
        # An empty file cannot be memory-mapped.
        if not self._offsets[name][-1]:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(self._path(name), np.uint8, "r"))

    def _part(self, block: int, leaf: int, part: str) -> np.ndarray:
        """Returns a part of a block, as bytes.

        Raises:
            DataLossError: Checksum mismatch.
        """
        stored, size, checksum = self._blocks[block].leaves[leaf].parts[part]
        name = f"leaf{leaf}.{part}"
        start = self._offsets[name][block]
        if self.is_mapped:
            data = self._mapped[name][start : start + stored]
        else:
            data = np.frombuffer(read_part(self._path(name), start, stored), np.uint8)
        if not self.is_mapped or (name, block) not in self._has_been_read:
            if zlib.crc32(data.data) != checksum:
                raise corrupt(
                    f"{self._folder}/{name}",
                    f"checksum mismatch in the bytes from {start} on (elements "
                    f"{self.starts[block]} to {self.starts[block + 1] - 1})",
                )
            self._has_been_read.add((name, block))
        if self._codec is not None:
            with decoding(f"{self._folder}/{name}"):
                data = np.frombuffer(self._codec.decompress(data.tobytes(), size), np.uint8)
                if data.size != size:
                    raise ValueError(f"expected {size} decompressed bytes, received {data.size}")
        return data

    def _column(self, block: int, leaf: int) -> Column:
        shape = self._blocks[block].leaves[leaf].shape
        dtype = self._dtypes[leaf]
        rows = self._blocks[block].rows
        values = self._part(block, leaf, "values")
        with decoding(f"{self._folder}/leaf{leaf}"):
            items: Any
            if dtype.kind == "O":
                lengths = self._part(block, leaf, "lengths").view(LENGTH)
                items, count = _Texts(values, checked_lengths(lengths, values.size)), lengths.size
            else:
                items = values.view(dtype)
                count = items.size
            sizes = None
            if shape is None:
                sizes = self._part(block, leaf, "sizes").view(LENGTH).reshape(rows, -1)
                sizes = checked_sizes(sizes, count)
            return Column(items, rows, shape, sizes)


class TableRows(Rows):
    """The elements of a table with at least one element."""

    def __init__(self, table: Table):
        self._table = table
        self._whole = [table.whole(leaf) for leaf in range(table.num_leaves)]
        blocks = len(table.starts) - 1
        self._is_unchecked = np.ones(blocks, bool)
        self._has_unchecked = any(whole is not None for whole in self._whole)
        self._mapped = MappedRows([whole for whole in self._whole if whole is not None])

    def __len__(self) -> int:
        return len(self._table)

    def take(self, indices: np.ndarray) -> Leaves:
        blocks = self._blocks_of(indices)
        self._check(blocks)
        # A block that has to be checked is read in order.
        self._mapped.expect(is_random=not self._has_unchecked)
        return tuple(
            self._one_by_one(leaf, blocks, indices) if whole is None else gathered(whole, indices)
            for leaf, whole in enumerate(self._whole)
        )

    def slice(self, start: int, stop: int) -> Leaves:
        first, last = self._blocks_of(np.array([start, stop - 1])).tolist()
        blocks = range(first, last + 1)
        self._mapped.expect(is_random=False)
        self._check(np.arange(first, last + 1))
        starts = self._table.starts.tolist()
        ranges = [
            (block, max(start, starts[block]), min(stop, starts[block + 1])) for block in blocks
        ]
        return tuple(
            concatenate(
                [
                    (self._table.column(b, leaf).slice(low - starts[b], high - starts[b]),)
                    for b, low, high in ranges
                ]
            )[0]
            if whole is None
            else whole[start:stop]
            for leaf, whole in enumerate(self._whole)
        )

    def element(self, index: int) -> Leaves:
        block = int(self._blocks_of(np.array([index]))[0])
        self._check(np.array([block]))
        row = index - int(self._table.starts[block])
        return tuple(
            self._table.column(block, leaf).element(row) if whole is None else whole[index]
            for leaf, whole in enumerate(self._whole)
        )

    def _blocks_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._table.starts, indices, "right") - 1

    def _one_by_one(self, leaf: int, blocks: np.ndarray, indices: np.ndarray) -> np.ndarray:
        rows = (indices - self._table.starts[blocks]).tolist()
        pairs = zip(blocks.tolist(), rows, strict=True)
        return stack([(self._table.column(block, leaf).element(row),) for block, row in pairs])[0]

    def _check(self, blocks: np.ndarray) -> None:
        """Checks the blocks of contiguous leaves that have not been read yet."""
        if not self._has_unchecked:
            return
        for block in np.unique(blocks[self._is_unchecked[blocks]]).tolist():
            for leaf, whole in enumerate(self._whole):
                if whole is not None:
                    self._table.check(block, leaf)
            self._is_unchecked[block] = False
        self._has_unchecked = bool(self._is_unchecked.any())
