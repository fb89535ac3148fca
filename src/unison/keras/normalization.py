"""Batch normalization over the global batch.

Keras supports `BatchNormalization(synchronized=True)` on TensorFlow only. This is the same layer
for replica programs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from keras import ops

from unison.collectives.gradient_weights import across_replicas, gradient_times
from unison.runtime.placement import REPLICA_AXIS
from unison.strategies import get_replica_context
from unison.strategies.replica_share import current_share


@keras.saving.register_keras_serializable(package="unison")
class BatchNormalization(keras.layers.BatchNormalization):
    """Keras' `BatchNormalization`, whose `synchronized=True` works in a replica program.

    With n_r positions, mean m_r and variance v_r on replica r, all replicas normalize with

        mean = sum_r n_r m_r / n,    variance = sum_r n_r (v_r + (m_r - mean)^2) / n,

    where n is the sum of the n_r: the moments of the global batch, however it is divided. One
    all-gather per layer and direction suffices. Outside of a replica program, and with one
    replica, `synchronized` changes nothing.

    Args:
        synchronized: Whether to normalize over all replicas' examples, not over the replica's own.
        *args: As for `keras.layers.BatchNormalization`.
        **kwargs: Likewise.

    TF: `tf.keras.layers.BatchNormalization`.
    """

    def __init__(self, *args: Any, synchronized: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.synchronized = synchronized

    def add_weight(self, *args: Any, trainable: bool = True, **kwargs: Any) -> keras.Variable:
        if self.synchronized and not trainable:
            # Replicas with examples compute equal statistics, and the first one has examples.
            kwargs["aggregation"] = "only_first_replica"
        return super().add_weight(*args, trainable=trainable, **kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if mask is not None:
            # Keras expects one dimension less than the inputs have.
            mask = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
        count, mean, variance = _local_moments(inputs, mask, self._reduction_axes)
        context = get_replica_context()
        if self.synchronized and context is not None and context.num_replicas_in_sync > 1:
            return _global_moments(count, mean, variance)
        return mean, variance


def init_taking_synchronized(original: Callable[..., None]) -> Callable[..., None]:
    """`BatchNormalization.__init__` of Keras, which makes a synchronized layer one of ours.

    Args:
        original: Keras' own, which refuses `synchronized=True` on JAX.
    """

    @functools.wraps(original)
    def init(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        if synchronized and type(self) is not keras.layers.BatchNormalization:
            raise ValueError(
                "Expected synchronized=True of Keras' own BatchNormalization, or of a class "
                "derived from unison.keras.BatchNormalization. Received: "
                f"{type(self).__name__}, derived from Keras' own: derive it from Unison's."
            )
        original(self, *args, **kwargs)
        if synchronized:
            self.__class__ = BatchNormalization
            self.synchronized = True

    # Keras asks for the arguments in two ways, of which one does not look behind wrappers.
    vars(init)["__signature__"] = inspect.signature(original)
    return init


def _local_moments(inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Returns, for each channel, the number of unmasked positions, their mean and variance."""
    weights = ops.ones_like(inputs) if mask is None else ops.cast(mask, inputs.dtype)
    count = ops.sum(weights, axes)
    mean = ops.divide_no_nan(ops.sum(inputs * weights, axes), count)
    deviations = (inputs - ops.expand_dims(mean, axes)) * weights
    return count, mean, ops.divide_no_nan(ops.sum(ops.square(deviations), axes), count)


def _global_moments(count: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
    """Returns the mean and variance of the positions of all replicas."""
    local = ops.stack([count, mean, variance])
    if current_share() == 0:
        # Its loss, of no examples (perhaps NaN), must not reach the others' parameters.
        gathered = gradient_times(lax.all_gather(_nothing(local), REPLICA_AXIS), 0.0)
    else:
        gathered = across_replicas(lambda own: lax.all_gather(own, REPLICA_AXIS), local)
    counts, means, variances = (gathered[:, index] for index in range(3))
    total = ops.sum(counts, 0)
    global_mean = ops.divide_no_nan(ops.sum(counts * means, 0), total)
    spread = counts * (variances + ops.square(means - global_mean))
    return global_mean, ops.divide_no_nan(ops.sum(spread, 0), total)


@jax.custom_vjp
def _nothing(value: jax.Array) -> jax.Array:
    """Returns zeros, with a gradient of zeros that are computed.

    A replica without examples has a row of filler, which must not count. It still takes part in
    every collective operation of the others, including those of the backward pass.
    """
    return jnp.zeros_like(value)


_nothing.defvjp(lambda value: (_nothing(value), None), lambda _, grad: (jnp.zeros_like(grad),))
