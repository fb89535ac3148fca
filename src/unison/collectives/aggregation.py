"""Combines the gradients of several replicas: `aggregate`, by an `AggregationMethod`.

All methods give the same sums up to round-off; they differ in the number of collective operations,
in how these are built, and in the memory that they take. The measurements are in the documentation,
"Aggregation methods"; `python -m benchmarks aggregation` repeats them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.collectives.communication import options_in_scope
from unison.collectives.method import AggregationMethod
from unison.collectives.operations import ReduceOp, mean_dtype
from unison.collectives.packing import (
    all_reduce_packed,
    pack,
    reduce_packed,
    share_buffers,
    takes_several_buffers,
    unpack,
)
from unison.collectives.tree import Team, all_reduce_tree
from unison.profiling.regions import AGGREGATE
from unison.runtime.placement import REPLICA_AXIS, placement_in_scope
from unison.slices import IndexedSlices

#: The number of bytes that `ACCUMULATE_N` reduces at a time, unless the options specify it.
_CHUNK_BYTES = 2**20

#: A larger tensor is reduced faster alone than copied into a buffer with others. Between processes
#: on CPU, one that is not larger is reduced faster by a tree of exchanges than by an all-reduce.
_LARGE_BYTES = 2**20


logger = logging.getLogger("unison")


def aggregate(
    tensors: Any,
    method: AggregationMethod | int | str | None = AggregationMethod.DEFAULT,
    op: ReduceOp | str = ReduceOp.SUM,
    axis_name: str = REPLICA_AXIS,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Combines `tensors` over the replicas by `method`; every replica gets the result.

    Like `all_reduce`, it is used inside a replica program and has the all-reduce of the gradients
    as its gradient. Booleans are counted; the mean of integers is a floating-point number.

    Args:
        tensors: A pytree of arrays of equal shapes on all replicas. `IndexedSlices` become dense.
        method: An `AggregationMethod`, its name or TensorFlow's number; None means `DEFAULT`:
            that of the strategy's `CommunicationOptions`, if they have one.
        op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
        axis_name: The mesh axis to reduce over.
        hosts: The indices of the replicas of each host, for `TREE` and `DEFAULT`. Default: those
            of each process of the current strategy; outside a strategy, one host.

    Returns:
        A tree like `tensors`.

    Raises:
        ValueError: There is no such method, `op` is neither a sum nor a mean, or `hosts` does not
            contain every replica exactly once.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> gradients = unison.PerReplica([1.0, 10.0])
        >>> strategy.run(lambda g: unison.aggregate(g, "TREE"), args=(gradients,)).values
        (Array(11., dtype=float32), Array(11., dtype=float32))

    TF: `tf.AggregationMethod`, and `all_reduce` of a `tf.distribute.ReplicaContext`.
    """
    method, op = AggregationMethod.parse(method), parse_linear(op)
    count = lax.axis_size(axis_name)
    hosts = _hosts_in_scope(axis_name) if hosts is None else _checked(hosts, count)
    leaves, structure = jax.tree.flatten(tensors, lambda node: isinstance(node, IndexedSlices))
    leaves = [_countable(jnp.asarray(leaf)) for leaf in leaves]
    with jax.named_scope(AGGREGATE):
        if count > 1 and leaves:
            leaves = _sums(leaves, method, axis_name, hosts)
        if op is ReduceOp.MEAN:
            leaves = [leaf.astype(mean_dtype(leaf.dtype)) / count for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def parse_linear(op: ReduceOp | str) -> ReduceOp:
    """Returns the operation that `op` is or names, which must be `SUM` or `MEAN`."""
    parsed = ReduceOp.parse(op)
    if parsed not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"Gradients are aggregated by SUM or MEAN. Received: {op!r}. For other operations use "
            "unison.all_reduce."
        )
    return parsed


def _sums(
    tensors: list[jax.Array], method: AggregationMethod, axis_name: str, hosts: Sequence[Team]
) -> list[jax.Array]:
    most_bytes = math.inf
    if method is AggregationMethod.DEFAULT and axis_name == REPLICA_AXIS:
        options = options_in_scope()
        method, most_bytes = options.method, options.bytes_per_pack or math.inf
    if method is AggregationMethod.ADD_N:
        return all_reduce_packed(tensors, axis_name, most_bytes, is_buffer_wanted=True)
    if method is AggregationMethod.TREE:
        return reduce_packed(
            tensors, lambda buffer: all_reduce_tree(buffer, hosts, axis_name), most_bytes
        )
    if method is AggregationMethod.ACCUMULATE_N:
        return _sums_in_turn(
            tensors, axis_name, _CHUNK_BYTES if most_bytes == math.inf else most_bytes
        )
    return _fastest_sums(tensors, axis_name, hosts, most_bytes)


def _fastest_sums(
    tensors: list[jax.Array], axis_name: str, hosts: Sequence[Team], most_bytes: float
) -> list[jax.Array]:
    """Reduces `tensors` by the method that was measured to be fastest."""
    if takes_several_buffers(axis_name):
        return all_reduce_packed(tensors, axis_name, most_bytes)

    def reduce(buffer: jax.Array) -> jax.Array:
        by_tree = len(hosts) > 1 and buffer.nbytes <= _LARGE_BYTES
        how = "by a tree" if by_tree else "by XLA's all-reduce"
        logger.debug("A SUM of %.3f MiB: %s", buffer.nbytes / 2**20, how)
        return all_reduce_tree(buffer, hosts, axis_name) if by_tree else lax.psum(buffer, axis_name)

    return reduce_packed(tensors, reduce, min(most_bytes, _LARGE_BYTES))


def _sums_in_turn(
    tensors: Sequence[jax.Array], axis_name: str, chunk_bytes: float
) -> list[jax.Array]:
    """Reduces `tensors` one chunk at a time, each in place."""
    if sum(tensor.nbytes for tensor in tensors) <= chunk_bytes:
        return all_reduce_packed(tensors, axis_name)
    summed = list(tensors)
    for indices in share_buffers(tensors, chunk_bytes):
        group = _sum_chunks([tensors[index] for index in indices], axis_name, chunk_bytes)
        for index, total in zip(indices, group, strict=True):
            summed[index] = total
    return summed


def _sum_chunks(
    tensors: Sequence[jax.Array], axis_name: str, chunk_bytes: float
) -> list[jax.Array]:
    """Reduces the tensors of one buffer in a loop.

    Only a loop reduces in place: XLA combines consecutive all-reduces of a program, and then needs
    all of their buffers at the same time. There are always at least two chunks, because XLA removes
    loops with a single iteration.
    """
    size = sum(tensor.size for tensor in tensors)
    count = max(2, math.ceil(size * tensors[0].dtype.itemsize / chunk_bytes))
    length = math.ceil(size / count)

    def sum_chunk(index: jax.Array, tensors: list[jax.Array]) -> list[jax.Array]:
        buffer = pack(tensors)
        # The last chunk ends where the buffer does, and overlaps with the one before it.
        start = jnp.minimum(index * length, size - length)
        chunk = lax.dynamic_slice_in_dim(buffer, start, length)
        is_new = start + jnp.arange(length) >= index * length
        total = lax.psum(jnp.where(is_new, chunk, jnp.zeros_like(chunk)), axis_name)
        buffer = lax.dynamic_update_slice_in_dim(buffer, jnp.where(is_new, total, chunk), start, 0)
        return unpack(buffer, tensors)

    return lax.fori_loop(0, count, sum_chunk, list(tensors))


def _hosts_in_scope(axis_name: str) -> tuple[Team, ...]:
    """Returns the replicas by process if the axis is the current strategy's, else as one host."""
    count = lax.axis_size(axis_name)
    devices = placement_in_scope().devices
    if axis_name != REPLICA_AXIS or len(devices) != count:
        return (tuple(range(count)),)
    of_process: dict[int, list[int]] = {}
    for index, device in enumerate(devices):
        of_process.setdefault(device.process_index, []).append(index)
    return tuple(map(tuple, of_process.values()))


def _checked(hosts: Sequence[Sequence[int]], count: int) -> tuple[Team, ...]:
    checked = tuple(tuple(host) for host in hosts)
    if sorted(index for host in checked for index in host) != list(range(count)) or () in checked:
        raise ValueError(
            f"hosts must name each of the {count} replicas once, grouped by host, such as "
            f"[[0, 1], [2, 3]]. Received: {hosts!r}"
        )
    return checked


def _countable(tensor: jax.Array) -> jax.Array:
    return tensor.astype(jnp.int32) if tensor.dtype == jnp.bool_ else tensor
