"""Indices of ragged tensors: `x[2]`, `x[1:3]`, `x[:, :2]`."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf.ragged.partitions import NOWHERE, known, lengths_of, ranges, rowids_of
from unison.tf.ragged.rows import around, implements, select
from unison.tf.ragged.tensor import RaggedTensor, is_ragged


@implements("getitem")
def getitem(ragged: RaggedTensor, key: Any) -> Any:
    """Returns a row, or rows, or parts of them, as TensorFlow's `RaggedTensor.__getitem__`."""
    keys = list(key) if isinstance(key, list | tuple) else [key]
    return _item(ragged, [_index(part) for part in keys])


def _index(key: Any) -> Any:
    """Returns an index as a number, a slice of numbers, None or Ellipsis."""
    if key is None or key is Ellipsis:
        return key
    if isinstance(key, slice):
        bounds = (key.start, key.stop, key.step)
        return slice(*(None if bound is None else _number(bound) for bound in bounds))
    return _number(key)


def _number(value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError("Use tf.boolean_mask, not a Boolean index, for ragged tensors.")
    if isinstance(value, jax.core.Tracer):
        found = known(value)
        if found is None:
            needs_python("Indexing a ragged tensor")
            raise ValueError(
                "In a compiled program the indices of a RaggedTensor are numbers. Received one "
                "that the program computes: use tf.gather on x.to_tensor(shape=...)."
            )
        value = found
    try:
        return operator.index(np.asarray(value)[()] if hasattr(value, "dtype") else value)
    except TypeError:
        raise TypeError(
            "The indices of a RaggedTensor are integers, slices, None and `...`. Received: "
            f"{value!r}"
        ) from None


def _item(value: Any, keys: list[Any]) -> Any:
    if not keys:
        return value
    if not is_ragged(value):
        return value[tuple(keys)]
    first, rest = keys[0], keys[1:]
    if first is Ellipsis:
        return _item(value, _without_ellipsis(keys, value.rank))
    if first is None:
        inner = _item(value, rest)
        count = inner.shape[0]
        return around(inner, np.array([0, count], _dtype(inner)), count)
    if isinstance(first, slice):
        return _inner(_rows(value, first), rest)
    return _item(_row(value, first), rest)


def _dtype(value: Any) -> Any:
    return value.partitions[0].dtype if is_ragged(value) else np.int64


def _without_ellipsis(keys: list[Any], rank: int) -> list[Any]:
    taken = sum(1 for key in keys if key is not None) - 1
    if taken > rank:
        raise IndexError("Too many indices for RaggedTensor")
    return [*[slice(None)] * (rank - taken), *keys[1:]]


def _row(ragged: RaggedTensor, index: int) -> Any:
    splits = ragged.partitions[0]
    nrows = splits.shape[0] - 1
    if not -nrows <= index < nrows:
        raise IndexError(f"Row key {index} out of bounds")
    index %= nrows
    if not isinstance(splits, np.ndarray):
        length = ragged.uniform_lengths[0]
        if length is None:
            needs_python("Taking a row of a ragged tensor")
            raise ValueError(
                "In a compiled program the length of a row is not known while it is compiled. Take "
                "the row of a padded tensor: x.to_tensor(shape=[None, 64])[i]."
            )
        return _slice(ragged.inner, index * length, (index + 1) * length)
    return _slice(ragged.inner, int(splits[index]), int(splits[index + 1]))


def _slice(values: Any, start: int, stop: int) -> Any:
    return _rows(values, slice(start, stop)) if is_ragged(values) else values[start:stop]


def _rows(ragged: RaggedTensor, key: slice) -> RaggedTensor:
    """Returns some of the rows."""
    if key == slice(None):
        return ragged
    splits, values = ragged.partitions[0], ragged.inner
    uniform = ragged.uniform_lengths[0]
    nrows = splits.shape[0] - 1
    start, stop, step = key.indices(nrows)
    if step == 1 and isinstance(splits, np.ndarray):
        own = splits[start : max(start, stop) + 1]
        return around(_slice(values, int(own[0]), int(own[-1])), own - own[0], uniform)
    if step == 1 and start == 0:
        return around(values, splits[: max(stop, 0) + 1], uniform)  # the rest is padding
    places, chosen = ranges(splits[:-1][key], lengths_of(splits)[key], values.shape[0])
    return around(select(values, places), chosen, uniform)


def _inner(ragged: Any, keys: list[Any]) -> Any:
    """Applies indices to the axes inside the first one."""
    if not keys:
        return ragged
    if not is_ragged(ragged):
        return ragged[(slice(None), *keys)]
    key, rest = keys[0], keys[1:]
    if key is Ellipsis:
        return _inner(ragged, _without_ellipsis(keys, ragged.rank - 1))
    if key is None:
        inner = _inner(ragged, rest)
        count = inner.shape[0]
        return around(inner, np.arange(count + 1, dtype=_dtype(inner)), 1)
    if isinstance(key, slice):
        chosen = ragged if key == slice(None) else _columns(ragged, key)
        return around_values(chosen, _inner(chosen.inner, rest))
    length = ragged.uniform_lengths[0]
    if length is None:
        raise ValueError("Cannot index into an inner ragged dimension.")
    if not -length <= key < length:
        raise InvalidArgumentError(message="Index out of bounds when indexing into a ragged tensor")
    values = ragged.inner
    step = slice(key % length, None, length)
    chosen = _rows(values, step) if is_ragged(values) else values[step]
    return _inner(chosen, rest)


def around_values(ragged: RaggedTensor, values: Any) -> RaggedTensor:
    """Returns the rows of a ragged tensor with other values, of which there are as many."""
    return around(values, ragged.partitions[0], ragged.uniform_lengths[0])


def _columns(ragged: RaggedTensor, key: slice) -> RaggedTensor:
    """Returns a slice of every row."""
    splits, uniform = ragged.partitions[0], ragged.uniform_lengths[0]
    module: Any = np if isinstance(splits, np.ndarray) else jnp
    lengths = lengths_of(splits)
    step = 1 if key.step is None else key.step
    if step == 0:
        raise ValueError("slice step cannot be zero")
    lowest, highest = (0, lengths) if step > 0 else (-1, lengths - 1)

    def bound(given: int | None, default: Any) -> Any:
        if given is None:
            return default
        place = given + lengths * (given < 0)
        return module.clip(place, lowest, highest)

    begins = bound(key.start, module.zeros_like(lengths) if step > 0 else highest)
    ends = bound(key.stop, highest if step > 0 else module.full_like(lengths, -1))
    counts = module.maximum(0, -((begins - ends) // step)).astype(splits.dtype)
    values = ragged.inner
    places, chosen = ranges(module.zeros_like(counts), counts, values.shape[0])
    places = _strided(places, chosen, splits[:-1] + begins, step, values.shape[0])
    length = None if uniform is None else len(range(uniform)[key])
    return around(select(values, places), chosen, length)


def _strided(places: Any, splits: Any, starts: Any, step: int, most: int) -> Any:
    """Returns the indices that begin at `starts` and go by `step`, given places in each range."""
    rows = rowids_of(splits, len(places) if isinstance(places, np.ndarray) else most)
    if isinstance(rows, np.ndarray) and isinstance(places, np.ndarray):
        return starts[rows] + places * step
    is_there = places < NOWHERE
    rows = jnp.minimum(rows, max(starts.shape[0] - 1, 0))
    own = jnp.asarray(starts).astype(np.int32)[rows.astype(np.int32)]
    return jnp.where(is_there, own + places * step, NOWHERE)
