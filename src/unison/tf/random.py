"""`tf.random`: numbers from one stream a process, seeded by `set_seed`, and stateless draws.

The stream is drawn from around the replicas only. Inside a replica program a draw would be made
once, while tracing, and give the same numbers at every step; there, pass a seed to the
`stateless_` functions, or use `keras.random` with a `SeedGenerator` made in the scope.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from unison.lifting import current_lift
from unison.tf.dtypes import float32
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor, device_dtype, start_devices

__getattr__ = names_missing_from(__name__)

_lock = threading.Lock()
_seed = 0
_draws: Iterator[int] = itertools.count()


def set_seed(seed: int) -> None:
    """Seeds the stream and starts it anew. TF: `tf.random.set_seed`."""
    global _seed, _draws
    with _lock:
        _seed, _draws = int(seed), itertools.count()


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.normal`."""
    del name
    return _normal(_next_key("normal", seed), shape, mean, stddev, dtype)


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws from `[minval, maxval)`; integers need a `maxval`. TF: `tf.random.uniform`."""
    del name
    return _uniform(_next_key("uniform", seed), shape, minval, maxval, dtype)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> jax.Array:
    """Shuffles along the first axis. TF: `tf.random.shuffle`."""
    del name
    return jax.random.permutation(_next_key("shuffle", seed), convert_to_tensor(value))


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    name: str | None = None,
) -> jax.Array:
    """Draws what the two integers of `seed` determine; they may be traced.

    TF: `tf.random.stateless_normal` (its numbers are others).
    """
    del name
    return _normal(_key_of(seed), shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = float32,
    name: str | None = None,
) -> jax.Array:
    """Draws what the two integers of `seed` determine; they may be traced.

    TF: `tf.random.stateless_uniform` (its numbers are others).
    """
    del name
    return _uniform(_key_of(seed), shape, minval, maxval, dtype)


def _normal(key: jax.Array, shape: Any, mean: Any, stddev: Any, dtype: Any) -> jax.Array:
    dtype = device_dtype(dtype)
    drawn = jax.random.normal(key, tuple(shape), dtype)
    return (drawn * stddev + mean).astype(dtype)


def _uniform(key: jax.Array, shape: Any, minval: Any, maxval: Any, dtype: Any) -> jax.Array:
    dtype = device_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if maxval is None:
            raise ValueError("Uniform integers need a maxval. Received: maxval=None")
        return jax.random.randint(key, tuple(shape), minval, maxval, dtype)
    return jax.random.uniform(key, tuple(shape), dtype, minval, 1 if maxval is None else maxval)


def _key_of(seed: Any) -> jax.Array:
    first, second = convert_to_tensor(seed)
    return jax.random.fold_in(jax.random.key(first), second)


def _next_key(function: str, seed: int | None) -> jax.Array:
    if current_lift() is not None:
        raise RuntimeError(
            f"tf.random.{function} inside strategy.run would draw once, while the program is "
            "traced, and give the same numbers at every step. Use tf.random.stateless_normal or "
            "stateless_uniform with a seed that is an argument, or keras.random with a "
            "keras.random.SeedGenerator that was created inside strategy.scope()."
        )
    start_devices()
    with _lock:
        key = jax.random.fold_in(jax.random.key(_seed), next(_draws))
    return key if seed is None else jax.random.fold_in(key, seed)
