"""The elements of datasets that a function returns: `flat_map`, `interleave`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from unison.data.chunks import Chunk, joined
from unison.data.functions import note_place
from unison.data.leaves import concatenate, count_rows
from unison.data.plan import AUTOTUNE, UNKNOWN, Plan, Reading, Stream, Transformation
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.data.transformations.mapping import check_parallel_calls
from unison.data.transformations.prefetching import Prefetch, ReadAheadStream
from unison.errors import InvalidArgumentError

#: Seconds between two checks of a stream that waits for a thread.
_LOOK_AFTER = 1.0

#: The function as plans call it: with an element's leaves and structure.
Function = Callable[[Leaves, Structure], Leaves]


class FromDatasets(Transformation):
    """Base of the transformations whose elements are those of datasets that a function returns."""

    def __init__(self, source: Plan, function: Function, stage: str):
        super().__init__(source)
        self._function = function
        self._stage = stage
        self._latest: Plan | None = None
        # The elements' structure, as an earlier dataset than the latest one has determined it.
        self._told: Structure | None = None

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        del inputs
        return None

    @property
    def structure(self) -> Structure:
        if self._told is not None:
            return self._told
        return self.signature.structure if self._latest is None else self._latest.structure

    def cardinality(self) -> int:
        return 0 if self._input.cardinality() == 0 else UNKNOWN

    def _made_of(self, arguments: Leaves, structure: Structure) -> Plan:
        """Returns the plan of the dataset that the function returns.

        Raises:
            TypeError: It returns something else.
        """
        leaves = self._function(arguments, structure)
        if len(leaves) != 1 or not isinstance(leaves[0], Plan):
            raise TypeError(
                f"The function of {self._stage} must return a Dataset. Received: {leaves!r}"
            )
        made = leaves[0]
        if self._latest is not None:
            self._check_fits(made, self._latest)
            if self._told is None:
                with contextlib.suppress(ValueError):  # it was empty
                    self._told = self._latest.structure
        self._latest = made
        return made

    def _check_fits(self, made: Plan, latest: Plan) -> None:
        """Raises a TypeError if two plans' elements are known to differ in structure or dtype.

        Those that only an element would determine are not compared.
        """
        one, two = latest.known_signature, made.known_signature
        if one is None or two is None:
            return
        try:
            one.widened(two)
        except TypeError as error:
            raise TypeError(
                f"The function of {self._stage} must return datasets of the same elements every "
                f"time. {error}"
            ) from None


class FlatMap(FromDatasets):
    """The elements of the datasets that a function returns for every element, in order."""

    def __init__(self, source: Plan, function: Function, stage: str = "flat_map"):
        super().__init__(source, function, stage)

    def inner_plan(self, element: Leaves, index: int) -> Plan:
        """Returns the plan of the function's dataset for element `index`."""
        try:
            return self._made_of(element, self._input.structure)
        except Exception as error:
            note_place(error, self._stage, index)
            raise

    def sample(self) -> Leaves | None:
        element = self._input.sample()
        return None if element is None else self.inner_plan(element, 0).sample()

    def _stream(self) -> Stream:
        return _FlatMapStream(self, self._input.stream())


class _Inner:
    """A dataset that the function has returned, and that is being read.

    Args:
        plan: The plan with the function.
        element: The function's argument.
        index: The element's number.
        when_ready: If a thread should read it ahead: called when something is ready.
    """

    def __init__(
        self,
        plan: FlatMap,
        element: Leaves,
        index: int,
        when_ready: Callable[[], None] | None = None,
    ):
        self._element = element
        self._index = index
        inner = plan.inner_plan(element, index)
        self._is_ahead = when_ready is not None
        if when_ready is not None:
            inner = Prefetch(inner, None, when_ready)
        self._reading = Reading(inner)

    @property
    def stream(self) -> Stream:
        """Its elements."""
        return self._reading.stream

    def state(self) -> State:
        return {
            "element": self._element,
            "index": self._index,
            "is_ahead": self._is_ahead,
            "reading": self._reading.state(),
        }

    @classmethod
    def of_state(
        cls, plan: FlatMap, state: State, when_ready: Callable[[], None] = lambda: None
    ) -> Self:
        """Returns the result of `state` of another one, with an equal plan."""
        ahead = when_ready if state["is_ahead"] else None
        inner = cls(plan, state["element"], state["index"], ahead)
        inner._reading.restore(state["reading"])
        return inner


class _FlatMapStream(Stream):
    def __init__(self, plan: FlatMap, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._inner: _Inner | None = None
        self._position = 0

    def state(self) -> State:
        return {
            "stream": self._stream.state(),
            "inner": None if self._inner is None else self._inner.state(),
            "position": self._position,
        }

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._inner = None
        if state["inner"] is not None:
            self._inner = _Inner.of_state(self._plan, state["inner"])
        self._position = state["position"]

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
        """Returns the dataset that is being read, or the next one; None at the end."""
        if self._inner is None:
            element = self._stream.next()
            if element is None:
                return None
            self._position += 1
            self._inner = _Inner(self._plan, element, self._position - 1)
        return self._inner.stream


class Interleave(FlatMap):
    """The elements of several such datasets, in turn.

    Args:
        source: The input.
        function: Returns the dataset of an element.
        cycle_length: The number of datasets that are read at a time.
        block_length: The number of elements that are taken from one in its turn.
        parallel_calls: The number of datasets that are read ahead, each in its own thread.
            `AUTOTUNE`: all; None: none. Datasets with access by index are not read ahead.
        is_ordered: Whether a dataset that is not ready is waited for in its turn.

    Raises:
        InvalidArgumentError: A number is not positive.
    """

    identity = ("_cycle_length", "_block_length")

    def __init__(
        self,
        source: Plan,
        function: Function,
        cycle_length: int,
        block_length: int,
        parallel_calls: int | None,
        is_ordered: bool = True,
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
        self._threads = cycle_length if parallel_calls == AUTOTUNE else parallel_calls or 0
        self._is_ordered = is_ordered

    def _stream(self) -> Stream:
        return _InterleaveStream(
            self,
            self._input.stream(),
            self._cycle_length,
            self._block_length,
            self._threads,
            self._is_ordered,
        )


class _Place:
    """A slot of the cycle: a dataset, and its elements that have been read ahead."""

    def __init__(self, inner: _Inner, read: Chunk | None = None):
        self._inner = inner
        self._read = read

    @property
    def is_ready(self) -> bool:
        """Whether the next element is ready."""
        return self._read is not None or getattr(self._inner.stream, "num_ready", 1) > 0

    def has(self, count: int) -> bool:
        """Whether a number of elements is ready."""
        missing = count - (0 if self._read is None else len(self._read))
        stream = self._inner.stream
        return missing <= 0 or not isinstance(stream, ReadAheadStream) or stream.has_ready(missing)

    def start(self) -> None:
        """Starts reading ahead, if requested."""
        stream = self._inner.stream
        if isinstance(stream, ReadAheadStream):
            stream.start()

    def next(self) -> Leaves | None:
        """Returns the next element; None at the end."""
        if self._read is None:
            return self._inner.stream.next()
        taken = self.take(1, 1)
        return None if taken is None else taken[0]

    def take(self, count: int, coming: int) -> Chunk | None:
        """Returns up to `count` of the next elements; None at the end.

        Args:
            count: Their maximum number.
            coming: The number that will be taken soon; so many are read at a time.
        """
        if self._read is None:
            block = self._inner.stream.next_block(coming)
            if block is None:
                return None
            self._read = Chunk(0, block)
        taken = self._read.part(0, count)
        self.drop(len(taken))
        return taken

    def read(self, count: int) -> Chunk:
        """Returns the next elements without taking them: at least `count`, or all that are left."""
        missing = count - (0 if self._read is None else len(self._read))
        block = self._inner.stream.next_block(missing) if missing > 0 else None
        if block is not None:
            read = Chunk(0, block)
            self._read = read if self._read is None else joined([self._read, read])
        return Chunk(0, elements=[]) if self._read is None else self._read

    def drop(self, count: int) -> None:
        """Takes a number of those that were read."""
        assert self._read is not None
        left = self._read.part(count, len(self._read))
        self._read = left if len(left) else None

    def state(self) -> State:
        read = None if self._read is None else self._read.state()
        return {"inner": self._inner.state(), "read": read}


class _InterleaveStream(Stream):
    """A cycle of open datasets; when a dataset ends, the next one replaces it in its turn."""

    def __init__(
        self,
        plan: Interleave,
        stream: Stream,
        cycle_length: int,
        block_length: int,
        threads: int,
        is_ordered: bool,
    ):
        self._plan = plan
        self._stream = stream
        self._block_length = block_length
        self._threads = threads
        self._is_ordered = is_ordered
        self._cycle: list[_Place | None] = [None] * cycle_length
        self._place = 0
        self._taken = 0
        self._position = 0
        self._has_begun = False
        self._has_ended = False
        # The threads reference this, and not the stream: otherwise they would keep it alive.
        self._ready = threading.Event()

    def state(self) -> State:
        return {
            "stream": self._stream.state(),
            "cycle": [None if place is None else place.state() for place in self._cycle],
            "place": self._place,
            "taken": self._taken,
            "position": self._position,
            "has_begun": self._has_begun,
            "has_ended": self._has_ended,
        }

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._cycle = [None if kept is None else self._restored(kept) for kept in state["cycle"]]
        self._place, self._taken = state["place"], state["taken"]
        self._position = state["position"]
        self._has_begun, self._has_ended = state["has_begun"], state["has_ended"]

    def _restored(self, state: State) -> _Place:
        inner = _Inner.of_state(self._plan, state["inner"], self._ready.set)
        return _Place(inner, None if state["read"] is None else Chunk.of_state(state["read"]))

    def next(self) -> Leaves | None:
        while (place := self._open()) is not None:
            element = place.next()
            if element is None:
                self._remove()
            else:
                self._count(1)
                return element
        return None

    def next_block(self, count: int) -> Leaves | None:
        block = self._rounds(count)
        if block is not None:
            return block
        parts: list[Chunk] = []
        while count and (place := self._open()) is not None:
            part = place.take(min(self._block_length - self._taken, count), self._coming(count))
            if part is None:
                self._remove()
            else:
                self._count(len(part))
                count -= len(part)
                parts.append(part)
        return concatenate([part.stacked() for part in parts]) if parts else None

    def _rounds(self, count: int) -> Leaves | None:
        """Returns the next elements if no dataset ends before `count`; otherwise takes none."""
        length = len(self._cycle)
        most = -(-count // length) + self._block_length
        if any(place is None or not (self._is_ordered or place.has(most)) for place in self._cycle):
            return None
        turns, within = np.divmod(np.arange(self._taken, self._taken + count), self._block_length)
        places = (self._place + turns) % length
        counts = np.bincount(places, minlength=length)
        wanted = [
            (place, count)
            for place, count in zip(self._cycle, counts.tolist(), strict=True)
            if place is not None and count
        ]
        read = [place.read(count).part(0, count) for place, count in wanted]
        if any(len(part) < count for part, (_, count) in zip(read, wanted, strict=True)):
            return None
        for place, count in wanted:
            place.drop(count)
        # They are ordered dataset by dataset: this is the position of the one whose turn it is.
        rows = (turns // length) * self._block_length + within
        rows[places == self._place] -= self._taken
        rows += (np.cumsum(counts) - counts)[places]
        block = joined(read).stacked()
        self._place = int(places[-1])
        self._taken = int(within[-1])
        self._count(1)
        return tuple(leaf.take(rows, 0) for leaf in block)

    def _coming(self, count: int) -> int:
        """Returns how many of the next `count` elements are of the current slot.

        There may be more if another one ends before.
        """
        if not self._is_ordered:
            return min(self._block_length - self._taken, count)
        first = min(self._block_length - self._taken, count)
        of_others = (len(self._cycle) - 1) * self._block_length
        rounds, rest = divmod(count - first, of_others + self._block_length)
        return first + rounds * self._block_length + max(rest - of_others, 0)

    def _open(self) -> _Place | None:
        """Returns the slot whose turn it is; None at the end."""
        if not self._has_begun:
            self._begin()
        while not self._has_ended or any(self._cycle):
            if self._cycle[self._place] is None:
                self._fill(self._place)
            place = self._cycle[self._place]
            if place is None:
                self._advance()
            elif self._is_ordered or place.is_ready:
                return place
            else:
                self._turn_to_ready()
        return None

    def _begin(self) -> None:
        """Starts those that are read ahead together."""
        self._has_begun = True
        for place in range(min(self._threads, len(self._cycle))):
            self._fill(place)

    def _fill(self, number: int) -> None:
        """Opens the next dataset in a slot, if there is one."""
        element = None if self._has_ended else self._stream.next()
        if element is None:
            self._has_ended = True
            return
        self._position += 1
        when_ready = self._ready.set if number < self._threads else None
        place = _Place(_Inner(self._plan, element, self._position - 1, when_ready))
        place.start()
        self._cycle[number] = place

    def _turn_to_ready(self) -> None:
        """Moves on to the next slot that is ready, or empty; waits while there is none."""
        self._ready.clear()
        for step in range(1, len(self._cycle)):
            number = (self._place + step) % len(self._cycle)
            place = self._cycle[number]
            if (place is None and not self._has_ended) or (place is not None and place.is_ready):
                self._place, self._taken = number, 0
                return
        self._ready.wait(_LOOK_AFTER)

    def _count(self, count: int) -> None:
        self._taken += count
        if self._taken == self._block_length:
            self._advance()

    def _remove(self) -> None:
        self._cycle[self._place] = None
        self._advance()

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._cycle)
        self._taken = 0
