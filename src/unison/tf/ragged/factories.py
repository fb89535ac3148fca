"""Ragged tensors of lists and ranges: `tf.ragged.constant` and its kin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf.ragged.arrays import stacked
from unison.tf.ragged.partitions import (
    partition,
    rowids_of,
    splits_of_lengths,
    splits_of_rowids,
    tensor_of,
)
from unison.tf.ragged.rows import around, select
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.tensors import constant as dense_constant
from unison.tf.tensors import convert_to_tensor, known_value, tensor_dtype


def constant(
    pylist: Any,
    dtype: Any = None,
    ragged_rank: int | None = None,
    inner_shape: Sequence[int] | None = None,
    name: str | None = None,
    row_splits_dtype: Any = np.int64,
) -> Any:
    """Returns nested lists as a ragged tensor; of a list of numbers, a tensor.

    Args:
        pylist: The lists, or arrays. All numbers, or strings, are nested as deep as each other.
        dtype: The dtype of the values; default: as `tf.constant` chooses it.
        ragged_rank: The number of ragged axes; default: all but the first.
        inner_shape: The sizes of the axes behind those.
        name: Without effect.
        row_splits_dtype: The dtype of the splits.

    Raises:
        ValueError: The nesting differs, or does not fit the other arguments.

    Examples:
        >>> constant([[3, 1], [], [4]])
        <tf.RaggedTensor [[3, 1], [], [4]]>

    TF: `tf.ragged.constant`.
    """
    if is_ragged(pylist):
        raise TypeError("pylist may not be a RaggedTensor or RaggedTensorValue.")
    inner = None if inner_shape is None else tuple(inner_shape)
    if not _is_list(pylist):
        if ragged_rank or inner:
            raise ValueError(f"Invalid pylist={pylist!r}: a number has no axes.")
        return dense_constant(pylist, dtype)
    if ragged_rank is not None and ragged_rank < 0:
        raise ValueError(f"Invalid ragged_rank={ragged_rank}: must be nonnegative")
    depth, deepest = _depths(pylist)
    if depth is not None and deepest > depth:
        raise ValueError(
            f"Invalid pylist={pylist!r}: empty list nesting is greater than scalar value nesting"
        )
    if depth is not None and ragged_rank is not None and deepest < ragged_rank:
        raise ValueError(
            f"Invalid pylist={pylist!r}, max depth smaller than ragged_rank={ragged_rank}"
        )
    if inner is not None and ragged_rank is not None:
        expected = ragged_rank + len(inner) + 1
        if expected != depth if depth is not None else expected < deepest:
            raise ValueError(
                f"Invalid pylist={pylist!r}: incompatible with ragged_rank={ragged_rank} and "
                f"dim(inner_shape)={len(inner)}"
            )
    is_dense = ragged_rank is None and deepest - len(inner or ()) < 2
    if ragged_rank == 0 or is_dense:
        return dense_constant(pylist, dtype, inner)
    if ragged_rank is not None and inner is None:
        inner = _inner_shape(pylist, ragged_rank)
    inner = inner or ()
    if ragged_rank is None:
        ragged_rank = max(1, deepest - 1 if depth is None else depth - 1 - len(inner))
    return _of_lists(pylist, dtype, ragged_rank, inner, tensor_dtype(row_splits_dtype))


def _of_lists(
    rows: Any, dtype: Any, ragged_rank: int, inner: tuple[int, ...], splits_dtype: Any
) -> RaggedTensor:
    partitions = []
    for _ in range(ragged_rank):
        lengths = np.array([len(row) for row in rows], splits_dtype)
        partitions.append(splits_of_lengths(lengths))
        rows = list(itertools.chain.from_iterable(rows))
    if rows:
        values = dense_constant(rows, dtype, (len(rows), *inner))
    else:
        values = dense_constant(np.zeros((0, *inner), np.float32).tolist(), dtype)
        values = values.reshape((0, *inner))
    return RaggedTensor.of(values, partitions)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or np.ndim(value) != 0


def _depths(value: Any) -> tuple[int | None, int]:
    """Returns how deep numbers are nested (None: there are none), and lists, at most."""
    if not _is_list(value):
        return 0, 0
    depth, deepest = None, 1
    for child in value:
        of_child, deepest_of_child = _depths(child)
        if of_child is not None:
            if depth not in (None, of_child + 1):
                raise ValueError("all scalar values must have the same nesting depth")
            depth = of_child + 1
        deepest = max(deepest, deepest_of_child + 1)
    return depth, deepest


def _inner_shape(rows: Any, ragged_rank: int) -> tuple[int, ...]:
    """Returns the sizes of the axes behind the ragged ones, which must be the same everywhere."""
    for level in range(ragged_rank):
        if not all(map(_is_list, rows)):
            raise ValueError(
                f"pylist has scalar values depth {level + 1}, but ragged_rank={ragged_rank} "
                f"requires scalar value depth greater than {ragged_rank}"
            )
        rows = list(itertools.chain.from_iterable(rows))
    try:
        return np.shape(rows)[1:]
    except ValueError:
        raise ValueError("inner values have inconsistent shape") from None


def range_(
    starts: Any,
    limits: Any = None,
    deltas: Any = 1,
    dtype: Any = None,
    name: str | None = None,
    row_splits_dtype: Any = np.int64,
) -> RaggedTensor:
    """Returns a ragged tensor whose row `i` is `tf.range(starts[i], limits[i], deltas[i])`.

    With `starts` alone, they are the limits, and rows begin with 0.

    Examples:
        >>> range_([3, 0, 2])
        <tf.RaggedTensor [[0, 1, 2], [], [0, 1]]>

    TF: `tf.ragged.range`.
    """
    first, last = (0, starts) if limits is None else (starts, limits)
    parts = [convert_to_tensor(part, dtype) for part in (first, last, deltas)]
    needs_python("tf.ragged.range")
    kind = np.result_type(*(part.dtype for part in parts))
    begins, ends, steps = np.broadcast_arrays(*(known_value(part) for part in parts))
    begins, ends, steps = (np.atleast_1d(part) for part in (begins, ends, steps))
    if (steps == 0).any():
        raise InvalidArgumentError(message="Requires delta != 0")
    rows = [np.arange(*bounds, dtype=kind) for bounds in zip(begins, ends, steps, strict=True)]
    lengths = np.array([len(row) for row in rows], tensor_dtype(row_splits_dtype))
    values = convert_to_tensor(np.concatenate([np.zeros(0, kind), *rows]))
    return RaggedTensor.of(values, (splits_of_lengths(lengths),))


def stack(values: Any, axis: int = 0, name: str | None = None) -> Any:
    """Joins tensors, whose axes may have different sizes, along a new axis into a ragged tensor.

    Examples:
        >>> stack([[1, 2], [3]])
        <tf.RaggedTensor [[1, 2], [3]]>

    TF: `tf.ragged.stack`.
    """
    if not isinstance(values, list | tuple):
        values = [values]
    tensors = [value if is_ragged(value) else convert_to_tensor(value) for value in values]
    if not tensors:
        raise ValueError("tf.ragged.stack needs at least one tensor.")
    if all(len(tensor.shape) == 0 for tensor in tensors):
        return dense_constant(tensors)
    return stacked(tensors, axis)


def row_splits_to_segment_ids(splits: Any, name: str | None = None, out_type: Any = None) -> Any:
    """Returns the row of every value, given the splits.

    TF: `tf.ragged.row_splits_to_segment_ids`.
    """
    own = partition(splits, "splits", out_type)
    if own.shape[0] == 0:
        raise ValueError("Invalid row_splits: []")
    if not isinstance(own, np.ndarray):
        needs_python("tf.ragged.row_splits_to_segment_ids")
        raise ValueError(
            "In a compiled program the number of values is not known from splits: use "
            "x.value_rowids()."
        )
    return tensor_of(rowids_of(own, int(own[-1])))


def segment_ids_to_row_splits(
    segment_ids: Any,
    num_segments: Any = None,
    out_type: Any = None,
    name: str | None = None,
) -> Any:
    """Returns the splits, given the row of every value, in increasing order.

    TF: `tf.ragged.segment_ids_to_row_splits`.
    """
    ids = partition(segment_ids, "segment_ids", out_type)
    if num_segments is None:
        if not isinstance(ids, np.ndarray):
            needs_python("tf.ragged.segment_ids_to_row_splits without num_segments")
            raise ValueError("In a compiled program num_segments must be given.")
        num_segments = int(ids[-1]) + 1 if len(ids) else 0
    return tensor_of(splits_of_rowids(ids, int(num_segments)))


def stack_dynamic_partitions(
    data: Any, partitions: Any, num_partitions: Any, name: str | None = None
) -> RaggedTensor:
    """Returns a ragged tensor whose row `i` has the slices of `data` marked with `i`.

    Examples:
        >>> stack_dynamic_partitions([5, 6, 7], [1, 0, 1], 3)
        <tf.RaggedTensor [[6], [5, 7], []]>

    TF: `tf.ragged.stack_dynamic_partitions`.
    """
    data = data if is_ragged(data) else convert_to_tensor(data)
    marks = partition(partitions, "partitions")
    if not isinstance(marks, np.ndarray):
        needs_python("tf.ragged.stack_dynamic_partitions")
        raise ValueError("tf.ragged.stack_dynamic_partitions works outside compiled programs only.")
    count = int(known_value(num_partitions))
    if ((marks < 0) | (marks >= count)).any():
        raise InvalidArgumentError(message=f"Partitions must be in [0, {count}). Received: {marks}")
    order = np.argsort(marks, kind="stable")
    splits = splits_of_lengths(np.bincount(marks, minlength=count).astype(np.int64))
    return around(select(data, order), splits)


def cross(inputs: Sequence[Any], name: str | None = None) -> RaggedTensor:
    """Returns, for every row, the combinations of one value of every input, joined by "_X_".

    Args:
        inputs: Ragged tensors, or matrices, of strings or integers, with as many rows.
        name: Without effect.

    Examples:
        >>> cross([constant([["a"], ["b", "c"]]), constant([["d"], ["e"]])])
        <tf.RaggedTensor [[b'a_X_d'], [b'b_X_e', b'c_X_e']]>

    TF: `tf.ragged.cross`.
    """
    needs_python("tf.ragged.cross")
    tensors = [
        value if is_ragged(value) else RaggedTensor.from_tensor(convert_to_tensor(value))
        for value in inputs
    ]
    if len({tensor.shape[0] for tensor in tensors}) != 1:
        raise ValueError(f"The inputs must have as many rows. Received: {inputs!r}")
    rows = [
        [b"_X_".join(map(_text, items)) for items in itertools.product(*of_row)]
        for of_row in zip(*(tensor.to_list() for tensor in tensors), strict=True)
    ]
    return constant(rows, "string", ragged_rank=1)


def _text(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()
