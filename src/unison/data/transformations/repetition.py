"""`repeat`: the elements several times."""

from __future__ import annotations

from unison.data.leaves import concatenate, count_rows
from unison.data.plan import INFINITE, Plan, Reading, SameElements, Stream
from unison.data.state import State
from unison.data.structure import Leaves


class Repeat(SameElements):
    """The elements several times; without end if `count` is negative."""

    identity = ("_count",)

    def __init__(self, source: Plan, count: int):
        super().__init__(source)
        self._count = count

    @property
    def passes(self) -> int:
        """The number of passes; negative: without end."""
        return self._count

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if self._count == 0 or length == 0:
            return 0
        if self._count < 0:
            return INFINITE
        return length if length < 0 else length * self._count

    def _stream(self) -> Stream:
        return _RepeatStream(self._input, self._count)


class _RepeatStream(Stream):
    """Consecutive passes, each over a new stream."""

    def __init__(self, source: Plan, count: int):
        self._source = source
        self._passes_left = count
        self._pass: Reading | None = None
        self._is_empty = False

    def state(self) -> State:
        return {
            "passes_left": self._passes_left,
            "pass": None if self._pass is None else self._pass.state(),
        }

    def restore(self, state: State) -> None:
        self._passes_left = state["passes_left"]
        self._pass = None
        if state["pass"] is not None:
            self._pass = Reading(self._source)
            self._pass.restore(state["pass"])

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

    def skip(self, count: int) -> int:
        missing = count
        # A pass counts, for the random numbers of the next ones, once an element of it is read.
        while missing and self.next() is not None:
            assert self._pass is not None
            missing -= 1 + self._pass.stream.skip(missing - 1)
        return count - missing

    def _open(self) -> Stream | None:
        """Returns the stream of the current pass; None if there is none left."""
        if self._pass is None and self._passes_left:
            self._pass = Reading(self._source)
            self._is_empty = True
        return None if self._pass is None else self._pass.stream

    def _close(self) -> None:
        self._pass = None
        self._passes_left -= 1
        if self._is_empty and self._passes_left < 0:
            # An empty input would repeat for ever.
            self._passes_left = 0
