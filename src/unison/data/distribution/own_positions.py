"""The examples of a worker's rows of every batch, as a sequence that can be read by index."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any, Protocol

from unison.data.distribution.shares import Shares
from unison.errors import InvalidArgumentError


class ByIndex(Sized, Protocol):
    """A sequence of examples; one with `sys.maxsize` of them repeats without an end."""

    def __getitem__(self, index: int, /) -> Any: ...


class SharesOfSize(Protocol):
    """Returns the shares of the replicas of a batch of a size."""

    def __call__(self, size: int, /) -> Shares: ...


class OwnPositions:
    """The examples of a worker's rows of the batches of a sequence.

    Several processes may read the sequence as Grain's do: process p of P makes batches of the
    examples p, p + P, p + 2P and so on, and batches are taken from the processes in turn. As many
    then read this one.

    Args:
        examples: The sequence.
        batch: The number of examples of a batch.
        shares: Returns the shares of the replicas of a batch of a size.
        replicas: The worker's replicas; all workers have as many.
        processes: The number of processes that read it.
        drop_remainder: Whether a last batch that is smaller is left out.

    Attributes:
        own: The number of the worker's rows of a full batch.
        num_batches: The number of batches; None for a sequence without an end.
        described: The number of examples of the sequence, and that of a batch.

    Raises:
        ValueError: A worker has no rows of a full batch, or processes would make batches of several
            sizes. All workers raise it.

    Examples:
        >>> from unison.data import Shares
        >>> own = OwnPositions(range(10), 4, lambda size: Shares(size, 2), range(1, 2))
        >>> [own[position] for position in range(len(own))], own.num_batches
        ([2, 3, 6, 7, 9], 3)
    """

    def __init__(
        self,
        examples: ByIndex,
        batch: int,
        shares: SharesOfSize,
        replicas: range,
        processes: int = 1,
        drop_remainder: bool = False,
    ):
        count = len(examples)
        of_processes = {len(range(process, count, processes)) for process in (0, processes - 1)}
        rounds = {length // batch for length in of_processes}
        self._examples = examples
        self._batch = batch
        self.described = [count, batch]
        self._processes = processes
        self._shares = shares(batch)
        self._slice = self._shares.of(replicas)
        self.own = self._slice.stop - self._slice.start
        self._is_endless = count == sys.maxsize
        self._full = min(rounds) * processes
        self._rest = Shares(0, 1)
        self._rest_slice = slice(0, 0)
        remainder = 0 if drop_remainder or self._is_endless else count - self._full * batch
        counts, each = self._shares.counts, len(replicas)
        are_all_busy = all(any(counts[at : at + each]) for at in range(0, len(counts), each))
        if not are_all_busy or (processes > 1 and (len(rounds) > 1 or remainder)):
            raise ValueError("Expected rows of every batch, and batches of one size.")
        if remainder:
            self._rest = shares(remainder)
            self._rest_slice = self._rest.of(replicas)
        self._length = self._full * self.own + self._rest_slice.stop - self._rest_slice.start

    @property
    def num_batches(self) -> int | None:
        return None if self._is_endless else self._full + bool(self._rest.examples)

    def shares_of(self, number: int) -> Shares:
        """Returns the shares of the replicas of a batch, by its number."""
        return self._shares if number < self._full else self._rest

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < self._length:
            raise IndexError(position)
        in_process, process = divmod(position, self._processes)
        batch, row = divmod(in_process, self.own)
        first = self._slice.start
        if batch * self._processes >= self._full:
            batch, row = self._full, position - self._full * self.own
            first = self._rest_slice.start
        example = (batch * self._batch + first + row) * self._processes + process
        found = self._examples[example]
        if found is None:
            raise InvalidArgumentError(
                message=f"The source has no element {example}: it gives None, and so a batch has "
                "less examples on one worker only. In a Grain dataset, leave elements out by "
                "filter(), and not by a map that returns None."
            )
        return found
