"""Row splits: where the rows of a ragged tensor begin and end in its values.

Outside compiled programs, splits are NumPy's arrays, on the host, and everything is exact. In a
program that is being compiled they are traced, sizes are fixed, and values may be longer than the
last split: rows end where the splits say, and what follows is padding (see `docs/ragged.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.errors import InvalidArgumentError
from unison.runtime.private_jax import constant_value, nothing_is_traced
from unison.tf.dtypes import named
from unison.tf.host import HostTensor
from unison.tf.tensors import convert_to_tensor, tensor_dtype

#: The index of padding: beyond all values.
NOWHERE = np.int32(2**31 - 1)

#: Row splits: NumPy's if they are known, traced ones otherwise.
Splits = Any


def known(value: Any) -> np.ndarray | None:
    """Returns the value of splits as NumPy's array; None if a program computes it."""
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, jax.core.Tracer):
        constant = constant_value(value)
        return None if constant is None else np.asarray(constant)
    return np.asarray(value) if isinstance(value, jax.Array) else None


def tensor_of(value: Any) -> Any:
    """Returns known numbers as a tensor: an array, or in a program one that stays known."""
    if not isinstance(value, np.ndarray):
        return value
    return convert_to_tensor(value) if nothing_is_traced() else value.view(HostTensor)


def partition(value: Any, what: str, dtype: Any = None) -> Splits:
    """Returns a vector of whole numbers as NumPy's array, or traced.

    Args:
        value: A list, an array or a tensor.
        what: Its name, for messages.
        dtype: int32 or int64; default: that of an array, int64 of a list.

    Raises:
        ValueError: It has another number of axes.
        TypeError: It has another dtype.
    """
    if dtype is not None and named(dtype) not in (np.int32, np.int64):
        raise ValueError(f"row_splits_dtype must be tf.int32 or tf.int64. Received: {dtype!r}")
    if not isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        value = array.astype(np.int64) if array.size == 0 or array.dtype.kind in "iu" else array
    if np.ndim(value) != 1:
        raise ValueError(f"{what} must have one axis. Received: shape {np.shape(value)}")
    if value.dtype not in (np.int32, np.int64):
        if np.dtype(value.dtype).kind not in "iu":
            raise TypeError(f"{what} must be int32 or int64. Received: dtype {value.dtype}")
        value = value.astype(np.int64)
    values = known(value)
    value = value if values is None else values
    return value if dtype is None else value.astype(tensor_dtype(dtype))


def check(condition: bool, what: str) -> None:
    """Raises `InvalidArgumentError` unless a condition of valid rows holds."""
    if not condition:
        raise InvalidArgumentError(
            message=f"The arguments do not form a valid RaggedTensor: {what}."
        )


def check_splits(splits: Splits, num_values: Any) -> None:
    """Raises unless known splits begin with 0, do not decrease, and end with the values."""
    values = known(splits)
    check(splits.shape[0] > 0, "row_splits may not be empty")
    if values is None:
        return
    check(values[0] == 0, f"row_splits must begin with 0, not {values[0]}")
    check(bool((np.diff(values) >= 0).all()), f"row_splits must not decrease: {values.tolist()}")
    if isinstance(num_values, int):
        check(
            values[-1] == num_values,
            f"row_splits end with {values[-1]}, and there are {num_values} values",
        )


def splits_of_lengths(lengths: Splits) -> Splits:
    """Returns the splits of rows of these lengths."""
    module = np if isinstance(lengths, np.ndarray) else jnp
    ends = module.cumsum(lengths, dtype=lengths.dtype)
    return module.concatenate([module.zeros(1, lengths.dtype), ends])


def lengths_of(splits: Splits) -> Splits:
    """Returns the lengths of the rows."""
    return splits[1:] - splits[:-1]


def rowids_of(splits: Splits, num_values: int) -> Splits:
    """Returns the row of every value; padding has the number of rows."""
    values = known(splits)
    if values is not None:
        ids = np.repeat(np.arange(len(values) - 1, dtype=values.dtype), np.diff(values))
        padding = np.full(num_values - len(ids), len(values) - 1, values.dtype)
        return np.concatenate([ids, padding]) if len(padding) else ids
    places = jnp.arange(num_values, dtype=np.int32)
    limits = splits[1:].astype(np.int32)
    return jnp.searchsorted(limits, places, side="right").astype(splits.dtype)


def splits_of_rowids(rowids: Splits, nrows: int) -> Splits:
    """Returns the splits of `nrows` rows, given the row of every value."""
    module = np if isinstance(rowids, np.ndarray) else jnp
    rows = module.arange(nrows + 1, dtype=rowids.dtype)
    return module.searchsorted(rowids, rows, side="left").astype(rowids.dtype)


def ranges(starts: Splits, lengths: Splits, most: int) -> tuple[Any, Splits]:
    """Returns the indices of consecutive ranges of values, and the splits of what they select.

    Args:
        starts: The first index of every range.
        lengths: The lengths.
        most: In a program, the number of indices: at least the sum of the lengths. What is beyond
            that sum is `NOWHERE`.
    """
    splits = splits_of_lengths(lengths)
    if isinstance(starts, np.ndarray) and isinstance(splits, np.ndarray):
        offsets = np.repeat(starts - splits[:-1], lengths)
        return np.arange(splits[-1], dtype=splits.dtype) + offsets, splits
    places = jnp.arange(most, dtype=np.int32)
    if starts.shape[0] == 0:
        return jnp.full(most, NOWHERE), splits
    splits_32 = jnp.asarray(splits).astype(np.int32)
    rows = jnp.minimum(rowids_of(splits_32, most), starts.shape[0] - 1)
    indices = jnp.asarray(starts).astype(np.int32)[rows] + places - splits_32[:-1][rows]
    return jnp.where(places < splits_32[-1], indices, NOWHERE), splits


def same(one: Sequence[Splits], other: Sequence[Splits]) -> bool | None:
    """Whether two lists of splits are equal; None if only a program would know."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if a is b:
            continue
        if a.shape != b.shape:
            return False
        first, second = known(a), known(b)
        if first is None or second is None:
            return None
        if not np.array_equal(first, second):
            return False
    return True
