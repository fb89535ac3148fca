"""`tf.random`: numbers from one stream a process, seeded by `set_seed`, and stateless draws.

See `random_keys` for the stream. The numbers themselves are not TensorFlow's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.tf import dtypes
from unison.tf.generators import Generator, get_global_generator, set_global_generator
from unison.tf.missing import names_missing_from
from unison.tf.random_draws import (
    draw_categorical,
    draw_gamma,
    draw_normal,
    draw_poisson,
    draw_shuffled,
    draw_truncated_normal,
    draw_uniform,
)
from unison.tf.random_keys import key_of, next_key, set_seed
from unison.tf.tensors import convert_to_tensor, sizes, tensor_dtype

__all__ = ["Generator", "get_global_generator", "set_global_generator", "set_seed"]

__getattr__ = names_missing_from(__name__)


# -- draws from the stream -----------------------------------------------------------------


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.normal`."""
    return draw_normal(next_key(seed), shape, mean, stddev, dtype)


def truncated_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws from the normal distribution within two standard deviations.

    TF: `tf.random.truncated_normal`.
    """
    return draw_truncated_normal(next_key(seed), shape, mean, stddev, dtype)


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws from `[minval, maxval)`; integers need a `maxval`. TF: `tf.random.uniform`."""
    return draw_uniform(next_key(seed), shape, minval, maxval, dtype)


def gamma(
    shape: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers for every `alpha` and `beta`. TF: `tf.random.gamma`."""
    alpha = convert_to_tensor(alpha)
    rates = 1 if beta is None else convert_to_tensor(beta)
    return draw_gamma(next_key(seed), _each(shape, alpha, rates), alpha, beta, dtype)


def poisson(
    shape: Any,
    lam: Any,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers for every `lam`. TF: `tf.random.poisson`."""
    lam = convert_to_tensor(lam)
    return draw_poisson(next_key(seed), _each(shape, lam), lam, dtype)


def _each(shape: Any, *parameters: Any) -> tuple[int, ...]:
    """Returns `shape`, followed by that of the distributions' parameters."""
    return (*sizes(shape), *np.broadcast_shapes(*(jnp.shape(part) for part in parameters)))


def categorical(
    logits: Any,
    num_samples: Any,
    dtype: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `num_samples` classes for every row of `logits`. TF: `tf.random.categorical`."""
    return draw_categorical(next_key(seed), logits, num_samples, dtype or dtypes.int64)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> Any:
    """Shuffles along the first axis. TF: `tf.random.shuffle`."""
    return draw_shuffled(next_key(seed), value)


# -- stateless draws -----------------------------------------------------------------------


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """Draws numbers determined by the two integers of `seed`; they may be traced.

    TF: `tf.random.stateless_normal` (its numbers are others).
    """
    return draw_normal(key_of(seed), shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """TF: `tf.random.stateless_truncated_normal`."""
    return draw_truncated_normal(key_of(seed), shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """Draws numbers determined by the two integers of `seed`; they may be traced.

    With both limits None, integers are drawn from all that the dtype has.

    TF: `tf.random.stateless_uniform` (its numbers are others).
    """
    if minval is None and maxval is None:
        return jax.random.bits(key_of(seed), sizes(shape), _unsigned(dtype)).astype(
            tensor_dtype(dtype)
        )
    return draw_uniform(key_of(seed), shape, minval, maxval, dtype)


def _unsigned(dtype: Any) -> np.dtype:
    return np.dtype(f"uint{8 * dtypes.named(dtype).itemsize}")


def stateless_gamma(
    shape: Any,
    seed: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_gamma`."""
    return draw_gamma(key_of(seed), shape, convert_to_tensor(alpha), beta, dtype)


def stateless_poisson(
    shape: Any, seed: Any, lam: Any, dtype: Any = dtypes.int32, name: str | None = None
) -> jax.Array:
    """TF: `tf.random.stateless_poisson`."""
    return draw_poisson(key_of(seed), shape, convert_to_tensor(lam), dtype)


def stateless_binomial(
    shape: Any,
    seed: Any,
    counts: Any,
    probs: Any,
    output_dtype: Any = dtypes.int32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_binomial`."""
    counts, probs = convert_to_tensor(counts), convert_to_tensor(probs)
    drawn = jax.random.binomial(key_of(seed), counts.astype(probs.dtype), probs, sizes(shape))
    return drawn.astype(tensor_dtype(output_dtype))


def stateless_categorical(
    logits: Any,
    num_samples: Any,
    seed: Any,
    dtype: Any = dtypes.int64,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_categorical`."""
    return draw_categorical(key_of(seed), logits, num_samples, dtype)


def stateless_shuffle(
    value: Any, seed: Any, alg: str = "auto_select", name: str | None = None
) -> Any:
    """TF: `tf.random.experimental.stateless_shuffle`."""
    return draw_shuffled(key_of(seed), value)


def fold_in(seed: Any, data: Any, alg: str = "auto_select") -> jax.Array:
    """Returns a seed that two integers and another one determine. TF: `tf.random.fold_in`."""
    return _seeds_of(jax.random.fold_in(key_of(seed), data), 1, convert_to_tensor(seed).dtype)[0]


def split(seed: Any, num: int = 2, alg: str = "auto_select") -> jax.Array:
    """Returns `num` seeds, as the rows of a matrix. TF: `tf.random.split`."""
    return _seeds_of(key_of(seed), num, convert_to_tensor(seed).dtype)


def _seeds_of(key: jax.Array, num: int, dtype: Any) -> jax.Array:
    return jax.random.bits(key, (num, 2), jnp.uint32).astype(dtype)
