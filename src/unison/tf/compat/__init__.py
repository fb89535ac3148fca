"""`tf.compat`: text and bytes, and the names of other versions of TensorFlow.

`tf.compat.v2` is `tf` itself; of `tf.compat.v1` there is what programs of TensorFlow 2 use.
"""

from __future__ import annotations

import numbers
import os
import sys
from typing import Any

import numpy as np

from unison.tf.compat import v1
from unison.tf.missing import names_missing_from

__all__ = [
    "as_bytes",
    "as_str",
    "as_str_any",
    "as_text",
    "bytes_or_text_types",
    "complex_types",
    "dimension_value",
    "forward_compatible",
    "integral_types",
    "path_to_str",
    "real_types",
    "v1",
    "v2",
]

v2 = sys.modules["unison.tf"]
# `import unison.tf.compat.v2 as tf`
sys.modules[f"{__name__}.v2"] = v2

integral_types = (numbers.Integral, np.integer)
real_types = (numbers.Real, np.integer, np.floating)
complex_types = (numbers.Complex, np.number)
bytes_or_text_types = (bytes, str)


def as_bytes(bytes_or_text: bytes | bytearray | str, encoding: str = "utf-8") -> bytes:
    """Returns text as encoded bytes, and bytes as they are.

    Raises:
        TypeError: It is neither.

    TF: `tf.compat.as_bytes`.
    """
    if isinstance(bytes_or_text, bytearray):
        return bytes(bytes_or_text)
    if isinstance(bytes_or_text, bytes | str):
        return bytes_or_text.encode(encoding) if isinstance(bytes_or_text, str) else bytes_or_text
    raise _neither(bytes_or_text)


def as_text(bytes_or_text: bytes | str, encoding: str = "utf-8") -> str:
    """Returns bytes as decoded text, and text as it is.

    Raises:
        TypeError: It is neither.

    TF: `tf.compat.as_text`, `tf.compat.as_str`.
    """
    if isinstance(bytes_or_text, bytes | str):
        return bytes_or_text if isinstance(bytes_or_text, str) else bytes_or_text.decode(encoding)
    raise _neither(bytes_or_text)


as_str = as_text


def as_str_any(value: Any, encoding: str = "utf-8") -> str:
    """Returns bytes as decoded text, and `str` of anything else. TF: `tf.compat.as_str_any`."""
    return as_text(value, encoding) if isinstance(value, bytes) else str(value)


def path_to_str(path: Any) -> Any:
    """Returns a path-like object as text, and anything else as it is.

    TF: `tf.compat.path_to_str`.
    """
    return as_text(os.fspath(path)) if isinstance(path, os.PathLike) else path


def dimension_value(dimension: int | None) -> int | None:
    """Returns `dimension`: sizes are numbers in TensorFlow 2. TF: `tf.compat.dimension_value`."""
    return dimension


def forward_compatible(year: int, month: int, day: int) -> bool:
    """Returns True: no older program reads the files of this one. TF: of the same name."""
    del year, month, day
    return True


def _neither(value: Any) -> TypeError:
    return TypeError(f"Expected bytes or text. Received: {value!r} of type {type(value).__name__}")


__getattr__ = names_missing_from(__name__)
