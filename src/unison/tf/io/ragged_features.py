"""`tf.io.RaggedFeature`: features of any length, parsed into ragged tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from unison.data.examples import ExampleParser, Sparse, VarLenFeature
from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.ragged.partitions import splits_of_lengths
from unison.tf.ragged.tensor import RaggedTensor
from unison.tf.tensors import convert_to_tensor
from unison.tf.text import StringTensor


class RowSplits(NamedTuple):
    """Rows whose splits are the values of a feature. TF: `tf.io.RaggedFeature.RowSplits`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        """Returns the lengths of the rows of an Example, of `count` values."""
        return np.diff(numbers)


class RowLengths(NamedTuple):
    """Rows whose lengths are. TF: `tf.io.RaggedFeature.RowLengths`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return numbers


class RowStarts(NamedTuple):
    """Rows whose first values' places are. TF: `tf.io.RaggedFeature.RowStarts`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return np.diff([*numbers, count])


class RowLimits(NamedTuple):
    """Rows whose ends are. TF: `tf.io.RaggedFeature.RowLimits`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return np.diff([0, *numbers])


class ValueRowIds(NamedTuple):
    """Rows of values whose rows' numbers are. TF: `tf.io.RaggedFeature.ValueRowIds`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return np.bincount(numbers, minlength=0)


class UniformRowLength(NamedTuple):
    """Rows of one length. TF: `tf.io.RaggedFeature.UniformRowLength`."""

    length: int


class _Feature(NamedTuple):
    dtype: Any
    value_key: str | None = None
    partitions: Sequence[Any] = ()
    row_splits_dtype: Any = dtypes.int32
    validate: bool = False


class RaggedFeature(_Feature):
    """A feature with any number of values; parsed, it is ragged.

    Attributes:
        dtype: float32, int64 or string.
        value_key: The feature of the values; default: the key under which it is requested.
        partitions: The ragged axes inside of an Example, outermost first: `RowSplits`,
            `RowLengths`, `RowStarts`, `RowLimits`, `ValueRowIds` of other features, or
            `UniformRowLength`.
        row_splits_dtype: The dtype of the splits.
        validate: Without effect: partitions are always checked.

    TF: `tf.io.RaggedFeature`.
    """

    __slots__ = ()

    RowSplits: TypeAlias = RowSplits
    RowLengths: TypeAlias = RowLengths
    RowStarts: TypeAlias = RowStarts
    RowLimits: TypeAlias = RowLimits
    ValueRowIds: TypeAlias = ValueRowIds
    UniformRowLength: TypeAlias = UniformRowLength


_Partition = RowSplits | RowLengths | RowStarts | RowLimits | ValueRowIds | UniformRowLength


class RaggedParser:
    """Parses the ragged features of serialized Examples.

    Args:
        features: The `RaggedFeature`s, by key.

    Raises:
        TypeError: A partition is invalid.
        ValueError: One feature is to be read with two dtypes.
    """

    def __init__(self, features: Mapping[str, RaggedFeature]):
        self._features = features
        raw: dict[str, VarLenFeature] = {}
        for key, feature in features.items():
            wanted = [(feature.value_key or key, np.dtype(dtypes.named(feature.dtype)))]
            for partition in feature.partitions:
                if not isinstance(partition, _Partition):
                    raise TypeError(f"Invalid partition of feature {key!r}: {partition!r}")
                if not isinstance(partition, UniformRowLength):
                    wanted.append((partition.key, np.dtype(np.int64)))
            for name, dtype in wanted:
                if raw.setdefault(name, VarLenFeature(dtype)).dtype != dtype:
                    raise ValueError(f"Feature {name!r} is to be read with two dtypes.")
        self._parser = ExampleParser(raw)

    def __call__(self, serialized: Any) -> dict[str, Any]:
        """Returns the features of an Example, or of a vector of them."""
        parsed = self._parser(serialized)
        return {key: self._ragged(key, feature, parsed) for key, feature in self._features.items()}

    def _ragged(self, key: str, feature: RaggedFeature, parsed: Mapping[str, Sparse]) -> Any:
        values = parsed[feature.value_key or key]
        is_batch = len(values.dense_shape) == 2
        counts = _counts(values)
        dtype = np.dtype(dtypes.named(feature.row_splits_dtype))
        flat = _tensor(values.values)
        splits: list[np.ndarray] = []
        uniform: list[int | None] = []
        for partition in reversed(feature.partitions):
            lengths = _lengths(key, partition, counts, parsed)
            counts = list(map(len, lengths))
            if isinstance(partition, UniformRowLength) and not splits:
                flat = flat.reshape((sum(counts), partition.length, *flat.shape[1:]))
                continue
            splits.insert(0, splits_of_lengths(np.concatenate(lengths).astype(dtype)))
            is_uniform = isinstance(partition, UniformRowLength)
            uniform.insert(0, partition.length if is_uniform else None)
        if is_batch:
            splits.insert(0, splits_of_lengths(np.array(counts, dtype)))
            uniform.insert(0, None)
        return RaggedTensor.of(flat, splits, uniform) if splits else flat


def _counts(values: Sparse) -> list[int]:
    """Returns the number of values of every Example."""
    if len(values.dense_shape) == 1:
        return [len(values.values)]
    return np.bincount(values.indices[:, 0], minlength=int(values.dense_shape[0])).tolist()


def _lengths(
    key: str, partition: Any, counts: Sequence[int], parsed: Mapping[str, Sparse]
) -> list[np.ndarray]:
    """Returns the lengths of the rows of every Example."""
    if isinstance(partition, UniformRowLength):
        size = partition.length
        lengths = [np.full(count // size if size else 0, size, np.int64) for count in counts]
    else:
        numbers = parsed[partition.key]
        ends = np.cumsum(_counts(numbers))[:-1]
        parts = np.split(np.asarray(numbers.values, np.int64), ends)
        lengths = [
            np.asarray(partition.lengths(part, count), np.int64)
            for part, count in zip(parts, counts, strict=True)
        ]
    for index, (own, count) in enumerate(zip(lengths, counts, strict=True)):
        if (own < 0).any() or own.sum() != count:
            raise InvalidArgumentError(
                message=f"The partition {partition} of feature {key!r} does not fit Example "
                f"{index}: rows of lengths {own.tolist()} of {count} values"
            )
    return lengths


def _tensor(values: np.ndarray) -> Any:
    return StringTensor(values) if values.dtype.kind == "O" else convert_to_tensor(values)
