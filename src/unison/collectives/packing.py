"""Gradients in one buffer: one collective for many tensors.

A collective costs a rendezvous of all replicas however small its tensor is, so the tensors of
one dtype travel in one buffer. The buffer is filled by `dynamic_update_slice` and not by
`concatenate`: into a concatenation XLA's CPU compiler fuses the reductions that make bias
gradients, and computes them again for every element.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from unison.runtime.placement import REPLICA_AXIS


def pack(tensors: Sequence[jax.Array]) -> jax.Array:
    """Returns the elements of `tensors`, which have one dtype, as one vector."""
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
    tensors: Sequence[jax.Array], axis_name: str = REPLICA_AXIS
) -> list[jax.Array]:
    """Returns the sums over the replicas of `tensors`, with one all-reduce a dtype."""
    sums: list[jax.Array | None] = [None] * len(tensors)
    by_dtype: dict[jnp.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    for indices in by_dtype.values():
        group = [tensors[index] for index in indices]
        if len(group) == 1:
            reduced = [lax.psum(group[0], axis_name)]
        else:
            reduced = unpack(lax.psum(pack(group), axis_name), group)
        for index, tensor in zip(indices, reduced, strict=True):
            sums[index] = tensor
    return sums  # type: ignore[return-value]
