"""Layers of random programs that Keras does not have.

Among them the reference of what several replicas do on purpose: `ReferenceNormalization` and
`Counts` calculate on one device what the documentation says of the replicas.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

import unison.tf as tf

#: The replicas whose shares a model on one device imitates.
_imitated = 1


@contextlib.contextmanager
def imitating(replicas: int) -> Iterator[None]:
    """Inside, layers on one device calculate by the shares of so many replicas."""
    global _imitated
    before, _imitated = _imitated, replicas
    try:
        yield
    finally:
        _imitated = before


def imitated() -> int:
    return _imitated


def shares(examples: int, replicas: int) -> list[slice]:
    """Returns the rows of the replicas that get some: contiguous chunks of ceil(n / replicas).

    >>> shares(9, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None)]
    """
    chunk = math.ceil(examples / replicas)
    return [slice(begin, min(begin + chunk, examples)) for begin in range(0, examples, chunk)]


@keras.saving.register_keras_serializable("random programs")
class ReferenceNormalization(keras.layers.BatchNormalization):
    """Batch normalization on one device, of the shares that so many replicas would have.

    Each share is normalized with its own moments. Each replica has moving statistics of its own,
    which change if it has examples; what is used outside of training is their mean.
    """

    def __init__(self, replicas: int | None = None, **options: Any):
        super().__init__(**options)
        self.replicas = imitated() if replicas is None else replicas

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "replicas": self.replicas}

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        shape = (self.replicas, input_shape[self.axis])
        add = self.add_weight
        self.means = add(shape=shape, name="of_replicas", initializer="zeros", trainable=False)
        self.variances = add(shape=shape, name="of_replicas", initializer="ones", trainable=False)
        self.built = True

    def take_means(self) -> None:
        """Gives each replica the mean of all, as reading and writing weights does."""
        self.means.assign(ops.zeros_like(self.means.value) + self.moving_mean.value)
        self.variances.assign(ops.ones_like(self.variances.value) * self.moving_variance.value)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training or not self.trainable or inputs.shape[0] is None:
            return super().call(inputs, training=False, mask=mask)
        means, variances = list(self.means.value), list(self.variances.value)
        outputs = []
        for replica, rows in enumerate(shares(inputs.shape[0], self.replicas)):
            # Keras' own layer, of the share: it assigns the new moving statistics.
            self.moving_mean.assign(means[replica])
            self.moving_variance.assign(variances[replica])
            of_share = None if mask is None else mask[rows]
            outputs.append(super().call(inputs[rows], training=True, mask=of_share))
            means[replica] = self.moving_mean.value
            variances[replica] = self.moving_variance.value
        self.means.assign(ops.stack(means))
        self.variances.assign(ops.stack(variances))
        self.moving_mean.assign(ops.mean(self.means.value, 0))
        self.moving_variance.assign(ops.mean(self.variances.value, 0))
        return ops.concatenate(outputs)


@keras.saving.register_keras_serializable("random programs")
class Counts(keras.layers.Layer):
    """Counts what it has seen in training, in variables of every annotation; returns its inputs.

    The sums count examples, and add up to those of one device. The first replica's variable holds
    the mean of the first replica's share.
    """

    supports_masking = True

    def __init__(self, replicas: int | None = None, **options: Any):
        super().__init__(**options)
        self.replicas = imitated() if replicas is None else replicas

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "replicas": self.replicas}

    def build(self, input_shape: Any) -> None:
        def add(name: str, aggregation: str, synchronization: str) -> Any:
            return self.add_weight(
                name=name,
                shape=(),
                initializer="zeros",
                trainable=False,
                aggregation=aggregation,
                synchronization=synchronization,
                autocast=False,
            )

        self.seen = add("seen", "sum", "on_read")
        self.first = add("first", "only_first_replica", "on_read")
        self.first_written = add("first_written", "only_first_replica", "on_write")
        self.steps = add("steps", "only_first_replica", "on_write")
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if training and inputs.shape[0] is not None:
            mean = ops.zeros((), self.first.dtype)  # what is written to all, all must write
            if inputs.shape[0]:
                first = inputs[shares(inputs.shape[0], self.replicas)[0]]
                mean = ops.mean(ops.cast(first, self.first.dtype))
            self.seen.assign_add(ops.cast(inputs.shape[0], self.seen.dtype))
            self.first.assign(mean)
            self.first_written.assign(2 * mean)
            self.steps.assign_add(1.0)
        return inputs


class _Untracked:
    """Holds what neither Keras nor a checkpoint is to find."""

    def __init__(self, *values: Any):
        self.values = values


@keras.saving.register_keras_serializable("random programs")
class Captures(keras.layers.Layer):
    """Scales its inputs by `tf.Variable`s that the model does not know, as a new layer does.

    A callback sets one of them (`set_factor`), and the layer counts its calls in training in the
    other.

    Args:
        has_weights: Whether they are weights of the layer instead. That is the reference: Keras'
            steps know them.
    """

    supports_masking = True

    def __init__(self, has_weights: bool, **options: Any):
        super().__init__(**options)
        self.has_weights = has_weights

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "has_weights": self.has_weights}

    def build(self, input_shape: Any) -> None:
        if self.has_weights:
            self.factor, self.calls = (
                self.add_weight(
                    shape=(), name="captured", initializer="zeros", trainable=False, autocast=False
                )
                for _ in range(2)
            )
        else:
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            zero = tf.constant(0.0, keras.config.floatx())
            variables = (
                tf.Variable(zero, trainable=False, aggregation=first),
                tf.Variable(zero, trainable=False, aggregation=first),
            )
            self.captured = _Untracked(*variables)
        self.built = True

    def _state(self) -> Any:
        return (self.factor, self.calls) if self.has_weights else self.captured.values

    def set_factor(self, value: float) -> None:
        self._state()[0].assign(value)

    def restart(self) -> None:
        """Begins anew, as the layer of a model that is loaded does."""
        if self.has_weights:
            for variable in self._state():
                variable.assign(0.0)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        factor, calls = self._state()
        if training:
            calls.assign_add(1.0)
        scale = 1 + 0.1 * ops.convert_to_tensor(factor) + 0.02 * ops.convert_to_tensor(calls)
        return inputs * ops.cast(scale, inputs.dtype)


@keras.saving.register_keras_serializable("random programs")
class DrawsNoise(keras.layers.Layer):
    """Adds numbers from the stream of `tf.random`."""

    supports_masking = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not training:
            return inputs
        return inputs + ops.cast(0.2 * tf.random.normal(tf.shape(inputs)), inputs.dtype)


@keras.saving.register_keras_serializable("random programs")
class AddsLoss(keras.layers.Layer):
    """Adds a loss that is a mean over the examples."""

    supports_masking = True

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.05 * ops.mean(ops.square(ops.cast(inputs, keras.config.floatx()))))
        return inputs


@keras.saving.register_keras_serializable("random programs")
class Centers(keras.layers.Layer):
    """Subtracts a part of the mean over the examples of all replicas, which it sums by hand."""

    supports_masking = True

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs: Any) -> Any:
        values = ops.cast(inputs, keras.config.floatx())
        total, count = ops.sum(values, 0), ops.cast(inputs.shape[0], values.dtype)
        replica = tf.distribute.get_replica_context()
        if replica is not None:  # else Keras builds the model
            total, count = replica.all_reduce("SUM", (total, count))
        return inputs - ops.cast(0.5 * total / count, inputs.dtype)


@keras.saving.register_keras_serializable("random programs")
class Residual(keras.layers.Layer):
    """Adds to its inputs what one dense layer, used twice, makes of them."""

    supports_masking = True

    def build(self, input_shape: Any) -> None:
        self.dense = keras.layers.Dense(input_shape[-1], activation="tanh", kernel_regularizer="l2")
        self.dense.build(input_shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs + self.dense(self.dense(inputs))
