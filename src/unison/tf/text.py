"""Text: tensors of strings, and `tf.compat`'s conversions between `bytes` and `str`.

JAX has no arrays of strings. A string tensor is a NumPy array of `bytes`, on the host, with the
few methods that TensorFlow's tensors have beyond NumPy's; `tf.strings` works on them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unison.tf import dtypes
from unison.tf.host import HostTensor


class StringTensor(HostTensor):
    """A tensor of strings: an array of `bytes`.

    Args:
        value: A string (`str` or `bytes`), or nested lists or an array of them. `str` is encoded
            in UTF-8.

    Raises:
        TypeError: `value` contains something that is not a string.
        ValueError: The lists are not rectangular.

    Examples:
        >>> words = StringTensor(["a", "bc"])
        >>> words[1].numpy(), words.shape, (words == "a").tolist()
        (b'bc', (2,), [True, False])

    TF: `tf.Tensor` of dtype `tf.string`.
    """

    def __new__(cls, value: Any) -> StringTensor:
        array = np.array(value, dtype=object)
        encoded = np.empty(array.shape, dtype=object)
        encoded.ravel()[:] = [_encoded(item) for item in array.flat]
        return encoded.view(cls)

    @property
    def dtype(self) -> Any:
        """`tf.string`."""
        return dtypes.string

    def __eq__(self, other: Any) -> Any:
        return _compared(np.equal, self, other)

    def __ne__(self, other: Any) -> Any:
        return _compared(np.not_equal, self, other)

    # As TensorFlow's, tensors compare by value and are no keys: see `ref`.
    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return StringTensor(self.view(np.ndarray) + _bytes_of(other))

    def __radd__(self, other: Any) -> Any:
        return StringTensor(_bytes_of(other) + self.view(np.ndarray))

    def __repr__(self) -> str:
        value = repr(self.numpy())
        lines = "\n" if "\n" in value else ""
        return f"<tf.Tensor: shape={self.shape}, dtype=string, numpy={lines}{value}>"

    def __str__(self) -> str:
        return f"tf.Tensor({self.numpy()}, shape={self.shape}, dtype=string)"

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

    def __reduce__(self) -> Any:
        return StringTensor, (self.view(np.ndarray),)


def is_text(value: Any) -> bool:
    """Whether `value` is a string, or an array or (nested) list whose first leaf is one."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, StringTensor) or value.dtype.kind in "SUT":
            return True
        return value.dtype.kind == "O" and value.size > 0 and isinstance(value.flat[0], str | bytes)
    return isinstance(value, str | bytes)


def as_bytes(bytes_or_text: Any, encoding: str = "utf-8") -> bytes:
    """Returns text as `bytes`. TF: `tf.compat.as_bytes`.

    Raises:
        TypeError: Neither `str` nor `bytes`.
    """
    if isinstance(bytes_or_text, bytearray):
        return bytes(bytes_or_text)
    if isinstance(bytes_or_text, str):
        return bytes_or_text.encode(encoding)
    if isinstance(bytes_or_text, bytes):
        return bytes_or_text
    raise TypeError(f"Expected binary or unicode string, got {bytes_or_text!r}")


def as_text(bytes_or_text: Any, encoding: str = "utf-8") -> str:
    """Returns `bytes` as text. TF: `tf.compat.as_text`.

    Raises:
        TypeError: Neither `str` nor `bytes`.
    """
    if isinstance(bytes_or_text, str):
        return bytes_or_text
    if isinstance(bytes_or_text, bytes):
        return bytes_or_text.decode(encoding)
    raise TypeError(f"Expected binary or unicode string, got {bytes_or_text!r}")


#: TF: `tf.compat.as_str`.
as_str = as_text


def as_str_any(value: Any, encoding: str = "utf-8") -> str:
    """Returns `bytes` as text, and anything else as `str` shows it.

    TF: `tf.compat.as_str_any`.
    """
    return as_text(value, encoding) if isinstance(value, bytes) else str(value)


def text_of(value: Any) -> str:
    """Returns the text of a scalar: a `str`, `bytes`, path, or string tensor.

    Raises:
        TypeError: `value` is not one of them.
    """
    if isinstance(value, np.ndarray):
        value = value.item()
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    return as_text(value)


def texts_of(value: Any) -> np.ndarray:
    """Returns strings in any form as NumPy's array of `bytes`; that of a tensor is not copied."""
    tensor = value if isinstance(value, StringTensor) else StringTensor(value)
    return tensor.view(np.ndarray)


def _encoded(item: Any) -> bytes:
    if isinstance(item, np.ndarray) and item.ndim == 0:
        item = item.item()
    if isinstance(item, list | tuple | np.ndarray):
        raise ValueError(f"Can't convert non-rectangular Python sequence to Tensor: {item!r}")
    return as_bytes(item)


def _bytes_of(value: Any) -> np.ndarray:
    return StringTensor(value).view(np.ndarray)


def _compared(operation: Any, one: StringTensor, other: Any) -> Any:
    if not is_text(other):
        return NotImplemented
    result = operation(one.view(np.ndarray), _bytes_of(other))
    return jax.numpy.asarray(np.asarray(result, dtype=bool))
