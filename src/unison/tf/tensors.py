"""Making tensors, which are `jax.Array`s, and asking about them.

Text makes `StringTensor`s, on the host. Signatures and defaults are TensorFlow's. As in every
module of operations here, `name` is accepted and without effect: arrays have no names. What an
operation gives for operands of different dtypes is JAX's promotion, as for the operators on
arrays; TensorFlow raises there.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.autograph.rows import counted_range
from unison.conversion import is_converting
from unison.errors import InvalidArgumentError
from unison.program.control_flow import VALUE_WANTED
from unison.runtime.devices import prepare_backend
from unison.runtime.precision import device_dtype
from unison.runtime.private_jax import (
    backend_is_started,
    constant_value,
    nothing_is_traced,
)
from unison.tf import dtypes
from unison.tf.dispatch import CompositeTensor, dispatch_on_ragged
from unison.tf.dtypes import named
from unison.tf.host import HostTensor, ShapeTensor, size_tensor
from unison.tf.operands import beside_64_bits
from unison.tf.patches import patch_operators
from unison.tf.pending import PendingImage, PendingText
from unison.tf.tensor_spec import TensorShape, broadcast_shapes, is_symbolic_size
from unison.tf.text import StringTensor, is_text
from unison.values import DistributedValues, Mirrored, no_common_value

#: The classes of `isinstance(x, tf.Tensor)`.
Tensor = jax.Array | HostTensor | PendingText | PendingImage

# -- common to the operations of `unison.tf` ------------------------------------------------


def start_devices() -> None:
    """Starts the devices as the program stated them, where its first tensor is made.

    TensorFlow programs make tensors before their strategy; JAX left to itself would then start
    with one CPU device, and too few threads for more.
    """
    if not backend_is_started():
        prepare_backend()


def tensor_dtype(dtype: Any) -> np.dtype:
    """Returns NumPy's dtype of a tensor for which `dtype` is asked, in any spelling of TF's."""
    return device_dtype(named(dtype))


def operand(value: Any) -> Any:
    """Returns `value` as an argument of a JAX function.

    Variables (Unison's and Keras') become their values and lists become arrays. A Python number
    stays one, so that it takes the dtype of the other operand.
    """
    if isinstance(value, jax.Array | int | float | complex):
        start_devices()
        return value
    return convert_to_tensor(value)


def operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns the operands of an operation; values that are not tensors get the tensor's dtype.

    For an array of NumPy's, the kind of dtype must not be narrowed (from floats to integers, say).
    """
    if is_tensor(x) and not is_tensor(y):
        return operand(x), _as_partner(y, x)
    if is_tensor(y) and not is_tensor(x):
        return _as_partner(x, y), operand(y)
    return operand(x), operand(y)


def _as_partner(value: Any, tensor: Any) -> Any:
    value = beside_64_bits(operand(value), dtype := np.dtype(tensor.dtype))
    if isinstance(value, jax.Array) and value.dtype != dtype:
        narrows = np.can_cast(value.dtype, dtype, "same_kind")
        return value.astype(dtype) if narrows else value
    return value


def is_variable(value: Any) -> builtins.bool:
    """Whether `value` is a variable, Unison's or Keras'."""
    # Tracers have the name, too, as None.
    has_an_array = callable(getattr(value, "__jax_array__", None))
    has_several = isinstance(value, DistributedValues) and not isinstance(value, Mirrored)
    is_tensor_too = isinstance(value, ShapeTensor | PendingImage) or is_symbolic_size(value)
    return has_an_array and not has_several and not is_tensor_too


def axes(axis: Any) -> Any:
    """Returns `axis` as JAX takes it: several become a tuple, a tensor becomes numbers."""
    if axis is None or isinstance(axis, int):
        return axis
    axis = known_value(axis).tolist()
    return tuple(axis) if isinstance(axis, list) else axis


def sizes(shape: Any) -> tuple[int, ...]:
    """Returns a shape, also one that is a tensor or holds tensors, as numbers and symbols."""
    if isinstance(shape, TensorShape):
        return tuple(shape.as_list())  # type: ignore[arg-type]
    parts = shape if isinstance(shape, list | tuple) else known_value(shape).reshape(-1)
    return tuple(map(size_of, parts))


def size_of(value: Any) -> int:
    """Returns a single size, also one that is a tensor: a number or, as JAX's shapes, a symbol."""
    if isinstance(value, int):
        return value
    found = scalar(known_value(value))
    return found if is_symbolic_size(found) else int(found)


def scalar(known: np.ndarray) -> Any:
    """Returns the value of an array without axes, of sizes a number or a symbol."""
    return known.item() if known.dtype == object else known[()]


def known_value(value: Any) -> np.ndarray:
    """Returns the value of a tensor, also inside a program if constants alone determine it.

    Raises:
        TypeError: The value depends on what the program is given (one of JAX's errors, which
            `tf.function` turns into advice).
    """
    if isinstance(value, jax.core.Tracer):
        constant = constant_value(value)
        value = value if constant is None else constant
    return np.asarray(value)


def array_module(*tensors: Any) -> Any:
    """Returns `numpy` if all tensors are on the host, else `jax.numpy`: both have the functions
    that only move elements.
    """
    return np if all(isinstance(tensor, HostTensor) for tensor in tensors) else jnp


@contextlib.contextmanager
def invalid_arguments(operation: str) -> Iterator[None]:
    """JAX's errors inside, mostly about shapes, become `InvalidArgumentError`, as in TensorFlow."""
    try:
        yield
    except VALUE_WANTED:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise InvalidArgumentError(message=f"{operation}: {error}") from error


def full_width(*dtypes: Any) -> AbstractContextManager[Any]:
    """Inside, JAX computes with 64 bits throughout, if one of `dtypes` has them.

    Some of its functions start from 32-bit constants otherwise, and then refuse 64-bit arrays
    (`jnp.max` of int64, for one).
    """
    has_64_bits = any(np.dtype(dtype).name in _WIDE for dtype in dtypes)
    return jax.enable_x64(True) if has_64_bits else contextlib.nullcontext()


_WIDE = frozenset("int64 uint64 float64 complex128".split())

# -- making tensors ------------------------------------------------------------------------


def constant(value: Any, dtype: Any = None, shape: Any = None, name: str = "Const") -> Any:
    """Returns `value`, which may be nested lists, as a tensor.

    Python's floats become float32 and its integers int32 (int64 where they are too large), as
    in TensorFlow; arrays of NumPy keep their dtype. With `shape`, the value is reshaped, or
    repeated if it is a scalar.

    Raises:
        TypeError: A Python value that `dtype` cannot hold, or a `shape` of another size.
        ValueError: Lists that are not rectangular, or that mix text and numbers.

    Examples:
        >>> constant([1, 2, 3])
        Array([1, 2, 3], dtype=int32)

    TF: `tf.constant`.
    """
    if isinstance(value, Tensor) and dtype is not None and value.dtype != named(dtype):
        raise TypeError(f"Expected tensor {value} with dtype {dtype}, but got {value.dtype}.")
    tensor = convert_to_tensor(value, dtype)
    if shape is None:
        return tensor
    shape = sizes(shape)
    module = array_module(tensor)
    if tensor.ndim == 0:
        return like(tensor, module.broadcast_to(tensor, shape))
    if tensor.size != int(np.prod(shape)):
        raise TypeError(
            f"tf.constant: a value of {tensor.size} elements cannot have the shape {shape}. "
            f"Received: {value!r}"
        )
    return like(tensor, module.reshape(tensor, shape))


def convert_to_tensor(
    value: Any, dtype: Any = None, dtype_hint: Any = None, name: str | None = None
) -> Any:
    """Returns a number, text, NumPy array, variable or list (also of tensors) as a tensor.

    Args:
        value: The value.
        dtype: The dtype to give. A tensor must have it already: `tf.cast` changes it.
        dtype_hint: A dtype to give if `value` can have it.
        name: Without effect.

    Raises:
        TypeError: A Python value that `dtype` cannot hold.
        ValueError: A tensor of another dtype, lists that are not rectangular or that mix text and
            numbers, or something that is not a value.

    TF: `tf.convert_to_tensor`.
    """
    if dtype is None and dtype_hint is not None:
        with contextlib.suppress(TypeError, ValueError):
            return convert_to_tensor(value, dtype_hint)
    if is_text(value) or (dtype is not None and named(dtype) == dtypes.string):
        return _string_tensor(value, dtype)
    start_devices()
    wanted = None if dtype is None else tensor_dtype(dtype)
    if is_variable(value) or isinstance(value, PendingImage):
        value = value.__jax_array__()
    elif is_symbolic_size(value):
        value = size_tensor(value)
    if isinstance(value, Tensor):
        if wanted not in (None, value.dtype):
            raise ValueError(
                f"Tensor conversion requested dtype {wanted} for a tensor with dtype "
                f"{value.dtype}. Use tf.cast to change a tensor's dtype."
            )
        return value
    if isinstance(value, list | tuple) and any(is_tensor(leaf) for leaf in jax.tree.leaves(value)):
        return _stacked(value, dtype)
    array = _host_array(value)
    if wanted is None:
        wanted = device_dtype(_inferred(value, array))
    elif not isinstance(value, np.ndarray | np.generic):
        _check_holds(value, array, wanted)
    return _on_device(array.astype(wanted, copy=False))


def _on_device(array: np.ndarray) -> jax.Array:
    # JAX keeps 64 bits where they are named, and is quicker where nothing is.
    return jnp.asarray(array, dtype=array.dtype if array.dtype.name in _WIDE else None)


def like(tensor: Any, result: Any) -> Any:
    """Returns the result of NumPy or JAX as the kind of tensor that `tensor` is."""
    if isinstance(tensor, HostTensor) and not isinstance(result, jax.Array):
        return np.asarray(result).view(type(tensor))
    return result


def _string_tensor(value: Any, dtype: Any) -> StringTensor:
    if dtype is not None and named(dtype) != dtypes.string:
        raise TypeError(f"Cannot convert {value!r} to a tensor of dtype {named(dtype).name}.")
    if isinstance(value, StringTensor):
        return value
    try:
        return StringTensor(value)
    except TypeError as error:
        if isinstance(value, list | tuple) and is_text(value):
            raise ValueError(
                f"Can't convert Python sequence with mixed types to Tensor: {value!r}"
            ) from error
        raise TypeError(f"Expected text for a tensor of strings. Received: {value!r}") from error


def _stacked(values: Sequence[Any], dtype: Any) -> Any:
    """Returns nested lists that hold tensors; numbers among them take the tensors' dtype."""
    if dtype is None:
        dtype = next(leaf.dtype for leaf in jax.tree.leaves(values) if is_tensor(leaf))
    return jnp.stack([convert_to_tensor(item, dtype) for item in values])


def _host_array(value: Any) -> np.ndarray:
    if isinstance(value, CompositeTensor):
        raise ValueError(
            "A RaggedTensor is not converted to a tensor. Use x.to_tensor(), which pads the rows, "
            f"or x.flat_values. Received: {value!r}"
        )
    if isinstance(value, DistributedValues):
        raise ValueError(no_common_value("Conversion to a tensor", value))
    if value is None:
        raise ValueError("Attempt to convert None to a tensor. Expected a number, text or array.")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"Can't convert non-rectangular Python sequence to Tensor: {value!r}"
        ) from error
    if array.dtype.kind in "OSUMmV" and array.dtype not in _EXTENSIONS:
        raise ValueError(
            f"Attempt to convert a value of type {type(value).__name__} to a tensor. Expected "
            f"numbers, text, or nested lists of them. Received: {value!r}"
        )
    return array


#: Dtypes beyond NumPy's own that arrays on devices have.
_EXTENSIONS = frozenset({named(dtypes.bfloat16)})


def _inferred(value: Any, array: np.ndarray) -> np.dtype:
    """Returns TensorFlow's dtype of a Python value: 32 bits; NumPy values keep their own."""
    if isinstance(value, np.ndarray | np.generic):
        return array.dtype
    if array.dtype == np.float64:
        return named(dtypes.float32)
    if array.dtype == np.int64 and np.array_equal(array, array.astype(np.int32)):
        return named(dtypes.int32)
    return array.dtype


def _check_holds(value: Any, array: np.ndarray, dtype: np.dtype) -> None:
    """Raises where TensorFlow does not turn a Python value into `dtype`."""
    wanted = dtypes.as_dtype(dtype)
    loses = array.dtype.kind == "f" and (wanted.is_integer or wanted.is_bool)
    if array.size and (loses or (wanted.is_bool and array.dtype.kind != "b")):
        raise TypeError(
            f"Cannot convert {value!r} to a tensor of dtype {wanted.name}. Use tf.cast."
        )


def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
    """Returns `x` with another dtype. TF: `tf.cast`."""
    if isinstance(x, StringTensor):
        return convert_to_tensor(x, dtype)
    tensor = x if isinstance(x, PendingImage) else convert_to_tensor(x)
    return tensor.astype(tensor_dtype(dtype))


def saturate_cast(value: Any, dtype: Any, name: str | None = None) -> Any:
    """Returns `value` with another dtype, clipped to its range.

    TF: `tf.saturate_cast`.
    """
    tensor = convert_to_tensor(value)
    target = dtypes.as_dtype(dtype)
    if tensor.dtype != target and (target.is_integer or target.is_floating):
        # The limits in the tensor's own dtype; those of an integer may not be exact in it.
        source = dtypes.as_dtype(tensor.dtype)
        low, high = max(source.min, target.min), min(source.max, target.max)
        if source.is_floating and int(np.array(high, source.dtype)) > high:
            # The limit itself is not a number of this dtype: take the next lower one.
            high = np.nextafter(np.array(high, source.dtype), np.array(0, source.dtype))
        tensor = jnp.clip(tensor, *np.array([low, high], source.dtype))
    return tensor.astype(tensor_dtype(target))


def bitcast(input: Any, type: Any, name: str | None = None) -> Any:
    """Returns the same bits under another dtype. TF: `tf.bitcast`."""
    return lax.bitcast_convert_type(convert_to_tensor(input), tensor_dtype(type))


def identity(input: Any, name: str | None = None) -> Any:
    """Returns the value of `input` as a tensor; nests keep their structure. TF: `tf.identity`."""
    return convert_to_tensor(input)


def identity_n(input: Sequence[Any], name: str | None = None) -> list[Any]:
    """TF: `tf.identity_n`."""
    return [convert_to_tensor(tensor) for tensor in input]


def stop_gradient(input: Any, name: str | None = None) -> Any:
    """Returns `input` as a constant of every gradient. TF: `tf.stop_gradient`."""
    return jax.tree.map(lambda leaf: lax.stop_gradient(convert_to_tensor(leaf)), input)


def zeros(
    shape: Any, dtype: Any = dtypes.float32, name: str | None = None, layout: Any = None
) -> Any:
    """TF: `tf.zeros`; of `tf.string` it holds empty strings."""
    if named(dtype) == dtypes.string:
        return StringTensor(np.full(sizes(shape), b"", dtype=object))
    start_devices()
    return jnp.zeros(sizes(shape), tensor_dtype(dtype))


def ones(
    shape: Any, dtype: Any = dtypes.float32, name: str | None = None, layout: Any = None
) -> Any:
    """TF: `tf.ones`."""
    start_devices()
    return jnp.ones(sizes(shape), tensor_dtype(dtype))


def fill(dims: Any, value: Any, name: str | None = None, layout: Any = None) -> Any:
    """Returns a tensor of the shape `dims`, filled with `value`.

    TF: `tf.fill`.
    """
    tensor = convert_to_tensor(value)
    return like(tensor, array_module(tensor).broadcast_to(tensor, sizes(dims)))


def zeros_like(input: Any, dtype: Any = None, name: str | None = None, layout: Any = None) -> Any:
    """TF: `tf.zeros_like`."""
    tensor = convert_to_tensor(input)
    return zeros(tensor.shape, tensor.dtype if dtype is None else dtype)


def ones_like(input: Any, dtype: Any = None, name: str | None = None, layout: Any = None) -> Any:
    """TF: `tf.ones_like`."""
    tensor = convert_to_tensor(input)
    return ones(tensor.shape, tensor.dtype if dtype is None else dtype)


def eye(
    num_rows: int,
    num_columns: int | None = None,
    batch_shape: Any = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> Any:
    """Returns identity matrices, of the shape `batch_shape + [num_rows, num_columns]`.

    TF: `tf.eye`.
    """
    start_devices()
    matrix = jnp.eye(num_rows, num_columns, dtype=tensor_dtype(dtype))
    return (
        matrix
        if batch_shape is None
        else jnp.broadcast_to(matrix, (*sizes(batch_shape), *matrix.shape))
    )


def range(
    start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str = "range"
) -> Any:
    """Returns `start, start + delta, ...` below `limit`; with one argument, from 0.

    The dtype is that of the widest argument, of Python's integers int32.

    TF: `tf.range`.
    """
    start_devices()
    first, end = (0, start) if limit is None else (start, limit)
    if dtype is None:
        given = [convert_to_tensor(part) for part in (first, end, delta)]
        dtype = jnp.result_type(*(part.dtype for part in given))
    dtype = tensor_dtype(dtype)
    try:
        with full_width(dtype):
            return jnp.arange(_number(first), _number(end), _number(delta), dtype=dtype)
    except VALUE_WANTED:
        if not is_converting():
            raise
        return counted_range(operand(first), operand(end), operand(delta), dtype)


def _number(value: Any) -> Any:
    """A range's size is part of the program: its limits must be known while it is traced."""
    return scalar(known_value(operand(value)))


def linspace(start: Any, stop: Any, num: int, name: str | None = None, axis: int = 0) -> Any:
    """Returns `num` numbers from `start` to `stop`, both included; of integers, float64.

    TF: `tf.linspace`.
    """
    start, stop = operands(convert_to_tensor(start), convert_to_tensor(stop))
    dtype = jnp.result_type(start, stop)
    dtype = device_dtype(np.float64) if jnp.issubdtype(dtype, jnp.integer) else dtype
    return jnp.linspace(start.astype(dtype), stop.astype(dtype), size_of(num), axis=axis)


# -- asking about tensors ------------------------------------------------------------------


def is_tensor(x: Any) -> builtins.bool:
    """Whether `x` is a tensor, a ragged one, or a variable. TF: `tf.is_tensor`."""
    return isinstance(x, Tensor) or is_variable(x) or isinstance(x, CompositeTensor)


def is_symbolic_tensor(tensor: Any) -> builtins.bool:
    """Whether `tensor` stands for a value that is known when the program runs.

    TF: `tf.is_symbolic_tensor`.
    """
    return isinstance(tensor, jax.core.Tracer)


def get_static_value(tensor: Any, partial: builtins.bool = False) -> Any:
    """Returns the value as a NumPy array, or None if the program being traced computes it.

    TF: `tf.get_static_value`.
    """
    try:
        return np.array(known_value(convert_to_tensor(tensor)))[()]
    except VALUE_WANTED:
        return None


def shape(input: Any, out_type: Any = None, name: str | None = None) -> Any:
    """Returns the shape as an int32 tensor; `tensor.shape` is the Python tuple.

    TF: `tf.shape`.
    """
    return _static(convert_to_tensor(input).shape, out_type)


def shape_n(input: Sequence[Any], out_type: Any = dtypes.int32, name: str | None = None) -> Any:
    """TF: `tf.shape_n`."""
    return [shape(tensor, out_type) for tensor in input]


def size(input: Any, out_type: Any = None, name: str | None = None) -> Any:
    """TF: `tf.size`."""
    return _static(convert_to_tensor(input).size, out_type)


def rank(input: Any, name: str | None = None) -> Any:
    """TF: `tf.rank`."""
    return _static(convert_to_tensor(input).ndim, None)


def _static(value: Any, out_type: Any) -> Any:
    """Returns a value that is known also while a program is traced, so that it stays known."""
    start_devices()
    if any(map(is_symbolic_size, value if isinstance(value, tuple) else (value,))):
        return size_tensor(value)
    dtype = tensor_dtype(dtypes.int32 if out_type is None else out_type)
    array = np.asarray(value, dtype)
    return _on_device(array) if nothing_is_traced() else array.view(HostTensor)


def ensure_shape(x: Any, shape: Any, name: str | None = None) -> Any:
    """Returns `x`, which must have the shape, where None stands for any size.

    Raises:
        InvalidArgumentError: It has another shape.

    TF: `tf.ensure_shape`.
    """
    if isinstance(x, PendingImage) and not TensorShape(shape).is_fully_defined():
        x.set_shape(shape)
        return x
    tensor = convert_to_tensor(x)
    if not TensorShape(tensor.shape).is_compatible_with(shape):
        raise InvalidArgumentError(
            message=f"tf.ensure_shape: expected the shape {shape}. Received: {tensor.shape}"
        )
    return tensor


def broadcast_static_shape(shape_x: TensorShape, shape_y: TensorShape) -> TensorShape:
    """Returns the shape that tensors of two shapes broadcast to.

    Raises:
        ValueError: They do not.

    TF: `tf.broadcast_static_shape`.
    """
    return broadcast_shapes(shape_x, shape_y)


def broadcast_dynamic_shape(shape_x: Any, shape_y: Any) -> Any:
    """Likewise, of shapes that are tensors. TF: `tf.broadcast_dynamic_shape`."""
    with invalid_arguments("tf.broadcast_dynamic_shape"):
        return _static(np.broadcast_shapes(sizes(shape_x), sizes(shape_y)), None)


#: Those that take ragged tensors; those above make tensors, or are asked very often.
_OF_RAGGED = (
    "bitcast",
    "cast",
    "identity",
    "ones_like",
    "rank",
    "saturate_cast",
    "shape",
    "size",
    "stop_gradient",
    "zeros_like",
)

dispatch_on_ragged(globals(), _OF_RAGGED)
patch_operators(convert_to_tensor)
