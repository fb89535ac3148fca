"""`tf.experimental.numpy.random`: NumPy's draws, from the stream of `tf.random`.

Numbers are 32 bits wide unless `dtype=` says otherwise, and are not NumPy's.
"""

from __future__ import annotations

from typing import Any

import jax

from unison.tf import dtypes
from unison.tf import random as tf_random
from unison.tf.missing import names_missing_from

__all__ = [
    "poisson",
    "rand",
    "randint",
    "randn",
    "random",
    "seed",
    "standard_normal",
    "uniform",
]

__getattr__ = names_missing_from("unison.tf.experimental.numpy.random")


def seed(s: int) -> None:
    """Seeds the stream: `tf.random.set_seed`."""
    tf_random.set_seed(s)


def randn(*args: int) -> jax.Array:
    """Returns numbers of the standard normal distribution, in the shape of the arguments."""
    return standard_normal(size=args)


def standard_normal(size: Any = None) -> jax.Array:
    """Returns numbers of the standard normal distribution."""
    return tf_random.normal(_shape(size))


def rand(*size: int) -> jax.Array:
    """Returns numbers from 0 to 1, in the shape of the arguments."""
    return uniform(size=size)


def random(size: Any = None) -> jax.Array:
    """Returns numbers from 0 to 1."""
    return uniform(size=size)


def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> jax.Array:
    """Returns numbers from `low` to `high`, without the latter."""
    return tf_random.uniform(_shape(size)) * (high - low) + low


def poisson(lam: Any = 1.0, size: Any = None) -> jax.Array:
    """Returns numbers of a Poisson distribution, as integers."""
    return tf_random.poisson(_shape(size), lam, dtypes.int32)


def randint(low: Any, high: Any = None, size: Any = None, dtype: Any = dtypes.int32) -> jax.Array:
    """Returns integers from `low` to `high`, without the latter; from 0 to `low` without `high`."""
    low, high = (0, low) if high is None else (low, high)
    return tf_random.uniform(_shape(size), low, high, dtype)


def _shape(size: Any) -> Any:
    return () if size is None else (size,) if isinstance(size, int) else size
