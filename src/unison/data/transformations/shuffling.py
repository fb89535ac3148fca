"""`shuffle`: elements in a random order, drawn from a buffer that moves over the input.

Element i of the output is drawn from the buffer, and the next element of the input replaces it;
at the end, the rest of the buffer is permuted. The order is a function of the seed, the
epoch and the sizes alone. If the input has access by index, the order is computed in advance, as
an array of indices, and no elements are buffered.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import numpy as np

from unison.data.passes import Passes
from unison.data.plan import INFINITE, UNKNOWN, Plan, Rows, SameElements, Stream
from unison.data.randomness import random_generator
from unison.data.state import State
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError

#: The purposes of draws: the positions in the buffer, and the order of the rest.
_PLACES, _REST = 0, 1

#: The number of positions that are drawn at a time.
_DRAWN_AT_ONCE = 1024

#: The number of positions that are drawn at a time if indices are buffered, not elements.
_ORDERED_AT_ONCE = 1 << 16

#: From this number on, indices are stored in 4 bytes.
_MANY_INDICES = 1 << 20


class Shuffle(SameElements):
    """The elements in a random order.

    Args:
        source: The input.
        buffer_size: The size of the buffer; `UNKNOWN` for one that holds all elements.
        seed: Determines the orders.
        reshuffles: Whether every pass has a new order.

    Raises:
        InvalidArgumentError: The size of the buffer is not positive.
    """

    identity = ("buffer_size", "_reshuffles")
    lasting = ("_seed", "_passes")

    def __init__(self, source: Plan, buffer_size: int, seed: int, reshuffles: bool):
        super().__init__(source)
        if buffer_size < 1 and buffer_size != UNKNOWN:
            raise InvalidArgumentError(
                message="Expected a buffer_size greater than zero, or tf.data.UNKNOWN_CARDINALITY "
                f"for a buffer of all elements. Received: buffer_size={buffer_size}"
            )
        if buffer_size == UNKNOWN and source.cardinality() == INFINITE:
            raise InvalidArgumentError(
                message="The dataset is infinite, and a buffer of all its elements "
                f"(buffer_size={buffer_size}) would never be full. Say how many elements it holds."
            )
        self.buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._seed = seed
        self._reshuffles = reshuffles
        self._passes = Passes()

    def _stream(self) -> Stream:
        begun = _Pass(self._seed, self._passes.begin() if self._reshuffles else 0)
        rows = self._input.rows()
        if rows is not None:
            return _PermutedStream(self, rows, begun)
        return _BufferedStream(self, self._input.stream(), begun)

    def order_of(self, count: int, begun: _Pass) -> np.ndarray:
        """Returns the order of `count` elements in a pass."""
        return shuffled_indices(count, self.buffer_size, begun.seed, begun.number)

    def resume(self, begun: _Pass) -> None:
        """Sets the number of passes that have begun to `begun`."""
        self._seed = begun.seed
        self._passes.resume(begun.number)


class _Pass(NamedTuple):
    """A pass over the elements, with its own order."""

    seed: int
    number: int


def shuffled_indices(count: int, buffer_size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order in which `count` elements leave a buffer of size `buffer_size`.

    There may be billions: from some number on, the order takes 4 bytes per index, and little more
    while it is computed. (Fewer are shuffled faster as 8 bytes.)
    """
    rest = random_generator(seed, epoch, _REST)
    is_short = _MANY_INDICES < count <= 2**32
    order = np.arange(count, dtype=np.uint32 if is_short else np.int64)
    if buffer_size >= count:
        rest.shuffle(order)
        return order
    draws = random_generator(seed, epoch, _PLACES)
    buffer = order[:buffer_size].copy()
    for start in range(0, count - buffer_size, _ORDERED_AT_ONCE):
        stop = min(start + _ORDERED_AT_ONCE, count - buffer_size)
        places = (draws.random(stop - start) * buffer_size).astype(np.int64)
        entering = np.arange(buffer_size + start, buffer_size + stop, dtype=order.dtype)
        # The element that leaves a position is the one that replaced the previous one there.
        by_place = np.argsort(places, kind="stable")
        repeats = places[by_place][1:] == places[by_place][:-1]
        leaving = buffer[places]
        leaving[by_place[1:][repeats]] = entering[by_place[:-1][repeats]]
        buffer[places] = entering  # with several, the last one stays
        order[start:stop] = leaving
    rest.shuffle(buffer)
    order[count - buffer_size :] = buffer
    return order


class _PermutedStream(Stream):
    """Rows in a random order."""

    def __init__(self, plan: Shuffle, rows: Rows, begun: _Pass):
        self._plan = plan
        self._rows = rows
        self._begun = begun
        self._position = 0

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return self._plan.order_of(len(self._rows), self._begun)

    def state(self) -> State:
        return {"begun": tuple(self._begun), "position": self._position}

    def restore(self, state: State) -> None:
        self._begun = _Pass(*state["begun"])
        self._plan.resume(self._begun)
        vars(self).pop("_order", None)
        self._position = state["position"]

    def next(self) -> Leaves | None:
        if self._position >= len(self._order):
            return None
        self._position += 1
        return self._rows.element(int(self._order[self._position - 1]))

    def next_block(self, count: int) -> Leaves | None:
        indices = self._order[self._position : self._position + count]
        if not len(indices):
            return None
        self._position += len(indices)
        return self._rows.take(indices.astype(np.int64))

    def skip(self, count: int) -> int:
        count = max(0, min(count, len(self._rows) - self._position))
        self._position += count
        return count


class _BufferedStream(Stream):
    """Elements that pass through a buffer."""

    moving = ("_stream", "_draws", "_rest", "_places", "_buffer", "_is_draining")

    def __init__(self, plan: Shuffle, stream: Stream, begun: _Pass):
        self._plan = plan
        self._stream = stream
        self._buffer_size = plan.buffer_size
        self._begun = begun
        self._draws = random_generator(*begun, _PLACES)
        self._rest = random_generator(*begun, _REST)
        self._places: list[int] = []
        self._buffer: list[Leaves] = []
        self._is_draining = False

    def state(self) -> State:
        return {**super().state(), "begun": tuple(self._begun)}

    def restore(self, state: State) -> None:
        super().restore(state)
        self._begun = _Pass(*state["begun"])
        self._plan.resume(self._begun)

    def next(self) -> Leaves | None:
        while not self._is_draining:
            element = self._stream.next()
            if element is None:
                self._drain()
            elif len(self._buffer) < self._buffer_size:
                self._buffer.append(element)
            else:
                place = self._draw_place()
                leaving, self._buffer[place] = self._buffer[place], element
                return leaving
        return self._buffer.pop() if self._buffer else None

    def _drain(self) -> None:
        self._is_draining = True
        order = self._rest.permutation(len(self._buffer))
        self._buffer = [self._buffer[index] for index in reversed(order)]

    def _draw_place(self) -> int:
        if not self._places:
            drawn = self._draws.random(_DRAWN_AT_ONCE)
            self._places = (drawn * self._buffer_size).astype(np.int64)[::-1].tolist()
        return self._places.pop()
