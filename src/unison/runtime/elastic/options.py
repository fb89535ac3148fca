"""What stays as it is when the number of replicas changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

#: What `keep` may be.
GLOBAL_BATCH: Final = "global_batch"
PER_REPLICA_BATCH: Final = "per_replica_batch"


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """What Keras' `fit` does when workers are lost or come, in an elastic job.

    Args:
        keep: What stays as it is: the "global_batch", of which each replica then has another part,
            so that the training is the same whoever takes part; or the "per_replica_batch": the
            global batch grows and shrinks with the replicas, and epochs have more or fewer steps.
        learning_rate: Returns by what the learning rate with which the job began is multiplied,
            given the number of replicas now and that at the beginning. Default: it stays.

    Raises:
        ValueError: `keep` is something else.

    Examples:
        The linear rule (Goyal et al., 2017, "Accurate, Large Minibatch SGD"):

        >>> options = ElasticOptions("per_replica_batch", lambda now, then: now / then)
        >>> options.learning_rate(6, 8)
        0.75
    """

    keep: str = GLOBAL_BATCH
    learning_rate: Callable[[int, int], float] | None = None

    def __post_init__(self) -> None:
        if self.keep not in (GLOBAL_BATCH, PER_REPLICA_BATCH):
            raise ValueError(
                f"Expected keep to be {GLOBAL_BATCH!r} or {PER_REPLICA_BATCH!r}. Received: "
                f"{self.keep!r}"
            )
