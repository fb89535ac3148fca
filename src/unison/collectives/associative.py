"""Reducing by any associative function, in the order of the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def combined_in_order(op: Callable[[Any, Any], Any], value: Any, axis_name: str) -> Any:
    """Returns `x0 * x1 * ... * x(n-1)` of the replicas' values, for an associative `*`.

    After the exchange at distance d, replica r has combined the values of the last 2d replicas up
    to itself (or of all of them, if it is one of the first): after ceil(log2(n)) exchanges the last
    replica has the complete result, for any n, and a broadcast distributes it. Operands stay in
    order, so `op` need not be commutative.

    Source: Hillis and Steele 1986, "Data parallel algorithms" (a parallel prefix sum).
    """
    count = lax.axis_size(axis_name)
    index = lax.axis_index(axis_name)
    distance = 1
    while distance < count:
        pairs = [(sender, sender + distance) for sender in range(count - distance)]
        receives = index >= distance

        def from_the_left(own: jax.Array, pairs: Any = pairs, receives: Any = receives) -> Any:
            # A replica that receives nothing uses its own value, and drops the result: with zeros,
            # `op` or its gradient might fail.
            return jnp.where(receives, lax.ppermute(own, axis_name, pairs), own)

        combined = op(jax.tree.map(from_the_left, value), value)
        value = jax.tree.map(
            lambda new, own, receives=receives: jnp.where(receives, new, own), combined, value
        )
        distance *= 2
    return jax.tree.map(lambda leaf: _from_the_last(leaf, count, index, axis_name), value)


def _from_the_last(leaf: jax.Array, count: int, index: jax.Array, axis_name: str) -> jax.Array:
    kept = jnp.where(index == count - 1, leaf, jnp.zeros_like(leaf))
    return lax.psum(kept, axis_name).astype(leaf.dtype)
