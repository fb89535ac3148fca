"""The arrays of a global batch, of which a worker has the rows of its own replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from unison.data.distribution.replica_batches import ReplicaBatches, count_examples
from unison.data.distribution.shares import Proportions, Shares
from unison.data.distribution.steps import Parts, Step, Steps
from unison.data.leaves import dtype_of, shape_of


class OwnRows:
    """An array of a global batch, of which this process has the rows of its own replicas.

    It has the shape and the dtype of the whole array, as programs for all replicas are compiled for
    them.

    Args:
        parts: The rows of each of this process's replicas, in order: arrays, or a stacked array.
        shares: The shares of all replicas of the batch.

    Attributes:
        parts: The rows of each of this process's replicas.
        shares: The shares of all replicas.
        dtype: The dtype.

    Examples:
        >>> import numpy as np
        >>> from unison.data import OwnRows, Shares
        >>> first = OwnRows([np.zeros((3, 28)), np.zeros((3, 28))], Shares(10, 4))
        >>> first.shape, first.shares.counts
        ((10, 28), (3, 3, 3, 1))
    """

    def __init__(self, parts: Parts, shares: Shares):
        self.parts = parts
        self.shares = shares
        self.dtype = dtype_of(parts[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.shares.examples, *shape_of(self.parts[0])[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shares.examples

    def __repr__(self) -> str:
        rows = [len(part) for part in self.parts]
        return f"OwnRows(shape={self.shape}, dtype={self.dtype}, rows of own replicas: {rows})"

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"A worker has its own rows of a global batch only. Received: {self!r}. Look at "
            "`parts`, or pass whole batches: AutoShardPolicy.OFF and a batch of each worker's own."
        )

    def map(self, function: Callable[[Any], Any]) -> OwnRows:
        """Returns the array whose rows are those that a function of each part returns."""
        return OwnRows([function(part) for part in self.parts], self.shares)

    def astype(self, dtype: Any) -> OwnRows:
        """Returns the array converted to `dtype`."""
        return self.map(lambda part: part.astype(dtype))

    def padded(self) -> Parts:
        """Returns the parts, each with rows of zeros up to the size of the largest share."""
        chunk = self.shares.chunk
        if all(len(part) == chunk for part in self.parts):
            return self.parts
        padded = np.zeros((len(self.parts), chunk, *self.shape[1:]), self.dtype)
        for rows, part in zip(padded, self.parts, strict=True):
            rows[: len(part)] = part
        return padded

    def sample(self, count: int) -> np.ndarray:
        """Returns `count` rows like those of the batch: its own ones, repeated."""
        own = np.concatenate([np.asarray(part) for part in self.parts])
        if not len(own):
            return np.zeros((count, *self.shape[1:]), self.dtype)
        return own[np.arange(count) % len(own)]


class BatchesOfOwnRows(Iterator[Any]):
    """Global batches, on the host, as trees of `OwnRows`. All workers take the same number.

    Args:
        source: The source of the batches of several workers; a pass begins with the first batch.
    """

    def __init__(self, source: ReplicaBatches):
        self._source = source
        self._opened: Steps | None = None

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            ValueError: The arrays of a replica have different numbers of examples, or those of
                different replicas other shapes.
        """
        steps = self._steps()
        proportions = self._source.shares.proportions
        steps.divide_by(proportions)
        step = steps.next()
        if step is None:
            raise StopIteration
        return step.pack(_own_rows_of(step, proportions))

    def skip(self, count: int) -> None:
        """Skips the next batches, without computing what only they need."""
        self._steps().skip(count)

    def _steps(self) -> Steps:
        if self._opened is None:
            self._opened = self._source.steps()
            # Otherwise, a worker that waits for others would continue to wait.
            weakref.finalize(self, self._opened.talk.leave)
        return self._opened


def rows_of(leaf: Any, count: int) -> Any:
    """Returns `count` rows of a leaf of a batch, for a look at their shapes or at their time."""
    return leaf.sample(count) if isinstance(leaf, OwnRows) else leaf[:count]


def shares_of(leaves: Sequence[Any], num_replicas: int, proportions: Proportions) -> Shares:
    """Returns the shares of a global batch: those that its `OwnRows` have, or equal ones.

    Args:
        leaves: The arrays of the batch.
        num_replicas: The number of replicas on all workers.
        proportions: Whole batches are divided in proportion to these.

    Raises:
        ValueError: The arrays have different numbers of examples.
    """
    examples = count_examples(leaves)
    if are_own_rows(leaves):
        shares: Shares = leaves[0].shares
        return shares
    return Shares(examples, num_replicas, proportions)


def are_own_rows(leaves: Sequence[Any]) -> bool:
    """Whether a batch consists of `OwnRows`: all of its leaves do, or none."""
    return bool(leaves) and isinstance(leaves[0], OwnRows)


def _own_rows_of(step: Step, proportions: Proportions) -> list[OwnRows]:
    """Returns the leaves of a step of several workers.

    Args:
        step: The step.
        proportions: The shares of the replicas, where their batches are divided by them.

    Raises:
        ValueError: The arrays of a replica have different numbers of examples, or those of
            different replicas other shapes.
    """
    assert step.shapes is not None  # of several workers
    counts = {tuple(shape[0] if shape else None for shape in shapes) for shapes in step.shapes}
    others = [{shape[1:] for shape in shapes} for shapes in step.shapes]
    if len(counts) != 1 or None in next(iter(counts)) or any(len(each) > 1 for each in others):
        raise ValueError(
            "All arrays of a batch must have the same number of examples along their first axis, "
            "and the same other sizes on all replicas. Received arrays of these shapes for the "
            f"replicas: {step.shapes}. Pad them to a fixed size."
        )
    shares = _with_counts(next(iter(counts)), proportions)
    return [OwnRows(parts, shares) for parts in step.parts]


@functools.lru_cache(maxsize=256)
def _with_counts(counts: tuple[int, ...], proportions: Proportions) -> Shares:
    """Returns the shares of replicas that get `counts` examples."""
    divided = Shares(sum(counts), len(counts), proportions)
    return divided if divided.counts == counts else Shares(sum(counts), len(counts), counts)
