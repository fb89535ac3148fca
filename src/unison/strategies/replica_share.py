"""A replica's share of the global batch, and what is multiplied by it, while a step is traced.

In a step of `fit`, what a replica computes as a mean over its examples counts by its share of the
global batch: the global mean is the sum of the replicas' means, each times its share. Which of
the step's numbers are multiplied depends on who wrote the step; see `ScaledBy`.

In a function given to `strategy.run` a replica does not know its share. There Keras' losses are
divided by the number of replicas, as on TensorFlow, and what else it computes the user scales.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

from unison.lifting import current_lift
from unison.strategies.context import get_replica_context

_thread = threading.local()


class ScaledBy(enum.Enum):
    """What a step multiplies by the replica's share, so that sums over replicas are global means.

    Attributes:
        GRADIENTS: Each gradient, where the optimizer sums it (Keras' own steps on JAX).
        LOSS: The loss, where the optimizer scales it (`LossScaleOptimizer`, whose scaled loss
            must overflow where that of one device does).
        LOSSES: Each loss, where it is computed, as Keras does on TensorFlow. Gradients are summed
            as they are (`train_step(self, data)` with a gradient tape).
    """

    GRADIENTS = enum.auto()
    LOSS = enum.auto()
    LOSSES = enum.auto()


@contextlib.contextmanager
def replica_share(share: float, scaled_by: ScaledBy) -> Iterator[None]:
    """Inside, the replica has `share` of the examples: 0 where it has none, 1 where it has all."""
    previous = getattr(_thread, "share", None)
    _thread.share = share, scaled_by
    try:
        yield
    finally:
        _thread.share = previous


def current_share(scaled_by: ScaledBy | None = None) -> float | None:
    """Returns the replica's share; None outside the steps of a Keras model.

    Args:
        scaled_by: If given, None is returned also where something else is multiplied by the share.
    """
    share, scaled = getattr(_thread, "share", None) or (None, None)
    return share if scaled_by in (None, scaled) else None


def scale_of_losses() -> float | None:
    """Returns what a Keras loss that is computed here is multiplied by; None where by nothing."""
    if getattr(_thread, "share", None) is not None:
        return current_share(ScaledBy.LOSSES)
    # Outside of all programs, no strategy is looked for: it would be made.
    context = None if current_lift() is None else get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return 1 / context.num_replicas_in_sync
