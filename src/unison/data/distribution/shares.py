"""The division of a global batch between the replicas."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

#: One number per replica: the parts of global batches are proportional to them, as far as whole
#: examples permit. None: equal chunks, as in TensorFlow.
Proportions = tuple[float, ...] | None


class ReplicaShares:
    """The shares of a strategy's replicas of every global batch.

    Args:
        proportions: The parts are proportional to these.

    Attributes:
        proportions: The current ones; all workers have the same at the same place of the program.
        may_change: Whether they may change later.
    """

    may_change = False

    def __init__(self, proportions: Proportions = None):
        self.proportions = proportions


#: The division of TensorFlow.
EQUAL_SHARES = ReplicaShares()


@dataclasses.dataclass(frozen=True)
class Shares:
    """The contiguous chunks of a global batch, one per replica.

    Replica r gets the r-th chunk of ceil(examples / replicas) examples, as in TensorFlow; the
    last replicas may get fewer, or none. With proportions, the chunks end at the examples
    nearest to the exact positions: each differs from its share by less than one example.

    Args:
        examples: The size of the global batch.
        num_replicas: The number of chunks.
        proportions: The chunks' sizes are proportional to these.

    Examples:
        >>> Shares(9, 4).counts
        (3, 3, 3, 0)
        >>> Shares(9, 4, (1, 1, 0, 2)).counts
        (2, 3, 0, 4)
    """

    examples: int
    num_replicas: int
    proportions: Proportions = None

    @functools.cached_property
    def _bounds(self) -> tuple[int, ...]:
        """The beginnings of the chunks, and the end of the last one."""
        if self.proportions is None:
            chunk = -(-self.examples // self.num_replicas)
            begins = [min(replica * chunk, self.examples) for replica in range(self.num_replicas)]
            return (*begins, self.examples)
        places = list(itertools.accumulate(self.proportions))
        return (0, *(int(self.examples * place / places[-1] + 0.5) for place in places))

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of examples of every replica."""
        return tuple(end - begin for begin, end in itertools.pairwise(self._bounds))

    @property
    def chunk(self) -> int:
        """The number of examples of the largest chunk."""
        return max(self.counts)

    def of(self, replicas: range) -> slice:
        """Returns the positions of the examples of consecutive replicas."""
        return slice(self._bounds[replicas.start], self._bounds[replicas.stop])

    @property
    def are_even(self) -> bool:
        return self.chunk * self.num_replicas == self.examples

    def pad(self, batch: np.ndarray, replicas: Sequence[int]) -> np.ndarray:
        """Returns `batch` with rows of zeros after the chunks, so that all have the same size.

        Args:
            batch: The examples of all replicas.
            replicas: The replicas whose chunks are needed; the parts of the others are zeros.
        """
        if self.are_even:
            return batch
        # Untouched zeros take no time: the operating system provides zeroed pages.
        padded = np.zeros((self.num_replicas, self.chunk, *batch.shape[1:]), batch.dtype)
        for replica in replicas:
            padded[replica, : self.counts[replica]] = batch[self.of(range(replica, replica + 1))]
        return padded.reshape(self.num_replicas * self.chunk, *batch.shape[1:])
