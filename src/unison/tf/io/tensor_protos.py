"""Tensors as bytes: `tf.io.serialize_tensor` and its reverse, in TensorFlow's `TensorProto`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unison.data.examples import message
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.runtime.precision import device_array
from unison.storage.decoding import shape_of
from unison.tf import dtypes
from unison.tf.tensors import convert_to_tensor
from unison.tf.text import StringTensor

#: The numbers of the dtypes in TensorFlow's messages.
_NUMBERS = {
    dtypes.float32: 1,
    dtypes.float64: 2,
    dtypes.int32: 3,
    dtypes.uint8: 4,
    dtypes.int16: 5,
    dtypes.int8: 6,
    dtypes.string: 7,
    dtypes.complex64: 8,
    dtypes.int64: 9,
    dtypes.bool: 10,
    dtypes.bfloat16: 14,
    dtypes.uint16: 17,
    dtypes.complex128: 18,
    dtypes.float16: 19,
    dtypes.uint32: 22,
    dtypes.uint64: 23,
}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}

#: The fields that hold values one by one, where `tensor_content` does not hold all of them.
_FIELDS = {
    1: "float_val",
    2: "double_val",
    3: "int_val",
    4: "int_val",
    5: "int_val",
    6: "int_val",
    8: "scomplex_val",
    9: "int64_val",
    10: "bool_val",
    14: "half_val",
    17: "int_val",
    18: "dcomplex_val",
    19: "half_val",
    22: "uint32_val",
    23: "uint64_val",
}


#: The maximum number of bytes of values that a message leaves out.
_MOST_FILLED = 1 << 26


def serialize_tensor(tensor: Any, name: str | None = None) -> StringTensor:
    """Returns a tensor as a string, TensorFlow's to the byte. TF: `tf.io.serialize_tensor`."""
    needs_python("tf.io.serialize_tensor")
    found = convert_to_tensor(tensor)
    array = np.asarray(found)
    proto = message("TensorProto")(dtype=_NUMBERS[dtypes.as_dtype(found.dtype)])
    proto.tensor_shape.SetInParent()
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if isinstance(found, StringTensor):
        proto.string_val.extend(array.ravel().tolist())
    else:
        proto.tensor_content = array.tobytes()
    return StringTensor(proto.SerializeToString())


def parse_tensor(serialized: Any, out_type: Any, name: str | None = None) -> Any:
    """Returns the tensor that a string holds.

    Raises:
        InvalidArgumentError: It holds none, or one of another dtype than `out_type`; or it has
            few values and a shape of more than 64 MiB.

    TF: `tf.io.parse_tensor`.
    """
    needs_python("tf.io.parse_tensor")
    text = StringTensor(serialized).item()
    try:
        proto = message("TensorProto").FromString(text)
        found = _DTYPES[proto.dtype]
    except Exception as error:
        if not isinstance(error, KeyError) and type(error).__name__ != "DecodeError":
            raise
        raise InvalidArgumentError(
            message=f"Could not parse `serialized` as TensorProto: {text[:64]!r}"
        ) from error
    wanted = dtypes.as_dtype(out_type)
    if found != wanted:
        raise InvalidArgumentError(
            message=f"Type mismatch between parsed tensor ({found.name}) and dtype ({wanted.name})"
        )
    try:
        values = _values_of(proto, found)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            message=f"The TensorProto of dtype {found.name} is invalid: {error}"
        ) from error
    return StringTensor(values) if found == dtypes.string else device_array(values)


def _values_of(proto: Any, found: dtypes.DType) -> np.ndarray:
    """Returns the values of a message.

    Raises:
        ValueError, OverflowError: They are not of its shape, or of its dtype.
    """
    shape = shape_of([dimension.size for dimension in proto.tensor_shape.dim])
    if found == dtypes.string:
        texts = np.empty(len(proto.string_val), object)
        texts[:] = list(proto.string_val)
        return _filled(texts, shape, b"")
    if proto.tensor_content:
        return np.frombuffer(proto.tensor_content, found.dtype).reshape(shape)
    values = np.array(getattr(proto, _FIELDS[proto.dtype]))
    if _FIELDS[proto.dtype] == "half_val":
        values = values.astype(np.uint16).view(found.dtype)
    elif found.is_complex:
        values = values.view(found.dtype)
    return _filled(values.astype(found.dtype), shape, 0)


def _filled(values: np.ndarray, shape: tuple[int, ...], nothing: Any) -> np.ndarray:
    """Returns values in a shape; the last one stands for all that are left out.

    Raises:
        ValueError: The shape has fewer, or more than a message is believed to stand for.
    """
    count = math.prod(shape)
    if values.size > count:
        raise ValueError(f"it has {values.size} values for the shape {list(shape)}")
    if count * values.dtype.itemsize > values.nbytes + _MOST_FILLED:
        raise ValueError(f"it has {values.size} values of {count} in the shape {list(shape)}")
    filled = np.full(count, values[-1] if values.size else nothing, values.dtype)
    filled[: values.size] = values
    return filled.reshape(shape)
