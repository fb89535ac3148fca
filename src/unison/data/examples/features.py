"""The requested features of an Example: their shapes and dtypes, under TensorFlow's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.data.examples.wire import Kind


class FixedLenFeature(NamedTuple):
    """A feature with the same number of values in every Example.

    Attributes:
        shape: The shape of its values.
        dtype: float32, int64, or a dtype of text: `bytes`, `str`, `object`.
        default_value: Its value in Examples without it; None: such an Example is an error.

    TF: `tf.io.FixedLenFeature`.
    """

    shape: Any
    dtype: Any
    default_value: Any = None


class VarLenFeature(NamedTuple):
    """A feature with any number of values; parsed, it is sparse.

    Attributes:
        dtype: float32, int64, or a dtype of text.

    TF: `tf.io.VarLenFeature`.
    """

    dtype: Any


class FixedLenSequenceFeature(NamedTuple):
    """A feature whose values are rows of one shape, any number of them; parsed, it is padded.

    Attributes:
        shape: The shape of a row.
        dtype: float32, int64, or a dtype of text.
        allow_missing: Whether Examples without it are accepted, and have no rows. In an Example, it
            must be True; in a list of a `SequenceExample`, it may be False.
        default_value: The padding; default: 0, or empty text.

    TF: `tf.io.FixedLenSequenceFeature`.
    """

    shape: Any
    dtype: Any
    allow_missing: bool = False
    default_value: Any = None


class SparseFeature(NamedTuple):
    """Values and their indices, from several features; parsed, it is sparse.

    Attributes:
        index_key: The feature of the indices; for several axes, several.
        value_key: The feature of the values.
        dtype: The dtype of the values: float32, int64, or a dtype of text.
        size: The size along the axis, or the sizes.
        already_sorted: Whether the indices are in order.

    TF: `tf.io.SparseFeature`.
    """

    index_key: str | Sequence[str]
    value_key: str
    dtype: Any
    size: int | Sequence[int]
    already_sorted: bool = False


class Sparse(NamedTuple):
    """An array of which only some values are stored.

    Attributes:
        indices: The positions of the values, int64 of shape [number of values, number of axes].
        values: The values.
        dense_shape: The shape of the array, int64.

    Examples:
        >>> array = Sparse(np.array([[0, 1]]), np.array([5]), np.array([2, 2]))
        >>> array.to_dense().tolist()
        [[0, 5], [0, 0]]
    """

    indices: np.ndarray
    values: np.ndarray
    dense_shape: np.ndarray

    def to_dense(self, default_value: Any = None) -> np.ndarray:
        """Returns the array, with `default_value` (0, or empty text) in all other positions."""
        if default_value is None:
            default_value = missing_value(self.values.dtype)
        dense = np.full(tuple(self.dense_shape), default_value, self.values.dtype)
        dense[tuple(self.indices.T)] = self.values
        return dense


def missing_value(dtype: np.dtype) -> Any:
    """Returns the default for missing values: 0, or empty text."""
    return b"" if dtype.kind == "O" else 0


_KINDS: dict[np.dtype, Kind] = {
    np.dtype("float32"): Kind.FLOAT,
    np.dtype("int64"): Kind.INT64,
    np.dtype("object"): Kind.BYTES,
}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}


def kind_of(dtype: Any) -> Kind:
    """Returns the kind of feature whose values have a dtype.

    Raises:
        ValueError: There is no such kind: features are float32, int64 or text.
    """
    try:
        found = np.dtype(object) if dtype == "string" else np.dtype(dtype)
    except TypeError:
        found = None
    if found is not None and found.kind in "OSU":
        found = np.dtype(object)
    if found not in _KINDS:
        raise ValueError(
            f"The dtype of a feature is float32, int64 or text (bytes). Received: {dtype!r}. "
            "Parse it as one of these, and convert it then."
        )
    return _KINDS[found]


def dtype_of_kind(kind: Kind) -> np.dtype:
    """Returns the dtype of the values of a kind of feature."""
    return _DTYPES[kind]
