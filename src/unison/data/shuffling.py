"""`shuffle`: elements in a random order, drawn from a buffer that moves over the input.

Element i of the output is drawn from the buffer, and the next element of the input takes its
place; at the end, the rest of the buffer is permuted. The order is a function of the seed, the
epoch and the sizes alone. Where the input has access by index it is computed at once, as an array
of indices, and elements are never held in a buffer.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from unison.data.plan import UNKNOWN, Plan, Rows, SameElements, Stream
from unison.data.randomness import random_generator
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError

#: What is drawn: the places in the buffer, and the order of the rest.
_PLACES, _REST = 0, 1

#: How many places are drawn at once.
_DRAWN_AT_ONCE = 1024


class Shuffle(SameElements):
    """The elements in a random order.

    Args:
        source: The input.
        buffer_size: The size of the buffer; `UNKNOWN` for one that holds everything.
        seed: Determines the orders.
        reshuffles: Whether every pass has an order of its own.

    Raises:
        InvalidArgumentError: The buffer has no place.
    """

    def __init__(self, source: Plan, buffer_size: int, seed: int, reshuffles: bool):
        super().__init__(source)
        if buffer_size < 1 and buffer_size != UNKNOWN:
            raise InvalidArgumentError(
                message="Expected a buffer_size greater than zero, or tf.data.UNKNOWN_CARDINALITY "
                f"for a buffer of all elements. Received: buffer_size={buffer_size}"
            )
        self._buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._seed = seed
        # The number of the next pass; what draws it draws it alone, also in another thread.
        self._epochs = itertools.count() if reshuffles else itertools.repeat(0)

    def _stream(self) -> Stream:
        epoch = next(self._epochs)
        rows = self._input.rows()
        if rows is not None:
            order = shuffled_indices(len(rows), self._buffer_size, self._seed, epoch)
            return _PermutedStream(rows, order)
        return _BufferedStream(self._input.stream(), self._buffer_size, self._seed, epoch)


def shuffled_indices(count: int, buffer_size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order in which `count` elements leave a buffer of `buffer_size` places."""
    rest = random_generator(seed, epoch, _REST)
    if buffer_size >= count:
        return rest.permutation(count)
    drawn = random_generator(seed, epoch, _PLACES).random(count - buffer_size)
    places = (drawn * buffer_size).astype(np.int64)
    numbers = np.arange(len(places))
    # What leaves a place is what was put there when it was drawn from before.
    by_place = np.argsort(places, kind="stable")
    repeats = places[by_place][1:] == places[by_place][:-1]
    leaving = places.copy()
    leaving[by_place[1:][repeats]] = buffer_size + by_place[:-1][repeats]
    buffer = np.arange(buffer_size)
    buffer[places] = buffer_size + numbers  # of several, the last one stays
    return np.concatenate([leaving, buffer[rest.permutation(buffer_size)]])


class _PermutedStream(Stream):
    """Rows in a given order."""

    def __init__(self, rows: Rows, order: np.ndarray):
        self._rows = rows
        self._order = order
        self._position = 0

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
        return self._rows.take(indices)

    def skip(self, count: int) -> None:
        self._position += count


class _BufferedStream(Stream):
    """Elements that go through a buffer."""

    def __init__(self, stream: Stream, buffer_size: int, seed: int, epoch: int):
        self._stream = stream
        self._buffer_size = buffer_size
        self._draws = random_generator(seed, epoch, _PLACES)
        self._rest = random_generator(seed, epoch, _REST)
        self._places: list[int] = []
        self._buffer: list[Leaves] = []
        self._is_draining = False

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
