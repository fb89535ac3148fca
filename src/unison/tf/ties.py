"""Operations whose gradients differ between JAX and TensorFlow where two values are equal.

There each has another subgradient: JAX takes half of each side, TensorFlow one side.

Source: `tensorflow/python/ops/math_grad.py` and `clip_ops.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


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
def larger(x: Any, y: Any) -> jax.Array:
    """`jnp.maximum`, with the whole gradient for the first one where both are equal.

    Examples:
        >>> [float(each) for each in jax.grad(larger, (0, 1))(1.0, 1.0)]
        [1.0, 0.0]
    """
    return jnp.maximum(x, y)


@larger.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return jnp.maximum(x, y), _tangent(x >= y, dx, dy)


@jax.custom_jvp
def smaller(x: Any, y: Any) -> jax.Array:
    """`jnp.minimum`, with the whole gradient for the first one where both are equal."""
    return jnp.minimum(x, y)


@smaller.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return jnp.minimum(x, y), _tangent(x <= y, dx, dy)


@jax.custom_jvp
def clipped(x: Any, low: Any, high: Any) -> jax.Array:
    """`jnp.clip`, with the whole gradient for the value at a bound."""
    return jnp.clip(x, low, high)


@clipped.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, low, high), (dx, dlow, dhigh) = primals, tangents
    inside = _tangent(x > high, dhigh, dx)
    return jnp.clip(x, low, high), _tangent(x < low, dlow, inside)


def _tangent(chosen: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the tangent of what is chosen; those of integers are nothing."""
    if first.dtype == jax.dtypes.float0 or second.dtype == jax.dtypes.float0:
        return first
    return jnp.where(chosen, first, second)
