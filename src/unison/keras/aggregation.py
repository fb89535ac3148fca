"""The aggregation method and the compression of a Keras optimizer."""

from __future__ import annotations

import keras

from unison.collectives import AggregationMethod
from unison.compression import Compression, LocalTraining

_ATTRIBUTE = "_unison_aggregation_method"
_COMPRESSION = "_unison_compression"


def give_aggregation_method(
    optimizer: keras.optimizers.Optimizer, method: AggregationMethod
) -> None:
    """Makes `optimizer` sum the replicas' gradients by `method`.

    Raises:
        TypeError: It is not a Keras optimizer.
    """
    _require_keras_optimizer(optimizer)
    # Bypasses Keras' attribute tracking.
    vars(optimizer)[_ATTRIBUTE] = method


def aggregation_method_of(optimizer: keras.optimizers.Optimizer) -> AggregationMethod:
    """Returns the method of `optimizer`, or of the one that it wraps; `DEFAULT` if none is set."""
    method = vars(optimizer).get(_ATTRIBUTE)
    if method is None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return aggregation_method_of(optimizer.inner_optimizer)
    return AggregationMethod.DEFAULT if method is None else method


def mark_compressed(
    optimizer: keras.optimizers.Optimizer, compression: Compression | LocalTraining
) -> None:
    """Sets the compression of `optimizer`; see `unison.keras.compression`.

    Raises:
        TypeError: It is not a Keras optimizer.
        ValueError: It already has a compression, or trains locally with a loss scale.
    """
    _require_keras_optimizer(optimizer)
    if compression_of(optimizer) is not None:
        raise ValueError(
            f"Optimizer {optimizer.name!r} has a compression already: "
            f"{compression_of(optimizer)!r}. Give it to a new optimizer."
        )
    inner = without_loss_scale(optimizer)
    if isinstance(compression, LocalTraining) and inner is not optimizer:
        raise ValueError(
            "Replicas that train apart would scale their losses differently: local_sgd and diloco "
            "take no LossScaleOptimizer. Use bfloat16, which needs no loss scale."
        )
    vars(inner)[_COMPRESSION] = compression


def compression_of(
    optimizer: keras.optimizers.Optimizer,
) -> Compression | LocalTraining | None:
    """Returns the compression of `optimizer`, or of the one that it wraps."""
    return vars(without_loss_scale(optimizer)).get(_COMPRESSION)


def without_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a `LossScaleOptimizer` wraps; any other unchanged."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return without_loss_scale(optimizer.inner_optimizer)
    return optimizer


def _require_keras_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"Expected a Keras optimizer, such as keras.optimizers.Adam(). Received: {optimizer!r}"
        )
