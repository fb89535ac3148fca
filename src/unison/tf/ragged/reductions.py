"""Reductions of ragged tensors, along rows, columns, or of all values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.eager_fallback import needs_python
from unison.tf.math import divide
from unison.tf.ragged.elementwise import elementwise, with_flat
from unison.tf.ragged.partitions import (
    known,
    lengths_of,
    rowids_of,
    splits_of_lengths,
)
from unison.tf.ragged.rows import around, at, implements
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.vanishing import sqrt

#: Combines the rows of values that have the same id: (values, ids, number of ids).
Segments = Callable[[Any, Any, int], Any]


def _sum(values: Any, ids: Any, count: int) -> Any:
    return jax.ops.segment_sum(values, ids, count)


def _prod(values: Any, ids: Any, count: int) -> Any:
    # JAX has no gradient of segment_prod.
    if not values.shape[0]:
        return jnp.ones((count, *values.shape[1:]), values.dtype)
    order = jnp.argsort(ids)
    ids = jnp.asarray(ids)[order]
    products = _running(values[order], ids, jnp.multiply)
    ends = jnp.searchsorted(ids, jnp.arange(count), side="right") - 1
    has_values = jax.ops.segment_sum(jnp.ones(ids.shape, np.int32), ids, count) > 0
    shape = (-1, *(1,) * (values.ndim - 1))
    return jnp.where(has_values.reshape(shape), products[jnp.maximum(ends, 0)], 1)


def _max(values: Any, ids: Any, count: int) -> Any:
    lowest = _limits(values.dtype).min
    return jnp.maximum(jax.ops.segment_max(values, ids, count), jnp.asarray(lowest, values.dtype))


def _min(values: Any, ids: Any, count: int) -> Any:
    highest = _limits(values.dtype).max
    return jnp.minimum(jax.ops.segment_min(values, ids, count), jnp.asarray(highest, values.dtype))


def _limits(dtype: Any) -> Any:
    return jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)


def _any(values: Any, ids: Any, count: int) -> Any:
    return jax.ops.segment_sum(values.astype(np.int32), ids, count) > 0


def _all(values: Any, ids: Any, count: int) -> Any:
    return jax.ops.segment_sum((~values).astype(np.int32), ids, count) == 0


def reduced(segments: Segments, ragged: Any, axes: list[int], keepdims: bool) -> Any:
    """Returns the reduction along axes, which are sorted."""
    result = ragged
    for axis in reversed(axes):
        result = _along(segments, result, axis)
    if keepdims:
        from_front = result
        for axis in axes:
            from_front = expanded(from_front, axis)
        return from_front
    return result


def expanded(value: Any, axis: int) -> Any:
    """Returns a tensor, or a ragged one, with a new axis of size 1."""
    if not is_ragged(value):
        return jnp.expand_dims(value, axis)
    if axis == 0:
        count = value.shape[0]
        return around(value, np.array([0, count], value.partitions[0].dtype), count)
    if axis == 1:
        count = value.shape[0]
        return around(value, np.arange(count + 1, dtype=value.partitions[0].dtype), 1)
    inner = expanded(value.inner, axis - 1)
    return around(inner, value.partitions[0], value.uniform_lengths[0])


def _along(segments: Segments, value: Any, axis: int) -> Any:
    if not is_ragged(value):
        ids = jnp.zeros(value.shape[axis], np.int32)
        return segments(jnp.moveaxis(value, axis, 0), ids, 1)[0]
    splits, values = value.partitions[0], value.inner
    if axis == 0:
        rows = rowids_of(splits, values.shape[0])
        nowhere = len(splits) - 1
        width = _width(splits)
        module: Any = np if isinstance(rows, np.ndarray) else jnp
        columns = module.arange(len(rows), dtype=rows.dtype) - at(splits, rows)
        return _combined(segments, values, module.where(rows < nowhere, columns, width), width)
    if axis == 1:
        count = splits.shape[0] - 1
        return _combined(segments, values, rowids_of(splits, values.shape[0]), count)
    inner = _along(segments, values, axis - 1)
    return around(inner, splits, value.uniform_lengths[0])


def _width(splits: Any) -> int:
    if isinstance(splits, np.ndarray):
        return int(np.diff(splits).max(initial=0))
    needs_python("Reducing a ragged tensor along axis 0")
    raise ValueError(
        "In a compiled program the largest length of the rows is not known, which is the size of a "
        "reduction along axis 0. Reduce x.to_tensor(shape=[None, 64]), or along axis 1."
    )


def _combined(segments: Segments, values: Any, ids: Any, count: int) -> Any:
    """Combines the rows of a tensor, or of a ragged one, that have the same id below `count`."""
    if not is_ragged(values):
        if count == 0:  # JAX has no gradient of sums of no segments
            return values[:0]
        return segments(values, jnp.asarray(ids).astype(np.int32), count)
    splits = values.partitions[0]
    lengths = lengths_of(splits)
    inner = values.inner
    is_known = isinstance(ids, np.ndarray) and isinstance(splits, np.ndarray)
    longest: Any
    if is_known:
        longest = np.zeros(count + 1, splits.dtype)
        np.maximum.at(longest, np.minimum(ids, count), lengths)
        longest = longest[:count]
    else:
        of_ids = jnp.asarray(ids).astype(np.int32)
        found = jax.ops.segment_max(jnp.asarray(lengths).astype(np.int32), of_ids, count)
        longest = jnp.maximum(found, 0).astype(splits.dtype)
    result_splits = splits_of_lengths(longest)
    rows = rowids_of(splits, inner.shape[0])
    # The last split, for rows and ids of padding, is the number of results: it is beyond them.
    starts = at(result_splits, at(ids, rows) if is_known else _ids_at(ids, rows, count))
    module: Any = np if is_known else jnp
    columns = module.arange(inner.shape[0], dtype=rows.dtype) - at(splits, rows)
    total = int(result_splits[-1]) if is_known else inner.shape[0]
    is_row = rows < splits.shape[0] - 1
    places = module.where(is_row, starts + columns, total)
    return around(_combined(segments, inner, places, total), result_splits)


def _ids_at(ids: Any, rows: Any, count: int) -> Any:
    ids = jnp.asarray(ids).astype(np.int32)
    return ids.at[rows].get(mode="fill", fill_value=count, wrap_negative_indices=False)


def of_all(operation: Callable[..., Any], ragged: RaggedTensor, neutral: Any) -> Any:
    """Returns the reduction of all values; in a program, padding counts as `neutral`."""
    return operation(without_padding(ragged, neutral))


def without_padding(ragged: RaggedTensor, neutral: Any) -> Any:
    """Returns the values; those that are padding, in a program, are replaced."""
    flat = ragged.flat
    is_there = is_value(ragged)
    if is_there is None:
        return flat
    mask = is_there.reshape((-1, *(1,) * (flat.ndim - 1)))
    return jnp.where(mask, flat, jnp.asarray(neutral, flat.dtype))


def is_value(ragged: RaggedTensor) -> Any:
    """Returns which of the flat values are in rows; None if all are."""
    splits = ragged.partitions
    if all(isinstance(own, np.ndarray) for own in splits):
        return None
    return jnp.arange(ragged.flat.shape[0]) < number_of_values(ragged)


def number_of_values(ragged: RaggedTensor) -> Any:
    """Returns the number of rows of the flat values that are in rows."""
    end = jnp.asarray(ragged.partitions[0])[-1].astype(np.int32)
    for splits in ragged.partitions[1:]:
        end = jnp.asarray(splits).astype(np.int32)[end]
    return end


def axes_of(ragged: RaggedTensor, axis: Any) -> list[int] | None:
    """Returns axes as sorted numbers; None for all."""
    if axis is None:
        return None
    array = known(axis)
    given = np.ravel(axis if array is None else array).tolist()
    rank = ragged.rank
    axes = []
    for one in given:
        number = operator.index(one)
        if not -rank <= number < rank:
            raise ValueError(f"axis={number} out of bounds: expected {-rank}<=axis<{rank}")
        axes.append(number % rank)
    return sorted(set(axes))


def _reduction(segments: Segments, neutral: Callable[[Any], Any]) -> Callable[..., Any]:
    def reduce(
        operation: Callable[..., Any],
        input_tensor: Any,
        axis: Any = None,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Any:
        axes = axes_of(input_tensor, axis)
        if axes is None:
            total = of_all(operation, input_tensor, neutral(input_tensor.flat.dtype))
            return jnp.reshape(total, (1,) * input_tensor.rank) if keepdims else total
        operation(jnp.zeros(0, input_tensor.flat.dtype))  # refuses what it refuses
        return reduced(segments, input_tensor, axes, bool(keepdims))

    return reduce


_REDUCTIONS = {
    "reduce_sum": (_sum, lambda dtype: 0),
    "reduce_prod": (_prod, lambda dtype: 1),
    "reduce_max": (_max, lambda dtype: _limits(dtype).min),
    "reduce_min": (_min, lambda dtype: _limits(dtype).max),
    "reduce_any": (_any, lambda dtype: False),
    "reduce_all": (_all, lambda dtype: True),
}

for _name, (_segments, _neutral) in _REDUCTIONS.items():
    implements(f"tf.math.{_name}")(_reduction(_segments, _neutral))


@implements("tf.math.reduce_mean")
def reduce_mean(
    operation: Callable[..., Any],
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the mean; of integers as float64, of an empty row NaN."""
    del operation
    return _mean(input_tensor, axis, bool(keepdims))


def _mean(ragged: RaggedTensor, axis: Any, keepdims: bool) -> Any:
    axes = axes_of(ragged, axis)
    if axes is None:
        flat = ragged.flat
        inner = int(np.prod(flat.shape[1:]))
        total = jnp.sum(without_padding(ragged, 0), dtype=flat.dtype)
        is_known = is_value(ragged) is None
        count = flat.size if is_known else number_of_values(ragged) * inner
        mean = divide(total, jnp.asarray(count).astype(flat.dtype))
        return jnp.reshape(mean, (1,) * ragged.rank) if keepdims else mean
    flat = ragged.flat
    total = reduced(_sum, ragged, axes, keepdims)
    count = reduced(_sum, with_flat(ragged, jnp.ones(flat.shape, flat.dtype)), axes, keepdims)
    if is_ragged(total):
        return with_flat(total, divide(total.flat, count.flat))
    return divide(total, count)


@implements("tf.math.reduce_variance")
def reduce_variance(
    operation: Callable[..., Any],
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the mean square minus the square of the mean, as TensorFlow computes it."""
    return _variance(operation, input_tensor, axis, bool(keepdims))


def _variance(
    operation: Callable[..., Any], ragged: RaggedTensor, axis: Any, keepdims: bool
) -> Any:
    operation(jnp.zeros(1, ragged.flat.dtype))  # refuses integers
    squares = _mean(with_flat(ragged, _square(ragged.flat)), axis, keepdims)
    mean = _mean(ragged, axis, keepdims)

    def difference(squares: Any, mean: Any) -> Any:
        return jnp.maximum(squares - _square(mean), 0)

    return elementwise(difference, squares, mean) if is_ragged(mean) else difference(squares, mean)


def _square(values: Any) -> Any:
    return jnp.square(jnp.abs(values))


@implements("tf.math.reduce_std")
def reduce_std(
    operation: Callable[..., Any],
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the root of the variance."""
    variance = _variance(operation, input_tensor, axis, bool(keepdims))
    if is_ragged(variance):
        return with_flat(variance, sqrt(variance.flat))
    return sqrt(variance)


@implements("tf.math.softmax", "tf.math.log_softmax")
def softmax(
    operation: Callable[..., Any], logits: Any, axis: Any = None, name: str | None = None
) -> Any:
    """Returns the softmax of every row, or along an axis inside of all ragged ones."""
    axis = -1 if axis is None else axis
    (number,) = axes_of(logits, axis) or [0]
    if number > logits.ragged_rank:
        return with_flat(logits, operation(logits.flat, number - logits.ragged_rank))
    if number < logits.ragged_rank or logits.flat.ndim > 1:
        raise ValueError(
            "The softmax of a RaggedTensor is along its last axis. Received: "
            f"axis={axis}, shape {logits.shape}"
        )
    inner = logits
    while is_ragged(inner.inner):
        inner = inner.inner
    flat = inner.flat
    splits = inner.partitions[0]
    rows = jnp.asarray(rowids_of(splits, flat.shape[0])).astype(np.int32)
    count = splits.shape[0] - 1
    if count == 0:
        return logits
    largest = jax.lax.stop_gradient(jax.ops.segment_max(flat, rows, count))
    shifted = flat - at(largest, rows)
    total = at(jax.ops.segment_sum(jnp.exp(shifted), rows, count), rows)
    is_there = rows < count
    total = jnp.where(is_there, total, 1)
    if operation.__name__ == "log_softmax":
        return with_flat(logits, jnp.where(is_there, shifted - jnp.log(total), 0))
    return with_flat(logits, jnp.where(is_there, jnp.exp(shifted) / total, 0))


@implements("tf.math.cumsum")
def cumsum(
    operation: Callable[..., Any],
    x: Any,
    axis: Any = 0,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the running sums: of every row, inside of all ragged axes, or over rows.

    Over rows, those that are too short count as padded by zeros.
    """
    (number,) = axes_of(x, axis) or [0]
    if number > x.ragged_rank:
        inner = operation(x.flat, number - x.ragged_rank, exclusive, reverse)
        return with_flat(x, inner)
    if number < x.ragged_rank:
        sums = operation(x.to_tensor(), number, exclusive, reverse)
        return with_flat(x, x.from_tensor(sums, lengths=x.nested_row_lengths()).flat)
    inner = x
    while is_ragged(inner.inner):
        inner = inner.inner
    flat, splits = inner.flat, inner.partitions[0]
    rows = jnp.asarray(rowids_of(splits, flat.shape[0])).astype(np.int32)
    if reverse:
        totals = _running_sums(flat[::-1], rows[::-1], exclusive)[::-1]
    else:
        totals = _running_sums(flat, rows, exclusive)
    return with_flat(x, totals)


def _running_sums(values: Any, rows: Any, exclusive: bool) -> Any:
    """Returns the running sums of values, which begin anew where the row changes."""
    if not values.shape[0]:
        return values
    if exclusive:
        before = jnp.concatenate([jnp.zeros_like(values[:1]), values[:-1]])
        values = jnp.where(_begins(values, rows), 0, before)
    return _running(values, rows, jnp.add)


def _begins(values: Any, rows: Any) -> Any:
    """Returns whether a row begins at each value, in a shape that is broadcast to the values'."""
    shape = (-1, *(1,) * (values.ndim - 1))
    return jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]]).reshape(shape)


def _running(values: Any, rows: Any, operation: Callable[[Any, Any], Any]) -> Any:
    """Returns the running results of an operation, which begin anew where the row changes."""

    def combine(one: Any, other: Any) -> Any:
        begins, result = other
        return one[0] | begins, jnp.where(begins, result, operation(one[1], result))

    begins = _begins(values, rows)
    return jax.lax.associative_scan(combine, (begins, values))[1].astype(values.dtype)
