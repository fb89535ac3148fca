"""Gradients through collective operations, where each replica's are multiplied by a weight later.

What comes back through a collective operation is of the losses of all replicas. The part of another
replica's loss must be multiplied by that replica's weight, and not by the weight of the replica
whose parameters it reaches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from unison.collectives.presence import combined_by
from unison.thread_local import ThreadLocal

_weight: ThreadLocal[float | None] = ThreadLocal(None)


@contextlib.contextmanager
def gradients_weighted_by(weight: float | None) -> Iterator[None]:
    """Context manager in which all gradients of this replica will be multiplied by `weight`.

    Args:
        weight: The weight; None: gradients are summed as they are.
    """
    with _weight.bound_to(weight):
        yield


def across_replicas(operation: Callable[[Any], Any], value: Any) -> Any:
    """Returns `operation(value)`, a collective operation, with its gradient as above.

    What comes from a replica of weight 0, whose loss may be NaN, reaches no parameters.
    """
    weight = _weight.value
    if weight:
        value = gradient_times(value, 1 / weight)
    combined = combined_by(operation, value)
    return combined if weight is None else gradient_times(combined, weight)


def gradient_times(tree: Any, factor: float) -> Any:
    """Returns a tree whose gradients will be multiplied by `factor`; by 0, NaN is 0, too."""

    def leaf_times(leaf: Any) -> Any:
        is_inexact = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _gradient_times(leaf, factor) if is_inexact else leaf

    return jax.tree.map(leaf_times, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gradient_times(value: jax.Array, factor: float) -> jax.Array:
    del factor
    return value


def _forward(value: jax.Array, factor: float) -> tuple[jax.Array, None]:
    del factor
    return value, None


def _backward(factor: float, residual: None, gradient: jax.Array) -> tuple[jax.Array]:
    del residual
    return (gradient * factor if factor else jnp.zeros_like(gradient),)


_gradient_times.defvjp(_forward, _backward)
