"""Datasets that every worker creates for itself, and their iterators."""

from __future__ import annotations

import collections
import itertools
import weakref
from typing import Any

from unison.interrupts import signals_held
from unison.parameter_server.programs import next_batch, on_workers_only


class PerWorkerDataset:
    """A dataset on every worker; see `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(self, iterators: PerWorkerIterators, maker: Any):
        self._iterators = iterators
        self._maker = maker

    def __iter__(self) -> PerWorkerIterator:
        return self._iterators.new(self._maker)


class PerWorkerIterator:
    """An iterator on every worker, for scheduled functions.

    In such a function, `next(iterator)` is the next batch of the worker that runs it.
    """

    def __init__(self, number: int):
        self.number = number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise on_workers_only()

    def get_next(self) -> Any:
        """Returns the next batch, in a scheduled function."""
        return next(self)


class IteratorOfCall(PerWorkerIterator):
    """An iterator as a scheduled function sees it: its number is its position in the call.

    So one program works with all iterators, and references none of them.
    """

    def __next__(self) -> Any:
        return next_batch(self.number)


class PerWorkerIterators:
    """The iterators of one coordinator, by number, and the functions that create their datasets."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._makers: dict[int, Any] = {}
        #: The numbers of deleted iterators.
        self._dropped: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._makers)

    def new(self, maker: Any) -> PerWorkerIterator:
        """Returns an iterator over the dataset that `maker` creates on every worker."""
        with signals_held:
            iterator = PerWorkerIterator(next(self._numbers))
            self._makers[iterator.number] = maker
        weakref.finalize(iterator, self._dropped.append, iterator.number).atexit = False
        return iterator

    def maker(self, iterator: int) -> Any:
        """Returns the maker of an iterator's dataset."""
        return self._makers[iterator]

    def unused(self, iterators: set[int]) -> list[int]:
        """Returns which of these iterators have been deleted; drops their makers."""
        while self._dropped:
            self._makers.pop(self._dropped.popleft(), None)
        return [number for number in iterators if number not in self._makers]
