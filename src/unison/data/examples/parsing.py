"""Serialized Examples to arrays: a whole batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unison.data.examples.columns import KIND_NAMES, columns_of
from unison.data.examples.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    Sparse,
    SparseFeature,
    VarLenFeature,
    dtype_of_kind,
    kind_of,
    missing_value,
)
from unison.data.examples.wire import Column, Kind
from unison.data.leaves import as_leaf
from unison.data.specs import as_shape
from unison.errors import InvalidArgumentError


def parse_example(serialized: Any, features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of one serialized `tf.train.Example`, or of a batch of them.

    A batch takes little longer than one Example, so `dataset.batch(n).map(parse)` is the fast way.

    Args:
        serialized: `bytes`, or an array or list of them.
        features: The features to parse, by key: `FixedLenFeature`, `VarLenFeature`,
            `FixedLenSequenceFeature`, `SparseFeature`.

    Returns:
        An array for each key, with a first axis for the batch; for a `VarLenFeature` and a
        `SparseFeature`, a `Sparse`.

    Raises:
        InvalidArgumentError: The bytes are not an Example, or it lacks a feature, or has one of
            another kind or size.

    Examples:
        >>> from unison.data.examples import message
        >>> example = message("Example")()
        >>> example.features.feature["label"].int64_list.value.append(3)
        >>> serialized = example.SerializeToString()
        >>> wanted = {"label": FixedLenFeature([], np.int64)}
        >>> parse_example(serialized, wanted), parse_example([serialized] * 2, wanted)
        ({'label': np.int64(3)}, {'label': array([3, 3])})

    TF: `tf.io.parse_example`, `tf.io.parse_single_example`.
    """
    return ExampleParser(features)(as_leaf(serialized))


class ExampleParser:
    """Reads the same features of many Examples; see `parse_example`.

    Raises:
        ValueError: No features are given, or they cannot be parsed.
        TypeError: An item is not a feature.
    """

    def __init__(self, features: Mapping[str, Any]):
        if not features:
            raise ValueError(f"Expected features to read, by key. Received: {features!r}")
        #: The kinds of the parsed features, by key.
        self._kinds: dict[str, Kind] = {}
        self._assemblers = {key: self._assembler(key, features[key]) for key in sorted(features)}

    def __call__(self, serialized: Any) -> dict[str, Any]:
        """Returns the features of one Example, or of a batch.

        Args:
            serialized: `bytes`, or an array of them with one axis.
        """
        if isinstance(serialized, bytes):
            batch = self._parsed([serialized])
            return {key: without_batch(value) for key, value in batch.items()}
        if getattr(serialized, "ndim", 1) != 1:
            raise InvalidArgumentError(
                message="Expected serialized to be a scalar or vector, got shape: "
                f"{list(serialized.shape)}"
            )
        return self._parsed(list(serialized))

    def _parsed(self, serialized: list[bytes]) -> dict[str, Any]:
        columns = columns_of(serialized, self._kinds)
        return {key: assemble(columns) for key, assemble in self._assemblers.items()}

    def _assembler(self, key: str, feature: Any) -> Callable[[dict[str, Column]], Any]:
        """Returns the function from the parsed columns to the result."""
        if isinstance(feature, SparseFeature):
            return self._sparse_assembler(feature)
        if not isinstance(feature, FixedLenFeature | VarLenFeature | FixedLenSequenceFeature):
            raise TypeError(
                "Expected a FixedLenFeature, VarLenFeature, FixedLenSequenceFeature or "
                f"SparseFeature for {key!r}. Received: {feature!r}"
            )
        kind = self._read(key, feature.dtype)
        if isinstance(feature, VarLenFeature):
            return lambda columns: sparse_of(columns[key])
        shape = known_shape(key, feature.shape)
        if isinstance(feature, FixedLenSequenceFeature):
            if not feature.allow_missing:
                raise ValueError(
                    "Unsupported: FixedLenSequenceFeature requires allow_missing to be True. "
                    f"Received for {key!r}: {feature!r}"
                )
            padding = _default(key, feature.default_value, kind, ())
            return lambda columns: _padded(key, columns[key], shape, padding)
        default = None
        if feature.default_value is not None:
            default = _default(key, feature.default_value, kind, shape)
        return lambda columns: _fixed(key, columns[key], kind, shape, default)

    def _sparse_assembler(self, feature: SparseFeature) -> Callable[[dict[str, Column]], Any]:
        given = feature.index_key
        keys = [given] if isinstance(given, str) else [*given]
        sizes = np.atleast_1d(np.asarray(feature.size, np.int64))
        if len(keys) != len(sizes):
            raise ValueError(f"Expected as many sizes as index keys. Received: {feature!r}")
        for key in keys:
            self._read(key, np.int64)
        self._read(feature.value_key, feature.dtype)
        return lambda columns: _sparse_from(
            [columns[key] for key in keys],
            columns[feature.value_key],
            sizes,
            feature,
        )

    def _read(self, key: str, dtype: Any) -> Kind:
        """Adds a feature to be parsed."""
        kind = kind_of(dtype)
        if self._kinds.setdefault(key, kind) is not kind:
            raise ValueError(
                f"The feature {key!r} is wanted with two dtypes: {KIND_NAMES[self._kinds[key]]} "
                f"and {KIND_NAMES[kind]}."
            )
        return kind


def without_batch(value: Any) -> Any:
    """Returns the result for the only Example of a batch."""
    if isinstance(value, Sparse):
        return Sparse(value.indices[:, 1:], value.values, value.dense_shape[1:])
    return value[0]


def known_shape(key: str, shape: Any) -> tuple[int, ...]:
    """Returns the shape of a feature's values.

    Raises:
        ValueError: A size is unknown.
    """
    sizes = as_shape(shape)
    if sizes is None or None in sizes:
        raise ValueError(
            f"First dimension of shape for feature {key} unknown. Consider using "
            f"FixedLenSequenceFeature. Received: {shape!r}"
        )
    return tuple(size for size in sizes if size is not None)


def _default(key: str, value: Any, kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
    dtype = dtype_of_kind(kind)
    if value is None:
        value = missing_value(dtype)
    leaf = as_leaf(value)
    array = np.empty((), object) if isinstance(leaf, bytes) else np.asarray(leaf)
    if isinstance(leaf, bytes):
        array[()] = leaf
    is_text = array.dtype.kind == "O"
    if array.size != math.prod(shape) or is_text != (dtype.kind == "O"):
        raise InvalidArgumentError(
            message=f"The default_value of {key} must be {math.prod(shape)} values of dtype "
            f"{KIND_NAMES[kind]}, for the shape {list(shape)}. Received: {value!r}"
        )
    return array.astype(dtype).reshape(shape)


def _fixed(
    key: str, column: Column, kind: Kind, shape: tuple[int, ...], default: np.ndarray | None
) -> np.ndarray:
    counts, values = column
    size = math.prod(shape)
    has_it = counts >= 0
    if default is None and not has_it.all():
        raise InvalidArgumentError(
            message=f"Feature: {key} (data type: {KIND_NAMES[kind]}) is required but could not be "
            f"found in example {np.argmin(has_it)} of {len(counts)}."
        )
    is_wrong = has_it & (counts != size)
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        raise InvalidArgumentError(
            message=f"Key: {key}, Index: {index}. Number of {KIND_NAMES[kind]} values != expected. "
            f"Values size: {counts[index]} but output shape: {list(shape)}"
        )
    if default is None or has_it.all():
        return values.reshape((len(counts), *shape))
    rows = np.empty((len(counts), *shape), values.dtype)
    rows[...] = default
    rows[has_it] = values.reshape((-1, *shape))
    return rows


def sparse_of(column: Column) -> Sparse:
    """Returns a column as a sparse array with a row for each Example."""
    counts = np.maximum(column.counts, 0)
    indices = np.stack([np.repeat(np.arange(len(counts)), counts), places_in_rows(counts)], 1)
    longest = counts.max(initial=0)
    return Sparse(indices, column.values, np.array([len(counts), longest], np.int64))


def places_in_rows(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... up to each count, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _padded(key: str, column: Column, shape: tuple[int, ...], padding: np.ndarray) -> np.ndarray:
    counts = np.maximum(column.counts, 0)
    size = math.prod(shape)
    if size and (counts % size).any():
        index = int(np.argmax(counts % size > 0))
        raise InvalidArgumentError(
            message=f"Key: {key}, Index: {index}. Number of values is not divisible by stride "
            f"length {size}, that of the shape {list(shape)}. Values size: {counts[index]}"
        )
    longest = int(counts.max(initial=0))
    rows = np.empty((len(counts), longest), column.values.dtype)
    rows[...] = padding
    rows[np.arange(longest) < counts[:, None]] = column.values
    return rows.reshape((len(counts), longest // size if size else 0, *shape))


def _sparse_from(
    axes: list[Column], column: Column, sizes: np.ndarray, feature: SparseFeature
) -> Sparse:
    counts = np.maximum(column.counts, 0)
    for key_counts, _ in axes:
        if not np.array_equal(np.maximum(key_counts, 0), counts):
            raise InvalidArgumentError(
                message=f"{feature.index_key} and {feature.value_key} have different numbers of "
                "values in an Example."
            )
    rows = np.repeat(np.arange(len(counts)), counts)
    indices = np.stack([rows, *(axis.values for axis in axes)], 1)
    if (indices[:, 1:] < 0).any() or (indices[:, 1:] >= sizes).any():
        raise InvalidArgumentError(
            message=f"An index of {feature.index_key} is outside of the size {feature.size}."
        )
    values = column.values
    if not feature.already_sorted:
        order = np.lexsort(indices.T[::-1])
        indices, values = indices[order], values[order]
    return Sparse(indices, values, np.array([len(counts), *sizes], np.int64))
