"""The elements of datasets that a function makes: `flat_map`, `interleave`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unison.data.functions import note_place
from unison.data.leaves import concatenate, count_rows
from unison.data.mapping import check_parallel_calls
from unison.data.plan import UNKNOWN, Plan, Stream, Transformation
from unison.data.prefetching import ReadAheadStream
from unison.data.specs import Signature
from unison.data.structure import Leaves, Structure
from unison.errors import InvalidArgumentError

#: What plans call: a function of an element's leaves and structure.
Function = Callable[[Leaves, Structure], Leaves]


class FromDatasets(Transformation):
    """Base of the transformations whose elements are those of datasets that a function makes."""

    def __init__(self, source: Plan, function: Function, stage: str):
        super().__init__(source)
        self._function = function
        self._stage = stage
        self._latest: Plan | None = None

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        del inputs
        return None

    @property
    def structure(self) -> Structure:
        return self.signature.structure if self._latest is None else self._latest.structure

    def cardinality(self) -> int:
        return 0 if self._input.cardinality() == 0 else UNKNOWN

    def _made_of(self, arguments: Leaves, structure: Structure) -> Plan:
        """Returns the plan of the dataset that the function makes.

        Raises:
            TypeError: It makes something else.
        """
        leaves = self._function(arguments, structure)
        if len(leaves) != 1 or not isinstance(leaves[0], Plan):
            raise TypeError(
                f"The function of {self._stage} must return a Dataset. Received: {leaves!r}"
            )
        self._latest = leaves[0]
        return self._latest


class FlatMap(FromDatasets):
    """The elements of the datasets that a function makes of every element, one after the other."""

    def __init__(self, source: Plan, function: Function, stage: str = "flat_map"):
        super().__init__(source, function, stage)

    def inner_plan(self, element: Leaves, index: int) -> Plan:
        """Returns the plan of what the function makes of element `index`."""
        try:
            return self._made_of(element, self._input.structure)
        except Exception as error:
            note_place(error, self._stage, index)
            raise

    def _stream(self) -> Stream:
        return _FlatMapStream(self, self._input.stream())


class _FlatMapStream(Stream):
    def __init__(self, plan: FlatMap, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._inner: Stream | None = None
        self._position = 0

    def next(self) -> Leaves | None:
        while (inner := self._open()) is not None:
            element = inner.next()
            if element is not None:
                return element
            self._inner = None
        return None

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and (inner := self._open()) is not None:
            block = inner.next_block(count)
            if block is None:
                self._inner = None
            else:
                blocks.append(block)
                count -= count_rows(block)
        return concatenate(blocks) if blocks else None

    def _open(self) -> Stream | None:
        """Returns the dataset being read, or the next one; None at the end."""
        if self._inner is None:
            element = self._stream.next()
            if element is not None:
                self._position += 1
                self._inner = self._plan.inner_plan(element, self._position - 1).stream()
        return self._inner


class Interleave(FlatMap):
    """The elements of several such datasets in turn.

    Args:
        source: The input.
        function: Makes a dataset of an element.
        cycle_length: How many datasets are read at a time.
        block_length: How many elements are taken of one before it is the next one's turn.
        parallel_calls: How many of them are read ahead, each in a thread of its own. None, and
            `AUTOTUNE`: none.

    Raises:
        InvalidArgumentError: A number is not positive.
    """

    def __init__(
        self,
        source: Plan,
        function: Function,
        cycle_length: int,
        block_length: int,
        parallel_calls: int | None,
    ):
        super().__init__(source, function, "interleave")
        check_parallel_calls(parallel_calls)
        for what, number in (("cycle_length", cycle_length), ("block_length", block_length)):
            if number < 1:
                raise InvalidArgumentError(
                    message=f"Expected {what} to be greater than zero. Received: {number}"
                )
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._threads = 0 if parallel_calls is None else max(parallel_calls, 0)

    def _stream(self) -> Stream:
        return _InterleaveStream(
            self, self._input.stream(), self._cycle_length, self._block_length, self._threads
        )


class _InterleaveStream(Stream):
    """A cycle of open datasets; a place whose dataset has ended takes the next one in its turn."""

    def __init__(
        self, plan: Interleave, stream: Stream, cycle_length: int, block_length: int, threads: int
    ):
        self._plan = plan
        self._stream = stream
        self._block_length = block_length
        self._threads = threads
        self._cycle: list[Stream | None] = [None] * cycle_length
        self._place = 0
        self._taken = 0
        self._position = 0
        self._has_ended = False

    def next(self) -> Leaves | None:
        while not self._has_ended or any(self._cycle):
            inner = self._cycle[self._place]
            if inner is None:
                self._fill()
                continue
            element = inner.next()
            if element is None:
                self._cycle[self._place] = None
                self._advance()
                continue
            self._taken += 1
            if self._taken == self._block_length:
                self._advance()
            return element
        return None

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._cycle)
        self._taken = 0

    def _fill(self) -> None:
        """Opens the next dataset in the empty place, or passes over it."""
        element = None if self._has_ended else self._stream.next()
        if element is None:
            self._has_ended = True
            self._advance()
            return
        self._position += 1
        inner = self._plan.inner_plan(element, self._position - 1).stream()
        if self._place < self._threads:
            inner = ReadAheadStream(inner, self._block_length)
        self._cycle[self._place] = inner
