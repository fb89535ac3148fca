"""`tf.keras.backend`: the parts of Keras 2's backend that programs use, on `keras.ops`.

Functions of graph mode, and those that only layers call, raise errors that name replacements.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import ops

from unison.tf.keras.names import stand_over

abs = ops.abs
cast = ops.cast
cos = ops.cos
elu = ops.elu
equal = ops.equal
exp = ops.exp
eye = ops.eye
greater = ops.greater
greater_equal = ops.greater_equal
less = ops.less
less_equal = ops.less_equal
log = ops.log
max = ops.max
maximum = ops.maximum
mean = ops.mean
min = ops.min
minimum = ops.minimum
not_equal = ops.not_equal
one_hot = ops.one_hot
ones_like = ops.ones_like
permute_dimensions = ops.transpose
pow = ops.power
prod = ops.prod
reshape = ops.reshape
round = ops.round
shape = ops.shape
sigmoid = ops.sigmoid
sign = ops.sign
sin = ops.sin
softmax = ops.softmax
softplus = ops.softplus
softsign = ops.softsign
sqrt = ops.sqrt
square = ops.square
std = ops.std
stop_gradient = ops.stop_gradient
sum = ops.sum
tanh = ops.tanh
tile = ops.tile
transpose = ops.transpose
var = ops.var
zeros_like = ops.zeros_like
name_scope = keras.name_scope


# -- values of variables --------------------------------------------------------------------


def get_value(x: Any) -> Any:
    """Returns the value of a variable or tensor as a NumPy array, or NumPy scalar.

    Examples:
        >>> from unison.tf import keras
        >>> optimizer = keras.optimizers.SGD(0.25)
        >>> float(keras.backend.get_value(optimizer.lr))
        0.25

    TF: `tf.keras.backend.get_value`.
    """
    return ops.convert_to_numpy(x)[()] if ops.is_tensor(x) or _is_variable(x) else x


eval = get_value


def set_value(x: Any, value: Any) -> None:
    """Assigns `value` to the variable `x`. TF: `tf.keras.backend.set_value`."""
    x.assign(np.asarray(value, dtype=x.dtype))


def batch_get_value(tensors: Iterable[Any]) -> list[Any]:
    """Returns the values of variables. TF: `tf.keras.backend.batch_get_value`."""
    return [get_value(tensor) for tensor in tensors]


def batch_set_value(tuples: Iterable[tuple[Any, Any]]) -> None:
    """Assigns to each variable its value. TF: `tf.keras.backend.batch_set_value`."""
    for variable, value in tuples:
        set_value(variable, value)


def update(x: Any, new_x: Any) -> Any:
    """TF: `tf.keras.backend.update`."""
    return x.assign(new_x)


def update_add(x: Any, increment: Any) -> Any:
    """TF: `tf.keras.backend.update_add`."""
    return x.assign_add(increment)


def update_sub(x: Any, decrement: Any) -> Any:
    """TF: `tf.keras.backend.update_sub`."""
    return x.assign_sub(decrement)


def moving_average_update(x: Any, value: Any, momentum: float) -> Any:
    """Assigns `x * momentum + value * (1 - momentum)` to the variable `x`.

    TF: `tf.keras.backend.moving_average_update`.
    """
    return x.assign(x * momentum + value * (1 - momentum))


def count_params(x: Any) -> int:
    """Returns the number of elements of `x`. TF: `tf.keras.backend.count_params`."""
    return int(np.prod(x.shape))


def _is_variable(x: Any) -> bool:
    return callable(getattr(x, "__jax_array__", None))


# -- making tensors and variables -----------------------------------------------------------


def variable(value: Any, dtype: Any = None, name: str | None = None, constraint: Any = None) -> Any:
    """Returns a `keras.Variable`. TF: `tf.keras.backend.variable`."""
    made = keras.Variable(value, dtype=dtype or keras.config.floatx(), name=name)
    made.constraint = constraint
    return made


def zeros(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Any:
    """Returns a variable of zeros. TF: `tf.keras.backend.zeros`."""
    return variable(np.zeros(shape), dtype, name)


def ones(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Any:
    """Returns a variable of ones. TF: `tf.keras.backend.ones`."""
    return variable(np.ones(shape), dtype, name)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = "int32") -> Any:
    """TF: `tf.keras.backend.arange`."""
    return ops.arange(start, stop, step, dtype=dtype)


def constant(value: Any, dtype: Any = None, shape: Any = None, name: str | None = None) -> Any:
    """TF: `tf.keras.backend.constant`."""
    del name
    tensor = ops.convert_to_tensor(value, dtype or keras.config.floatx())
    if shape is None:
        return tensor
    return ops.broadcast_to(tensor, shape) if tensor.ndim == 0 else ops.reshape(tensor, shape)


def cast_to_floatx(x: Any) -> Any:
    """TF: `tf.keras.backend.cast_to_floatx`."""
    if isinstance(x, np.ndarray | builtins.float | int):
        return np.asarray(x, dtype=keras.config.floatx())
    return ops.cast(x, keras.config.floatx())


# -- properties of a tensor -------------------------------------------------------------------


def dtype(x: Any) -> str:
    """Returns the name of the dtype. TF: `tf.keras.backend.dtype`."""
    return keras.backend.standardize_dtype(x.dtype)


def int_shape(x: Any) -> tuple[int | None, ...] | None:
    """Returns the shape, or None if there is none. TF: `tf.keras.backend.int_shape`."""
    return tuple(x.shape) if hasattr(x, "shape") else None


def ndim(x: Any) -> int:
    """TF: `tf.keras.backend.ndim`."""
    return len(x.shape)


def is_sparse(tensor: Any) -> bool:
    """TF: `tf.keras.backend.is_sparse`."""
    return bool(getattr(tensor, "sparse", False))


# -- computing ------------------------------------------------------------------------------


def all(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """TF: `tf.keras.backend.all`."""
    return ops.all(ops.cast(x, "bool"), axis=axis, keepdims=keepdims)


def any(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """TF: `tf.keras.backend.any`."""
    return ops.any(ops.cast(x, "bool"), axis=axis, keepdims=keepdims)


def argmax(x: Any, axis: int = -1) -> Any:
    """TF: `tf.keras.backend.argmax`."""
    return ops.argmax(x, axis=axis)


def argmin(x: Any, axis: int = -1) -> Any:
    """TF: `tf.keras.backend.argmin`."""
    return ops.argmin(x, axis=axis)


def cumsum(x: Any, axis: int = 0) -> Any:
    """TF: `tf.keras.backend.cumsum`."""
    return ops.cumsum(x, axis=axis)


def cumprod(x: Any, axis: int = 0) -> Any:
    """TF: `tf.keras.backend.cumprod`."""
    return ops.cumprod(x, axis=axis)


def reverse(x: Any, axes: Any) -> Any:
    """TF: `tf.keras.backend.reverse`."""
    return ops.flip(x, axis=axes)


def repeat_elements(x: Any, rep: int, axis: int) -> Any:
    """TF: `tf.keras.backend.repeat_elements`."""
    return ops.repeat(x, rep, axis=axis)


def clip(x: Any, min_value: Any, max_value: Any) -> Any:
    """TF: `tf.keras.backend.clip`."""
    low = -np.inf if min_value is None else min_value
    high = np.inf if max_value is None else max_value
    return ops.clip(x, low, ops.maximum(low, high))


def concatenate(tensors: Sequence[Any], axis: int = -1) -> Any:
    """TF: `tf.keras.backend.concatenate`."""
    return ops.concatenate(tensors, axis=axis)


def stack(x: Sequence[Any], axis: int = 0) -> Any:
    """TF: `tf.keras.backend.stack`."""
    return ops.stack(x, axis=axis)


def expand_dims(x: Any, axis: int = -1) -> Any:
    """TF: `tf.keras.backend.expand_dims`."""
    return ops.expand_dims(x, axis)


def squeeze(x: Any, axis: int) -> Any:
    """TF: `tf.keras.backend.squeeze`."""
    return ops.squeeze(x, axis)


def flatten(x: Any) -> Any:
    """Returns `x` with one axis. TF: `tf.keras.backend.flatten`."""
    return ops.reshape(x, (-1,))


def batch_flatten(x: Any) -> Any:
    """Returns `x` with two axes. TF: `tf.keras.backend.batch_flatten`."""
    return ops.reshape(x, (-1, int(np.prod(x.shape[1:]))))


def repeat(x: Any, n: int) -> Any:
    """Returns the `(samples, dim)` tensor `x` as `(samples, n, dim)`.

    TF: `tf.keras.backend.repeat`.
    """
    return ops.repeat(ops.expand_dims(x, 1), n, axis=1)


def gather(reference: Any, indices: Any) -> Any:
    """TF: `tf.keras.backend.gather`."""
    return ops.take(reference, indices, axis=0)


def dot(x: Any, y: Any) -> Any:
    """TF: `tf.keras.backend.dot`."""
    return ops.dot(x, y)


def batch_dot(x: Any, y: Any, axes: Any = None) -> Any:
    """TF: `tf.keras.backend.batch_dot`."""
    if axes is None:
        axes = (len(x.shape) - 1, 1 if len(y.shape) == 2 else len(y.shape) - 2)
    return keras.layers.Dot(axes)([x, y])


def l2_normalize(x: Any, axis: int | None = None) -> Any:
    """TF: `tf.keras.backend.l2_normalize`."""
    squared = ops.sum(ops.square(x), axis=axis, keepdims=True)
    return x * ops.rsqrt(ops.maximum(squared, 1e-12))


def bias_add(x: Any, bias: Any, data_format: str | None = None) -> Any:
    """TF: `tf.keras.backend.bias_add`."""
    if (data_format or keras.config.image_data_format()) == "channels_first" and x.ndim > 2:
        bias = ops.reshape(bias, (-1,) + (1,) * (x.ndim - 2))
    return x + bias


def relu(x: Any, alpha: float = 0.0, max_value: float | None = None, threshold: float = 0) -> Any:
    """TF: `tf.keras.backend.relu`."""
    return keras.activations.relu(x, negative_slope=alpha, max_value=max_value, threshold=threshold)


def hard_sigmoid(x: Any) -> Any:
    """Returns `clip(0.2 * x + 0.5, 0, 1)`, as Keras 2 defines it.

    TF: `tf.keras.backend.hard_sigmoid`.
    """
    return ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def in_top_k(predictions: Any, targets: Any, k: int) -> Any:
    """TF: `tf.keras.backend.in_top_k`."""
    return ops.in_top_k(targets, predictions, k)


def switch(condition: Any, then_expression: Any, else_expression: Any) -> Any:
    """Chooses between two tensors, or the results of two functions.

    TF: `tf.keras.backend.switch`.
    """
    if callable(then_expression) and callable(else_expression):
        return ops.cond(condition, then_expression, else_expression)
    then = then_expression() if callable(then_expression) else then_expression
    otherwise = else_expression() if callable(else_expression) else else_expression
    condition = ops.convert_to_tensor(condition)
    missing = len(then.shape) - len(condition.shape)
    return ops.where(ops.reshape(condition, condition.shape + (1,) * missing), then, otherwise)


def dropout(x: Any, level: float, noise_shape: Any = None, seed: int | None = None) -> Any:
    """TF: `tf.keras.backend.dropout`."""
    return keras.random.dropout(x, level, noise_shape=noise_shape, seed=seed)


def map_fn(fn: Callable[[Any], Any], elems: Any, name: str | None = None, dtype: Any = None) -> Any:
    """TF: `tf.keras.backend.map_fn`."""
    del name
    mapped = ops.map(fn, elems)
    return mapped if dtype is None else ops.cast(mapped, dtype)


def print_tensor(x: Any, message: str = "", summarize: int = 3) -> Any:
    """Prints `x`, also from within a compiled program, and returns it.

    TF: `tf.keras.backend.print_tensor`.
    """
    del summarize
    jax.debug.print("{message}{x}", message=message, x=x)
    return x


# -- losses: Keras 2's order of arguments ---------------------------------------------------


def binary_crossentropy(target: Any, output: Any, from_logits: bool = False) -> Any:
    """Returns one value an element. TF: `tf.keras.backend.binary_crossentropy`."""
    return ops.binary_crossentropy(target, output, from_logits=from_logits)


def categorical_crossentropy(
    target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """TF: `tf.keras.backend.categorical_crossentropy`."""
    return ops.categorical_crossentropy(target, output, from_logits=from_logits, axis=axis)


def sparse_categorical_crossentropy(
    target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """TF: `tf.keras.backend.sparse_categorical_crossentropy`."""
    return ops.sparse_categorical_crossentropy(target, output, from_logits=from_logits, axis=axis)


# -- random ---------------------------------------------------------------------------------


def random_normal(
    shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: int | None = None
) -> Any:
    """TF: `tf.keras.backend.random_normal`."""
    return keras.random.normal(shape, mean, stddev, dtype=dtype, seed=seed)


def random_uniform(
    shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: int | None = None
) -> Any:
    """TF: `tf.keras.backend.random_uniform`."""
    return keras.random.uniform(shape, minval, maxval, dtype=dtype, seed=seed)


def random_bernoulli(shape: Any, p: float = 0.0, dtype: Any = None, seed: int | None = None) -> Any:
    """TF: `tf.keras.backend.random_bernoulli`."""
    drawn = keras.random.uniform(shape, seed=seed) < p
    return ops.cast(drawn, dtype or keras.config.floatx())


def truncated_normal(
    shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: int | None = None
) -> Any:
    """TF: `tf.keras.backend.truncated_normal`."""
    return keras.random.truncated_normal(shape, mean, stddev, dtype=dtype, seed=seed)


__getattr__ = stand_over(__name__)
