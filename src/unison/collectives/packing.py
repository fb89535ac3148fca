"""Tensors in one buffer: one collective for many tensors.

A collective of XLA costs a rendezvous of all replicas however small its tensor is, so on CPUs the
tensors of one dtype are packed into one buffer where XLA sums them. The buffer is filled by
`dynamic_update_slice` and not by `concatenate`: XLA's CPU compiler fuses the reductions that
compute bias gradients into a concatenation, and computes them again for every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from unison.runtime.placement import REPLICA_AXIS, placement_in_scope
from unison.runtime.shared_memory import shared_memory_of


def pack(tensors: Sequence[jax.Array]) -> jax.Array:
    """Returns the elements of `tensors`, which have one dtype, as one vector."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    buffer = jnp.zeros(sum(tensor.size for tensor in tensors), tensors[0].dtype)
    start = 0
    for tensor in tensors:
        buffer = lax.dynamic_update_slice(buffer, tensor.reshape(-1), (start,))
        start += tensor.size
    return buffer


def unpack(buffer: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the tensors that `pack` put into `buffer`, in the shapes of `like`."""
    tensors = []
    start = 0
    for tensor in like:
        piece = lax.slice(buffer, (start,), (start + tensor.size,))
        tensors.append(piece.reshape(tensor.shape))
        start += tensor.size
    return tensors


def all_reduce_packed(
    tensors: Sequence[jax.Array],
    axis_name: str = REPLICA_AXIS,
    most_bytes: float = math.inf,
    is_buffer_wanted: bool = False,
) -> list[jax.Array]:
    """Returns the sums over the replicas of `tensors`, with as few all-reduces as possible.

    That is one per dtype; or one, where a collective takes several buffers.

    Args:
        tensors: The tensors.
        axis_name: The mesh axis of the replicas.
        most_bytes: The most bytes that one all-reduce takes, except for a single larger tensor.
        is_buffer_wanted: Whether to use a common buffer also where it only costs time.
    """
    needs_buffer = is_buffer_wanted and _is_on_accelerators() and not _is_divided()
    if needs_buffer or not takes_several_buffers(axis_name):
        return reduce_packed(tensors, lambda buffer: lax.psum(buffer, axis_name), most_bytes)
    if most_bytes == math.inf:
        return lax.psum(list(tensors), axis_name)
    summed = list(tensors)
    for indices in share_buffers(tensors, most_bytes):
        for index, total in zip(
            indices, lax.psum([tensors[index] for index in indices], axis_name), strict=True
        ):
            summed[index] = total
    return summed


def takes_several_buffers(axis_name: str) -> bool:
    """Whether an all-reduce takes tensors in place, without a common buffer for each dtype.

    On accelerators it does: XLA combines all-reduces of gradients that are computed shortly after
    each other, up to a size that it chooses, and computes the next ones meanwhile. A common buffer
    would make one all-reduce that depends on every gradient, and copy all of them twice.
    """
    if _is_on_accelerators():
        return True
    if axis_name != REPLICA_AXIS:
        return False
    if _is_divided():
        return True
    placement = placement_in_scope()
    if placement.is_elastic:
        return placement.spans_processes
    return placement.exchanges_buffers or shared_memory_of(placement.devices) is not None


def _is_on_accelerators() -> bool:
    return placement_in_scope().platform != "cpu"


def _is_divided() -> bool:
    """Whether cores divide tensors: in one buffer, each would need the parts of all the others."""
    return placement_in_scope().rules is not None


def reduce_packed(
    tensors: Sequence[jax.Array],
    reduce: Callable[[jax.Array], jax.Array],
    most_bytes: float = math.inf,
) -> list[jax.Array]:
    """Returns `tensors`, reduced in buffers of one dtype.

    Args:
        tensors: The tensors.
        reduce: Reduces a buffer: a vector with the elements of several tensors, or one tensor as
            it is.
        most_bytes: The size of the largest buffer; a larger tensor is reduced alone.
    """
    reduced: list[jax.Array | None] = [None] * len(tensors)
    for indices in share_buffers(tensors, most_bytes):
        group = [tensors[index] for index in indices]
        pieces = [reduce(group[0])] if len(group) == 1 else unpack(reduce(pack(group)), group)
        for index, piece in zip(indices, pieces, strict=True):
            reduced[index] = piece
    return reduced  # type: ignore[return-value]


def share_buffers(tensors: Sequence[jax.Array], most_bytes: float) -> list[list[int]]:
    """Returns, for every buffer of one dtype, the indices of the tensors in it.

    The buffers have at most `most_bytes`, except for those of a single larger tensor.
    """
    buffers: list[list[int]] = []
    open_buffers: dict[jnp.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        buffer, size = open_buffers.get(tensor.dtype, ([], 0))
        if size + tensor.nbytes > most_bytes:
            buffer, size = [], 0
        if not buffer:
            buffers.append(buffer)
        buffer.append(index)
        if tensor.nbytes <= most_bytes:
            open_buffers[tensor.dtype] = (buffer, size + tensor.nbytes)
    return buffers
