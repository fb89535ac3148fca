"""All-reduce, all-gather, broadcast and reduce over the replica axis, on pytrees.

They are usable wherever a replica program is traced: inside `strategy.run`, under `jax.grad`,
and in a hand-written `jax.shard_map` with an axis of the same name.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.collectives.associative import combined_in_order
from unison.collectives.communication import CommunicationOptions
from unison.collectives.extrema import maximum, minimum
from unison.collectives.gradient_weights import across_replicas
from unison.collectives.packing import all_reduce_packed
from unison.collectives.uneven import sizes_of_next_gather
from unison.profiling.regions import AGGREGATE
from unison.runtime.placement import REPLICA_AXIS
from unison.runtime.precision import device_dtype
from unison.slices import IndexedSlices
from unison.thread_local import ThreadLocal
from unison.values import NotCombined, refuse_to_combine


class ReduceOp(enum.Enum):
    """The combination of several replicas' values (`tf.distribute.ReduceOp`, and three more)."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the member that `op` is or names, in any case (`"sum"`, `"MEAN"`)."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            "Expected a reduce operation: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name. "
            f"Received: {op!r}"
        )


#: An associative function of two values of equal structure.
Associative = Callable[[Any, Any], Any]


def all_reduce(
    op: ReduceOp | str | Associative,
    value: Any,
    axis_name: str = REPLICA_AXIS,
    options: CommunicationOptions | None = None,
) -> Any:
    """Combines `value` over the replicas; every replica gets the result.

    Arrays of one dtype are summed by one collective operation. The gradient of a sum is the sum of
    the gradients, as in TensorFlow: a loss that is equal on all replicas counts once for each.
    (In a hand-written `shard_map` with `check_vma=True`, JAX knows from its type that such a loss
    is one value, and counts it once.) The gradient of a maximum goes to the replica that holds it,
    or in equal parts to several.

    Args:
        op: A `ReduceOp` or its name; or an associative function of two values like `value`, which
            is applied in the order of the replicas, `(x0 * x1) * (x2 * x3)`, and need not be
            commutative.
        value: A pytree of arrays of equal shapes on all replicas. For `IndexedSlices`, which may be
            summed or averaged, the slices of all replicas are gathered.
        axis_name: The mesh axis to reduce over.
        options: Their `bytes_per_pack` limits the buffers of sums and means.

    Returns:
        A tree like `value`. Booleans are counted by `SUM`; the mean of integers is a floating-point
        number.

    Raises:
        ValueError: There is no such operation.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> x = unison.PerReplica([1.0, 5.0])
        >>> strategy.run(lambda x: unison.all_reduce("MAX", x), args=(x,)).values
        (Array(5., dtype=float32), Array(5., dtype=float32))

    TF: `tf.distribute.ReplicaContext.all_reduce`.
    """
    with jax.named_scope(AGGREGATE):
        value = jax.tree.map(_as_operand, value, is_leaf=_is_operand)
        return across_replicas(lambda own: _all_reduced(op, own, axis_name, options), value)


def _all_reduced(
    op: ReduceOp | str | Associative,
    value: Any,
    axis_name: str,
    options: CommunicationOptions | None,
) -> Any:
    if callable(op):
        return combined_in_order(op, value, axis_name)
    op = ReduceOp.parse(op)
    leaves, structure = jax.tree.flatten(value, is_leaf=_is_slices)
    if op is ReduceOp.PROD:
        return combined_in_order(_product, value, axis_name)
    if op in _EXTREMA:
        return jax.tree.map(lambda leaf: _EXTREMA[op](leaf, axis_name), value)
    return jax.tree.unflatten(structure, _added(op, leaves, axis_name, options))


def reduce(
    value: Any,
    op: ReduceOp | str | Associative,
    destination: int = 0,
    axis_name: str = REPLICA_AXIS,
) -> Any:
    """Combines `value` over the replicas; the replica `destination` gets the result.

    Args:
        value: A pytree of arrays of equal shapes on all replicas.
        op: As in `all_reduce`, where it is the first argument.
        destination: The index of the replica that gets the result.
        axis_name: The mesh axis to reduce over.

    Returns:
        A tree like `value`: the result on `destination`, zeros on the others.

    Raises:
        ValueError: There is no such operation or replica.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> x = unison.PerReplica([2.0, 5.0])
        >>> strategy.run(lambda x: unison.reduce(x, "PROD", destination=1), args=(x,)).values
        (Array(0., dtype=float32), Array(10., dtype=float32))
    """
    _require_replica(destination, axis_name)
    is_destination = lax.axis_index(axis_name) == destination
    return jax.tree.map(
        lambda leaf: jnp.where(is_destination, leaf, jnp.zeros_like(leaf)),
        all_reduce(op, value, axis_name),
    )


def all_gather(value: Any, axis: int, axis_name: str = REPLICA_AXIS) -> Any:
    """Concatenates the replicas' values along `axis`; every replica gets the result.

    The gradient of an all-gather is the replica's own slice of the summed gradients, as in
    TensorFlow.

    Args:
        value: A pytree of arrays, each of rank 1 or more. Inside `strategy.run` their sizes along
            `axis` may differ between replicas whose arguments differ in shape.
        axis: The axis to concatenate along.
        axis_name: The mesh axis to gather over.

    Raises:
        ValueError: A leaf is a scalar or `axis` is not one of its axes.

    TF: `tf.distribute.ReplicaContext.all_gather`.
    """

    def gather(leaf: Any) -> jax.Array:
        refuse_to_combine(leaf)
        leaf = jnp.asarray(leaf)
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"all_gather concatenates along an axis of the value. Received: axis={axis} and a "
                f"value of shape {leaf.shape}. Add the axis first (value[None])."
            )
        sizes = sizes_of_next_gather(leaf.shape[axis])
        return across_replicas(
            lambda own: _gathered_along(own, axis % leaf.ndim, sizes, axis_name), leaf
        )

    return jax.tree.map(gather, value, is_leaf=lambda leaf: isinstance(leaf, NotCombined))


def _gathered_along(
    leaf: jax.Array, axis: int, sizes: Sequence[int] | None, axis_name: str
) -> jax.Array:
    """All-gathers values of the given `sizes` along `axis`, padded to the largest in transit."""
    if sizes is None:
        return lax.all_gather(leaf, axis_name, axis=axis, tiled=True)
    padding = [(0, 0)] * leaf.ndim
    padding[axis] = (0, max(sizes) - leaf.shape[axis])
    rows = lax.all_gather(jnp.pad(leaf, padding), axis_name)
    pieces = [lax.slice_in_dim(rows[index], 0, size, axis=axis) for index, size in enumerate(sizes)]
    return jnp.concatenate(pieces, axis)


def broadcast(value: Any, source: int = 0, axis_name: str = REPLICA_AXIS) -> Any:
    """Returns the value of replica `source` on every replica.

    Args:
        value: A pytree of arrays of equal shapes on all replicas.
        source: The index of the replica whose value is taken.
        axis_name: The mesh axis to broadcast over.

    Raises:
        ValueError: There is no such replica.
    """
    _require_replica(source, axis_name)
    is_source = lax.axis_index(axis_name) == source

    def keep(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return jnp.where(is_source, leaf, jnp.zeros_like(leaf))

    kept = jax.tree.map(keep, value)
    total = across_replicas(lambda own: lax.psum(own, axis_name), kept)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), total, kept)


#: Sums tensors over the replicas: maps a replica's tensors, and the axis name, to the sums.
Adder = Callable[[Sequence[jax.Array], str], list[jax.Array]]
_adder: ThreadLocal[Adder | None] = ThreadLocal(None)


@contextlib.contextmanager
def adding_by(adder: Adder) -> Iterator[None]:
    """Context manager in which this thread traces sums over the replicas with `adder`."""
    with _adder.bound_to(adder):
        yield


def sum_over_replicas(tensors: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums over the replicas of `tensors`; Booleans are counted."""
    adder = _adder.value or all_reduce_packed
    return adder([_countable(tensor) for tensor in tensors], REPLICA_AXIS)


def mean_dtype(dtype: Any) -> Any:
    """Returns the dtype of a mean of values of `dtype`: for integers, a floating one, as in TF."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return device_dtype(jnp.float32 if jnp.dtype(dtype).itemsize < 4 else jnp.float64)


def _added(
    op: ReduceOp,
    leaves: list[Any],
    axis_name: str,
    options: CommunicationOptions | None,
) -> list[Any]:
    """Returns the sums or means over the replicas."""
    count = lax.axis_size(axis_name)
    arrays = [_countable(leaf) for leaf in leaves if not _is_slices(leaf)]
    adder = _adder.value
    if adder is not None and axis_name == REPLICA_AXIS:
        totals = adder(arrays, axis_name)
    else:
        packs = [] if options is None else options.packs(arrays)
        totals = [total for pack in packs for total in all_reduce_packed(pack, axis_name)]
        totals = totals or lax.psum(arrays, axis_name)
    if op is ReduceOp.MEAN:
        totals = [total.astype(mean_dtype(total.dtype)) / count for total in totals]
    remaining = iter(totals)
    scale = count if op is ReduceOp.MEAN else 1
    return [
        _gathered(leaf, scale, axis_name) if _is_slices(leaf) else next(remaining)
        for leaf in leaves
    ]


def _gathered(slices: IndexedSlices, scale: int, axis_name: str) -> IndexedSlices:
    values, indices = all_gather((slices.values, slices.indices), 0, axis_name)
    return IndexedSlices(values if scale == 1 else values / scale, indices, slices.dense_shape)


_EXTREMA: dict[ReduceOp, Callable[[jax.Array, str], jax.Array]] = {
    ReduceOp.MIN: minimum,
    ReduceOp.MAX: maximum,
}


def _product(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.multiply, left, right)


def _is_slices(value: Any) -> bool:
    return isinstance(value, IndexedSlices)


def _countable(array: jax.Array) -> jax.Array:
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def _is_operand(value: Any) -> bool:
    return isinstance(value, IndexedSlices | NotCombined)


def _as_operand(leaf: Any) -> Any:
    refuse_to_combine(leaf)
    return leaf if _is_slices(leaf) else jnp.asarray(leaf)


def _require_replica(index: int, axis_name: str) -> None:
    count = lax.axis_size(axis_name)
    if not 0 <= index < count:
        raise ValueError(f"Expected the index of one of {count} replicas. Received: {index!r}")
