"""`tf.bitwise`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor, operands

__getattr__ = names_missing_from(__name__)


def bitwise_and(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.bitwise_and`."""
    return jnp.bitwise_and(*operands(x, y))


def bitwise_or(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.bitwise_or`."""
    return jnp.bitwise_or(*operands(x, y))


def bitwise_xor(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.bitwise_xor`."""
    return jnp.bitwise_xor(*operands(x, y))


def invert(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.invert`."""
    return jnp.invert(convert_to_tensor(x))


def left_shift(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.left_shift`."""
    return jnp.left_shift(*operands(x, y))


def right_shift(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.bitwise.right_shift`."""
    return jnp.right_shift(*operands(x, y))


dispatch_on_ragged(globals())
