"""Batches that a thread puts on the devices, ahead of those who want them."""

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

#: Where the steps are is noted after so many of them, at least: a note copies what waits in
#: buffers. Who goes on from a position takes the steps behind the note once more.
_STEPS_BETWEEN_NOTES = 16

#: And after so many times the time that the last note took.
_TIME_BETWEEN_NOTES = 50


class BatchesAhead(Iterator[Any]):
    """The batches of steps, one after the other.

    Args:
        source: What the steps come from.
        others: Returns other ways to divide the same dataset, by which a pass goes on that has
            begun so.
        placed: Puts what the replicas get on their devices.
        size: How many batches may wait; 0: none is read before it is asked for.

    When the shares of the source change, the batch that is asked for next is read by now, or not
    yet: the new ones divide the batch that comes `size` later, on every worker the same.
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
        #: What is read, and how it is divided.
        self.description = source.description
        #: Whether positions are the same on all workers.
        self.is_global = steps.is_global
        self._steps = steps
        self._position: Callable[[], Position] = lambda: Position(steps.state(), 0)
        # What divides the next batches to be read.
        self._to_come = collections.deque([source.shares.proportions] * self._size)
        if not self._size:
            return
        reader = _Reader(steps, self._placed, self._to_come.popleft)
        self._position = reader.note()
        self._ahead = ReadAhead(reader.next, self._size)
        # Else a thread that waits for other workers would go on waiting.
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
        """Returns where the pass is, behind the batch that was taken last.

        Raises:
            TypeError: The steps do not know where they are.
        """
        return self._position()

    def close(self) -> None:
        """Ends the thread as soon as it has the batch that it is reading."""
        if self._size:
            self._ahead.close()
        self._steps.talk.leave()

    def resume(self, description: str, positions: Sequence[Position]) -> None:
        """Goes to where a pass was; see `Steps.resume`.

        Args:
            description: That of what was read.
            positions: Where the workers were.

        Raises:
            ValueError: It was something else.
        """
        source = self._source
        if source.description != description:
            same = [other for other in self._others() if other.description == description]
            if not same:
                raise ValueError(
                    f"The state is that of something else. Expected: {source.description}. "
                    f"Received: {description}. Make the dataset as it was when the state was "
                    "saved, or begin a new epoch."
                )
            source = same[0]
        steps = source.steps()
        steps.resume(positions)
        self._steps.talk.leave()
        self._open(source, steps)


class _Reader:
    """Takes steps, and notes where they are."""

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
        """Returns the next batch, and what tells the position behind it; None at the end."""
        if self._taken >= _STEPS_BETWEEN_NOTES and time.perf_counter() >= self._next_note:
            self._note()
        self._steps.divide_by(self._next_proportions())
        step = self._steps.next()
        if step is None:
            return None
        self._taken += 1
        return self._placed(step), self.note()

    def note(self) -> Callable[[], Position]:
        """Returns what tells the present position, or raises the error that there is none."""
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
