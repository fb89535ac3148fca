"""The convolutions and poolings of `tf.nn`.

Inputs have their channels last ("NHWC") or, on request, second ("NCHW"); filters have the shape
`[*window, in_channels, out_channels]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.tf import dtypes
from unison.tf.tensors import (
    convert_to_tensor,
    full_width,
    invalid_arguments,
    operands,
    sizes,
    tensor_dtype,
)

_SPACE = {1: "W", 2: "HW", 3: "DHW"}


class PooledAndPlaces(NamedTuple):
    """The largest elements of windows, and their places."""

    output: jax.Array
    argmax: jax.Array


class _Layout:
    """The axes of an input, by the data format or its default."""

    def __init__(self, spatial: int, data_format: str | None):
        last, first = f"N{_SPACE[spatial]}C", f"NC{_SPACE[spatial]}"
        if data_format not in (None, last, first):
            raise ValueError(
                f"Expected the data_format {last} or {first}. Received: {data_format!r}"
            )
        self.spatial = spatial
        self.axes = first if data_format == first else last
        self.channel_axis = self.axes.index("C")
        start = 2 if data_format == first else 1
        self.space = range(start, start + spatial)

    def window(self, value: Any) -> tuple[int, ...]:
        """Returns strides or dilations as one number a spatial axis."""
        given = (1,) if value is None else sizes(value)
        if len(given) == self.spatial + 2:
            return tuple(given[axis] for axis in self.space)
        if len(given) == 1:
            return given * self.spatial
        if len(given) == self.spatial:
            return given
        raise ValueError(
            f"Expected 1, {self.spatial} or {self.spatial + 2} numbers. Received: {value!r}"
        )

    def whole(self, window: Sequence[Any], other: Any) -> tuple[Any, ...]:
        """Returns one item an axis: those of `window` for the spatial ones, else `other`."""
        parts = [other] * (self.spatial + 2)
        for axis, part in zip(self.space, window, strict=True):
            parts[axis] = part
        return tuple(parts)

    def padding(self, padding: Any) -> Any:
        """Returns "SAME", "VALID", or one pair a spatial axis of explicit paddings."""
        if isinstance(padding, str):
            return padding.upper()
        pairs = np.asarray(padding).tolist()
        if len(pairs) == self.spatial + 2:
            pairs = [pairs[axis] for axis in self.space]
        return [tuple(pair) for pair in pairs]


# -- convolutions --------------------------------------------------------------------------


def convolution(
    input: Any,
    filters: Any,
    strides: Any = None,
    padding: Any = "VALID",
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the convolution over 1, 2 or 3 spatial axes. TF: `tf.nn.convolution`."""
    input, filters = operands(convert_to_tensor(input), convert_to_tensor(filters))
    spatial = filters.ndim - 2
    layout = _Layout(spatial, data_format)
    channels = input.shape[layout.channel_axis]
    with invalid_arguments("tf.nn.convolution"):
        return lax.conv_general_dilated(
            input,
            filters,
            layout.window(strides),
            layout.padding(padding),
            rhs_dilation=layout.window(dilations),
            dimension_numbers=(layout.axes, f"{_SPACE[spatial]}IO", layout.axes),
            feature_group_count=max(channels // filters.shape[-2], 1),
        )


def conv1d(
    input: Any,
    filters: Any,
    stride: Any,
    padding: Any,
    data_format: str = "NWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv1d`."""
    return convolution(input, filters, stride, padding, data_format, dilations)


def conv2d(
    input: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv2d`."""
    return convolution(input, filters, strides, padding, data_format, dilations)


def conv3d(
    input: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv3d`."""
    return convolution(input, filters, strides, padding, data_format, dilations)


def atrous_conv2d(
    value: Any, filters: Any, rate: int, padding: Any, name: str | None = None
) -> jax.Array:
    """TF: `tf.nn.atrous_conv2d`."""
    return convolution(value, filters, 1, padding, dilations=rate)


def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """Convolves every channel with filters of its own; `filter` has the shape
    `[height, width, channels, multiplier]`.

    TF: `tf.nn.depthwise_conv2d`.
    """
    filter = convert_to_tensor(filter)
    height, width, channels, multiplier = filter.shape
    grouped = filter.reshape(height, width, 1, channels * multiplier)
    return convolution(input, grouped, strides, padding, data_format, dilations)


def separable_conv2d(
    input: Any,
    depthwise_filter: Any,
    pointwise_filter: Any,
    strides: Any,
    padding: Any,
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.separable_conv2d`."""
    depthwise = depthwise_conv2d(input, depthwise_filter, strides, padding, data_format, dilations)
    return convolution(depthwise, pointwise_filter, 1, "VALID", data_format)


def conv_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the gradient of the convolution that maps `output_shape` to the shape of `input`.

    Args:
        input: What the convolution would return.
        filters: Of the shape `[*window, out_channels, in_channels]`.
        output_shape: The whole shape of the result.
        strides: Those of the convolution.
        padding: "SAME", "VALID" or explicit paddings.
        data_format: Where the channels are.
        dilations: Those of the convolution.
        name: Without effect.

    TF: `tf.nn.conv_transpose`.
    """
    input, filters = operands(convert_to_tensor(input), convert_to_tensor(filters))
    target = jax.ShapeDtypeStruct(sizes(output_shape), input.dtype)

    def forward(value: jax.Array) -> jax.Array:
        return convolution(value, filters, strides, padding, data_format, dilations)

    with invalid_arguments("tf.nn.conv_transpose"):
        expected = jax.eval_shape(forward, target).shape
        if expected != input.shape:
            raise ValueError(
                f"the convolution maps output_shape {target.shape} to {expected}, and the input "
                f"has the shape {input.shape}"
            )
        (result,) = jax.linear_transpose(forward, target)(input)
    return result


def conv1d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: str = "NWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv1d_transpose`."""
    return conv_transpose(input, filters, output_shape, strides, padding, data_format, dilations)


def conv2d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: str = "NHWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv2d_transpose`."""
    return conv_transpose(input, filters, output_shape, strides, padding, data_format, dilations)


def conv3d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: str = "NDHWC",
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.conv3d_transpose`."""
    return conv_transpose(input, filters, output_shape, strides, padding, data_format, dilations)


# -- pooling -------------------------------------------------------------------------------


def max_pool(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the largest element of every window. TF: `tf.nn.max_pool`."""
    input = convert_to_tensor(input)
    is_inexact = jnp.issubdtype(input.dtype, jnp.inexact)
    lowest = -np.inf if is_inexact else dtypes.as_dtype(input.dtype).min
    return _pooled(lax.max, lowest, input, ksize, strides, padding, data_format)


def avg_pool(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the mean of every window; the padding does not count. TF: `tf.nn.avg_pool`."""
    input = convert_to_tensor(input)
    totals = _pooled(lax.add, 0, input, ksize, strides, padding, data_format)
    if isinstance(padding, str) and padding.upper() == "VALID":
        layout = _Layout(input.ndim - 2, data_format)
        return totals / np.asarray(math.prod(layout.window(ksize)), totals.dtype)
    ones = jnp.ones(input.shape, input.dtype)
    return totals / _pooled(lax.add, 0, ones, ksize, strides, padding, data_format)


def _pooled(
    combine: Any,
    initial: Any,
    input: jax.Array,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str | None,
) -> jax.Array:
    layout = _Layout(input.ndim - 2, data_format)
    pads = layout.padding(padding)
    start = np.asarray(initial, input.dtype)[()]
    with invalid_arguments("tf.nn.pool"), full_width(input.dtype):
        return lax.reduce_window(
            input,
            start,
            combine,
            layout.whole(layout.window(ksize), 1),
            layout.whole(layout.window(strides), 1),
            pads if isinstance(pads, str) else layout.whole(pads, (0, 0)),
        )


def pool(
    input: Any,
    window_shape: Any,
    pooling_type: str,
    strides: Any = None,
    padding: Any = "VALID",
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
) -> jax.Array:
    """Pools by "MAX" or "AVG"; without `dilations`.

    Raises:
        ValueError: Another `pooling_type`, or `dilations`.

    TF: `tf.nn.pool`.
    """
    if dilations is not None and set(sizes(dilations)) != {1}:
        raise ValueError(f"tf.nn.pool takes no dilations in Unison. Received: {dilations!r}")
    if pooling_type not in ("MAX", "AVG"):
        raise ValueError(f"Expected the pooling_type MAX or AVG. Received: {pooling_type!r}")
    pooling = max_pool if pooling_type == "MAX" else avg_pool
    return pooling(input, window_shape, 1 if strides is None else strides, padding, data_format)


def max_pool1d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.max_pool1d`."""
    return max_pool(input, ksize, strides, padding, data_format)


def max_pool2d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.max_pool2d`."""
    return max_pool(input, ksize, strides, padding, data_format)


def max_pool3d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.max_pool3d`."""
    return max_pool(input, ksize, strides, padding, data_format)


def avg_pool1d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.avg_pool1d`."""
    return avg_pool(input, ksize, strides, padding, data_format)


def avg_pool2d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.avg_pool2d`."""
    return avg_pool(input, ksize, strides, padding, data_format)


def avg_pool3d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.nn.avg_pool3d`."""
    return avg_pool(input, ksize, strides, padding, data_format)


# -- rearranging ---------------------------------------------------------------------------


def depth_to_space(
    input: Any, block_size: int, data_format: str = "NHWC", name: str | None = None
) -> jax.Array:
    """Moves channels into blocks of pixels. TF: `tf.nn.depth_to_space`."""
    image = _channels_last(convert_to_tensor(input), data_format)
    batch, height, width, depth = image.shape
    blocks = image.reshape(batch, height, width, block_size, block_size, -1)
    shape = (batch, height * block_size, width * block_size, depth // block_size**2)
    return _as_format(blocks.transpose(0, 1, 3, 2, 4, 5).reshape(shape), data_format)


def space_to_depth(
    input: Any, block_size: int, data_format: str = "NHWC", name: str | None = None
) -> jax.Array:
    """Moves blocks of pixels into channels. TF: `tf.nn.space_to_depth`."""
    image = _channels_last(convert_to_tensor(input), data_format)
    batch, height, width, _ = image.shape
    rows, columns = height // block_size, width // block_size
    blocks = image.reshape(batch, rows, block_size, columns, block_size, -1)
    moved = blocks.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, -1)
    return _as_format(moved, data_format)


def _channels_last(image: jax.Array, data_format: str) -> jax.Array:
    return jnp.moveaxis(image, 1, -1) if data_format == "NCHW" else image


def _as_format(image: jax.Array, data_format: str) -> jax.Array:
    return jnp.moveaxis(image, -1, 1) if data_format == "NCHW" else image


def max_pool_with_argmax(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: str,
    data_format: str = "NHWC",
    output_dtype: Any = dtypes.int64,
    include_batch_in_index: bool = False,
    name: str | None = None,
) -> PooledAndPlaces:
    """Returns the largest elements, and their places in the flattened image.

    TF: `tf.nn.max_pool_with_argmax`.
    """
    input = convert_to_tensor(input)
    layout = _Layout(2, data_format)
    images = input.size if include_batch_in_index else input.size // input.shape[0]
    places = jnp.arange(input.size, dtype=jnp.int32).reshape(input.shape) % images

    def larger(one: Any, another: Any) -> Any:
        is_first = (one[0] > another[0]) | ((one[0] == another[0]) & (one[1] < another[1]))
        return tuple(jnp.where(is_first, a, b) for a, b in zip(one, another, strict=True))

    values, indices = lax.reduce_window(
        (input, places),
        (np.asarray(-np.inf, input.dtype)[()], np.int32(2**31 - 1)),
        larger,
        layout.whole(layout.window(ksize), 1),
        layout.whole(layout.window(strides), 1),
        layout.padding(padding),
    )
    return PooledAndPlaces(values, indices.astype(tensor_dtype(output_dtype)))
