"""A replica's share of the global batch, and what is scaled by it, while a step is traced.

In a step of `fit`, a mean that a replica computes over its examples is weighted by its share of the
global batch: the global mean is the sum of the replicas' means, each times its share. Which values
of the step are scaled depends on how the step is implemented; see `ScaledBy`.

In a function given to `strategy.run` the share is not known. There Keras' losses are divided by the
number of replicas, as on TensorFlow, and the user scales everything else.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from unison.collectives.gradient_weights import gradients_weighted_by
from unison.lifting import current_lift
from unison.strategies.context import replica_context_in_scope
from unison.thread_local import ThreadLocal


class ScaledBy(enum.Enum):
    """The values that a step multiplies by the replica's share, so that sums are global means.

    Attributes:
        GRADIENTS: Each gradient, where the optimizer sums it (a step of the user's for Keras on
            JAX, which returns its new state).
        LOSS: The loss, where the optimizer scales it (Keras' own step on JAX, where this is one
            number rather than a kernel for each gradient; and `LossScaleOptimizer`, whose scaled
            loss must overflow where that of one device does).
        LOSSES: Each loss, where it is computed, as Keras does on TensorFlow. Gradients are summed
            as they are (`train_step(self, data)` with a gradient tape).
    """

    GRADIENTS = enum.auto()
    LOSS = enum.auto()
    LOSSES = enum.auto()


_share: ThreadLocal[tuple[float, ScaledBy] | None] = ThreadLocal(None)


@contextlib.contextmanager
def replica_share(share: float, scaled_by: ScaledBy) -> Iterator[None]:
    """Context manager in which the replica has `share` of the examples: 0 for none, 1 for all."""
    weight = share if scaled_by is ScaledBy.GRADIENTS else None
    with _share.bound_to((share, scaled_by)), gradients_weighted_by(weight):
        yield


def current_share(scaled_by: ScaledBy | None = None) -> float | None:
    """Returns the replica's share; None outside the steps of a Keras model.

    Args:
        scaled_by: If given, None is also returned if something else is scaled by the share.
    """
    share, scaled = _share.value or (None, None)
    return share if scaled_by in (None, scaled) else None


def scale_of_losses() -> float | None:
    """Returns the factor for a Keras loss that is computed here; None if it is not scaled."""
    if _share.value is not None:
        return current_share(ScaledBy.LOSSES)
    context = None if current_lift() is None else replica_context_in_scope()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return 1 / context.num_replicas_in_sync
