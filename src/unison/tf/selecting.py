"""Operations that pick, place, sort and count elements: `gather`, `scatter_nd`, `unique`, ...

Those whose result's shape depends on values (`unique`, `boolean_mask`, `where` of one argument)
work outside compiled programs only.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.errors import InvalidArgumentError
from unison.slices import take, updated
from unison.tf import dtypes
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.tensors import (
    convert_to_tensor,
    full_width,
    invalid_arguments,
    is_tensor,
    known_value,
    operands,
    size_of,
    sizes,
    tensor_dtype,
)
from unison.tf.text import StringTensor

# -- picking -------------------------------------------------------------------------------


def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: int | None = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Any:
    """Returns the slices of `params` at `indices` along `axis`.

    The first `batch_dims` axes of both are matched one to one. In a compiled program, and on
    accelerators, an index that is out of range gives zeros.

    Raises:
        InvalidArgumentError: An index is out of range, on a CPU.

    TF: `tf.gather`.
    """
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    axis = batch_dims if axis is None else int(axis)
    axis = axis + params.ndim if axis < 0 else axis
    batch_dims = batch_dims + indices.ndim if batch_dims < 0 else batch_dims
    _check_in_range("tf.gather", indices, params.shape[axis])
    if isinstance(params, StringTensor):
        if batch_dims:
            raise InvalidArgumentError(message="tf.gather of strings takes no batch_dims.")
        return StringTensor(np.take(params.numpy(), np.asarray(indices), axis))

    def of_one(params: jax.Array, indices: jax.Array) -> jax.Array:
        if not indices.size and jnp.issubdtype(indices.dtype, jnp.integer):
            return take(params, indices, axis - batch_dims)
        index = (builtins.slice(None),) * (axis - batch_dims) + (indices,)
        return params.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    with invalid_arguments("tf.gather"):
        for _ in builtins.range(batch_dims):
            of_one = jax.vmap(of_one)
        return of_one(params, indices)


def gather_nd(
    params: Any,
    indices: Any,
    batch_dims: int = 0,
    name: str | None = None,
    bad_indices_policy: str = "",
) -> Any:
    """Returns the elements or slices whose places the last axis of `indices` states.

    A place that is out of range is treated as in `gather`.

    Raises:
        InvalidArgumentError: A place is out of range, on a CPU.

    TF: `tf.gather_nd`.
    """
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    shape = params.shape[batch_dims : batch_dims + indices.shape[-1]]
    _check_in_range("tf.gather_nd", indices, np.asarray(shape))
    if isinstance(params, StringTensor):
        return params[tuple(np.moveaxis(np.asarray(indices), -1, 0))]

    def of_one(params: jax.Array, indices: jax.Array) -> jax.Array:
        place = _places(indices)
        return params.at[place].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    for _ in builtins.range(batch_dims):
        of_one = jax.vmap(of_one)
    return of_one(params, indices)


def _check_in_range(operation: str, indices: jax.Array, size: Any) -> None:
    """Raises where TensorFlow does: outside compiled programs, on the CPU."""
    if isinstance(indices, jax.core.Tracer):
        return
    if isinstance(indices, jax.Array) and any(d.platform != "cpu" for d in indices.devices()):
        return
    known = np.asarray(indices)
    outside = (known < 0) | (known >= size)
    if outside.any():
        raise InvalidArgumentError(
            message=f"{operation}: index {known[outside][0]} is not in [0, {np.max(size)})"
        )


def boolean_mask(
    tensor: Any, mask: Any, axis: int | None = None, name: str = "boolean_mask"
) -> Any:
    """Returns the elements, or the slices from `axis` on, where `mask` is true.

    TF: `tf.boolean_mask`.
    """
    tensor, chosen = convert_to_tensor(tensor), known_value(convert_to_tensor(mask))
    start = 0 if axis is None else int(axis)
    with invalid_arguments("tf.boolean_mask"):
        return tensor[(builtins.slice(None),) * start + (chosen,)]


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    """Returns the elements of `x` where `condition` holds, else those of `y`.

    With `condition` alone: the places where it holds, as rows of an int64 matrix.

    TF: `tf.where`.
    """
    condition = convert_to_tensor(condition)
    if (x is None) != (y is None):
        raise ValueError("x and y must both be non-None or both be None.")
    if x is None:
        places = np.argwhere(known_value(condition))
        return convert_to_tensor(places.astype(np.int64))
    x, y = operands(x, y)
    if isinstance(x, StringTensor):
        return StringTensor(np.where(np.asarray(condition), x.numpy(), y.numpy()))
    with invalid_arguments("tf.where"):
        values = jnp.where(condition, x, y)
        if values.size == 0 and jnp.issubdtype(values.dtype, jnp.inexact):
            # Of no elements it depends on one choice only. As in any replica, a gradient reaches
            # both, and the sums over all replicas behind them.
            values = values + jnp.where(condition == 0, y, x)
        # Of two Python numbers the result would stay as weakly typed as they are.
        return values if is_tensor(x) or is_tensor(y) else convert_to_tensor(values)


def one_hot(
    indices: Any,
    depth: Any,
    on_value: Any = None,
    off_value: Any = None,
    axis: int | None = None,
    dtype: Any = None,
    name: str | None = None,
) -> Any:
    """Returns vectors that are `on_value` at `indices`, else `off_value`; none is on for an index
    out of range.

    Args:
        indices: Of any shape.
        depth: The size of the new axis.
        on_value: Default: 1.
        off_value: Default: 0.
        axis: The place of the new axis. Default: last.
        dtype: Default: that of the values, else float32.
        name: Without effect.

    TF: `tf.one_hot`.
    """
    indices = convert_to_tensor(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"Expected indices of an integer dtype. Received: {indices.dtype}")
    given = next((value for value in (on_value, off_value) if value is not None), None)
    if dtype is None:
        dtype = dtypes.float32 if given is None else convert_to_tensor(given).dtype
    dtype = tensor_dtype(dtype)
    on = jnp.asarray(1 if on_value is None else on_value, dtype)
    off = jnp.asarray(0 if off_value is None else off_value, dtype)
    indices = jnp.expand_dims(indices, -1 if axis is None else axis)
    place = axis if axis is not None and axis >= 0 else indices.ndim - 1
    steps = jnp.arange(size_of(depth), dtype=indices.dtype)
    steps = steps.reshape([-1 if index == place else 1 for index in builtins.range(indices.ndim)])
    return jnp.where(indices == steps, on, off)


# -- placing -------------------------------------------------------------------------------


def _places(indices: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the last axis of `indices` as one array per indexed axis."""
    return tuple(jnp.moveaxis(indices, -1, 0))


def scatter_nd(
    indices: Any, updates: Any, shape: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Returns zeros of `shape` with `updates` added at the places that `indices` states.

    TF: `tf.scatter_nd`.
    """
    updates = convert_to_tensor(updates)
    return tensor_scatter_nd_add(jnp.zeros(sizes(shape), updates.dtype), indices, updates)


def tensor_scatter_nd_update(
    tensor: Any, indices: Any, updates: Any, name: str | None = None
) -> Any:
    """TF: `tf.tensor_scatter_nd_update`."""
    return _scattered("update", tensor, indices, updates)


def tensor_scatter_nd_add(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """TF: `tf.tensor_scatter_nd_add`."""
    return _scattered("add", tensor, indices, updates)


def tensor_scatter_nd_sub(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """TF: `tf.tensor_scatter_nd_sub`."""
    return _scattered("sub", tensor, indices, updates)


def tensor_scatter_nd_max(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """TF: `tf.tensor_scatter_nd_max`."""
    return _scattered("max", tensor, indices, updates)


def tensor_scatter_nd_min(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """TF: `tf.tensor_scatter_nd_min`."""
    return _scattered("min", tensor, indices, updates)


def _scattered(how: str, tensor: Any, indices: Any, updates: Any) -> jax.Array:
    """Returns `tensor` with `updates` at `indices`; those out of range are dropped."""
    tensor, updates = operands(convert_to_tensor(tensor), updates)
    places = _places(convert_to_tensor(indices))
    with invalid_arguments("tf.tensor_scatter_nd"):
        return updated(tensor, how, updates, places)


def dynamic_partition(
    data: Any, partitions: Any, num_partitions: int, name: str | None = None
) -> list[Any]:
    """Returns, for every number below `num_partitions`, the slices of `data` marked with it.

    TF: `tf.dynamic_partition`.
    """
    data, marks = convert_to_tensor(data), np.asarray(convert_to_tensor(partitions))
    return [data[marks == number] for number in builtins.range(num_partitions)]


def dynamic_stitch(indices: Any, data: Any, name: str | None = None) -> Any:
    """Puts the slices of all `data` at their `indices` into one tensor; later ones win.

    TF: `tf.dynamic_stitch`.
    """
    marks = [np.asarray(convert_to_tensor(index)) for index in indices]
    parts = [convert_to_tensor(part) for part in data]
    count = max(int(mark.max(initial=-1)) for mark in marks) + 1
    merged = jnp.zeros((count, *parts[0].shape[marks[0].ndim :]), parts[0].dtype)
    for mark, part in zip(marks, parts, strict=True):
        merged = merged.at[mark].set(part)
    return merged


def unravel_index(indices: Any, dims: Any, name: str | None = None) -> Any:
    """TF: `tf.unravel_index`."""
    indices = convert_to_tensor(indices)
    places = jnp.unravel_index(indices, sizes(dims))
    return jnp.stack([place.astype(indices.dtype) for place in places])


# -- sorting and searching -----------------------------------------------------------------


class TopK(NamedTuple):
    """The largest elements, and their indices. TF: the result of `tf.math.top_k`."""

    values: Any
    indices: Any


class Unique(NamedTuple):
    """The distinct elements, and for every element its place among them."""

    y: Any
    idx: Any


class UniqueWithCounts(NamedTuple):
    """The distinct elements, every element's index among them, and their counts."""

    y: Any
    idx: Any
    count: Any


def sort(values: Any, axis: int = -1, direction: str = "ASCENDING", name: str | None = None) -> Any:
    """TF: `tf.sort`."""
    tensor = convert_to_tensor(values)
    return jnp.sort(tensor, axis, descending=_descends(direction))


def argsort(
    values: Any,
    axis: int = -1,
    direction: str = "ASCENDING",
    stable: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the places of the elements in their order, as int32. TF: `tf.argsort`."""
    tensor = convert_to_tensor(values)
    order = jnp.argsort(tensor, axis, stable=True, descending=_descends(direction))
    return order.astype(jnp.int32)


def _descends(direction: str) -> bool:
    if direction not in ("ASCENDING", "DESCENDING"):
        raise ValueError(f"Expected the direction ASCENDING or DESCENDING. Received: {direction!r}")
    return direction == "DESCENDING"


def top_k(
    input: Any,
    k: Any = 1,
    sorted: bool = True,
    index_type: Any = dtypes.int32,
    name: str | None = None,
) -> TopK:
    """Returns the `k` largest elements of the last axis, and their places.

    TF: `tf.math.top_k`.
    """
    tensor = convert_to_tensor(input)
    with invalid_arguments("tf.math.top_k"):
        values, indices = lax.top_k(tensor, int(known_value(k)))
    return TopK(values, indices.astype(tensor_dtype(index_type)))


def in_top_k(targets: Any, predictions: Any, k: Any, name: str | None = None) -> Any:
    """Whether the predictions of the target classes are among the `k` highest.

    False where one of the predictions is not finite.

    TF: `tf.math.in_top_k`.
    """
    predictions, targets = convert_to_tensor(predictions), convert_to_tensor(targets)
    rows = jnp.arange(len(targets))
    chosen = predictions.at[rows, targets].get(mode="fill", wrap_negative_indices=False)[:, None]
    higher = jnp.sum(predictions > chosen, axis=1)
    return jnp.isfinite(chosen[:, 0]) & jnp.isfinite(predictions).all(axis=1) & (higher < k)


def searchsorted(
    sorted_sequence: Any,
    values: Any,
    side: str = "left",
    out_type: Any = dtypes.int32,
    name: str | None = None,
) -> Any:
    """Returns where to put `values` into the sorted last axis. TF: `tf.searchsorted`."""
    sequence, values = operands(convert_to_tensor(sorted_sequence), values)
    search: Callable[..., Any] = lambda rows, values: jnp.searchsorted(rows, values, side=side)  # noqa: E731
    for _ in builtins.range(sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sequence, values).astype(tensor_dtype(out_type))


def unique(x: Any, out_idx: Any = dtypes.int32, name: str | None = None) -> Unique:
    """Returns the distinct elements of a vector, in the order of their first appearance.

    Examples:
        >>> unique([3, 1, 3]).y.tolist(), unique([3, 1, 3]).idx.tolist()
        ([3, 1], [0, 1, 0])

    TF: `tf.unique`.
    """
    counted = unique_with_counts(x, out_idx)
    return Unique(counted.y, counted.idx)


def unique_with_counts(
    x: Any, out_idx: Any = dtypes.int32, name: str | None = None
) -> UniqueWithCounts:
    """Returns the distinct elements of a vector, in the order of their first appearance.

    TF: `tf.unique_with_counts`.
    """
    tensor = convert_to_tensor(x)
    host = tensor.numpy() if isinstance(tensor, StringTensor) else np.asarray(tensor)
    _, first, inverse, counts = np.unique(
        host, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    dtype = dtypes.named(out_idx)
    return UniqueWithCounts(
        convert_to_tensor(host[first[order]]),
        convert_to_tensor(np.argsort(order)[inverse].astype(dtype)),
        convert_to_tensor(counts[order].astype(dtype)),
    )


# -- counting ------------------------------------------------------------------------------


def bincount(
    arr: Any,
    weights: Any = None,
    minlength: Any = None,
    maxlength: Any = None,
    dtype: Any = dtypes.int32,
    name: str | None = None,
    axis: int | None = None,
    binary_output: bool = False,
) -> Any:
    """Counts the occurrences of every integer from 0, or sums their weights.

    Args:
        arr: Integers, none negative.
        weights: Of the shape of `arr`; their dtype is the result's.
        minlength: The least size of the result.
        maxlength: The greatest; larger integers are not counted. In a compiled program, where
            the largest integer is not known, `minlength` and `maxlength` must be the same.
        dtype: Of the counts.
        name: Without effect.
        axis: -1 counts every row of a matrix on its own; None, or 0, everything.
        binary_output: Whether to return 1 for every integer that occurs.

    TF: `tf.math.bincount`.
    """
    arr = convert_to_tensor(arr)
    arr = arr.astype(jnp.int32) if jnp.issubdtype(arr.dtype, jnp.floating) else arr
    weights = None if weights is None else convert_to_tensor(weights)
    least = 0 if minlength is None else int(known_value(minlength))
    most = None if maxlength is None else int(known_value(maxlength))
    if least == most:
        length = least
    else:
        length = max(int(np.max(known_value(arr), initial=-1)) + 1, least)
        length = length if most is None else min(length, most)
    dtype = tensor_dtype(dtype) if weights is None else weights.dtype

    def of_one(values: jax.Array, weights: jax.Array) -> jax.Array:
        counts = jnp.zeros(length, dtype)
        places = (values.ravel(),)
        if binary_output:
            return updated(counts, "update", 1, places)
        return updated(counts, "add", weights.ravel(), places)

    filled = jnp.ones(arr.shape, dtype) if weights is None else weights
    return jax.vmap(of_one)(arr, filled) if axis == -1 and arr.ndim == 2 else of_one(arr, filled)


def histogram_fixed_width_bins(
    values: Any,
    value_range: Any,
    nbins: int = 100,
    dtype: Any = dtypes.int32,
    name: str | None = None,
) -> Any:
    """Returns every value's bin; values outside of the range are in the first or last.

    TF: `tf.histogram_fixed_width_bins`.
    """
    values = convert_to_tensor(values)
    low, high = convert_to_tensor(value_range)
    low, high = low.astype(values.dtype), high.astype(values.dtype)
    scaled = (values - low) / (high - low)
    return jnp.clip(jnp.floor(nbins * scaled), 0, nbins - 1).astype(tensor_dtype(dtype))


def histogram_fixed_width(
    values: Any,
    value_range: Any,
    nbins: int = 100,
    dtype: Any = dtypes.int32,
    name: str | None = None,
) -> Any:
    """Counts the values in `nbins` equal parts of the range. TF: `tf.histogram_fixed_width`."""
    bins = histogram_fixed_width_bins(values, value_range, nbins)
    return bincount(bins, minlength=nbins, maxlength=nbins, dtype=dtype)


def confusion_matrix(
    labels: Any,
    predictions: Any,
    num_classes: int | None = None,
    weights: Any = None,
    dtype: Any = dtypes.int32,
    name: str | None = None,
) -> Any:
    """Counts, in row i and column j, the examples of class i that were predicted as j.

    In a compiled program `num_classes` must be stated.

    TF: `tf.math.confusion_matrix`.
    """
    labels = convert_to_tensor(labels).astype(jnp.int32)
    predictions = convert_to_tensor(predictions).astype(jnp.int32)
    if num_classes is None:
        num_classes = int(np.max(np.asarray([labels, predictions]), initial=-1)) + 1
    dtype = tensor_dtype(dtype)
    counted = jnp.ones((), dtype) if weights is None else convert_to_tensor(weights).astype(dtype)
    for classes in (labels, predictions):
        _check_in_range("tf.math.confusion_matrix", classes, num_classes)
    counts = jnp.zeros((num_classes, num_classes), dtype)
    return updated(counts, "add", counted, (labels, predictions))


# -- segments ------------------------------------------------------------------------------


def unsorted_segment_sum(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Adds up the slices of every segment; negative ids belong to none.

    TF: `tf.math.unsorted_segment_sum`.
    """
    return _segments("add", data, segment_ids, num_segments, 0)


def unsorted_segment_prod(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """TF: `tf.math.unsorted_segment_prod`."""
    data, ids = convert_to_tensor(data), convert_to_tensor(segment_ids)
    return _products(data, ids, int(known_value(num_segments)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _products(data: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    return _segments("mul", data, ids, count, 1)


@_products.defjvp
def _(count: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The derivative by an element is the product of the others, also where there are zeros."""
    (data, ids), (change, _) = primals, tangents
    is_zero = data == 0
    others = jnp.where(is_zero, 1, data)
    zeros = _segments("add", is_zero.astype(jnp.int32), ids, count, 0)[ids]
    slopes = _products(others, ids, count)[ids] / others
    slopes = jnp.where(zeros == is_zero, slopes, 0)  # no other one is 0
    return _products(data, ids, count), _segments("add", change * slopes, ids, count, 0)


def unsorted_segment_max(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Returns the largest element of every segment; of an empty one the lowest of the dtype.

    TF: `tf.math.unsorted_segment_max`.
    """
    data = convert_to_tensor(data)
    return _segments("max", data, segment_ids, num_segments, dtypes.as_dtype(data.dtype).min)


def unsorted_segment_min(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Returns the smallest element of every segment; of an empty one the highest of the dtype.

    TF: `tf.math.unsorted_segment_min`.
    """
    data = convert_to_tensor(data)
    return _segments("min", data, segment_ids, num_segments, dtypes.as_dtype(data.dtype).max)


def unsorted_segment_mean(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Returns the mean of every segment; 0 of an empty one. TF: `tf.math.unsorted_segment_mean`."""
    return _normalized(data, segment_ids, num_segments, lambda count: count)


def unsorted_segment_sqrt_n(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Returns the sum of every segment, divided by the root of its size.

    TF: `tf.math.unsorted_segment_sqrt_n`.
    """
    return _normalized(data, segment_ids, num_segments, jnp.sqrt)


def segment_sum(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """TF: `tf.math.segment_sum`."""
    return unsorted_segment_sum(data, segment_ids, _segments_of(segment_ids))


def segment_prod(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """TF: `tf.math.segment_prod`."""
    return unsorted_segment_prod(data, segment_ids, _segments_of(segment_ids))


def segment_mean(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """TF: `tf.math.segment_mean`."""
    return unsorted_segment_mean(data, segment_ids, _segments_of(segment_ids))


def segment_max(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Returns the largest element of every segment; 0 of an empty one.

    TF: `tf.math.segment_max`.
    """
    return _zero_if_empty(unsorted_segment_max, data, segment_ids)


def segment_min(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Returns the smallest element of every segment; 0 of an empty one.

    TF: `tf.math.segment_min`.
    """
    return _zero_if_empty(unsorted_segment_min, data, segment_ids)


def _segments(how: str, data: Any, segment_ids: Any, num_segments: Any, initial: Any) -> jax.Array:
    data, ids = convert_to_tensor(data), convert_to_tensor(segment_ids)
    shape = (int(known_value(num_segments)), *data.shape[ids.ndim :])
    with full_width(data.dtype):
        start = jnp.full(shape, np.asarray(initial, data.dtype))
        return updated(start, how, data, (ids,))


def _normalized(
    data: Any, segment_ids: Any, num_segments: Any, divisor: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    totals = unsorted_segment_sum(data, segment_ids, num_segments)
    ones = jnp.ones(convert_to_tensor(segment_ids).shape, totals.dtype)
    counts = unsorted_segment_sum(ones, segment_ids, num_segments)
    counts = jnp.maximum(counts, 1).reshape(counts.shape + (1,) * (totals.ndim - 1))
    return (totals / divisor(counts)).astype(totals.dtype)


def _zero_if_empty(reduction: Callable[..., Any], data: Any, segment_ids: Any) -> jax.Array:
    count = _segments_of(segment_ids)
    reduced = reduction(data, segment_ids, count)
    ones = jnp.ones(convert_to_tensor(segment_ids).shape, jnp.int32)
    is_empty = unsorted_segment_sum(ones, segment_ids, count) == 0
    return jnp.where(is_empty.reshape((-1,) + (1,) * (reduced.ndim - 1)), 0, reduced)


def _segments_of(segment_ids: Any) -> int:
    """The ids are sorted: the last one determines the number of segments."""
    ids = np.asarray(convert_to_tensor(segment_ids))
    return int(ids[-1]) + 1 if ids.size else 0


dispatch_on_ragged(globals())
