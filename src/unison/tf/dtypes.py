"""`tf.dtypes`: TensorFlow's dtypes, which NumPy, JAX and Keras take as they take their own.

A `DType` equals the NumPy dtype that it names, with the same hash: `x.dtype == tf.float32` is
asked of arrays, whose dtypes are NumPy's. What TensorFlow's dtypes tell about themselves
(`is_floating`, `as_numpy_dtype`, `max`), `tf.as_dtype(x.dtype)` tells about an array's.
"""

from __future__ import annotations

import builtins
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from unison.tf.missing import names_missing_from
from unison.tf.trace_types import TraceTypeMembers
from unison.unsupported import UnsupportedMember

__getattr__ = names_missing_from(__name__)


class DType(TraceTypeMembers):
    """A dtype under TensorFlow's name.

    Attributes:
        name: "float32", "string", ...
        dtype: The NumPy dtype; NumPy and JAX ask for it where a dtype is expected.

    Examples:
        >>> float32, float32.is_floating, float32 == np.dtype("float32")
        (tf.float32, True, True)
        >>> np.zeros(2, dtype=float32).dtype
        dtype('float32')

    TF: `tf.dtypes.DType`.
    """

    __slots__ = ("dtype", "name")

    as_datatype_enum = UnsupportedMember("there are no protocol buffers of dtypes: use dtype.name")

    def __init__(self, name: str, dtype: Any):
        self.name = name
        self.dtype = np.dtype(dtype)

    def is_subtype_of(self, other: Any) -> builtins.bool:
        """Whether `other` is the same dtype."""
        return self == other

    @property
    def as_numpy_dtype(self) -> type:
        """The NumPy scalar type; `object` for text."""
        return builtins.object if self is string else self.dtype.type

    @property
    def base_dtype(self) -> DType:
        return self

    @property
    def real_dtype(self) -> DType:
        """The dtype of the real part."""
        return {complex64: float32, complex128: float64}.get(self, self)

    @property
    def size(self) -> int:
        """Bytes of one element; 1 for text, as in TensorFlow."""
        return 1 if self is string else self.dtype.itemsize

    @property
    def is_bool(self) -> builtins.bool:
        return self is bool

    @property
    def is_integer(self) -> builtins.bool:
        return jnp.issubdtype(self.dtype, jnp.integer)

    @property
    def is_unsigned(self) -> builtins.bool:
        return jnp.issubdtype(self.dtype, jnp.unsignedinteger)

    @property
    def is_floating(self) -> builtins.bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def is_complex(self) -> builtins.bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def is_numeric(self) -> builtins.bool:
        return jnp.issubdtype(self.dtype, jnp.number)

    @property
    def is_quantized(self) -> builtins.bool:
        return False

    @property
    def is_numpy_compatible(self) -> builtins.bool:
        return True

    @property
    def min(self) -> Any:
        """The smallest value.

        Raises:
            TypeError: The dtype is bool, complex or string.
        """
        return self._bounds("minimum").min

    @property
    def max(self) -> Any:
        """The largest value.

        Raises:
            TypeError: The dtype is bool, complex or string.
        """
        return self._bounds("maximum").max

    @property
    def limits(self) -> tuple[Any, Any]:
        """The range of images of this dtype: 0 to 1, or that of the integers."""
        return (self.min, self.max) if self.is_integer else (0, 1)

    def _bounds(self, which: str) -> Any:
        if self.is_integer:
            return jnp.iinfo(self.dtype)
        if self.is_floating:
            return jnp.finfo(self.dtype)
        raise TypeError(f"Cannot find the {which} of {self!s}: it has none.")

    def is_compatible_with(self, other: Any) -> builtins.bool:
        """Whether `other` is the same dtype."""
        return self == other

    @property
    def kind(self) -> str:
        """NumPy's letter for the kind of dtype, for code that expects one of NumPy's."""
        return self.dtype.kind

    @property
    def itemsize(self) -> int:
        """NumPy's bytes of one element."""
        return self.dtype.itemsize

    def __eq__(self, other: Any) -> Any:
        if other is None:
            return False
        try:
            return self.dtype == as_dtype(other).dtype
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return f"tf.{self.name}"

    def __str__(self) -> str:
        return f"<dtype: {self.name!r}>"

    def __reduce__(self) -> Any:
        return as_dtype, (self.name,)


bfloat16 = DType("bfloat16", ml_dtypes.bfloat16)
bool = DType("bool", "bool")
complex64 = DType("complex64", "complex64")
complex128 = DType("complex128", "complex128")
float16 = half = DType("float16", "float16")
float32 = DType("float32", "float32")
float64 = double = DType("float64", "float64")
int8 = DType("int8", "int8")
int16 = DType("int16", "int16")
int32 = DType("int32", "int32")
int64 = DType("int64", "int64")
string = DType("string", "object")
uint8 = DType("uint8", "uint8")
uint16 = DType("uint16", "uint16")
uint32 = DType("uint32", "uint32")
uint64 = DType("uint64", "uint64")

_ALL = [value for value in list(globals().values()) if isinstance(value, DType)]
_BY_DTYPE = {dtype.dtype: dtype for dtype in _ALL}
_BY_NAME = {
    **{dtype.name: dtype for dtype in _ALL},
    "half": float16,
    "double": float64,
    "float": float32,
}
#: Python's types, which mean 32 bits to TensorFlow.
_BY_TYPE = {float: float32, builtins.bool: bool, str: string, bytes: string}


def as_dtype(type_value: Any) -> DType:
    """Returns the `DType` of a name, a NumPy dtype or type, or Python's `float`, `bool`, `str`.

    Raises:
        TypeError: `type_value` names no dtype.

    Examples:
        >>> as_dtype(np.zeros(2).dtype).is_floating
        True

    TF: `tf.as_dtype`.
    """
    if isinstance(type_value, DType):
        return type_value
    if isinstance(type_value, str):
        found = _BY_NAME.get(type_value)
    elif isinstance(type_value, type) and type_value in _BY_TYPE:
        found = _BY_TYPE[type_value]
    elif type_value is None or type_value is int:
        found = None
    else:
        try:
            dtype = np.dtype(type_value)
        except TypeError:
            found = None
        else:
            found = string if dtype.kind in "OSUT" else _BY_DTYPE.get(dtype)
    if found is None:
        raise TypeError(
            f"Cannot convert the argument `type_value`: {type_value!r} to a TensorFlow DType. "
            f"Expected one of {sorted(_BY_NAME)}, or a NumPy dtype."
        )
    return found


def named(dtype: Any) -> np.dtype:
    """Returns `dtype`, in any of the spellings that `as_dtype` takes, as NumPy's."""
    return as_dtype(dtype).dtype
