"""The arrays of a global batch, of which a worker has the rows of its own replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from unison.data.distribution.input_workers import InputWorkers
from unison.data.distribution.replica_batches import OwnedSteps, ReplicaBatches, count_examples, cut
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
        first: This process's first replica.
        again: Reads the batch again, for the replicas that this process has then; None if their
            number does not change.

    Attributes:
        parts: The rows of each of this process's replicas.
        shares: The shares of all replicas.
        first: This process's first replica.
        again: Reads the batch again.
        dtype: The dtype.

    Examples:
        >>> import numpy as np
        >>> from unison.data import Shares
        >>> rows = OwnRows([np.zeros((3, 28)), np.zeros((3, 28))], Shares(10, 4), 0)
        >>> rows.shape, rows.shares.counts
        ((10, 28), (3, 3, 3, 1))
    """

    def __init__(
        self,
        parts: Parts,
        shares: Shares,
        first: int,
        again: Callable[[], Any] | None = None,
    ):
        self.parts = parts
        self.shares = shares
        self.first = first
        self.again = again
        self.dtype = dtype_of(parts[0])

    @classmethod
    def of(cls, rows: Any, shares: Shares, replicas: range) -> OwnRows:
        """Returns the array of which a process has the rows of consecutive replicas, in one array.

        Rows after those, which show the shape where the replicas have none, are left out.
        """
        counts = shares.counts[replicas.start : replicas.stop]
        count = sum(counts)
        (parts,) = cut([rows[:count] if len(rows) > count else rows], counts)
        return cls(parts, shares, replicas.start)

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
            f"A worker has its own rows of a global batch only. Received: {self!r}. Its rows are "
            "in `parts`, one array for each of its replicas."
        )

    def map(self, function: Callable[[Any], Any]) -> OwnRows:
        """Returns the array whose rows are those that a function of each part returns."""
        parts = [function(part) for part in self.parts]
        return OwnRows(parts, self.shares, self.first, self.again)

    def with_again(self, again: Callable[[], Any]) -> OwnRows:
        """Returns the same rows of a batch that `again` reads again."""
        return OwnRows(self.parts, self.shares, self.first, again)

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
        workers: This worker's index among them. If they may change, a batch can be read again.
    """

    def __init__(self, source: ReplicaBatches, workers: InputWorkers):
        self._source = source
        self._workers = workers
        self._opened: Steps | None = None
        self._count = 0
        #: Steps that read batches again, and the number of the next one.
        self._again: tuple[OwnedSteps, int] | None = None

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            ValueError: The arrays of a replica have different numbers of examples, or those of
                different replicas other shapes.
        """
        batch = self._next_of(self._steps(), self._count)
        if batch is None:
            raise StopIteration
        self._count += 1
        return batch

    def skip(self, count: int) -> None:
        """Skips the next batches; see `Steps.skip`."""
        self._steps().skip(count)
        self._count += count

    def leave(self) -> None:
        """Ends the wait for other workers, in any thread: no further batch is needed."""
        if self._opened is not None:
            self._opened.talk.leave()

    def _next_of(self, steps: Steps, number: int) -> Any:
        """Returns the next batch, which has a number in its pass; None at the end."""
        proportions = self._source.shares.proportions
        steps.divide_by(proportions)
        again = None
        if self._workers.may_change:
            assert isinstance(steps, OwnedSteps)
            steps.divide_among_present()
            again = functools.partial(self._read_again, number)
        step = steps.next()
        if step is None:
            return None
        return step.pack(_own_rows_of(step, proportions, self._workers.index, again))

    def _read_again(self, number: int) -> Any:
        """Returns a batch of the pass, for the workers that there are now."""
        assert isinstance(self._opened, OwnedSteps)
        steps, following = self._again or (None, None)
        if steps is None or following != number:
            steps = self._opened.at(number)
        self._again = steps, number + 1
        return self._next_of(steps, number)

    def _steps(self) -> Steps:
        if self._opened is None:
            self._opened = self._source.steps()
            # Otherwise, a worker that waits for others would continue to wait.
            weakref.finalize(self, self._opened.talk.leave)
        return self._opened


def rows_of(leaf: Any, count: int) -> Any:
    """Returns `count` rows of a leaf of a batch, for a look at their shapes or at their time."""
    return leaf.sample(count) if isinstance(leaf, OwnRows) else leaf[:count]


def whole_like(leaf: Any) -> Any:
    """Returns zeros, without memory, of the whole shape of `OwnRows`; other leaves as they are."""
    if not isinstance(leaf, OwnRows):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def is_divided_for_others(leaves: Sequence[Any], num_replicas: int, first: int) -> bool:
    """Whether a batch has the rows of other replicas than a worker has now.

    Args:
        leaves: The arrays of the batch.
        num_replicas: The number of replicas on all workers.
        first: The worker's first replica.
    """
    if not are_own_rows(leaves):
        return False
    return bool((leaves[0].shares.num_replicas, leaves[0].first) != (num_replicas, first))


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


def _own_rows_of(
    step: Step, proportions: Proportions, worker: int, again: Callable[[], Any] | None
) -> list[OwnRows]:
    """Returns the leaves of a step of several workers.

    Args:
        step: The step.
        proportions: The shares of the replicas, where their batches are divided by them.
        worker: The index of this worker.
        again: Reads the batch again.

    Raises:
        ValueError: The arrays of a replica have different numbers of examples, or those of
            different replicas other shapes.
    """
    of_all = step.shapes or [[shape_of(part) for part in parts] for parts in step.parts]
    counts = {tuple(shape[0] if shape else None for shape in shapes) for shapes in of_all}
    others = [{shape[1:] for shape in shapes} for shapes in of_all]
    if len(counts) != 1 or None in next(iter(counts)) or any(len(each) > 1 for each in others):
        raise ValueError(
            "All arrays of a batch must have the same number of examples along their first axis, "
            "and the same other sizes on all replicas. Received arrays of these shapes for the "
            f"replicas: {of_all}. Pad them to a fixed size."
        )
    shares = _with_counts(next(iter(counts)), proportions)
    return [OwnRows(parts, shares, worker * len(parts), again) for parts in step.parts]


@functools.lru_cache(maxsize=256)
def _with_counts(counts: tuple[int, ...], proportions: Proportions) -> Shares:
    """Returns the shares of replicas that get `counts` examples."""
    divided = Shares(sum(counts), len(counts), proportions)
    return divided if divided.counts == counts else Shares(sum(counts), len(counts), counts)
