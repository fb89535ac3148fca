"""Batches that a thread copies to the devices ahead of their use."""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unison.data.distribution.replica_batches import ReplicaBatches
from unison.data.distribution.shares import Proportions
from unison.data.distribution.steps import Position, Step, Steps
from unison.data.state import State
from unison.data.transformations.prefetching import ReadAhead

#: The minimum number of steps between two records of the position: a record copies what is
#: buffered. A pass that resumes at a position repeats the steps after the record.
_STEPS_BETWEEN_NOTES = 16

#: The minimum time between two records, in multiples of the duration of the last one.
_TIME_BETWEEN_NOTES = 50


class BatchesAhead(Iterator[Any]):
    """The batches of consecutive steps.

    Args:
        source: The source of the steps.
        others: Returns other ways to divide the same dataset, with which a pass resumes that
            began with them.
        placed: Copies the replicas' parts to their devices.
        size: The number of batches that are read ahead; 0: each is read when it is requested.

    When the shares of the source change, the next requested batch may have been read already, or
    not: the new shares apply to the batch that is `size` later, which is the same on all workers.
    """

    def __init__(
        self,
        source: ReplicaBatches,
        others: Callable[[], Sequence[ReplicaBatches]],
        placed: Callable[[Step], Any],
        size: int,
    ):
        self._source = source
        self._others = others
        self._placed = placed
        self._size = size
        self._open(source, source.steps())

    def _open(self, source: ReplicaBatches, steps: Steps) -> None:
        #: The source of the steps, and how they are divided.
        self.description = source.description
        #: Whether positions are the same on all workers.
        self.is_global = source.is_global
        self._steps = steps
        self._position: Callable[[], Position] = lambda: Position(steps.state(), 0)
        # Sets the shares of the next batches to be read.
        self._to_come = collections.deque([source.shares.proportions] * self._size)
        if not self._size:
            return
        reader = _Reader(steps, self._placed, self._to_come.popleft)
        self._position = reader.note()
        self._ahead = ReadAhead(reader.next, self._size)
        # Otherwise, a thread that waits for other workers would continue to wait.
        weakref.finalize(self, steps.talk.leave)

    def __next__(self) -> Any:
        self._to_come.append(self._source.shares.proportions)
        if not self._size:
            self._steps.divide_by(self._to_come.popleft())
            step = self._steps.next()
            if step is None:
                raise StopIteration
            return self._placed(step)
        read = self._ahead.get()
        if read is None:
            raise StopIteration
        batch, self._position = read
        return batch

    def position(self) -> Position:
        """Returns the position of the pass, after the last batch that was returned.

        Raises:
            TypeError: The steps have no position.
        """
        return self._position()

    def close(self) -> None:
        """Ends the thread when it has read its current batch."""
        if self._size:
            self._ahead.close()
        self._steps.talk.leave()

    def resume(self, description: str, positions: Sequence[Position]) -> None:
        """Resumes at a position; see `Steps.resume`.

        Args:
            description: The description of the source of that position.
            positions: The positions of the workers.

        Raises:
            ValueError: The position is that of another source.
        """
        source = self._source
        if source.description != description:
            same = [other for other in self._others() if other.description == description]
            if not same:
                raise ValueError(
                    f"The state belongs to another dataset. Expected: {source.description}. "
                    f"Received: {description}. Make the dataset as it was when the state was "
                    "saved, or begin a new epoch."
                )
            source = same[0]
        steps = source.steps()
        steps.resume(positions)
        self._steps.talk.leave()
        self._open(source, steps)


class _Reader:
    """Takes steps, and records their positions."""

    def __init__(
        self,
        steps: Steps,
        placed: Callable[[Step], Any],
        next_proportions: Callable[[], Proportions],
    ):
        self._steps = steps
        self._placed = placed
        self._next_proportions = next_proportions
        self._noted: Callable[[], State] = lambda: None
        self._taken = 0
        self._next_note = 0.0
        self._note()

    def next(self) -> tuple[Any, Callable[[], Position]] | None:
        """Returns the next batch, and a function for the position after it; None at the end."""
        if self._taken >= _STEPS_BETWEEN_NOTES and time.perf_counter() >= self._next_note:
            self._note()
        self._steps.divide_by(self._next_proportions())
        step = self._steps.next()
        if step is None:
            return None
        self._taken += 1
        return self._placed(step), self.note()

    def note(self) -> Callable[[], Position]:
        """Returns a function that returns the position, or raises the error that there is none."""
        noted, taken = self._noted, self._taken
        return lambda: Position(noted(), taken)

    def _note(self) -> None:
        begin = time.perf_counter()
        self._taken = 0
        try:
            state = self._steps.state()
        except TypeError as error:
            self._noted = _raising(error)
        else:
            self._noted = lambda: state
        end = time.perf_counter()
        self._next_note = end + _TIME_BETWEEN_NOTES * (end - begin)


def _raising(error: Exception) -> Callable[[], State]:
    def raise_error() -> State:
        raise error

    return raise_error
