"""The elements that a worker has computed and nobody has taken yet, by who may take them.

- `FirstCome`: whoever asks first.
- `Rounds`: in round r, consumer i gets the i-th of consecutive elements.
- `Window`: every trainer, as long as they are kept.

They hold no locks: `tasks.Task` guards them.
"""

from __future__ import annotations

import collections
from typing import Protocol

from unison.data.chunks import Chunk
from unison.data.service.iterations import ROUNDS_OF_BLOCK
from unison.errors import FailedPreconditionError, InvalidArgumentError

#: The number of bytes that a buffer holds; a larger element is held alone.
MOST_BYTES = 32 << 20

#: The number of bytes that are kept for several trainers.
WINDOW_BYTES = 256 << 20

#: The most rounds that wait for the slowest consumer. It is more than those of a block, which a
#: worker may serve in the place of a lost one to consumers that have not read them elsewhere.
_MOST_ROUNDS = 2 * ROUNDS_OF_BLOCK

#: The most chunks that wait, beside the limit in bytes.
_MOST_CHUNKS = 4


class Request:
    """A consumer's request for elements of a task.

    Args:
        most: The most elements; 0: as many as one message should have.
        consumer: Its index, of coordinated reads.
        round_number: The round, of coordinated reads.
        trainer: The name of its training program, if elements are shared between several.
    """

    def __init__(
        self, most: int = 0, consumer: int = -1, round_number: int = -1, trainer: str = ""
    ):
        self.most = most
        self.consumer = consumer
        self.round_number = round_number
        self.trainer = trainer


class Buffer(Protocol):
    """Computed elements, until they are taken."""

    #: The most elements of a chunk that is added; 0: the task chooses.
    chunk_size: int

    def is_full(self) -> bool:
        """Whether the task should wait before it computes more."""
        ...

    def add(self, chunk: Chunk) -> None:
        """Adds the next elements."""
        ...

    def take(self, request: Request) -> Chunk | None:
        """Removes and returns elements for a consumer; None if there are none yet."""
        ...


class FirstCome:
    """Elements for whoever asks first."""

    chunk_size = 0

    def __init__(self) -> None:
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._bytes = 0

    def is_full(self) -> bool:
        return len(self._chunks) >= _MOST_CHUNKS or self._bytes >= MOST_BYTES

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._bytes += size_of(chunk)

    def take(self, request: Request) -> Chunk | None:
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        self._bytes -= size_of(chunk)
        if 0 < request.most < len(chunk):
            rest = chunk.part(request.most, len(chunk))
            self._chunks.appendleft(rest)
            self._bytes += size_of(rest)
            chunk = chunk.part(0, request.most)
        return chunk


class Rounds:
    """Elements of rounds: each of `num_consumers` consecutive elements, one for each consumer.

    A round gets its elements when its first consumer asks for it. A consumer asks for rounds in
    ascending order, and may ask for one again if the connection was lost; a round that all have
    passed is dropped. A consumer that is far ahead of another one waits.

    Args:
        num_consumers: The number of consumers.
    """

    chunk_size = 1

    def __init__(self, num_consumers: int):
        self._num_consumers = num_consumers
        self._ready: collections.deque[Chunk] = collections.deque()
        self._rounds: dict[int, list[Chunk]] = {}
        self._latest = [-1] * num_consumers

    def is_full(self) -> bool:
        return len(self._ready) >= 2 * self._num_consumers

    def add(self, chunk: Chunk) -> None:
        self._ready.append(chunk)

    def take(self, request: Request) -> Chunk | None:
        number, consumer = request.round_number, request.consumer
        if not 0 <= consumer < self._num_consumers or number < 0:
            raise InvalidArgumentError(
                message=f"Expected a consumer_index below num_consumers={self._num_consumers}. "
                f"Received: {consumer}"
            )
        self._latest[consumer] = max(self._latest[consumer], number)
        passed = min(self._latest)
        if number < passed:
            raise FailedPreconditionError(
                message=f"Round {number} of coordinated reads is over: all consumers have asked "
                f"for round {passed}. A program that has restarted cannot take part in the "
                "iteration of the others: restart all of them, with another job_name."
            )
        for old in [each for each in self._rounds if each < passed]:
            del self._rounds[old]
        if number not in self._rounds:
            if sum(each < number for each in self._rounds) >= _MOST_ROUNDS:
                return None
            if len(self._ready) < self._num_consumers:
                return None
            self._rounds[number] = [self._ready.popleft() for _ in range(self._num_consumers)]
        return self._rounds[number][consumer]


class Window:
    """The most recent elements, which every trainer reads once.

    A trainer that is slower than the others misses those that are not kept any more.

    Args:
        most_bytes: How many bytes are kept.
    """

    chunk_size = 0

    def __init__(self, most_bytes: int = WINDOW_BYTES):
        self._most_bytes = most_bytes
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._bytes = 0
        #: The number of the first kept chunk, and of the next one of each trainer.
        self._first = 0
        self._next: dict[str, int] = {}

    def is_full(self) -> bool:
        end = self._first + len(self._chunks)
        return max(self._next.values(), default=self._first) + _MOST_CHUNKS <= end

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._bytes += size_of(chunk)
        while self._bytes > self._most_bytes and len(self._chunks) > 1:
            self._bytes -= size_of(self._chunks.popleft())
            self._first += 1

    def take(self, request: Request) -> Chunk | None:
        place = max(self._next.get(request.trainer, 0), self._first)
        if place >= self._first + len(self._chunks):
            return None
        self._next[request.trainer] = place + 1
        return self._chunks[place - self._first]


def size_of(chunk: Chunk) -> int:
    """Returns the bytes of a chunk's arrays, about."""
    if chunk.is_stacked:
        return sum(leaf.nbytes for leaf in chunk.stacked())
    return sum(getattr(leaf, "nbytes", 64) for element in chunk for leaf in element)
