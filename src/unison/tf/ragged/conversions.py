"""Ragged tensors from dense and sparse ones, and the other way round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf.ragged.partitions import lengths_of, partition, ranges, rowids_of
from unison.tf.ragged.rows import around, at, implements, select
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.sparse import SparseTensor
from unison.tf.tensor_spec import TensorShape
from unison.tf.tensors import convert_to_tensor, tensor_dtype
from unison.tf.text import StringTensor


def array_or_numpy(tensor: Any) -> Any:
    """Returns the module that computes with a tensor: NumPy's for text."""
    return np if isinstance(tensor, StringTensor) else jnp


@implements("from_tensor")
def from_tensor(
    tensor: Any, lengths: Any, padding: Any, ragged_rank: Any, splits_dtype: Any
) -> RaggedTensor:
    """Returns the rows of a tensor; see `RaggedTensor.from_tensor`."""
    if lengths is not None and padding is not None:
        raise ValueError("Specify argument `lengths` or `padding`, but not both.")
    if not isinstance(ragged_rank, int):
        raise TypeError(f"Argument `ragged_rank` must be an int. Received {ragged_rank}.")
    if ragged_rank <= 0:
        raise ValueError(f"Argument `ragged_rank` must be greater than 0. Received {ragged_rank}.")
    tensor = convert_to_tensor(tensor)
    if tensor.ndim < ragged_rank + 1 or tensor.ndim < 2:
        raise ValueError(
            f"A tensor with {ragged_rank} ragged axes has at least {ragged_rank + 1} axes. "
            f"Received: shape {tensor.shape}"
        )
    dtype = tensor_dtype(splits_dtype)
    if isinstance(lengths, list | tuple) and len(lengths) and np.ndim(lengths[0]):
        if ragged_rank not in (1, len(lengths)):
            raise ValueError(
                f"If Argument `lengths` is a tuple of row_lengths, argument `ragged_rank` must be "
                f"len(lengths): {len(lengths)}. Received ragged_rank: {ragged_rank}."
            )
        outer = from_tensor(tensor, lengths[0], None, 1, splits_dtype)
        if len(lengths) == 1:
            return outer
        return outer.with_values(from_tensor(outer.inner, lengths[1:], None, 1, splits_dtype))
    if ragged_rank > 1:
        rows, columns, *rest = tensor.shape
        inner = tensor.reshape((rows * columns, *rest))
        values = from_tensor(inner, lengths, padding, ragged_rank - 1, splits_dtype)
        return around(values, np.arange(rows + 1, dtype=dtype) * columns, columns)
    rows, columns, *rest = tensor.shape
    values = tensor.reshape((rows * columns, *rest))
    if padding is not None:
        lengths = _lengths_without(tensor, padding, dtype)
    if lengths is None:
        return around(values, np.arange(rows + 1, dtype=dtype) * columns, columns)
    lengths = partition(lengths, "lengths", dtype)
    if lengths.shape != (rows,):
        raise ValueError(f"Expected {rows} lengths. Received: shape {lengths.shape}")
    module = np if isinstance(lengths, np.ndarray) else jnp
    lengths = module.clip(lengths, 0, columns).astype(dtype)
    places, splits = ranges(np.arange(rows, dtype=dtype) * columns, lengths, rows * columns)
    return around(select(values, places), splits)


def _lengths_without(tensor: Any, padding: Any, dtype: Any) -> Any:
    """Returns the lengths of the rows without the padding at their ends."""
    padding = convert_to_tensor(padding, None if isinstance(tensor, StringTensor) else tensor.dtype)
    if padding.ndim and padding.shape != tensor.shape[2:]:
        raise ValueError(f"Shapes {padding.shape} and {tensor.shape[2:]} are incompatible")
    if isinstance(tensor, StringTensor):
        differs = tensor.numpy() != padding.numpy()
    else:
        differs = tensor != padding
        differs = differs if isinstance(differs, jax.core.Tracer) else np.asarray(differs)
    differs = differs.any(tuple(range(2, tensor.ndim)))
    return (differs * np.arange(1, tensor.shape[1] + 1, dtype=dtype)).max(1, initial=0)


@implements("to_tensor")
def to_tensor(ragged: RaggedTensor, default: Any, shape: Any) -> Any:
    """Returns a dense tensor; see `RaggedTensor.to_tensor`."""
    sizes = TensorShape(_numbers(shape))
    if sizes.rank is None:
        sizes = TensorShape([None] * ragged.rank)
    if sizes.rank != ragged.rank:
        raise ValueError(f"Expected a shape of {ragged.rank} sizes. Received: {shape}")
    flat = ragged.flat
    if default is None:
        default = StringTensor(b"") if isinstance(flat, StringTensor) else 0
    else:
        default = _default(default, flat)
    rows, *others = sizes.as_list()
    dense = _padded(ragged, default, others)
    if rows is None or rows == dense.shape[0]:
        return dense
    if rows < dense.shape[0]:
        return dense[:rows]
    module = array_or_numpy(flat)
    missing = module.broadcast_to(default, (rows - dense.shape[0], *dense.shape[1:]))
    whole = module.concatenate([dense, module.asarray(missing, flat.dtype)])
    return StringTensor(whole) if isinstance(flat, StringTensor) else whole


def _numbers(shape: Any) -> Any:
    if shape is None or isinstance(shape, TensorShape | list | tuple):
        return shape
    return np.asarray(shape).tolist()


def _default(default: Any, flat: Any) -> Any:
    if not isinstance(flat, StringTensor):
        default = convert_to_tensor(default, dtype_hint=flat.dtype)
        if default.dtype != flat.dtype:
            raise ValueError(
                f"default_value must have the dtype {flat.dtype}. Received: {default.dtype}"
            )
    else:
        default = convert_to_tensor(default)
    try:
        np.broadcast_shapes(default.shape, flat.shape[1:])
    except ValueError:
        raise InvalidArgumentError(
            message=f"default_value.shape={default.shape} and rt_input.flat.shape="
            f"{flat.shape} are incompatible"
        ) from None
    return default


def _padded(ragged: RaggedTensor, default: Any, sizes: list[int | None]) -> Any:
    """Returns the rows, padded to the sizes of the axes behind the first one."""
    splits, uniform = ragged.partitions[0], ragged.uniform_lengths[0]
    values = ragged.inner
    inner = _padded(values, default, sizes[1:]) if is_ragged(values) else values
    if not is_ragged(values) and not TensorShape(inner.shape[1:]).is_compatible_with(sizes[1:]):
        raise InvalidArgumentError(
            message=f"The rows have values of shape {inner.shape[1:]}, not of {sizes[1:]}."
        )
    width = sizes[0]
    if width is None:
        width = uniform if uniform is not None else _longest(splits)
    lengths = lengths_of(splits)
    is_text = isinstance(inner, StringTensor)
    module: Any = np if isinstance(splits, np.ndarray) else jnp
    columns = module.arange(width, dtype=splits.dtype)
    places = splits[:-1][:, None] + columns
    is_there = columns < lengths[:, None]
    if inner.shape[0] == 0:
        taken = array_or_numpy(inner).zeros((*places.shape, *inner.shape[1:]), inner.dtype)
        if is_text:
            taken = np.full(taken.shape, b"", object)
    else:
        taken = inner[module.where(is_there, places, 0)]
    mask = is_there.reshape((*is_there.shape, *(1,) * (inner.ndim - 1)))
    if is_text:
        text = np.where(mask, np.asarray(taken, object), np.asarray(default, object))
        return StringTensor(text)
    return jnp.where(mask, taken, jnp.asarray(default, inner.dtype))


def _longest(splits: Any) -> int:
    if isinstance(splits, np.ndarray):
        return int(np.diff(splits).max(initial=0))
    needs_python("to_tensor of rows whose largest length is not known")
    raise ValueError(
        "In a compiled program the lengths of rows are not known while it is compiled, but the "
        "size of a tensor must be. Write it down: x.to_tensor(shape=[None, 64]) pads every row to "
        "64 values (and cuts longer ones). Or call to_tensor in Dataset.map."
    )


@implements("merge_dims")
def merge_dims(value: Any, outer: int, inner: int) -> Any:
    """Returns a tensor with the axes from `outer` to `inner` merged."""
    if outer == inner:
        return value
    while outer == 0 and is_ragged(value):
        value, inner = value.inner, inner - 1
        if inner == 0:
            return value
    if not is_ragged(value):
        return value.reshape((*value.shape[:outer], -1, *value.shape[inner + 1 :]))
    if outer > 1:
        return value.with_values(merge_dims(value.inner, outer - 1, inner - 1))
    splits, values = value.partitions[0], value.inner
    for axis in range(outer, inner):
        if is_ragged(values):
            splits = at(values.partitions[0], splits)
            values = values.inner
        else:
            merged = inner - axis + 1
            size = int(np.prod(values.shape[1:merged]))
            values = values.reshape((-1, *values.shape[merged:]))
            splits = splits * size
            break
    return around(values, splits)


@implements("to_sparse")
def to_sparse(ragged: RaggedTensor) -> SparseTensor:
    """Returns a sparse tensor of the same values."""
    needs_python("RaggedTensor.to_sparse")
    shape = np.asarray(ragged.bounding_shape(), np.int64)
    return SparseTensor(np.stack(places_of(ragged), 1), _flattened(ragged), shape)


def _flattened(ragged: RaggedTensor) -> Any:
    return ragged.flat.reshape(-1)


def places_of(ragged: RaggedTensor) -> list[np.ndarray]:
    """Returns for every value of a known ragged tensor its index along every axis."""
    axes: list[np.ndarray] = []
    levels: Any = ragged
    while is_ragged(levels):
        splits = levels.partitions[0].astype(np.int64)
        rows = rowids_of(splits, int(splits[-1]))
        columns = np.arange(splits[-1]) - splits[:-1][rows]
        axes = [axis[rows] for axis in axes] if axes else [rows]
        axes.append(columns)
        levels = levels.inner
    inner = levels.shape[1:]
    size = int(np.prod(inner))
    axes = [np.repeat(axis, size) for axis in axes]
    grid = [np.tile(part.ravel(), levels.shape[0]) for part in np.indices(inner)] if inner else []
    return [axis.astype(np.int64) for axis in (*axes, *grid)]


@implements("from_sparse")
def from_sparse(sparse: Any, splits_dtype: Any) -> RaggedTensor:
    """Returns the rows of a sparse matrix."""
    if not isinstance(sparse, SparseTensor):
        raise TypeError(
            f"Argument `st_input` must be of type SparseTensor, but is of type {type(sparse)}."
        )
    needs_python("RaggedTensor.from_sparse")
    indices, shape = np.asarray(sparse.indices), np.asarray(sparse.dense_shape)
    if len(shape) != 2:
        raise ValueError(f"rank(st_input) must be 2. Received: {len(shape)}")
    rows = indices[:, 0].astype(tensor_dtype(splits_dtype))
    result = RaggedTensor.from_value_rowids(sparse.values, rows, int(shape[0]))
    splits = result.partitions[0]
    columns = np.arange(len(rows)) - splits[:-1][rows]
    if not np.array_equal(columns, indices[:, 1]):
        raise InvalidArgumentError(message="SparseTensor is not right-ragged")
    return result
