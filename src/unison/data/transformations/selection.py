"""A subset of a dataset's elements, by their position: `take`, `skip`, `shard`."""

from __future__ import annotations

import numpy as np

from unison.data.plan import INFINITE, Plan, Rows, SameElements, Stream
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError


class _SelectedRows(Rows):
    """The rows at the positions of a range."""

    def __init__(self, rows: Rows, positions: range):
        self._rows = rows
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def take(self, indices: np.ndarray) -> Leaves:
        return self._rows.take(self._positions.start + self._positions.step * indices)

    def slice(self, start: int, stop: int) -> Leaves:
        if self._positions.step != 1:
            return super().slice(start, stop)
        first = self._positions.start
        return self._rows.slice(first + start, first + stop)

    def element(self, index: int) -> Leaves:
        return self._rows.element(self._positions[index])


class _Selection(SameElements):
    """The elements at regular positions."""

    def _positions(self, length: int) -> range:
        """Returns the positions, among `length` elements: all of them."""
        return range(length)

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length < 0 else len(self._positions(length))

    def rows(self) -> Rows | None:
        rows = self._input.rows()
        return None if rows is None else _SelectedRows(rows, self._positions(len(rows)))


class Take(_Selection):
    """The first elements; all of them if `count` is -1."""

    identity = ("_count",)

    def __init__(self, source: Plan, count: int):
        super().__init__(source)
        self._count = count

    def _positions(self, length: int) -> range:
        return range(length if self._count < 0 else min(self._count, length))

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return self._count if length == INFINITE and self._count >= 0 else super().cardinality()

    def _stream(self) -> Stream:
        stream = self._input.stream()
        return stream if self._count < 0 else _TakeStream(stream, self._count)


class _TakeStream(Stream):
    moving = ("_stream", "_left")

    def __init__(self, stream: Stream, count: int):
        self._stream = stream
        self._left = count

    def next(self) -> Leaves | None:
        if not self._left:
            return None
        self._left -= 1
        return self._stream.next()

    def next_block(self, count: int) -> Leaves | None:
        count = min(count, self._left)
        if not count:
            return None
        self._left -= count
        return self._stream.next_block(count)

    def skip(self, count: int) -> int:
        count = min(count, self._left)
        self._left -= count
        return self._stream.skip(count)


class Skip(_Selection):
    """The elements after the first ones; none if `count` is -1."""

    identity = ("_count",)

    def __init__(self, source: Plan, count: int):
        super().__init__(source)
        self._count = count

    def _positions(self, length: int) -> range:
        return range(length if self._count < 0 else min(self._count, length), length)

    def cardinality(self) -> int:
        return 0 if self._count < 0 else super().cardinality()

    def _stream(self) -> Stream:
        stream = self._input.stream()
        return _TakeStream(stream, 0) if self._count < 0 else _SkipStream(stream, self._count)


class _SkipStream(Stream):
    moving = ("_stream", "_to_skip")

    def __init__(self, stream: Stream, count: int):
        self._stream = stream
        self._to_skip = count

    def _start(self) -> None:
        if self._to_skip:
            self._stream.skip(self._to_skip)
            self._to_skip = 0

    def next(self) -> Leaves | None:
        self._start()
        return self._stream.next()

    def next_block(self, count: int) -> Leaves | None:
        self._start()
        return self._stream.next_block(count)

    def skip(self, count: int) -> int:
        self._start()
        return self._stream.skip(count)


class Shard(_Selection):
    """Every `num_shards`-th element, starting at `index`.

    Raises:
        InvalidArgumentError: The shard does not exist.
    """

    identity = ("_num_shards", "_index")

    def __init__(self, source: Plan, num_shards: int, index: int):
        super().__init__(source)
        if num_shards < 1:
            raise InvalidArgumentError(
                message=f"Expected at least one shard. Received: num_shards={num_shards}"
            )
        if not 0 <= index < num_shards:
            raise InvalidArgumentError(
                message=f"Expected an index between 0 and {num_shards - 1}. Received: {index}"
            )
        self._num_shards = num_shards
        self._index = index

    def _positions(self, length: int) -> range:
        return range(min(self._index, length), length, self._num_shards)

    def _stream(self) -> Stream:
        return _ShardStream(self._input.stream(), self._num_shards, self._index)


class _ShardStream(Stream):
    moving = ("_stream", "_to_skip")

    def __init__(self, stream: Stream, num_shards: int, index: int):
        self._stream = stream
        self._num_shards = num_shards
        self._to_skip = index

    def next(self) -> Leaves | None:
        self._stream.skip(self._to_skip)
        self._to_skip = self._num_shards - 1
        return self._stream.next()
