"""Combines one component per replica into one value: `Strategy.reduce` and `gather` on a leaf."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.cells import Cell, Layout, has_cell
from unison.collectives import CrossDeviceOps, ReduceOp, all_gather, all_reduce
from unison.collectives.components import on_device, reduce_components, sum_dtype
from unison.collectives.operations import mean_dtype
from unison.lifting import current_lift
from unison.program import MIRRORED, PER_REPLICA
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.replica_function import ReplicaFunction
from unison.slices import IndexedSlices
from unison.values import (
    DistributedValues,
    NotCombined,
    PerReplica,
    ReplicaLocal,
    is_distributed,
    refuse_to_combine,
)
from unison.variables import Variable

Axis = int | Sequence[int] | None


def is_leaf(value: Any) -> bool:
    """Whether `value` is one value in a tree that is reduced or gathered."""
    is_one = is_distributed(value) or isinstance(value, IndexedSlices | NotCombined)
    return is_one or has_cell(value)


def components_of(value: Any) -> tuple[Any, ...] | None:
    """Returns the components of a leaf (for a variable, its copies); None if it has none."""
    if isinstance(value, DistributedValues):
        return value.values
    if not has_cell(value):
        return None
    lift = current_lift()
    if lift is not None:
        return ReplicaLocal(lift.own_copy(value.cell)).values
    if isinstance(value, Variable):
        return value.local_copies()
    return tuple(map(on_device, value.cell.copies()))  # of Keras' variable


def reduced(
    op: ReduceOp,
    value: Any,
    axis: Axis,
    placement: Placement,
    cross_device_ops: CrossDeviceOps | None = None,
) -> Any:
    """Combines the components of a leaf into one value; see `Strategy.reduce`."""
    refuse_to_combine(value)
    if has_cell(value):
        value = _copies_or_value(value.cell)
    if isinstance(value, ReplicaLocal):
        return _reduced_in_program(op, value.local, axis)
    if isinstance(value, IndexedSlices):
        return _reduced_slices(op, value, axis, placement)
    if isinstance(value, PerReplica):
        if axis is None and cross_device_ops is not None:
            return cross_device_ops.reduce(op, value, placement.devices[0])
        stacked = value.stacked(placement) if axis is None else None
        if stacked is not None:
            return _over_replicas(op, placement)(stacked).addressable_data(0)
        components = (
            value.of_all_replicas(placement) if placement.spans_processes else value.components
        )
        return reduce_components(op, components, axis)
    components = components_of(value) or (value,)
    return _reduced_whole(op, components[0], axis, placement)


def gathered(value: Any, axis: int, placement: Placement) -> Any:
    """Concatenates the components of a leaf along `axis`; see `Strategy.gather`."""
    refuse_to_combine(value)
    if isinstance(value, ReplicaLocal):
        return all_gather(value.local, axis)
    lift = current_lift()
    if has_cell(value) and lift is not None:
        return all_gather(lift.own_copy(value.cell), axis)
    components = components_of(value)
    if components is None:
        return value
    if placement.spans_processes:
        given = value if isinstance(value, PerReplica) else PerReplica(components)
        components = given.of_all_replicas(placement)
    parts = [np.asarray(part) for part in components]
    if not -parts[0].ndim <= axis < parts[0].ndim:
        raise ValueError(
            "gather concatenates along an axis of the components. Received: "
            f"axis={axis}, components of shape {parts[0].shape}"
        )
    return on_device(np.concatenate(parts, axis))


def _copies_or_value(cell: Cell) -> Any:
    """Returns the copies of a variable as components; if they are equal by design, one of them."""
    lift = current_lift()
    if lift is not None:
        own = lift.own_copy(cell)
        return ReplicaLocal(own) if lift.copies_differ(cell) and not cell.is_alone else own
    if cell.layout is Layout.LOCAL and not cell.is_alone:
        return PerReplica(cell.copies())
    return cell.read()


def _reduced_whole(op: ReduceOp, whole: Any, axis: Axis, placement: Placement) -> Any:
    """Reduces a value that all replicas have in common."""
    is_traced = isinstance(whole, jax.core.Tracer)
    adds = op in (ReduceOp.SUM, ReduceOp.PROD) and placement.num_replicas > 1
    if adds and (is_traced or np.any(np.asarray(whole) != 0)):
        raise ValueError(
            f"The {op.name} over {placement.num_replicas} replicas of a value that is the same on "
            f"all of them is ambiguous. Received: {whole!r}. Pass what strategy.run returned, or "
            "use ReduceOp.MEAN."
        )
    if axis is None:
        return whole
    return _ALONG[op](whole, axis) if is_traced else reduce_components(op, [whole], axis)


def _reduced_slices(
    op: ReduceOp, slices: IndexedSlices, axis: Axis, placement: Placement
) -> IndexedSlices:
    """Joins the slices of all replicas; `MEAN` divides them by the number of replicas."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) or axis is not None:
        raise ValueError(
            "IndexedSlices can be reduced by SUM and MEAN with axis=None. "
            f"Received: {op}, axis={axis}"
        )
    count = placement.num_replicas
    is_whole = not is_distributed(slices.values)
    if is_whole and op is ReduceOp.SUM and count > 1:
        raise ValueError(
            f"The SUM over {count} replicas of IndexedSlices that are the same on all of them is "
            "ambiguous. Pass what strategy.run returned, or use ReduceOp.MEAN."
        )
    values = gathered(slices.values, 0, placement)
    if op is ReduceOp.MEAN and not is_whole:
        values = values / count
    return IndexedSlices(values, gathered(slices.indices, 0, placement), slices.dense_shape)


@functools.lru_cache
def _over_replicas(op: ReduceOp, placement: Placement) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that combines the slices of an array; every replica gets the result."""
    return placement.program(
        ReplicaFunction(
            lambda own: _OF_SLICES[op](own[0]), PER_REPLICA, MIRRORED, name=f"reduce by {op.name}"
        )
    )


def _sum_of_slices(own: jax.Array) -> jax.Array:
    return lax.psum(own.astype(sum_dtype(own.dtype)), REPLICA_AXIS)


def _mean_of_slices(own: jax.Array) -> jax.Array:
    dtype = mean_dtype(own.dtype)
    return (lax.psum(own.astype(dtype), REPLICA_AXIS) / lax.axis_size(REPLICA_AXIS)).astype(dtype)


def _all_slices(own: jax.Array) -> jax.Array:
    return lax.all_gather(own, REPLICA_AXIS)


_OF_SLICES: dict[ReduceOp, Callable[[jax.Array], jax.Array]] = {
    ReduceOp.SUM: _sum_of_slices,
    ReduceOp.MEAN: _mean_of_slices,
    ReduceOp.MIN: lambda own: jnp.min(_all_slices(own), axis=0),
    ReduceOp.MAX: lambda own: jnp.max(_all_slices(own), axis=0),
    ReduceOp.PROD: lambda own: jnp.prod(_all_slices(own), axis=0, dtype=own.dtype),
}


def _reduced_in_program(op: ReduceOp, local: Any, axis: Axis) -> Any:
    """Reduces the values of all replicas, inside the `merge_call` of a program."""
    if axis is None:
        return all_reduce(op, local)
    local = jnp.asarray(local)
    if op is not ReduceOp.MEAN:
        return all_reduce(op, _ALONG[op](local, axis))
    axes = (axis,) if isinstance(axis, int) else axis
    own_count = math.prod(local.shape[axis] for axis in axes)
    total, count = all_reduce(ReduceOp.SUM, (jnp.sum(local, axis), own_count))
    return total.astype(mean_dtype(total.dtype)) / count


_ALONG: dict[ReduceOp, Callable[..., jax.Array]] = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MIN: jnp.min,
    ReduceOp.MAX: jnp.max,
    ReduceOp.PROD: jnp.prod,
}
