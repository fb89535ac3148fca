"""The class methods that make ragged tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np

from unison.eager_fallback import needs_python
from unison.tf.dispatch import CompositeTensor, implementations
from unison.tf.ragged.partitions import (
    Splits,
    check,
    check_splits,
    partition,
    splits_of_lengths,
    splits_of_rowids,
)
from unison.tf.tensors import convert_to_tensor, size_of


class Constructors(CompositeTensor):
    """Base of `RaggedTensor`: its class methods."""

    __slots__ = ()

    @classmethod
    def of(
        cls,
        flat: Any,
        splits: Sequence[Splits],
        uniform: Sequence[int | None] | None = None,
        is_padded: bool = False,
    ) -> Self:
        """Returns the ragged tensor of parts that are known to fit."""
        raise NotImplementedError

    @property
    def partitions(self) -> tuple[Splits, ...]:
        """The splits of all ragged axes: NumPy's arrays, or traced ones."""
        raise NotImplementedError

    @classmethod
    def around(cls, values: Any, splits: Splits, uniform: int | None = None) -> Self:
        """Returns the rows of a tensor, or of a ragged one, that splits determine, unchecked."""
        raise NotImplementedError

    @classmethod
    def from_row_splits(
        cls, values: Any, row_splits: Any, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns the rows `values[row_splits[i]:row_splits[i + 1]]`.

        Args:
            values: A tensor, or a ragged one.
            row_splits: One more than there are rows: from 0 to the number of values.
            name: Without effect.
            validate: Whether the splits are checked; in a compiled program they are not.

        Raises:
            InvalidArgumentError: The splits are invalid.
        """
        values = values_of(values)
        splits = partition(row_splits, "row_splits")
        if validate:
            check_splits(splits, count_of(values))
        return cls.around(values, splits)

    @classmethod
    def from_row_lengths(
        cls, values: Any, row_lengths: Any, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns consecutive rows of these lengths."""
        lengths = partition(row_lengths, "row_lengths")
        if validate and isinstance(lengths, np.ndarray):
            check(bool((lengths >= 0).all()), f"a length is negative: {lengths.tolist()}")
        return cls.from_row_splits(values, splits_of_lengths(lengths), name, validate)

    @classmethod
    def from_value_rowids(
        cls,
        values: Any,
        value_rowids: Any,
        nrows: Any = None,
        name: str | None = None,
        validate: bool = True,
    ) -> Self:
        """Returns the rows of values whose numbers of rows are given, in increasing order.

        In a compiled program `nrows` is required.
        """
        ids = partition(value_rowids, "value_rowids")
        is_known = isinstance(ids, np.ndarray)
        if nrows is None:
            if not is_known:
                needs_python("from_value_rowids without nrows")
                raise ValueError("In a compiled program from_value_rowids needs nrows.")
            nrows = int(ids[-1]) + 1 if len(ids) else 0
        nrows = size_of(nrows)
        if nrows < 0:
            raise ValueError(f"Expected nrows >= 0; got {nrows}")
        if is_known and len(ids) and nrows <= ids[-1]:
            raise ValueError(
                f"Expected nrows >= value_rowids[-1] + 1; got nrows={nrows}, "
                f"value_rowids[-1]={ids[-1]}"
            )
        values = values_of(values)
        if validate and is_known:
            check(bool((np.diff(ids) >= 0).all()), f"value_rowids decrease: {ids.tolist()}")
            check(len(ids) == count_of(values), f"{len(ids)} row ids for {count_of(values)} values")
        return cls.around(values, splits_of_rowids(ids, nrows))

    @classmethod
    def from_row_starts(
        cls, values: Any, row_starts: Any, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns the rows that begin at the given values."""
        values = values_of(values)
        starts = partition(row_starts, "row_starts")
        end = np.array([count_of(values)], starts.dtype)
        return cls.from_row_splits(values, _joined(starts, end), name, validate)

    @classmethod
    def from_row_limits(
        cls, values: Any, row_limits: Any, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns consecutive rows that end before the given values."""
        limits = partition(row_limits, "row_limits")
        return cls.from_row_splits(
            values, _joined(np.zeros(1, limits.dtype), limits), name, validate
        )

    @classmethod
    def from_uniform_row_length(
        cls,
        values: Any,
        uniform_row_length: Any,
        nrows: Any = None,
        validate: bool = True,
        name: str | None = None,
    ) -> Self:
        """Returns consecutive rows of one length; `nrows` is required if that is 0."""
        values = values_of(values)
        length, count = size_of(uniform_row_length), count_of(values)
        if length < 0:
            raise ValueError(f"uniform_row_length must not be negative. Received: {length}")
        if nrows is None:
            nrows = count // length if length else 0
        nrows = size_of(nrows)
        if validate:
            check(nrows * length == count, f"{nrows} rows of {length} values are not {count}")
        splits = np.arange(nrows + 1, dtype=_splits_dtype(values)) * length
        return cls.around(values, splits, length)

    @classmethod
    def from_nested_row_splits(
        cls,
        flat_values: Any,
        nested_row_splits: Any,
        name: str | None = None,
        validate: bool = True,
    ) -> Self:
        """Returns the tensor of several ragged axes, given their splits, outermost first."""
        return _nested(cls.from_row_splits, flat_values, nested_row_splits, validate)

    @classmethod
    def from_nested_row_lengths(
        cls,
        flat_values: Any,
        nested_row_lengths: Any,
        name: str | None = None,
        validate: bool = True,
    ) -> Self:
        """Likewise, given the lengths of the rows."""
        return _nested(cls.from_row_lengths, flat_values, nested_row_lengths, validate)

    @classmethod
    def from_nested_value_rowids(
        cls,
        flat_values: Any,
        nested_value_rowids: Any,
        nested_nrows: Any = None,
        name: str | None = None,
        validate: bool = True,
    ) -> Self:
        """Likewise, given the row of every value, and the numbers of rows."""
        counts = nested_nrows or [None] * len(nested_value_rowids)
        result = flat_values
        for ids, count in zip(reversed(nested_value_rowids), reversed(counts), strict=True):
            result = cls.from_value_rowids(result, ids, count, validate=validate)
        return result

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        lengths: Any = None,
        padding: Any = None,
        ragged_rank: int = 1,
        name: str | None = None,
        row_splits_dtype: Any = np.int64,
    ) -> Self:
        """Returns the rows of a tensor, without what is beyond `lengths`, or equal to `padding`.

        Args:
            tensor: A tensor of two or more axes.
            lengths: The lengths of the rows; several vectors of them for several ragged axes.
            padding: Instead, the value with which rows were padded at their ends.
            ragged_rank: The number of ragged axes.
            name: Without effect.
            row_splits_dtype: The dtype of the splits.
        """
        return implementations["from_tensor"](
            tensor, lengths, padding, ragged_rank, row_splits_dtype
        )

    @classmethod
    def from_sparse(
        cls, st_input: Any, name: str | None = None, row_splits_dtype: Any = np.int64
    ) -> Self:
        """Returns the rows of a sparse matrix whose values begin each row, without gaps."""
        return implementations["from_sparse"](st_input, row_splits_dtype)

    @classmethod
    def of_uniform_axes(cls, flat: Any, lengths: Sequence[int], shape: Sequence[int]) -> Self:
        """Returns consecutive rows of these lengths, one for every element of a dense tensor.

        Args:
            flat: The values of all rows.
            lengths: Their lengths.
            shape: The shape of the dense tensor.
        """
        splits = [splits_of_lengths(np.array(lengths, np.int64))]
        for axis in range(len(shape) - 1, 0, -1):
            count = int(np.prod(shape[:axis]))
            splits.insert(0, np.arange(count + 1, dtype=np.int64) * shape[axis])
        return cls.of(flat, splits, [*shape[1:], None])


# -- their parts -----------------------------------------------------------------------------


def values_of(values: Any) -> Any:
    """Returns values as a tensor of at least one axis; ragged ones as they are."""
    if isinstance(values, CompositeTensor):
        return values
    tensor = convert_to_tensor(values)
    if tensor.ndim == 0:
        raise ValueError("The values of a RaggedTensor have an axis. Received: a scalar")
    return tensor


def count_of(values: Any) -> int:
    """Returns the number of rows of a tensor or ragged tensor."""
    return values.shape[0]


def _splits_dtype(values: Any) -> Any:
    is_ragged = isinstance(values, Constructors)
    return values.partitions[0].dtype if is_ragged else np.dtype(np.int64)


def _joined(one: Splits, other: Splits) -> Splits:
    are_known = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return (np if are_known else jax.numpy).concatenate([one, other])


def _nested(make: Callable[..., Any], flat: Any, parts: Any, validate: bool) -> Any:
    if not isinstance(parts, list | tuple):
        raise TypeError(f"Expected a list of the parts of every ragged axis. Received: {parts!r}")
    result = flat
    for part in reversed(parts):
        result = make(result, part, validate=validate)
    return result if parts else values_of(flat)
