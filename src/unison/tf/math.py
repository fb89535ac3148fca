"""`tf.math`: elementwise operations, products and reductions on `jax.Array`s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.tf.dtypes import int64
from unison.tf.missing import names_missing_from
from unison.tf.tensors import axes, convert_to_tensor, device_dtype, operand

__getattr__ = names_missing_from(__name__)


def _unary(function: Callable[[Any], jax.Array]) -> Callable[..., jax.Array]:
    def operation(x: Any, name: str | None = None) -> jax.Array:
        del name
        return function(operand(x))

    return operation


def _binary(function: Callable[[Any, Any], jax.Array]) -> Callable[..., jax.Array]:
    def operation(x: Any, y: Any, name: str | None = None) -> jax.Array:
        del name
        return function(operand(x), operand(y))

    return operation


abs = _unary(jnp.abs)
ceil = _unary(jnp.ceil)
cos = _unary(jnp.cos)
exp = _unary(jnp.exp)
floor = _unary(jnp.floor)
is_finite = _unary(jnp.isfinite)
is_nan = _unary(jnp.isnan)
log = _unary(jnp.log)
log1p = _unary(jnp.log1p)
logical_not = _unary(jnp.logical_not)
negative = _unary(jnp.negative)
round = _unary(jnp.round)
rsqrt = _unary(lax.rsqrt)
sigmoid = _unary(jax.nn.sigmoid)
sign = _unary(jnp.sign)
sin = _unary(jnp.sin)
sqrt = _unary(jnp.sqrt)
square = _unary(jnp.square)
tanh = _unary(jnp.tanh)

add = _binary(jnp.add)
divide = _binary(jnp.divide)
equal = _binary(jnp.equal)
floordiv = _binary(jnp.floor_divide)
greater = _binary(jnp.greater)
greater_equal = _binary(jnp.greater_equal)
less = _binary(jnp.less)
less_equal = _binary(jnp.less_equal)
logical_and = _binary(jnp.logical_and)
logical_or = _binary(jnp.logical_or)
maximum = _binary(jnp.maximum)
minimum = _binary(jnp.minimum)
mod = _binary(jnp.mod)
multiply = _binary(jnp.multiply)
not_equal = _binary(jnp.not_equal)
pow = _binary(jnp.power)
subtract = _binary(jnp.subtract)


def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the (batched) matrix product. TF: `tf.linalg.matmul`."""
    del name
    a, b = convert_to_tensor(a), convert_to_tensor(b)
    return jnp.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def reduce_sum(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_sum`."""
    del name
    tensor = convert_to_tensor(input_tensor)
    return jnp.sum(tensor, axes(axis), keepdims=keepdims, dtype=tensor.dtype)


def reduce_mean(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the mean, in the tensor's own dtype: of integers it is rounded towards zero.

    TF: `tf.reduce_mean`.
    """
    del name
    tensor = convert_to_tensor(input_tensor)
    return jnp.mean(tensor, axes(axis), keepdims=keepdims).astype(tensor.dtype)


def reduce_max(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_max`."""
    del name
    return jnp.max(convert_to_tensor(input_tensor), axes(axis), keepdims=keepdims)


def reduce_min(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_min`."""
    del name
    return jnp.min(convert_to_tensor(input_tensor), axes(axis), keepdims=keepdims)


def reduce_prod(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_prod`."""
    del name
    tensor = convert_to_tensor(input_tensor)
    return jnp.prod(tensor, axes(axis), keepdims=keepdims, dtype=tensor.dtype)


def reduce_all(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_all`."""
    del name
    return jnp.all(convert_to_tensor(input_tensor), axes(axis), keepdims=keepdims)


def reduce_any(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.reduce_any`."""
    del name
    return jnp.any(convert_to_tensor(input_tensor), axes(axis), keepdims=keepdims)


def argmax(
    input: Any, axis: int | None = None, output_type: Any = int64, name: str | None = None
) -> jax.Array:
    """Returns the index of the largest element along `axis`, by default the first axis.

    TF: `tf.argmax`.
    """
    del name
    index = jnp.argmax(convert_to_tensor(input), 0 if axis is None else axis)
    return index.astype(device_dtype(output_type))


def argmin(
    input: Any, axis: int | None = None, output_type: Any = int64, name: str | None = None
) -> jax.Array:
    """Returns the index of the smallest element along `axis`, by default the first axis.

    TF: `tf.argmin`.
    """
    del name
    index = jnp.argmin(convert_to_tensor(input), 0 if axis is None else axis)
    return index.astype(device_dtype(output_type))


def clip_by_value(
    t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> jax.Array:
    """TF: `tf.clip_by_value`."""
    del name
    return jnp.clip(convert_to_tensor(t), operand(clip_value_min), operand(clip_value_max))


def add_n(inputs: Any, name: str | None = None) -> jax.Array:
    """Returns the sum of tensors of one shape. TF: `tf.add_n`."""
    del name
    total, *rest = [convert_to_tensor(tensor) for tensor in inputs]
    for tensor in rest:
        total += tensor
    return total
