"""`repeat`: the elements several times over."""

from __future__ import annotations

from unison.data.leaves import concatenate, count_rows
from unison.data.plan import INFINITE, Plan, SameElements, Stream
from unison.data.structure import Leaves


class Repeat(SameElements):
    """The elements several times over; without end if `count` is negative."""

    def __init__(self, source: Plan, count: int):
        super().__init__(source)
        self._count = count

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if self._count == 0 or length == 0:
            return 0
        if length < 0:
            return length
        return INFINITE if self._count < 0 else length * self._count

    def _stream(self) -> Stream:
        return _RepeatStream(self._input, self._count)


class _RepeatStream(Stream):
    """One pass after the other, each over a new stream."""

    def __init__(self, source: Plan, count: int):
        self._source = source
        self._passes_left = count
        self._pass: Stream | None = None
        self._is_empty = False

    def next(self) -> Leaves | None:
        while (stream := self._open()) is not None:
            element = stream.next()
            if element is not None:
                self._is_empty = False
                return element
            self._close()
        return None

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        missing = count
        while missing and (stream := self._open()) is not None:
            block = stream.next_block(missing)
            if block is not None:
                self._is_empty = False
                blocks.append(block)
                missing -= count_rows(block)
            else:
                self._close()
        return concatenate(blocks) if blocks else None

    def _open(self) -> Stream | None:
        """Returns the stream of the present pass; None if there is none left."""
        if self._pass is None and self._passes_left:
            self._pass = self._source.stream()
            self._is_empty = True
        return self._pass

    def _close(self) -> None:
        self._pass = None
        self._passes_left -= 1
        if self._is_empty and self._passes_left < 0:
            # There is nothing to repeat for ever.
            self._passes_left = 0
