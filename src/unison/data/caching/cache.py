"""`cache`: elements are computed in the first pass and stored for later passes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from unison.data.caching.column_files import BLOCK_BYTES
from unison.data.caching.dataset_files import DatasetWriter, read_dataset
from unison.data.leaves import (
    NestedDataset,
    concatenate,
    count_rows,
    dtype_of,
    read_only,
    shape_of,
    stack,
)
from unison.data.plan import Plan, Rows, RowsStream, SameElements, Stream, position_of, stream_at
from unison.data.sources.in_memory import ArrayRows
from unison.data.specs import Signature
from unison.data.state import State, restore_checked
from unison.data.structure import Leaves, Structure
from unison.storage.file_systems import is_remote

#: The number of elements that are read together if they are small.
_ROWS_AT_ONCE = 1024


class KeepsElements(SameElements):
    """Base of the transformations that store the elements of one pass for later ones."""

    #: The signature of the elements in the files; None if there are no files.
    kept_signature: Signature | None = None

    @abc.abstractmethod
    def of(self, source: Plan, part: str = "") -> KeepsElements:
        """Returns the same transformation of other elements, with nothing stored yet.

        Args:
            source: The plan of the elements.
            part: The suffix of its files' names, which distinguishes them from this one's.
        """

    def with_inputs(self, inputs: Sequence[Plan]) -> Any:
        return self.of(inputs[0])

    def _find_signature(self) -> Signature:
        return self.kept_signature or self._input.signature

    @property
    def structure(self) -> Structure:
        kept = self.kept_signature
        return self._input.structure if kept is None else kept.structure


class Cache(KeepsElements):
    """The elements, which are stored when a pass has reached their end.

    Later passes have access by index, except to remote files.

    Args:
        source: The input.
        path: Where files are stored for later processes; None for memory only.

    Raises:
        InvalidArgumentError: The files hold the elements of another pipeline.
        DataLossError: The files are corrupt.
    """

    lasts_on_worker = True

    def __init__(self, source: Plan, path: str | None = None):
        super().__init__(source)
        self._path = path
        self._kept: Rows | None = None if path is None else self._read()
        # The position of the input at which the pass began whose elements are stored.
        self._begin: State = None
        # A position from before they were stored is restored with nothing stored yet.
        self._is_used = True
        self._is_to_be_filled = False

    @property
    def is_in_files(self) -> bool:
        """Whether the elements are stored in files."""
        return self._path is not None

    def of(self, source: Plan, part: str = "") -> Cache:
        return Cache(source, None if self._path is None else self._path + part)

    def cardinality(self) -> int:
        return self._input.cardinality() if self._kept is None else len(self._kept)

    def rows(self) -> Rows | None:
        if self._is_to_be_filled:
            self._fill()
        is_elsewhere = self._path is not None and is_remote(self._path)
        return self._kept if self._is_used and not is_elsewhere else None

    def _open(self) -> Stream:
        if self._is_to_be_filled:
            self._fill()
        if self._kept is not None and self._is_used:
            return _KeptStream(self._kept, self._begin)
        return self._first_pass()

    def memory(self) -> State:
        is_kept = self._is_to_be_filled or (self._kept is not None and self._is_used)
        return {"is_kept": is_kept, "begin": self._begin}

    def remember(self, memory: State) -> None:
        self._is_used = memory["is_kept"]
        self._is_to_be_filled = self._is_used and self._kept is None
        if self._kept is None:
            self._begin = memory["begin"]

    def _first_pass(self) -> KeepingStream:
        def keep(begin: State) -> None:
            if self._kept is None and not isinstance(keeper, _NoKeeper):
                self._begin = begin
                self._kept = self._rows_of(keeper)
            self._is_used = True
            self._is_to_be_filled = False

        keeper: _MemoryKeeper | DatasetWriter | _NoKeeper = _MemoryKeeper()
        if self._kept is not None:
            keeper = _NoKeeper()
        elif self._path is not None:
            message = (
                f"A pass over cache({self._path!r}) ended before its last element. What it has "
                "written is removed; a whole pass fills the cache (take before cache, not after)."
            )
            keeper = DatasetWriter(self._folder, said_when_dropped=message)
        return KeepingStream(self._input, keeper, keep)

    def _rows_of(self, keeper: _MemoryKeeper | DatasetWriter) -> Rows | None:
        if isinstance(keeper, _MemoryKeeper):
            return keeper.rows()
        keeper.publish(self._input)
        return self._read()

    def _read(self) -> Rows | None:
        kept = read_dataset(self._folder, self._input.known_signature)
        if kept is None:
            return None
        self.kept_signature = kept.signature
        return kept.shards[0].table_rows

    def _fill(self) -> None:
        self._is_to_be_filled = False
        stream = self._first_pass()
        if self._begin is not None:
            restore_checked(stream, {"begin": self._begin, "position": 0}, (ValueError,))
        while read_some(stream, self._input.known_signature) is not None:
            pass

    @property
    def _folder(self) -> str:
        return f"{self._path}.cache"


class ListRows(Rows):
    """Elements of any shapes, in a list."""

    def __init__(self, elements: Sequence[Leaves]):
        self._elements = elements

    def __len__(self) -> int:
        return len(self._elements)

    def take(self, indices: np.ndarray) -> Leaves:
        return stack([self._elements[index] for index in indices.tolist()])

    def slice(self, start: int, stop: int) -> Leaves:
        return stack(self._elements[start:stop])

    def element(self, index: int) -> Leaves:
        return self._elements[index]


class Keeper(Protocol):
    """Stores the elements of a pass."""

    def add(self, block: Leaves) -> None:
        """Adds stacked elements."""

    def discard(self) -> None:
        """Discards all elements."""


class _NoKeeper:
    """For a pass that is restored at a position at which nothing had been stored yet."""

    def add(self, block: Leaves) -> None:
        pass

    def discard(self) -> None:
        pass


class _MemoryKeeper:
    def __init__(self) -> None:
        self._blocks: list[Leaves] = []

    def add(self, block: Leaves) -> None:
        self._blocks.append(block)

    def discard(self) -> None:
        self._blocks = []

    def rows(self) -> Rows:
        """Returns all elements: as arrays if they have one shape, else in a list."""
        blocks = self._blocks
        kinds = {tuple((shape_of(leaf)[1:], dtype_of(leaf)) for leaf in block) for block in blocks}
        if len(kinds) == 1:
            return ArrayRows(concatenate(blocks))
        return ListRows(
            [
                tuple(read_only(leaf[row]) for leaf in block)
                for block in blocks
                for row in range(count_rows(block))
            ]
        )


class KeepingStream(Stream):
    """A pass that adds what it reads to a keeper. After an error, nothing is stored.

    Its state is the position at which the pass began: when it is restored, it reads the
    elements before its own position again, so that all can be stored.

    Args:
        source: The plan whose elements these are.
        keeper: Stores them.
        when_whole: Called at the end of a complete pass, with the position at which it began.
    """

    def __init__(self, source: Plan, keeper: Keeper, when_whole: Callable[[State], None]):
        self._source = source
        self._stream = source.stream()
        self._begin = position_of(source, self._stream)
        self._position = 0
        self._keeper: Keeper | None = keeper
        self._when_whole = when_whole

    def state(self) -> State:
        return {"begin": self._begin, "position": self._position}

    def restore(self, state: State) -> None:
        self._begin = state["begin"]
        self._stream = stream_at(self._source, self._begin)
        self._position = 0
        self.skip(state["position"])

    def next(self) -> Leaves | None:
        element = self._read(self._stream.next)
        if element is None:
            self._end()
            return None
        self._keep(as_block(element), 1)
        return tuple(map(read_only, element))

    def next_block(self, count: int) -> Leaves | None:
        block = self._read(lambda: self._stream.next_block(count))
        if block is None:
            self._end()
            return None
        self._keep(block, count_rows(block))
        return tuple(map(read_only, block))

    def _read(self, read: Callable[[], Leaves | None]) -> Leaves | None:
        try:
            return read()
        except BaseException:
            self.stop_keeping()
            raise

    def _keep(self, block: Leaves, rows: int) -> None:
        self._position += rows
        if self._keeper is not None:
            self._keeper.add(block)

    def _end(self) -> None:
        if self._keeper is not None:
            self._keeper = None
            self._when_whole(self._begin)

    def stop_keeping(self) -> None:
        """Continues without storing anything."""
        if self._keeper is not None:
            self._keeper.discard()
            self._keeper = None


class _KeptStream(RowsStream):
    """The stored elements, in order."""

    def __init__(self, rows: Rows, begin: State):
        super().__init__(rows)
        self._begin = begin

    def state(self) -> State:
        return {"begin": self._begin, "position": self._position}

    def restore(self, state: State) -> None:
        self._position = state["position"]


def read_some(stream: Stream, signature: Signature | None) -> Leaves | None:
    """Returns some of the next elements stacked; None at the end.

    Args:
        stream: The elements.
        signature: Their signature: elements of one shape are taken many at a time.
    """
    rows = rows_at_once(signature)
    if rows > 1:
        return stream.next_block(rows)
    element = stream.next()
    return None if element is None else as_block(element)


def as_block(element: Leaves) -> Leaves:
    """Returns one element stacked, as it is stored.

    Raises:
        TypeError: A leaf is a dataset.
    """
    if any(isinstance(leaf, NestedDataset) for leaf in element):
        raise TypeError("Datasets, such as windows, cannot be kept. Keep them after flat_map.")
    return stack([element])


def rows_at_once(signature: Signature | None) -> int:
    """Returns the number of elements in a block; 1 if they may have different shapes."""
    if signature is None:
        return 1
    bytes_of_row = 0
    for spec in signature.specs:
        if spec.shape is None or None in spec.shape or not hasattr(spec, "dtype"):
            return 1
        bytes_of_row += int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
    return max(1, min(_ROWS_AT_ONCE, BLOCK_BYTES // max(1, bytes_of_row)))
