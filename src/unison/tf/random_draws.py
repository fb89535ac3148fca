"""Random numbers that a key determines, with TensorFlow's parameters and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.errors import InvalidArgumentError
from unison.tf.tensors import (
    convert_to_tensor,
    full_width,
    is_tensor,
    known_value,
    like,
    sizes,
    tensor_dtype,
)
from unison.tf.text import StringTensor


def _drawn(draw: Callable[..., jax.Array], key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    dtype = tensor_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"Expected a floating dtype. Received: {dtype}")
    with full_width(dtype):
        return draw(key, sizes(shape), dtype)


def draw_normal(key: jax.Array, shape: Any, mean: Any, stddev: Any, dtype: Any) -> jax.Array:
    """Returns normal numbers; see `normal`."""
    drawn = _drawn(jax.random.normal, key, shape, dtype)
    return (drawn * _parameter(stddev, drawn) + _parameter(mean, drawn)).astype(drawn.dtype)


def draw_truncated_normal(
    key: jax.Array, shape: Any, mean: Any, stddev: Any, dtype: Any
) -> jax.Array:
    """Returns normal numbers within two standard deviations."""

    def within_two(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.truncated_normal(key, -2, 2, shape, dtype)

    drawn = _drawn(within_two, key, shape, dtype)
    return (drawn * _parameter(stddev, drawn) + _parameter(mean, drawn)).astype(drawn.dtype)


def _parameter(value: Any, drawn: jax.Array) -> Any:
    return convert_to_tensor(value).astype(drawn.dtype)


def draw_uniform(key: jax.Array, shape: Any, minval: Any, maxval: Any, dtype: Any) -> jax.Array:
    """Returns numbers from `[minval, maxval)`; see `uniform`."""
    dtype = tensor_dtype(dtype)
    low = convert_to_tensor(minval).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if maxval is None:
            raise ValueError(f"Must specify maxval for integer dtype {dtype}. Received: None")
        with full_width(dtype):
            high = convert_to_tensor(maxval).astype(dtype)
            _require_some(low, high)
            return jax.random.randint(key, sizes(shape), low, high, dtype)
    high = convert_to_tensor(1 if maxval is None else maxval).astype(dtype)
    # In [0, 1) the last digit is uniform, too; scaled, TensorFlow's way.
    return _drawn(jax.random.uniform, key, shape, dtype) * (high - low) + low


def _require_some(low: jax.Array, high: jax.Array) -> None:
    """Raises an error if there is no integer to draw, as far as the bounds are known."""
    if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
        return
    if np.any(np.asarray(low) >= np.asarray(high)):
        raise InvalidArgumentError(message=f"Need minval < maxval, got {low} >= {high}")


def draw_gamma(key: jax.Array, shape: Any, alpha: Any, beta: Any, dtype: Any) -> jax.Array:
    """Returns numbers of the gamma distribution with shape `alpha` and rate `beta`."""

    def standard(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.gamma(key, alpha.astype(dtype), shape, dtype)

    drawn = _drawn(standard, key, shape, dtype)
    return drawn if beta is None else drawn / _parameter(beta, drawn)


def draw_poisson(key: jax.Array, shape: Any, lam: Any, dtype: Any) -> jax.Array:
    """Returns numbers of the Poisson distribution with the mean `lam`."""
    return jax.random.poisson(key, lam, sizes(shape)).astype(tensor_dtype(dtype))


def draw_categorical(key: jax.Array, logits: Any, num_samples: Any, dtype: Any) -> jax.Array:
    """Returns classes, one row of `num_samples` for every row of `logits`."""
    logits = convert_to_tensor(logits)
    shape = (int(known_value(num_samples)), *logits.shape[:-1])
    return jax.random.categorical(key, logits, shape=shape).T.astype(tensor_dtype(dtype))


def draw_shuffled(key: jax.Array, value: Any) -> Any:
    """Returns the slices along the first axis in another order."""
    tensor = value if is_tensor(value) else convert_to_tensor(value)
    if isinstance(tensor, StringTensor):
        order = np.asarray(jax.random.permutation(key, len(tensor)))
        return like(tensor, tensor[order])
    return jax.random.permutation(key, convert_to_tensor(tensor))
