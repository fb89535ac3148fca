"""How a global batch is divided between the replicas."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shares:
    """The contiguous chunks of a global batch, one a replica.

    Replica r gets the r-th chunk of ceil(examples / replicas) examples, as in TensorFlow; the
    last replicas may get fewer, or none.

    Args:
        examples: The size of the global batch.
        num_replicas: The number of chunks.

    Examples:
        >>> Shares(9, 4).counts
        (3, 3, 3, 0)
    """

    examples: int
    num_replicas: int

    @property
    def chunk(self) -> int:
        """The number of examples of a full chunk."""
        return -(-self.examples // self.num_replicas)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of examples of every replica."""
        left = [self.examples - replica * self.chunk for replica in range(self.num_replicas)]
        return tuple(min(max(count, 0), self.chunk) for count in left)

    def of(self, replicas: range) -> slice:
        """Returns where the examples of consecutive replicas are."""
        return slice(replicas.start * self.chunk, replicas.stop * self.chunk)

    @property
    def are_even(self) -> bool:
        return self.chunk * self.num_replicas == self.examples

    def pad(self, batch: np.ndarray) -> np.ndarray:
        """Returns `batch` with rows of zeros behind it, so that all chunks are full."""
        missing = self.chunk * self.num_replicas - self.examples
        if not missing:
            return batch
        return np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), batch.dtype)])
