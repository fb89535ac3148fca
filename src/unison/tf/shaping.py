"""Operations that reshape, join, cut and move the elements of tensors, also of strings."""

from __future__ import annotations

import builtins
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.tf import dtypes
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.host import HostTensor, ShapeTensor
from unison.tf.tensor_spec import is_symbolic_size
from unison.tf.tensors import (
    array_module,
    axes,
    convert_to_tensor,
    invalid_arguments,
    is_tensor,
    known_value,
    like,
    scalar,
    size_of,
    sizes,
    tensor_dtype,
)
from unison.tf.text import StringTensor, is_text


def reshape(tensor: Any, shape: Any, name: str | None = None) -> Any:
    """TF: `tf.reshape`."""
    tensor = convert_to_tensor(tensor)
    with invalid_arguments("tf.reshape"):
        return like(tensor, array_module(tensor).reshape(tensor, sizes(shape)))


def transpose(a: Any, perm: Any = None, conjugate: bool = False, name: str = "transpose") -> Any:
    """Permutes the axes by `perm`; by default, reverses them. TF: `tf.transpose`."""
    a = convert_to_tensor(a)
    with invalid_arguments("tf.transpose"):
        result = like(a, array_module(a).transpose(a, axes(perm)))
    return jnp.conj(result) if conjugate else result


def expand_dims(input: Any, axis: int, name: str | None = None) -> Any:
    """TF: `tf.expand_dims`."""
    tensor = convert_to_tensor(input)
    with invalid_arguments("tf.expand_dims"):
        return like(tensor, array_module(tensor).expand_dims(tensor, axes(axis)))


def squeeze(input: Any, axis: Any = None, name: str | None = None) -> Any:
    """Drops the axes of size 1: those of `axis`, or all. TF: `tf.squeeze`."""
    tensor = convert_to_tensor(input)
    with invalid_arguments("tf.squeeze"):
        return like(tensor, array_module(tensor).squeeze(tensor, axes(axis) or None))


def stack(values: Any, axis: int = 0, name: str = "stack") -> Any:
    """Joins tensors of one shape along a new axis. TF: `tf.stack`."""
    tensors = _of_one_dtype(values)
    with invalid_arguments("tf.stack"):
        return like(tensors[0], array_module(*tensors).stack(tensors, axis))


def parallel_stack(values: Any, name: str = "parallel_stack") -> Any:
    """TF: `tf.parallel_stack`."""
    return stack(values)


def unstack(value: Any, num: int | None = None, axis: int = 0, name: str = "unstack") -> list[Any]:
    """Cuts a tensor into its slices along `axis`.

    Raises:
        InvalidArgumentError: They are not `num`.

    TF: `tf.unstack`.
    """
    tensor = convert_to_tensor(value)
    with invalid_arguments("tf.unstack"):
        moved = array_module(tensor).moveaxis(tensor, axis, 0)
        if num not in (None, moved.shape[0]):
            raise ValueError(f"expected {num} tensors along axis {axis}, not {moved.shape[0]}")
        return list(moved)


def concat(values: Any, axis: Any, name: str = "concat") -> Any:
    """Joins tensors along an axis that they have. TF: `tf.concat`."""
    tensors = _of_one_dtype(values) if isinstance(values, list | tuple) else [values]
    with invalid_arguments("tf.concat"):
        return like(tensors[0], array_module(*tensors).concatenate(tensors, axes(axis)))


def _of_one_dtype(values: Any) -> list[Any]:
    """Returns `values` as tensors; numbers among them take the dtype of the first tensor."""
    if not isinstance(values, list | tuple):
        return list(convert_to_tensor(values))
    tensors = [value for value in values if is_tensor(value)]
    if any(isinstance(value, ShapeTensor) or is_symbolic_size(value) for value in values):
        # Beside shapes with symbols, so do constants.
        return [known_value(value).astype(object).view(ShapeTensor) for value in values]
    if not tensors:
        return list(map(convert_to_tensor, values))
    if all(isinstance(tensor, HostTensor) for tensor in tensors) and not is_text(tensors[0]):
        # Shapes, joined with numbers, stay known while a program is traced.
        return [np.asarray(value, tensors[0].dtype).view(HostTensor) for value in values]
    known = tensors[0].dtype
    return [
        convert_to_tensor(value) if is_tensor(value) else convert_to_tensor(value, dtype_hint=known)
        for value in values
    ]


def split(
    value: Any, num_or_size_splits: Any, axis: Any = 0, num: int | None = None, name: str = "split"
) -> list[Any]:
    """Splits `value` into a number of equal parts, or parts of given sizes, one of them maybe -1.

    Raises:
        InvalidArgumentError: The sizes do not add up, or the parts are not equal.

    TF: `tf.split`.
    """
    tensor = convert_to_tensor(value)
    axis = axes(axis)
    module = array_module(tensor)
    with invalid_arguments("tf.split"):
        if np.ndim(known_value(num_or_size_splits)) == 0:
            parts = module.split(tensor, int(known_value(num_or_size_splits)), axis)
        else:
            length = tensor.shape[axis]
            wanted = list(sizes(num_or_size_splits))
            if -1 in wanted:
                wanted[wanted.index(-1)] = length - sum(wanted) - 1
            if sum(wanted) != length or min(wanted) < 0:
                raise ValueError(f"the sizes {wanted} do not add up to {length}, axis {axis}")
            parts = module.split(tensor, np.cumsum(wanted)[:-1].tolist(), axis)
    return [like(tensor, part) for part in parts]


def tile(input: Any, multiples: Any, name: str | None = None) -> Any:
    """TF: `tf.tile`."""
    tensor = convert_to_tensor(input)
    return like(tensor, array_module(tensor).tile(tensor, sizes(multiples)))


def repeat(input: Any, repeats: Any, axis: int | None = None, name: str | None = None) -> Any:
    """Repeats every element, or slice along `axis`, so often. TF: `tf.repeat`."""
    tensor = convert_to_tensor(input)
    times = known_value(repeats)
    with invalid_arguments("tf.repeat"):
        return like(
            tensor,
            array_module(tensor).repeat(tensor, times if times.ndim else scalar(times), axis),
        )


def broadcast_to(input: Any, shape: Any, name: str | None = None) -> Any:
    """TF: `tf.broadcast_to`."""
    tensor = convert_to_tensor(input)
    with invalid_arguments("tf.broadcast_to"):
        return like(tensor, array_module(tensor).broadcast_to(tensor, sizes(shape)))


def meshgrid(*args: Any, indexing: str = "xy", name: str | None = None) -> list[Any]:
    """TF: `tf.meshgrid`."""
    return list(jnp.meshgrid(*(convert_to_tensor(arg) for arg in args), indexing=indexing))


def pad(
    tensor: Any,
    paddings: Any,
    mode: str = "CONSTANT",
    constant_values: Any = 0,
    name: str | None = None,
) -> Any:
    """Pads every axis by `paddings[axis] = [before, after]`.

    Args:
        tensor: The tensor.
        paddings: Two numbers an axis.
        mode: "CONSTANT", "REFLECT" or "SYMMETRIC", in any case of letters.
        constant_values: What "CONSTANT" pads with.
        name: Without effect.

    TF: `tf.pad`.
    """
    tensor = convert_to_tensor(tensor)
    widths = [tuple(sizes(pair)) for pair in known_value(paddings).tolist()]
    how = mode.lower()
    if how not in ("constant", "reflect", "symmetric"):
        raise ValueError(f"Expected the mode CONSTANT, REFLECT or SYMMETRIC. Received: {mode!r}")
    with invalid_arguments("tf.pad"):
        if how != "constant":
            return jnp.pad(tensor, widths, how)
        if isinstance(tensor, StringTensor):
            return StringTensor(np.pad(tensor.numpy(), widths, constant_values=b""))
        return jnp.pad(tensor, widths, constant_values=constant_values)


def reverse(tensor: Any, axis: Any, name: str | None = None) -> Any:
    """TF: `tf.reverse`."""
    tensor = convert_to_tensor(tensor)
    with invalid_arguments("tf.reverse"):
        return like(tensor, array_module(tensor).flip(tensor, axes(axis)))


def reverse_sequence(
    input: Any,
    seq_lengths: Any,
    seq_axis: int | None = None,
    batch_axis: int | None = None,
    name: str | None = None,
) -> Any:
    """Reverses the first `seq_lengths[i]` elements of the i-th sequence.

    TF: `tf.reverse_sequence`.
    """
    tensor = convert_to_tensor(input)
    lengths = convert_to_tensor(seq_lengths)
    moved = jnp.moveaxis(tensor, (batch_axis or 0, seq_axis or 0), (0, 1))
    steps = jnp.arange(moved.shape[1])[None, :]
    source = jnp.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    source = source.reshape(source.shape + (1,) * (moved.ndim - 2))
    reversed_ = jnp.take_along_axis(moved, source, axis=1)
    return jnp.moveaxis(reversed_, (0, 1), (batch_axis or 0, seq_axis or 0))


def roll(input: Any, shift: Any, axis: Any, name: str | None = None) -> Any:
    """TF: `tf.roll`."""
    tensor = convert_to_tensor(input)
    shifts = shift if isinstance(shift, jax.Array) else axes(shift)
    return like(tensor, array_module(tensor).roll(tensor, shifts, axes(axis)))


def slice(input_: Any, begin: Any, size: Any, name: str | None = None) -> Any:
    """Returns the part that begins at `begin` and has the shape `size`; -1 extends to the end.

    In a compiled program `begin` may be computed, `size` must be known.

    TF: `tf.slice`.
    """
    tensor = convert_to_tensor(input_)
    lengths = sizes(size)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(begin)):
        begin = convert_to_tensor(begin)
        return jax.lax.dynamic_slice(tensor, tuple(begin), lengths)
    starts = sizes(begin)
    stops = [
        whole if length == -1 else start + length
        for start, length, whole in zip(starts, lengths, tensor.shape, strict=True)
    ]
    with invalid_arguments("tf.slice"):
        if any(stop > whole for stop, whole in zip(stops, tensor.shape, strict=True)):
            raise ValueError(f"begin {starts} and size {lengths} leave the shape {tensor.shape}")
    return tensor[tuple(map(builtins.slice, starts, stops))]


def strided_slice(
    input_: Any,
    begin: Any,
    end: Any,
    strides: Any = None,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    var: Any = None,
    name: str | None = None,
) -> Any:
    """Returns the result of `input_[begin:end:strides, ...]`, as modified by the masks.

    TF: `tf.strided_slice`.
    """
    tensor = convert_to_tensor(input_)
    begin, end = sizes(begin), sizes(end)
    strides = (1,) * len(begin) if strides is None else sizes(strides)

    def index_of(position: int) -> Any:
        bit = 1 << position
        if ellipsis_mask & bit:
            return ...
        if new_axis_mask & bit:
            return None
        if shrink_axis_mask & bit:
            return begin[position]
        return builtins.slice(
            None if begin_mask & bit else begin[position],
            None if end_mask & bit else end[position],
            strides[position],
        )

    return tensor[tuple(index_of(position) for position in range(len(begin)))]


def space_to_batch_nd(input: Any, block_shape: Any, paddings: Any, name: str | None = None) -> Any:
    """Moves blocks of the spatial axes into the batch. TF: `tf.space_to_batch_nd`."""
    tensor = convert_to_tensor(input)
    blocks = sizes(block_shape)
    count = len(blocks)
    rest = tensor.ndim - 1 - count
    widths = [(0, 0), *map(tuple, known_value(paddings).tolist()), *[(0, 0)] * rest]
    padded = jnp.pad(tensor, widths)
    batch, *space = padded.shape[: count + 1]
    depth = padded.shape[count + 1 :]
    outer = [size // block for size, block in zip(space, blocks, strict=True)]
    cut = [part for pair in zip(outer, blocks, strict=True) for part in pair]
    split_up = padded.reshape((batch, *cut, *depth))
    positions = [1 + 2 * index for index in range(count)]
    order = [*(position + 1 for position in positions), 0, *positions]
    order += range(1 + 2 * count, split_up.ndim)
    return split_up.transpose(order).reshape((batch * math.prod(blocks), *outer, *depth))


space_to_batch = space_to_batch_nd


def batch_to_space(input: Any, block_shape: Any, crops: Any, name: str | None = None) -> Any:
    """The inverse of `space_to_batch`. TF: `tf.batch_to_space`."""
    tensor = convert_to_tensor(input)
    blocks = sizes(block_shape)
    count = len(blocks)
    batch = tensor.shape[0] // math.prod(blocks)
    space, depth = tensor.shape[1 : count + 1], tensor.shape[count + 1 :]
    split_up = tensor.reshape((*blocks, batch, *space, *depth))
    order = [count]
    for index in range(count):
        order += [count + 1 + index, index]
    order += range(2 * count + 1, split_up.ndim)
    joined = [size * block for size, block in zip(space, blocks, strict=True)]
    whole = split_up.transpose(order).reshape((batch, *joined, *depth))
    cut = [
        builtins.slice(before, size - after)
        for (before, after), size in zip(known_value(crops).tolist(), joined, strict=True)
    ]
    return whole[(builtins.slice(None), *cut)]


def sequence_mask(
    lengths: Any, maxlen: Any = None, dtype: Any = dtypes.bool, name: str | None = None
) -> Any:
    """Returns a mask whose i-th row is true for the first `lengths[i]` of `maxlen` positions.

    Without `maxlen` (outside compiled programs) it is the largest of `lengths`.

    TF: `tf.sequence_mask`.
    """
    lengths = convert_to_tensor(lengths)
    width = size_of(np.max(known_value(lengths), initial=0) if maxlen is None else maxlen)
    return (jnp.arange(width) < lengths[..., None]).astype(tensor_dtype(dtype))


def required_space_to_batch_paddings(
    input_shape: Any, block_shape: Any, base_paddings: Any = None, name: str | None = None
) -> tuple[Any, Any]:
    """Returns the paddings that make a shape divisible by blocks, and the crops that undo them.

    TF: `tf.required_space_to_batch_paddings`.
    """
    shape, blocks = known_value(input_shape), known_value(block_shape)
    base = np.zeros((len(blocks), 2), int) if base_paddings is None else known_value(base_paddings)
    extra = -(shape + base.sum(1)) % blocks
    paddings = np.stack([base[:, 0], base[:, 1] + extra], 1)
    crops = np.stack([np.zeros_like(extra), extra], 1)
    return convert_to_tensor(paddings.astype(np.int32)), convert_to_tensor(crops.astype(np.int32))


dispatch_on_ragged(globals())
