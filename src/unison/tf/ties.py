"""Operations whose gradients differ between JAX and TensorFlow where two values are equal.

There each has another subgradient: JAX takes half of each side, TensorFlow one side.

Source: `tensorflow/python/ops/math_grad.py` and `clip_ops.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.abs(x)


@_magnitude.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return jnp.abs(x), jnp.sign(x) * dx


def magnitude(x: Any) -> jax.Array:
    """`jnp.abs`, with the gradient 0 at 0.

    Examples:
        >>> float(jax.grad(magnitude)(0.0)), float(jax.grad(jnp.abs)(0.0))
        (0.0, 1.0)
    """
    return _magnitude(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else jnp.abs(x)


@jax.custom_jvp
def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.maximum(x, y)


@_larger.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return jnp.maximum(x, y), _chosen(x >= y, dx, dy)


def larger(x: Any, y: Any) -> jax.Array:
    """`jnp.maximum`, with the whole gradient for the first one where both are equal.

    Examples:
        >>> [float(each) for each in jax.grad(larger, (0, 1))(1.0, 1.0)]
        [1.0, 0.0]
    """
    real = _real(x, y)
    return jnp.maximum(x, y) if real is None else _larger(*real)


@jax.custom_jvp
def _smaller(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.minimum(x, y)


@_smaller.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return jnp.minimum(x, y), _chosen(x <= y, dx, dy)


def smaller(x: Any, y: Any) -> jax.Array:
    """`jnp.minimum`, with the whole gradient for the first one where both are equal."""
    real = _real(x, y)
    return jnp.minimum(x, y) if real is None else _smaller(*real)


@jax.custom_jvp
def _clipped(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.clip(x, low, high)


@_clipped.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, low, high), (dx, dlow, dhigh) = primals, tangents
    inside = _chosen(x > high, dhigh, dx)
    return jnp.clip(x, low, high), _chosen(x < low, dlow, inside)


def clipped(x: Any, low: Any, high: Any) -> jax.Array:
    """`jnp.clip`, with the whole gradient for the value at a bound."""
    real = _real(x, low, high)
    return jnp.clip(x, low, high) if real is None else _clipped(*real)


def _chosen(condition: jax.Array, if_true: Any, if_false: Any) -> jax.Array:
    """`jnp.where`, whose result depends on both choices also if it is empty.

    The gradient of a replica without examples must reach the others' sums, as every replica's.
    """
    dtype = jnp.result_type(if_true, if_false)
    choices = (jnp.asarray(choice, dtype) for choice in (if_true, if_false))
    return lax.select(*jnp.broadcast_arrays(condition, *choices))


def _real(*operands: Any) -> list[jax.Array] | None:
    """Returns operands in their common dtype, if that has gradients."""
    dtype = jnp.result_type(*operands)
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return [jnp.asarray(operand, dtype) for operand in operands]
