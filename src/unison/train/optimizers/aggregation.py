"""An aggregation method for the optimizers of Keras and Optax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import lax

from unison.collectives import AggregationMethod, ReduceOp, aggregate
from unison.collectives.aggregation import parse_linear
from unison.runtime.placement import REPLICA_AXIS

if TYPE_CHECKING:
    import keras
    import optax


def with_aggregation(
    optimizer: keras.optimizers.Optimizer, method: AggregationMethod | int | str
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer sum the replicas' gradients by `method`; returns the optimizer.

    In `fit`, in a custom `train_step` and in a custom loop. It must be called before the first
    step: a compiled step keeps its method. The method is not part of the optimizer's
    configuration: set it again for an optimizer that was loaded. With a method other than
    `DEFAULT`, every replica updates all weights.

    Args:
        optimizer: A Keras optimizer.
        method: An `AggregationMethod` or its name.

    Raises:
        ValueError: Unknown method.

    Examples:
        >>> import keras, unison, unison.train
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     sgd = unison.train.with_aggregation(keras.optimizers.SGD(0.1), "TREE")
        ...     model.compile(sgd, "mse")
    """
    from unison.keras.aggregation import give_aggregation_method

    give_aggregation_method(optimizer, AggregationMethod.parse(method))
    return optimizer


def aggregated(
    transformation: optax.GradientTransformation,
    method: AggregationMethod | int | str | None = AggregationMethod.DEFAULT,
    op: ReduceOp | str = ReduceOp.SUM,
    axis_name: str = REPLICA_AXIS,
) -> optax.GradientTransformationExtraArgs:
    """Returns an Optax transformation that first combines the replicas' gradients by `method`.

    For programs under `strategy.run`, and for a hand-written `jax.shard_map`. Elsewhere,
    there is nothing to combine.

    Args:
        transformation: An Optax optimizer or another transformation of gradients.
        method: An `AggregationMethod` or its name.
        op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
        axis_name: The mesh axis of the replicas.

    Raises:
        ValueError: Unknown method or operation.

    Examples:
        >>> import jax, optax, unison, unison.train
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> sgd = unison.train.aggregated(optax.sgd(0.1), "TREE", op="MEAN")
        >>> def step(weight, x):
        ...     gradient = jax.grad(lambda w: w * x)(weight)
        ...     update, _ = sgd.update(gradient, sgd.init(weight))
        ...     return optax.apply_updates(weight, update)
        >>> [float(w) for w in strategy.run(step, (1.0, unison.PerReplica([1.0, 2.0]))).values]
        [0.85..., 0.85...]
    """
    import optax

    method, op = AggregationMethod.parse(method), parse_linear(op)
    inner = optax.with_extra_args_support(transformation)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if _is_bound(axis_name):
            updates = aggregate(updates, method, op, axis_name)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _is_bound(axis_name: str) -> bool:
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True
