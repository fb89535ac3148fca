"""`tf.io.RaggedFeature`: features of any length, parsed into ragged tensors."""

from __future__ import annotations

import reprlib
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

#: The number of rows that the row ids of a batch may name: so many, and more for its values. An id
#: of a few bytes is that of a row, and rows before it take memory; TensorFlow allocates up to 2^31.
_FEW_ROWS = 1 << 20
_ROWS_A_VALUE = 16


class RowSplits(NamedTuple):
    """Rows whose splits are the values of a feature. TF: `tf.io.RaggedFeature.RowSplits`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        """Returns the lengths of the rows of an Example, of `count` values.

        Raises:
            ValueError: They are of no rows.
        """
        if numbers[:1].any():
            raise ValueError(f"the first split is {numbers[0]}, and not 0")
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
        return np.diff(numbers, append=count)


class RowLimits(NamedTuple):
    """Rows whose ends are. TF: `tf.io.RaggedFeature.RowLimits`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        return np.diff(numbers, prepend=0)


class ValueRowIds(NamedTuple):
    """Rows of values whose rows' numbers are. TF: `tf.io.RaggedFeature.ValueRowIds`."""

    key: str

    def lengths(self, numbers: np.ndarray, count: int) -> np.ndarray:
        if (numbers < 0).any() or (numbers[1:] < numbers[:-1]).any():
            raise ValueError(
                f"expected row ids from 0 on, in the order of the rows, received {_shown(numbers)}"
            )
        return np.bincount(numbers)


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
        ValueError: One feature is to be read with two dtypes, or rows have a negative length.
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
                elif partition.length < 0:
                    raise ValueError(
                        f"Expected rows of feature {key!r} of a length of at least 0. "
                        f"Received: {partition!r}"
                    )
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
            splits.insert(
                0,
                splits_of_lengths(np.concatenate([np.zeros(0, np.int64), *lengths]).astype(dtype)),
            )
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
        parts = np.split(np.asarray(numbers.values, np.int64), ends)[: len(counts)]
        if isinstance(partition, ValueRowIds):
            _check_number_of_rows(key, partition, parts, sum(counts))
        lengths = []
        for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
            try:
                lengths.append(np.asarray(partition.lengths(part, count), np.int64))
            except ValueError as error:
                raise _misfit(key, partition, index, str(error)) from error
    for index, (own, count) in enumerate(zip(lengths, counts, strict=True)):
        # Each is compared, too: the sum of a few large ones overflows, to any number.
        if ((own < 0) | (own > count)).any() or own.sum() != count:
            what = f"rows of lengths {_shown(own)} of {count} values"
            raise _misfit(key, partition, index, what)
    return lengths


def _check_number_of_rows(
    key: str, partition: ValueRowIds, parts: Sequence[np.ndarray], num_values: int
) -> None:
    """Checks that the rows of all Examples are few enough for their values.

    Raises:
        InvalidArgumentError: They are not.
    """
    num_rows = sum(int(part.max(initial=-1)) + 1 for part in parts)
    most = _FEW_ROWS + _ROWS_A_VALUE * num_values
    if num_rows > most:
        raise InvalidArgumentError(
            message=f"Expected the partition {partition} of feature {key!r} to name at most {most} "
            f"rows of {num_values} values. Received {num_rows}, of which most are empty. Write "
            "lengths or splits of so many rows: tf.io.RaggedFeature.RowLengths, RowSplits"
        )


def _misfit(key: str, partition: Any, index: int, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        message=f"The partition {partition} of feature {key!r} does not fit Example {index}: "
        f"{reason}"
    )


def _shown(numbers: np.ndarray) -> str:
    """Returns the first numbers as text."""
    return reprlib.repr(numbers[:7].tolist())


def _tensor(values: np.ndarray) -> Any:
    return StringTensor(values) if values.dtype.kind == "O" else convert_to_tensor(values)
