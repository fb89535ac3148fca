"""Making and reshaping tensors, which are `jax.Array`s. Signatures and defaults are TensorFlow's.

As in every module of operations here, `name` is accepted and without effect: arrays have no names.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.runtime.devices import prepare_backend
from unison.runtime.private_jax import backend_is_started
from unison.tf import dtypes


def start_devices() -> None:
    """Starts the devices as the program stated them, where its first tensor is made.

    TensorFlow programs make tensors before their strategy; JAX left to itself would then start
    with one CPU device, and too few threads for more.
    """
    if not backend_is_started():
        prepare_backend()


def device_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype that an array on a device has where `dtype` is asked for."""
    return jnp.dtype(jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)))


def operand(value: Any) -> Any:
    """Returns `value` as an argument of a JAX function.

    Variables (Unison's and Keras') become their values and lists become arrays. A Python number
    stays one, so that it takes the dtype of what it is combined with.
    """
    start_devices()
    if is_variable(value):
        return value.__jax_array__()
    if isinstance(value, list | tuple):
        return convert_to_tensor(value)
    return value


def is_variable(value: Any) -> builtins.bool:
    """Whether `value` is a variable, Unison's or Keras'."""
    # Tracers have the name, too, as None.
    return callable(getattr(value, "__jax_array__", None))


def axes(axis: Any) -> Any:
    """Returns `axis` as JAX takes it: a list of axes becomes a tuple."""
    return tuple(axis) if isinstance(axis, list) else axis


def constant(
    value: Any, dtype: Any = None, shape: Sequence[int] | None = None, name: str | None = None
) -> jax.Array:
    """Returns `value`, which may be nested lists, as a tensor.

    Python's floats become float32 and its integers int32, as in TensorFlow. With `shape`, the
    value is reshaped, or repeated if it is a scalar.

    Raises:
        TypeError: Text: JAX has no arrays of strings.

    Example:
        >>> constant([1, 2, 3])
        Array([1, 2, 3], dtype=int32)

    TF: `tf.constant`.
    """
    del name
    tensor = convert_to_tensor(value, dtype)
    if shape is None:
        return tensor
    return jnp.full(shape, tensor) if tensor.ndim == 0 else tensor.reshape(tuple(shape))


def convert_to_tensor(value: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
    """Returns a number, NumPy array, variable or list (also of tensors) as a tensor.

    Raises:
        TypeError: Text: JAX has no arrays of strings.

    TF: `tf.convert_to_tensor`.
    """
    del name
    start_devices()
    if is_variable(value):
        value = value.__jax_array__()
    wanted = None if dtype is None else device_dtype(dtype)
    if isinstance(value, jax.Array):
        return value if wanted in (None, value.dtype) else value.astype(wanted)
    if isinstance(value, list | tuple) and any(is_tensor(leaf) for leaf in jax.tree.leaves(value)):
        return jnp.stack([convert_to_tensor(item, dtype) for item in value])
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        raise TypeError(
            "Tensors hold numbers: JAX has no arrays of strings or Python objects. Received: "
            f"{value!r}. Keep text in Python or NumPy."
        )
    if wanted is None:
        wanted = device_dtype(_inferred(value, array.dtype))
    return jnp.asarray(array.astype(wanted, copy=False))


def _inferred(value: Any, dtype: np.dtype) -> np.dtype:
    """Returns TensorFlow's dtype of a Python value: 32 bits; NumPy values keep their own."""
    if isinstance(value, np.ndarray | np.generic):
        return dtype
    narrow = {dtypes.float64: dtypes.float32, dtypes.int64: dtypes.int32}
    return narrow.get(dtype, dtype)


def cast(x: Any, dtype: Any, name: str | None = None) -> jax.Array:
    """Returns `x` with another dtype (64 bits become 32 unless `jax_enable_x64` is set).

    TF: `tf.cast`.
    """
    del name
    return convert_to_tensor(x).astype(device_dtype(dtype))


def is_tensor(x: Any) -> builtins.bool:
    """Whether `x` is a tensor or a variable. TF: `tf.is_tensor`."""
    return isinstance(x, jax.Array) or is_variable(x)


def identity(input: Any, name: str | None = None) -> jax.Array:
    """Returns the value of `input` as a tensor. TF: `tf.identity`."""
    del name
    return convert_to_tensor(input)


def zeros(shape: Any, dtype: Any = dtypes.float32, name: str | None = None) -> jax.Array:
    """TF: `tf.zeros`."""
    del name
    start_devices()
    return jnp.zeros(shape, device_dtype(dtype))


def ones(shape: Any, dtype: Any = dtypes.float32, name: str | None = None) -> jax.Array:
    """TF: `tf.ones`."""
    del name
    start_devices()
    return jnp.ones(shape, device_dtype(dtype))


def fill(dims: Any, value: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.fill`."""
    del name
    return jnp.full(dims, convert_to_tensor(value))


def zeros_like(input: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
    """TF: `tf.zeros_like`."""
    tensor = convert_to_tensor(input)
    return zeros(tensor.shape, dtype or tensor.dtype, name)


def ones_like(input: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
    """TF: `tf.ones_like`."""
    tensor = convert_to_tensor(input)
    return ones(tensor.shape, dtype or tensor.dtype, name)


def eye(
    num_rows: int,
    num_columns: int | None = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.eye`, of one matrix."""
    del name
    start_devices()
    return jnp.eye(num_rows, num_columns, dtype=device_dtype(dtype))


def range(
    start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str | None = None
) -> jax.Array:
    """Returns `start, start + delta, ...` below `limit`; with one argument, from 0.

    TF: `tf.range`.
    """
    del name
    start_devices()
    first, end = (0, start) if limit is None else (start, limit)
    return convert_to_tensor(jnp.arange(first, end, delta), dtype)


def shape(input: Any, name: str | None = None) -> jax.Array:
    """Returns the shape as an int32 tensor; `tensor.shape` is the Python tuple.

    TF: `tf.shape`.
    """
    del name
    return jnp.asarray(convert_to_tensor(input).shape, jnp.int32)


def size(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.size`."""
    del name
    return jnp.asarray(convert_to_tensor(input).size, jnp.int32)


def rank(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.rank`."""
    del name
    return jnp.asarray(convert_to_tensor(input).ndim, jnp.int32)


def reshape(tensor: Any, shape: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.reshape`."""
    del name
    return jnp.reshape(convert_to_tensor(tensor), shape)


def transpose(a: Any, perm: Any = None, name: str | None = None) -> jax.Array:
    """TF: `tf.transpose`."""
    del name
    return jnp.transpose(convert_to_tensor(a), perm)


def expand_dims(input: Any, axis: int, name: str | None = None) -> jax.Array:
    """TF: `tf.expand_dims`."""
    del name
    return jnp.expand_dims(convert_to_tensor(input), axis)


def squeeze(input: Any, axis: Any = None, name: str | None = None) -> jax.Array:
    """TF: `tf.squeeze`."""
    del name
    return jnp.squeeze(convert_to_tensor(input), axes(axis))


def stack(values: Any, axis: int = 0, name: str | None = None) -> jax.Array:
    """TF: `tf.stack`."""
    del name
    return jnp.stack([convert_to_tensor(value) for value in values], axis)


def unstack(
    value: Any, num: int | None = None, axis: int = 0, name: str | None = None
) -> list[jax.Array]:
    """TF: `tf.unstack`."""
    del name
    parts = list(jnp.unstack(convert_to_tensor(value), axis=axis))
    if num not in (None, len(parts)):
        raise ValueError(f"Expected {num} tensors along axis {axis}. Received: {len(parts)}")
    return parts


def concat(values: Any, axis: int, name: str | None = None) -> jax.Array:
    """TF: `tf.concat`."""
    del name
    return jnp.concatenate([convert_to_tensor(value) for value in values], axis)


def split(
    value: Any, num_or_size_splits: Any, axis: int = 0, name: str | None = None
) -> list[jax.Array]:
    """Cuts `value` into so many equal parts, or into parts of these sizes.

    TF: `tf.split`.
    """
    del name
    parts = num_or_size_splits
    if not isinstance(parts, int):
        parts = np.cumsum(parts)[:-1]
    return list(jnp.split(convert_to_tensor(value), parts, axis))


def tile(input: Any, multiples: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.tile`."""
    del name
    return jnp.tile(convert_to_tensor(input), multiples)


def gather(params: Any, indices: Any, axis: int = 0, name: str | None = None) -> jax.Array:
    """TF: `tf.gather`."""
    del name
    return jnp.take(convert_to_tensor(params), convert_to_tensor(indices), axis)


def where(condition: Any, x: Any, y: Any, name: str | None = None) -> jax.Array:
    """Returns the elements of `x` where `condition` holds, else those of `y`.

    TF: `tf.where` with three arguments.
    """
    del name
    return jnp.where(operand(condition), operand(x), operand(y))


def one_hot(
    indices: Any, depth: int, dtype: Any = dtypes.float32, name: str | None = None
) -> jax.Array:
    """TF: `tf.one_hot`, with the new axis last."""
    del name
    return jax.nn.one_hot(convert_to_tensor(indices), depth, dtype=device_dtype(dtype))
