"""Compression for the optimizers of Keras and Optax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax

from unison.collectives import AggregationMethod, ReduceOp
from unison.collectives.aggregation import parse_linear
from unison.compression import (
    Compression,
    CompressionState,
    LocalTraining,
    Report,
)
from unison.runtime.placement import REPLICA_AXIS

if TYPE_CHECKING:
    import keras
    import optax

KerasOptimizer = TypeVar("KerasOptimizer", bound="keras.optimizers.Optimizer")


def with_compression(
    optimizer: KerasOptimizer, compression: Compression | LocalTraining
) -> KerasOptimizer:
    """Makes a Keras optimizer send the replicas' gradients compressed; returns the optimizer.

    In `fit`, in a custom `train_step` and in a custom loop, under every strategy. It must be
    called before the first step. The compression's state is in the optimizer's variables, and so in
    checkpoints. The compression itself is not part of the optimizer's configuration: add it
    again to an optimizer that was loaded, before its variables are loaded.

    Uncompressed gradients are summed by the method of `with_aggregation`. Every replica updates
    all weights.

    Args:
        optimizer: A Keras optimizer.
        compression: A compression of `unison.compression`.

    Raises:
        TypeError: It is not a Keras optimizer, or not a compression.
        ValueError: The optimizer already has a compression, or it is a `LossScaleOptimizer` and
            the compression trains the replicas apart.

    Examples:
        >>> import keras, unison, unison.train
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64)])
        ...     adam = unison.train.with_compression(keras.optimizers.Adam(), compression.int8())
        ...     model.compile(adam, "mse")
    """
    _require_compression(compression)
    from unison.keras.compression import give_compression

    give_compression(optimizer, compression)
    return optimizer


def compression_report(optimizer: keras.optimizers.Optimizer) -> tuple[Report, float]:
    """Returns the bytes that a step of `optimizer` sends, and the norm of the residuals.

    The norm is that of the sum of all replicas' residuals.

    Raises:
        ValueError: It has no compression, or has no weights yet.

    Examples:
        >>> import keras, unison, unison.train
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     kernel = keras.Variable("ones", shape=(64, 64))
        ...     sgd = unison.train.with_compression(keras.optimizers.SGD(), compression.sign())
        ...     sgd.build([kernel])
        >>> sent, norm = unison.train.compression_report(sgd)
        >>> round(sent.ratio), norm
        (30, 0.0)
    """
    from unison.keras.compression import report_of

    return report_of(optimizer)


class CompressedState(NamedTuple):
    """The state of a `compressed` transformation.

    Attributes:
        compression: The state of the compression.
        inner: The state of the wrapped transformation.
    """

    compression: CompressionState
    inner: Any


def compressed(
    transformation: optax.GradientTransformation,
    compression: Compression | LocalTraining,
    op: ReduceOp | str = ReduceOp.SUM,
    method: AggregationMethod | int | str | None = None,
    axis_name: str = REPLICA_AXIS,
) -> optax.GradientTransformationExtraArgs:
    """Returns an Optax transformation that first combines the replicas' gradients, compressed.

    For programs under `strategy.run`, and for a hand-written `jax.shard_map`. Its state differs
    between the replicas: store what `strategy.run` returns, and pass it on. With `local_sgd` and
    `diloco`, the weights differ as well, except after each averaging (up to rounding); their step
    needs the parameters.

    Args:
        transformation: An Optax optimizer or another transformation of gradients.
        compression: A compression of `unison.compression`.
        op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
        method: The method by which uncompressed gradients are summed.
        axis_name: The mesh axis of the replicas.

    Raises:
        TypeError: It is not a compression.
        ValueError: Unknown method or operation.

    Examples:
        >>> import jax.numpy as jnp, optax, unison, unison.train
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> sgd = unison.train.compressed(optax.sgd(0.1), compression.int8(), op="MEAN")
        >>> weights = jnp.ones((64, 64))
        >>> def step(state, x):
        ...     updates, state = sgd.update(jnp.full((64, 64), x), state, weights)
        ...     return optax.apply_updates(weights, updates), state
        >>> new, state = strategy.run(step, (sgd.init(weights), unison.PerReplica([1.0, 3.0])))
        >>> [round(float(w[0, 0]), 4) for w in new.values]
        [0.8, 0.8]
    """
    import optax

    _require_compression(compression)
    method, op = AggregationMethod.parse(method), parse_linear(op)
    inner = optax.with_extra_args_support(transformation)

    def init(params: Any) -> CompressedState:
        return CompressedState(compression.init(params), inner.init(params))

    def update(
        updates: Any, state: CompressedState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, CompressedState]:
        if isinstance(compression, Compression):
            updates, sent = compression.apply(updates, state.compression, op, method, axis_name)
            updates, after = inner.update(updates, state.inner, params, **extra_args)
            return updates, CompressedState(sent, after)
        if params is None:
            raise ValueError(
                "Replicas that train apart average their weights: pass them, as in "
                "update(gradients, state, params)."
            )
        own = compression.own_gradients(updates, op, axis_name)
        updates, after = inner.update(own, state.inner, params, **extra_args)
        weights, averaged = compression.synchronized(
            params, optax.apply_updates(params, updates), state.compression, method, axis_name
        )
        updates = jax.tree.map(lambda new, old: new - old, weights, params)
        return updates, CompressedState(averaged, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _require_compression(compression: Any) -> None:
    if not isinstance(compression, Compression | LocalTraining):
        raise TypeError(
            f"Expected a compression, such as unison.compression.int8(). Received: {compression!r}"
        )
