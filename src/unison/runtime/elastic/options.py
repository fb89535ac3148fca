"""Options for changes of the number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

#: The values of `keep`.
GLOBAL_BATCH: Final = "global_batch"
PER_REPLICA_BATCH: Final = "per_replica_batch"


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """The behaviour of Keras' `fit` when workers are lost or join, in an elastic job.

    Args:
        keep: What stays the same: the "global_batch", which is redivided among the replicas, so
            that training does not depend on the workers that take part; or the "per_replica_batch":
            the global batch grows and shrinks with the number of replicas, and epochs have fewer or
            more steps.
        learning_rate: Returns the factor by which the initial learning rate is multiplied, given
            the current number of replicas and the initial one. Default: the learning rate does not
            change.

    Raises:
        ValueError: `keep` has another value.

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
