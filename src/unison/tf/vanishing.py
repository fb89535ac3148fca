"""Functions whose derivative is infinite or undefined at some arguments: `sqrt` at 0, say.

Where no gradient arrives there, TensorFlow's kernels pass none on. JAX multiplies it by the
derivative, and 0 times infinity is NaN: `tf.where(x > 0, tf.sqrt(x), 0)` would train to NaN.

A derivative must be linear in what arrives, so that it can be transposed and batched. So it is a
product of factors that are finite, and that overflow together with anything but 0.

Source: `sqrt_gradient`, `rsqrt_gradient` and `inverse_gradient` of Eigen's functors in TensorFlow's
`cwise_ops_gradients.h`; `_XLogyGrad`, `_XLog1pyGrad` and `_XDivyGrad` of `math_grad.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.tf.ties import magnitude


def _with_derivative(
    function: Callable[[Any], jax.Array],
    derivative: Callable[[jax.Array], jax.Array],
    is_regular: Callable[[jax.Array], jax.Array],
    sign: int,
) -> Callable[[Any], jax.Array]:
    """Returns a function of real or complex numbers; the former have such a derivative.

    Args:
        function: The function.
        derivative: Its derivative where it is finite, by itself.
        is_regular: Where it is finite. It is infinite at 0, and NaN elsewhere.
        sign: The sign of the infinite derivative.
    """

    @jax.custom_jvp
    def of_reals(x: jax.Array) -> jax.Array:
        return function(x)

    @of_reals.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        regular = is_regular(x)
        defined = regular | (x == 0)
        largest = jnp.asarray(jnp.finfo(x.dtype).max, x.dtype)
        one = jnp.ones((), x.dtype)
        slope = derivative(jnp.where(regular, x, one))
        growing = jnp.where(regular, slope, sign * largest)
        infinite = jnp.where(regular, one, largest)
        # Infinity times 0 is NaN, also where the product is transposed: from right to left.
        vanishing, also_growing = (jnp.where(defined, one, end) for end in (0 * one, largest))
        return of_reals(x), dx * growing * infinite * vanishing * also_growing * also_growing

    def operation(x: Any) -> jax.Array:
        is_real = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return of_reals(jnp.asarray(x)) if is_real else function(x)

    return operation


#: `jnp.sqrt`.
sqrt = _with_derivative(jnp.sqrt, lambda x: 0.5 / jnp.sqrt(x), lambda x: x > 0, 1)

#: `lax.rsqrt`.
rsqrt = _with_derivative(
    lambda x: lax.rsqrt(jnp.asarray(x)), lambda x: -0.5 * lax.rsqrt(x) / x, lambda x: x > 0, -1
)

#: 1 / x.
reciprocal = _with_derivative(
    lambda x: 1 / x, lambda x: -jnp.square(1 / x), lambda x: (x != 0) & ~jnp.isnan(x), -1
)


def standard_deviation(x: jax.Array, axis: Any = None, keepdims: bool = False) -> jax.Array:
    """`jnp.std`, by `sqrt`."""
    return sqrt(jnp.var(x, axis, keepdims=keepdims))


def norm(x: jax.Array, ord: Any = None, axis: Any = None, keepdims: bool = False) -> jax.Array:
    """`jnp.linalg.norm`: Euclidean ones by `sqrt`, other ones of vectors by `magnitude`."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    if ord is not None and ord != ("fro" if len(axes) == 2 else 2):
        return jnp.linalg.norm(magnitude(x) if len(axes) == 1 else x, ord, axis, keepdims)
    return sqrt(jnp.sum(jnp.real(x * jnp.conj(x)), axis, keepdims=keepdims))


def unless_zero(x: Any, value: jax.Array) -> jax.Array:
    """Returns `value`, with 0 where `x` is 0."""
    return jnp.where(jnp.equal(x, 0), jnp.zeros((), value.dtype), value)


def one_if_zero(x: Any, y: Any) -> jax.Array:
    """Returns `y`, with 1 where `x` is 0: neither a quotient by it nor its gradient is infinite."""
    return jnp.where(jnp.equal(x, 0), jnp.ones_like(y), y)


def _weighed(
    function: Callable[[Any, Any], jax.Array],
    slopes: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
) -> Callable[[Any, Any], jax.Array]:
    """Returns a function that is 0 where its first argument is, and so are its derivatives.

    Args:
        function: What it is where the first argument is not 0.
        slopes: Returns its two derivatives there.
    """

    @jax.custom_jvp
    def weighed(x: jax.Array, y: jax.Array) -> jax.Array:
        return unless_zero(x, function(x, one_if_zero(x, y)))

    @weighed.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x, y), (dx, dy) = primals, tangents
        by_x, by_y = (unless_zero(x, slope) for slope in slopes(x, one_if_zero(x, y)))
        return weighed(x, y), dx * by_x + dy * by_y

    def operation(x: Any, y: Any) -> jax.Array:
        dtype = jnp.result_type(x, y)
        return weighed(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))

    return operation


xlogy = _weighed(lambda x, y: x * jnp.log(y), lambda x, y: (jnp.log(y), x / y))
xlog1py = _weighed(lambda x, y: x * jnp.log1p(y), lambda x, y: (jnp.log1p(y), x / (1 + y)))
xdivy = _weighed(lambda x, y: x / y, lambda x, y: (1 / y, -x / jnp.square(y)))
