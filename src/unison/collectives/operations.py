"""All-reduce, all-gather and broadcast over the replica axis, on pytrees.

They are usable wherever a replica program is traced: inside `strategy.run`, under `jax.grad`,
and in a hand-written `jax.shard_map` with an axis of the same name.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.runtime.placement import REPLICA_AXIS


class ReduceOp(enum.Enum):
    """How values of several replicas become one (`tf.distribute.ReduceOp`)."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the member that `op` is or names, in any case (`"sum"`, `"MEAN"`)."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            f"Expected a reduce operation: ReduceOp.SUM, ReduceOp.MEAN, 'SUM' or 'MEAN'. "
            f"Received: {op!r}"
        )


def all_reduce(op: ReduceOp | str, value: Any, axis_name: str = REPLICA_AXIS) -> Any:
    """Combines `value` over the replicas; every replica gets the result.

    The whole tree is reduced by one collective operation. The gradient of an all-reduce is the
    all-reduce of the gradients, as in TensorFlow: a loss that is equal on all replicas counts
    once for each. (In a hand-written `shard_map` with `check_vma=True`, JAX knows by its type that
    such a loss is one value, and counts it once.)

    Args:
        op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
        value: A pytree of arrays of equal shapes on all replicas.
        axis_name: The mesh axis to reduce over.

    Returns:
        A tree like `value`.

    TF: `tf.distribute.ReplicaContext.all_reduce`.
    """
    total = lax.psum(jax.tree.map(jnp.asarray, value), axis_name)
    if ReduceOp.parse(op) is ReduceOp.SUM:
        return total
    count = lax.axis_size(axis_name)
    return jax.tree.map(lambda leaf: leaf / count, total)


def all_gather(value: Any, axis: int, axis_name: str = REPLICA_AXIS) -> Any:
    """Concatenates the replicas' values along `axis`; every replica gets the result.

    The gradient of an all-gather is the replica's own slice of the summed gradients, as in
    TensorFlow.

    Args:
        value: A pytree of arrays, each of rank 1 or more and of equal shape on all replicas.
        axis: The axis to concatenate along.
        axis_name: The mesh axis to gather over.

    Raises:
        ValueError: A leaf is a scalar or `axis` is not one of its axes.

    TF: `tf.distribute.ReplicaContext.all_gather`.
    """

    def gather(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"all_gather concatenates along an axis of the value. Received: axis={axis} and a "
                f"value of shape {leaf.shape}. Add the axis first (value[None])."
            )
        return lax.all_gather(leaf, axis_name, axis=axis % leaf.ndim, tiled=True)

    return jax.tree.map(gather, value)


def broadcast(value: Any, source: int = 0, axis_name: str = REPLICA_AXIS) -> Any:
    """Returns the value of replica `source` on every replica.

    Args:
        value: A pytree of arrays of equal shapes on all replicas.
        source: The index of the replica whose value is taken.
        axis_name: The mesh axis to broadcast over.
    """
    is_source = lax.axis_index(axis_name) == source

    def keep(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return jnp.where(is_source, leaf, jnp.zeros_like(leaf))

    kept = jax.tree.map(keep, value)
    total = lax.psum(kept, axis_name)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), total, kept)
