"""Operations that join, select, reshape and describe ragged tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.conversion import called
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf import nest
from unison.tf.printing import Shown
from unison.tf.ragged.conversions import from_tensor, places_of
from unison.tf.ragged.elementwise import check_same_rows, with_flat
from unison.tf.ragged.partitions import (
    NOWHERE,
    lengths_of,
    ranges,
    rowids_of,
    splits_of_lengths,
    tensor_of,
)
from unison.tf.ragged.reductions import expanded, is_value, number_of_values
from unison.tf.ragged.rows import (
    around,
    at,
    check_range,
    implements,
    joined,
    match_splits_dtypes,
    select,
)
from unison.tf.ragged.shapes import DynamicRaggedShape
from unison.tf.ragged.specs import RaggedTensorSpec
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.tensors import cast, convert_to_tensor, known_value, tensor_dtype

# -- joining -------------------------------------------------------------------------------


def axis_of(axis: Any, rank: int) -> int:
    """Returns an axis as a number from 0."""
    number = operator.index(known_value(axis)[()] if hasattr(axis, "dtype") else axis)
    if not -rank <= number < rank:
        raise ValueError(f"axis={number} out of bounds: expected {-rank}<=axis<{rank}")
    return number % rank


@implements("tf.shaping.concat")
def concat(
    operation: Callable[..., Any], values: Any, axis: Any, name: str | None = None
) -> RaggedTensor:
    """Joins ragged tensors, and dense ones of as many axes, along an axis."""
    tensors = [value if is_ragged(value) else _dense(value, values) for value in values]
    ranks = {len(tensor.shape) for tensor in tensors}
    if len(ranks) > 1:
        shapes = [tensor.shape for tensor in tensors]
        raise ValueError(f"The tensors must have as many axes as each other. Received: {shapes}")
    match_splits_dtypes([tensor for tensor in tensors if is_ragged(tensor)])
    return _concatenated(operation, tensors, axis_of(axis, ranks.pop()))


def _dense(value: Any, others: Any) -> Any:
    dtype = next(other.flat.dtype for other in others if is_ragged(other))
    return convert_to_tensor(value, dtype_hint=dtype if isinstance(dtype, np.dtype) else None)


def _concatenated(operation: Callable[..., Any], tensors: Sequence[Any], axis: int) -> Any:
    if not any(map(is_ragged, tensors)):
        return operation(list(tensors), axis)
    splits = next(tensor.partitions[0] for tensor in tensors if is_ragged(tensor))
    ragged = [_as_ragged(tensor, splits.dtype) for tensor in tensors]
    inner = [tensor.inner for tensor in ragged]
    if any(map(is_ragged, inner)):
        inner = [_as_ragged(values, splits.dtype) for values in inner]
        ragged = [
            around(values, own.partitions[0], own.uniform_lengths[0])
            for values, own in zip(inner, ragged, strict=True)
        ]
    if axis == 0:
        return _alike(joined, ragged)[0]
    counts = {tensor.shape[0] for tensor in ragged}
    if len(counts) > 1:
        raise InvalidArgumentError(
            message=f"Input tensors have incompatible shapes: {[t.shape for t in ragged]}"
        )
    if axis > 1:
        check_same_rows([around(jnp.zeros(t.inner.shape[0]), t.partitions[0]) for t in ragged])
        values = _concatenated(operation, inner, axis - 1)
        return around(values, ragged[0].partitions[0], ragged[0].uniform_lengths[0])
    whole, firsts = _alike(joined, inner)
    are_known = all(isinstance(t.partitions[0], np.ndarray) for t in ragged)
    module: Any = np if are_known else jnp
    begins = module.stack(
        [t.partitions[0][:-1] + first for t, first in zip(ragged, firsts, strict=False)], 1
    )
    lengths = module.stack([lengths_of(tensor.partitions[0]) for tensor in ragged], 1)
    places, _ = ranges(begins.reshape(-1), lengths.reshape(-1), whole.shape[0])
    return around(select(whole, places), splits_of_lengths(lengths.sum(1).astype(splits.dtype)))


def _as_ragged(tensor: Any, dtype: Any) -> RaggedTensor:
    return tensor if is_ragged(tensor) else from_tensor(tensor, None, None, 1, dtype)


def _alike(join: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]) -> Any:
    """Joins tensors, of which some may have more ragged axes than others."""
    most = max(tensor.ragged_rank if is_ragged(tensor) else 0 for tensor in tensors)
    return join([_with_ragged_rank(tensor, most) for tensor in tensors])


def _with_ragged_rank(tensor: Any, rank: int) -> Any:
    if rank == 0:
        return tensor
    if not is_ragged(tensor):
        return from_tensor(tensor, None, None, rank, np.int64)
    inner = _with_ragged_rank(tensor.inner, rank - 1)
    return around(inner, tensor.partitions[0], tensor.uniform_lengths[0])


@implements("tf.shaping.stack")
def stack(
    operation: Callable[..., Any], values: Any, axis: Any = 0, name: str | None = None
) -> Any:
    """Joins ragged tensors, and dense ones of as many axes, along a new axis."""
    return stacked([value if is_ragged(value) else _dense(value, values) for value in values], axis)


def stacked(tensors: Sequence[Any], axis: Any = 0) -> Any:
    """Returns tensors, dense or ragged, joined along a new axis, of which one is ragged."""
    number = axis_of(axis, len(tensors[0].shape) + 1)
    parts = [_as_ragged(expanded(tensor, number), np.int64) for tensor in tensors]
    return _concatenated(_concatenate, parts, number)


def _concatenate(tensors: Sequence[Any], axis: int) -> Any:
    if axis == 0:
        return joined(tensors)[0]
    return jnp.concatenate(tensors, axis)


@implements("tf.shaping.tile")
def tile(operation: Callable[..., Any], input: Any, multiples: Any, name: str | None = None) -> Any:
    """Repeats a ragged tensor along its axes."""
    counts = known_value(multiples).tolist()
    if len(counts) != input.rank:
        raise ValueError(f"Expected {input.rank} multiples. Received: {counts}")
    result = input
    for axis, count in enumerate(counts[: input.ragged_rank + 1]):
        if count == 0:
            result = result[(*[slice(None)] * axis, slice(0, 0))]
        elif count > 1:
            result = _concatenated(_concatenate, [result] * count, axis)
    rest = counts[input.ragged_rank + 1 :]
    return with_flat(result, operation(result.flat, [1, *rest])) if rest else result


# -- selecting -----------------------------------------------------------------------------


@implements("tf.selecting.gather")
def gather(
    operation: Callable[..., Any],
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Any:
    """Returns the rows of `params` at `indices`, of which one is ragged, or both are."""
    params = params if is_ragged(params) else convert_to_tensor(params)
    indices = indices if is_ragged(indices) else convert_to_tensor(indices)
    axis = batch_dims if axis is None else axis_of(axis, len(params.shape))
    if batch_dims == 0 and axis == 0:
        return _gathered(operation, params, indices)
    if batch_dims == 0 and axis == 1 and is_ragged(params) and not is_ragged(indices):
        shape = (params.shape[0], *indices.shape)
        indices = jnp.broadcast_to(jnp.asarray(indices), shape)
        batch_dims = 1
    if batch_dims != 1 or axis != 1:
        raise ValueError(
            "tf.gather of ragged tensors takes axis 0 or 1, and batch_dims 0 or 1, in Unison. "
            f"Received: axis={axis}, batch_dims={batch_dims}"
        )
    ragged_params = _as_ragged(params, np.int64)
    splits = ragged_params.partitions[0]
    if is_ragged(indices):
        inner = indices.inner
        rows = rowids_of(indices.partitions[0], inner.shape[0])
        if is_ragged(inner):
            rows = at(rows, rowids_of(inner.partitions[0], inner.flat.shape[0]))
        flat = _placed(splits, rows, indices.flat)
        return _gathered(operation, ragged_params.inner, with_flat(indices, flat))
    rows = np.arange(indices.shape[0]).reshape((-1, *(1,) * (indices.ndim - 1)))
    return _gathered(operation, ragged_params.inner, _placed(splits, rows, indices))


def _placed(splits: Any, rows: Any, indices: Any) -> Any:
    """Returns the places in the values of indices in rows."""
    own = indices if isinstance(indices, jax.core.Tracer) else np.asarray(indices)
    starts, lengths = at(splits[:-1], rows), at(lengths_of(splits), rows)
    if isinstance(own, np.ndarray) and isinstance(lengths, np.ndarray):
        outside = (own < 0) | (own >= lengths)
        if outside.any():
            raise InvalidArgumentError(
                message=f"tf.gather: index {own[outside][0]} is not in its row, of length "
                f"{np.broadcast_to(lengths, own.shape)[outside][0]}"
            )
        return starts + own
    is_there = (own >= 0) & (own < lengths)
    return jnp.where(is_there, jnp.asarray(starts).astype(np.int32) + own, NOWHERE)


def _gathered(operation: Callable[..., Any], params: Any, indices: Any) -> Any:
    if is_ragged(indices):
        flat = _gathered(operation, params, indices.flat)
        inner = indices
        if not is_ragged(flat):
            return with_flat(inner, flat)
        for splits, uniform in zip(
            reversed(indices.partitions), reversed(indices.uniform_lengths), strict=True
        ):
            flat = around(flat, splits, uniform)
        return flat
    if not is_ragged(params):
        return operation(params, indices)
    check_range(indices, params.shape[0], "tf.gather: index")
    splits = params.partitions[0]
    if isinstance(indices, jax.core.Tracer) or not isinstance(splits, np.ndarray):
        needs_python("tf.gather of the rows of a ragged tensor")
        raise ValueError(
            "In a compiled program it is not known how long the rows are that tf.gather selects. "
            "Gather from x.to_tensor(shape=[None, 64]), or from the lengths and values."
        )
    places = np.asarray(indices)
    result = select(params, places.ravel())
    for size in reversed(places.shape[1:]):
        count = result.shape[0] // size if size else 0
        result = around(result, np.arange(count + 1, dtype=splits.dtype) * size)
    return result if places.ndim else result[0]


@implements("tf.selecting.gather_nd")
def gather_nd(
    operation: Callable[..., Any],
    params: Any,
    indices: Any,
    batch_dims: int = 0,
    name: str | None = None,
    bad_indices_policy: str = "",
) -> Any:
    """Returns the values, or rows, of a ragged tensor at places."""
    if batch_dims or is_ragged(indices) or not is_ragged(params):
        raise ValueError(
            "tf.gather_nd takes ragged params with dense indices, and no batch_dims, in Unison."
        )
    indices = convert_to_tensor(indices)
    depth = indices.shape[-1]
    if not isinstance(indices, jax.core.Tracer):
        indices = np.asarray(indices)
    check_range(indices[..., 0], params.shape[0], "tf.gather_nd: index")
    place, value = indices[..., 0], params
    for axis in range(1, min(depth, params.ragged_rank + 1)):
        place = _placed(value.partitions[0], place, indices[..., axis])
        value = value.inner
    if depth <= params.ragged_rank + 1:
        return _gathered(_gather, value, tensor_of(place) if not is_ragged(value) else place)
    rest = [indices[..., axis] for axis in range(params.ragged_rank + 1, depth)]
    return operation(value, jnp.stack([jnp.asarray(place), *map(jnp.asarray, rest)], -1))


def _gather(params: Any, indices: Any) -> Any:
    return params[np.asarray(indices)] if isinstance(params, np.ndarray) else at(params, indices)


def boolean_mask(data: Any, mask: Any, name: str | None = None) -> Any:
    """Returns the elements where a mask is true, without joining rows.

    Args:
        data: A tensor, or a ragged one.
        mask: Booleans, with the axes of `data`, or some of the first ones.
        name: Without effect.

    Returns:
        A tensor, if `mask` has one axis and `data` is a tensor; otherwise a ragged one, whose rows
        have the elements that are left.

    TF: `tf.ragged.boolean_mask`.
    """
    data = data if is_ragged(data) else convert_to_tensor(data)
    mask = mask if is_ragged(mask) else convert_to_tensor(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"The mask must be Boolean. Received: dtype {mask.dtype}")
    if len(mask.shape) == 0:
        raise ValueError("mask cannot be scalar.")
    return _masked(data, mask, None)


def _masked(data: Any, mask: Any, is_there: Any) -> Any:
    if not is_ragged(mask) and mask.ndim == 1:
        if not isinstance(mask, jax.core.Tracer) and is_there is None:
            chosen = np.asarray(mask)
            if len(chosen) != data.shape[0]:
                raise InvalidArgumentError(
                    message=f"A mask of {len(chosen)} elements does not fit {data.shape}."
                )
            return select(data, np.flatnonzero(chosen))
        mask = mask if is_there is None else mask & is_there
        size = mask.shape[0]
        if is_there is None and not is_ragged(data):
            needs_python("A mask of unknown values")
            raise ValueError(
                "In a compiled program the number of elements that a mask keeps is not known. Use "
                "tf.where, or multiply by the mask."
            )
        return select(data, jnp.nonzero(mask, size=size, fill_value=NOWHERE)[0].astype(np.int32))
    mask, data = _as_ragged(mask, np.int64), _as_ragged(data, np.int64)
    flat_data = around(jnp.zeros(data.inner.shape[0]), data.partitions[0])
    check_same_rows([around(jnp.zeros(mask.inner.shape[0]), mask.partitions[0]), flat_data])
    splits, inner = mask.partitions[0], mask.inner
    if is_ragged(inner):
        return around(_masked(data.inner, inner, None), splits)
    if inner.ndim > 1:
        return around(_masked(data.inner, _as_ragged(inner, np.int64), None), splits)
    own = None if isinstance(splits, np.ndarray) else rowids_of(splits, inner.shape[0])
    is_there = None if own is None else own < splits.shape[0] - 1
    if is_there is None and isinstance(inner, jax.core.Tracer):
        is_there = jnp.ones(inner.shape, bool)
    if is_there is None:
        kept = splits_of_lengths(np.asarray(inner).astype(splits.dtype))[splits]
    else:
        before = splits_of_lengths((inner & is_there).astype(np.int32))
        kept = at(before, jnp.asarray(splits).astype(np.int32)).astype(splits.dtype)
    return around(_masked(data.inner, inner, is_there), kept)


@implements("places")
def places_where(condition: RaggedTensor) -> Any:
    """Returns the places where a ragged tensor holds, as rows of an int64 matrix."""
    if any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(condition)):
        needs_python("tf.where of one argument")
        raise ValueError("tf.where of a condition alone works outside compiled programs only.")
    holds = np.asarray(condition.flat).ravel().astype(bool)
    return convert_to_tensor(np.stack(places_of(condition), 1)[holds].astype(np.int64))


@implements("tf.shaping.reverse")
def reverse(operation: Callable[..., Any], tensor: Any, axis: Any, name: Any = None) -> Any:
    """Reverses a ragged tensor along axes."""
    result = tensor
    for one in np.ravel(known_value(axis)).tolist():
        number = axis_of(one, tensor.rank)
        if number > tensor.ragged_rank:
            result = with_flat(result, operation(result.flat, [number - tensor.ragged_rank]))
        else:
            result = result[(*[slice(None)] * number, slice(None, None, -1))]
    return result


@implements("tf.shaping.split")
def split(
    operation: Callable[..., Any],
    value: Any,
    num_or_size_splits: Any,
    axis: Any = 0,
    num: Any = None,
    name: Any = None,
) -> list[Any]:
    """Splits the rows of a ragged tensor."""
    if axis_of(axis, value.rank) != 0:
        raise ValueError("tf.split of a RaggedTensor splits its rows: axis=0.")
    sizes = known_value(num_or_size_splits).tolist()
    nrows = value.shape[0]
    if isinstance(sizes, int):
        if nrows % sizes:
            raise InvalidArgumentError(message=f"{nrows} rows are not split into {sizes} parts.")
        sizes = [nrows // sizes] * sizes
    if sum(sizes) != nrows:
        raise InvalidArgumentError(message=f"Parts of {sizes} rows are not {nrows} rows.")
    ends = np.cumsum([0, *sizes]).tolist()
    return [value[start:end] for start, end in itertools.pairwise(ends)]


# -- axes, sizes ---------------------------------------------------------------------------


@implements("tf.shaping.expand_dims")
def expand_dims(operation: Callable[..., Any], input: Any, axis: Any, name: Any = None) -> Any:
    """Returns a ragged tensor with a new axis of size 1."""
    return expanded(input, axis_of(axis, input.rank + 1))


@implements("tf.shaping.squeeze")
def squeeze(operation: Callable[..., Any], input: Any, axis: Any = None, name: Any = None) -> Any:
    """Drops axes of size 1 of a ragged tensor."""
    if axis is None:
        raise ValueError("Ragged.squeeze must have an axis argument.")
    numbers = [axis_of(one, input.rank) for one in np.ravel(known_value(axis)).tolist()]
    result = input
    for number in sorted(numbers, reverse=True):
        result = _squeezed(operation, result, number)
    return result


def _squeezed(operation: Callable[..., Any], value: Any, axis: int) -> Any:
    if not is_ragged(value):
        return operation(value, [axis])
    splits, inner = value.partitions[0], value.inner
    if axis > 1:
        return around(_squeezed(operation, inner, axis - 1), splits, value.uniform_lengths[0])
    are_one = value.shape[0] == 1
    if axis == 1:
        are_one = value.uniform_lengths[0] == 1 or (
            isinstance(splits, np.ndarray) and bool((lengths_of(splits) == 1).all())
        )
    if not are_one:
        raise InvalidArgumentError(message=f"Axis {axis} of shape {value.shape} has not size 1.")
    return inner


@implements("tf.shaping.reshape")
def reshape(operation: Callable[..., Any], tensor: Any, shape: Any, name: Any = None) -> Any:
    """Returns all values as a vector; ragged tensors have no other dense shapes."""
    sizes = shape if isinstance(shape, list | tuple) else known_value(shape).tolist()
    if list(sizes) != [-1] or is_value(tensor) is not None:
        raise ValueError(
            "A RaggedTensor is reshaped to [-1] only, outside compiled programs. Received: "
            f"{sizes}. Use merge_dims, or x.to_tensor()."
        )
    return operation(tensor.flat, [-1])


@implements("tf.tensors.shape")
def shape(operation: Callable[..., Any], input: Any, out_type: Any = None, name: Any = None) -> Any:
    """Returns the shape, of which axes are ragged."""
    return DynamicRaggedShape(input, np.int32 if out_type is None else tensor_dtype(out_type))


@implements("tf.tensors.size")
def size(operation: Callable[..., Any], input: Any, out_type: Any = None, name: Any = None) -> Any:
    """Returns the number of values."""
    dtype = tensor_dtype(np.int32 if out_type is None else out_type)
    flat = input.flat
    if is_value(input) is None:
        return tensor_of(np.array(flat.size, dtype))
    return (number_of_values(input) * int(np.prod(flat.shape[1:]))).astype(dtype)


@implements("tf.tensors.rank")
def rank(operation: Callable[..., Any], input: Any, name: str | None = None) -> Any:
    """Returns the number of axes."""
    return tensor_of(np.array(input.rank, np.int32))


# -- loops, printing -----------------------------------------------------------------------


@implements("tf.looping.map_fn")
def map_fn(
    operation: Callable[..., Any],
    fn: Callable[[Any], Any],
    elems: Any,
    dtype: Any = None,
    parallel_iterations: Any = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: Any = None,
) -> Any:
    """Applies a function to rows, and stacks its results: ragged if their shapes differ."""
    wanted = dtype if fn_output_signature is None else fn_output_signature
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(elems)):
        needs_python("tf.map_fn over the rows of a ragged tensor")
        raise ValueError(
            "In a compiled program the rows of a RaggedTensor have no known lengths: use "
            "reductions along axis 1, or tf.map_fn over x.to_tensor(shape=[None, 64])."
        )
    leaves = [x if is_ragged(x) else convert_to_tensor(x) for x in nest.flatten(elems)]
    counts = {leaf.shape[0] for leaf in leaves}
    if len(counts) > 1:
        raise ValueError(f"The elements must have as many rows as each other. Received: {counts}")
    results = [
        called(fn, nest.pack_sequence_as(elems, [leaf[row] for leaf in leaves]))
        for row in range(counts.pop())
    ]
    if not results:
        raise ValueError("tf.map_fn over a RaggedTensor needs at least one row.")
    specs = [None] * len(nest.flatten(results[0])) if wanted is None else nest.flatten(wanted)
    columns = zip(*map(nest.flatten, results), strict=True)
    joint = [_stacked_results(column, spec) for column, spec in zip(columns, specs, strict=True)]
    return nest.pack_sequence_as(results[0], joint)


def _stacked_results(results: Sequence[Any], spec: Any) -> Any:
    tensors = [x if is_ragged(x) else convert_to_tensor(x) for x in results]
    if spec is not None:
        wanted = getattr(spec, "dtype", spec)
        tensors = [cast(tensor, wanted) for tensor in tensors]
    is_dense = not any(map(is_ragged, tensors)) and not isinstance(spec, RaggedTensorSpec)
    if is_dense and len({tensor.shape for tensor in tensors}) == 1:
        return jnp.stack(tensors)
    return stacked(tensors)


@implements("tf.printing.print")
def print_(operation: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Prints ragged tensors among other values."""

    def printable(value: Any) -> Any:
        if is_ragged(value):
            return Shown(repr(value).removeprefix("<tf.RaggedTensor ").removesuffix(">"))
        if isinstance(value, list | tuple):
            return type(value)(map(printable, value))
        return value

    operation(*map(printable, inputs), **options)
