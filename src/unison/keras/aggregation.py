"""The aggregation method that a Keras optimizer was given."""

from __future__ import annotations

import keras

from unison.collectives import AggregationMethod

_ATTRIBUTE = "_unison_aggregation_method"


def give_aggregation_method(
    optimizer: keras.optimizers.Optimizer, method: AggregationMethod
) -> None:
    """Makes `optimizer` sum the replicas' gradients by `method`.

    Raises:
        TypeError: It is no Keras optimizer.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"Expected a Keras optimizer, such as keras.optimizers.Adam(). Received: {optimizer!r}"
        )
    # Past Keras' attribute tracking.
    vars(optimizer)[_ATTRIBUTE] = method


def aggregation_method_of(optimizer: keras.optimizers.Optimizer) -> AggregationMethod:
    """Returns the method that `optimizer`, or the one that it wraps, was given; else `DEFAULT`."""
    method = vars(optimizer).get(_ATTRIBUTE)
    if method is None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return aggregation_method_of(optimizer.inner_optimizer)
    return AggregationMethod.DEFAULT if method is None else method
