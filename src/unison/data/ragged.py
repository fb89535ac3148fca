"""Leaves whose rows have different lengths: `RaggedArray`.

A batch of such rows is a pair of arrays: the rows, one after the other, and the splits between
them, as in `tf.RaggedTensor`, which they are in `unison.tf`. They stay on the host until a batch
is copied to devices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.errors import InvalidArgumentError


class OtherLeaf:
    """Base of the leaves that are not arrays: ragged arrays, plans of datasets."""

    __slots__ = ()


class RaggedArray(OtherLeaf):
    """An array with ragged axes, or a row of one.

    Args:
        flat: The values inside of all ragged axes.
        splits: The splits of every ragged axis, outermost first: row `i` is
            `values[splits[i]:splits[i + 1]]`. Without any, it is an array of which batches are
            ragged, as a row is.
        splits_dtype: The dtype of splits: int32 or int64.

    Examples:
        >>> rows = RaggedArray(np.arange(4), (np.array([0, 1, 4]),))
        >>> rows.shape, rows[1].flat, rows[1:].splits
        ((2, None), array([1, 2, 3]), (array([0, 3]),))
    """

    __slots__ = ("flat", "splits", "splits_dtype")

    def __init__(self, flat: Any, splits: Sequence[Any] = (), splits_dtype: Any = np.int64):
        self.flat = flat
        self.splits = tuple(splits)
        self.splits_dtype = splits[0].dtype if splits else np.dtype(splits_dtype)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.flat, *self.splits), self.splits_dtype

    @classmethod
    def tree_unflatten(cls, splits_dtype: Any, parts: Sequence[Any]) -> RaggedArray:
        made = cls.__new__(cls)
        made.flat, *splits = parts
        made.splits = tuple(splits)
        made.splits_dtype = splits_dtype
        return made

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes, None for ragged axes."""
        if not self.splits:
            return self.flat.shape
        return (len(self), *(None,) * len(self.splits), *self.flat.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.flat.dtype

    @property
    def values(self) -> RaggedArray:
        """The rows, one after the other."""
        return RaggedArray(self.flat, self.splits[1:], self.splits_dtype)

    def __len__(self) -> int:
        return len(self.splits[0]) - 1 if self.splits else len(self.flat)

    def __getitem__(self, index: Any) -> Any:
        """Returns a row, or the rows of a slice or of indices."""
        if not self.splits:
            part = self.flat[index]
            is_row = isinstance(index, int | np.integer)
            return part if is_row else RaggedArray(part, (), self.splits_dtype)
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):
                raise IndexError(
                    f"Expected the index of one of {len(self)} rows. Received: {index}"
                )
            place = index % len(self)
            return self.values[int(self.splits[0][place]) : int(self.splits[0][place + 1])]
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            splits = self.splits[0][start : max(start, stop) + 1]
            inner = self.values[int(splits[0]) : int(splits[-1])]
            return _around(inner, splits - splits[0])
        places = np.arange(len(self))[index]
        starts = self.splits[0][:-1][places]
        splits = _splits_of(self.splits[0][1:][places] - starts)
        offsets = np.repeat(starts - splits[:-1], np.diff(splits))
        return _around(self.values[np.arange(splits[-1]) + offsets], splits)

    @classmethod
    def stacked(cls, rows: Sequence[Any]) -> RaggedArray:
        """Returns arrays of any lengths, or ragged ones, as the rows of a ragged array.

        Raises:
            InvalidArgumentError: They differ in dtype, in number of axes, or in their last ones.
        """
        own = [
            row if isinstance(row, RaggedArray) else RaggedArray(np.asarray(row)) for row in rows
        ]
        kinds = {(len(row.shape), len(row.splits), row.dtype) for row in own}
        if len(kinds) > 1 or not own[0].shape:
            shapes = [f"{row.dtype}{list(row.shape)}" for row in own]
            raise InvalidArgumentError(
                message=f"The rows of a ragged batch must have as many axes and one dtype, and at "
                f"least one axis. Received: {shapes}"
            )
        lengths = np.array(list(map(len, own)), own[0].splits_dtype)
        return _around(joined(own), _splits_of(lengths))

    def __reduce__(self) -> Any:
        return RaggedArray, (self.flat, self.splits, self.splits_dtype)

    def __repr__(self) -> str:
        return f"RaggedArray({self.flat!r}, {self.splits!r})"


if "jax" in sys.modules:  # not in the processes of workers, which load what needs NumPy only
    sys.modules["jax"].tree_util.register_pytree_node_class(RaggedArray)


def _around(values: RaggedArray, splits: np.ndarray) -> RaggedArray:
    return RaggedArray(values.flat, (splits, *values.splits))


def _splits_of(lengths: np.ndarray) -> np.ndarray:
    splits = np.zeros(len(lengths) + 1, lengths.dtype)
    np.cumsum(lengths, out=splits[1:])
    return splits


def joined(parts: Sequence[RaggedArray]) -> RaggedArray:
    """Returns ragged arrays of one kind, one after the other.

    Raises:
        InvalidArgumentError: Their last axes differ.
    """
    if parts[0].splits:
        firsts = np.cumsum([0, *(part.splits[0][-1] for part in parts)])
        limits = [part.splits[0][1:] + first for part, first in zip(parts, firsts, strict=False)]
        splits = np.concatenate([parts[0].splits[0][:1], *limits])
        splits = splits.astype(parts[0].splits_dtype, copy=False)
        return _around(joined([part.values for part in parts]), splits)
    try:
        flat = np.concatenate([part.flat for part in parts])
    except ValueError as error:
        shapes = [list(part.flat.shape) for part in parts]
        raise InvalidArgumentError(
            message="The rows of a ragged batch may differ in their ragged axes only. Received "
            f"values of shapes: {shapes}"
        ) from error
    return RaggedArray(flat, (), parts[0].splits_dtype)


def ragged_of(value: Any, ragged_rank: int, splits_dtype: Any = np.int64) -> RaggedArray:
    """Returns an array as a ragged one whose rows have one length, but may not in a batch.

    Args:
        value: The array, of more axes than `ragged_rank`.
        ragged_rank: The number of ragged axes.
        splits_dtype: The dtype of the splits.
    """
    array = np.asarray(value)
    sizes = array.shape[: ragged_rank + 1]
    splits = [
        np.arange(int(np.prod(sizes[: axis + 1])) + 1, dtype=splits_dtype) * sizes[axis + 1]
        for axis in range(ragged_rank)
    ]
    flat = array.reshape((int(np.prod(sizes)), *array.shape[ragged_rank + 1 :]))
    return RaggedArray(flat, splits, splits_dtype)


def empty_like(dtype: np.dtype, shape: Sequence[int | None]) -> RaggedArray:
    """Returns a ragged array without rows, of the dtype and the axes of another one."""
    ragged_rank = sum(size is None for size in shape[1:])
    inner = [size or 0 for size in shape[ragged_rank + 1 :]]
    return RaggedArray(np.empty((0, *inner), dtype), [np.zeros(1, np.int64)] * ragged_rank)
