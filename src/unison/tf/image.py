"""`tf.image`: images as tensors `[height, width, channels]`, or batches of them.

Everything but the reading and writing of files can be part of a compiled program.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.image_files import (
    decode_and_crop_jpeg,
    decode_bmp,
    decode_gif,
    decode_image,
    decode_jpeg,
    decode_png,
    decode_webp,
    encode_jpeg,
    encode_png,
    extract_jpeg_shape,
    is_jpeg,
)
from unison.tf.image_quality import halved, product_of_scales, structural_similarities
from unison.tf.image_scaling import (
    Terms,
    nearest_pixels,
    scaled,
    scaled_by_products,
    scaled_on_host,
    scaling_terms,
    scaling_weights,
)
from unison.tf.missing import names_missing_from
from unison.tf.pending import PendingImage, PixelStep, computed, with_functions_apart
from unison.tf.random_keys import key_of, next_key
from unison.tf.tensor_spec import is_symbolic_size
from unison.tf.tensors import cast, convert_to_tensor, saturate_cast, sizes
from unison.tf.ties import magnitude
from unison.tf.vanishing import standard_deviation

__all__ = [
    "decode_and_crop_jpeg",
    "decode_bmp",
    "decode_gif",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "decode_webp",
    "encode_jpeg",
    "encode_png",
    "extract_jpeg_shape",
    "is_jpeg",
]  # and all functions below

__getattr__ = names_missing_from(__name__)


def _image(value: Any) -> jax.Array:
    """Returns an image or a batch of them.

    Raises:
        ValueError: Neither 3 nor 4 axes.
    """
    image = convert_to_tensor(value)
    if image.ndim not in (3, 4):
        raise ValueError(f"'image' must have 3 or 4 axes. Received: the shape {image.shape}")
    return image


# -- turning and cutting -------------------------------------------------------------------


def flip_left_right(image: Any) -> jax.Array:
    """TF: `tf.image.flip_left_right`."""
    return jnp.flip(_image(image), -2)


def flip_up_down(image: Any) -> jax.Array:
    """TF: `tf.image.flip_up_down`."""
    return jnp.flip(_image(image), -3)


def transpose(image: Any, name: str | None = None) -> jax.Array:
    """Swaps height and width. TF: `tf.image.transpose`."""
    return jnp.swapaxes(_image(image), -3, -2)


def rot90(image: Any, k: int = 1, name: str | None = None) -> jax.Array:
    """Turns counter-clockwise by `k` right angles. TF: `tf.image.rot90`."""
    return jnp.rot90(_image(image), k, (-3, -2))


def central_crop(image: Any, central_fraction: float) -> jax.Array:
    """Returns the middle of an image, this part of its height and width.

    TF: `tf.image.central_crop`.
    """
    if not 0 < central_fraction <= 1:
        raise ValueError(f"central_fraction must be within (0, 1]. Received: {central_fraction}")
    image = _image(image)
    height, width = image.shape[-3:-1]
    top = int((height - height * central_fraction) / 2)
    left = int((width - width * central_fraction) / 2)
    return image[..., top : height - top, left : width - left, :]


def crop_to_bounding_box(
    image: Any, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> jax.Array:
    """TF: `tf.image.crop_to_bounding_box`."""
    image = _image(image)
    height, width = image.shape[-3:-1]
    top, left, rows, columns = sizes([offset_height, offset_width, target_height, target_width])
    fits = 0 <= top <= height - rows and 0 <= left <= width - columns
    if not fits or min(rows, columns) <= 0:
        raise ValueError(
            f"A box of {rows} x {columns} at ({top}, {left}) is not inside an image of {height} x "
            f"{width}."
        )
    return image[..., top : top + rows, left : left + columns, :]


def pad_to_bounding_box(
    image: Any, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> jax.Array:
    """Puts an image into a larger one of zeros. TF: `tf.image.pad_to_bounding_box`."""
    image = _image(image)
    height, width = image.shape[-3:-1]
    top, left, rows, columns = sizes([offset_height, offset_width, target_height, target_width])
    below, right = rows - top - height, columns - left - width
    if min(top, left, below, right) < 0:
        raise ValueError(
            f"An image of {height} x {width} at ({top}, {left}) is not inside one of {rows} x "
            f"{columns}."
        )
    batch = [(0, 0)] * (image.ndim - 3)
    return jnp.pad(image, [*batch, (top, below), (left, right), (0, 0)])


def resize_with_crop_or_pad(image: Any, target_height: int, target_width: int) -> jax.Array:
    """Cuts or fills up an image around its middle. TF: `tf.image.resize_with_crop_or_pad`."""
    image = _image(image)
    height, width = image.shape[-3:-1]
    rows, columns = sizes([target_height, target_width])
    top, left = max(height - rows, 0) // 2, max(width - columns, 0) // 2
    inside = crop_to_bounding_box(image, top, left, min(height, rows), min(width, columns))
    above, before = max(rows - height, 0) // 2, max(columns - width, 0) // 2
    return pad_to_bounding_box(inside, above, before, rows, columns)


def extract_patches(
    images: Any, sizes: Any, strides: Any, rates: Any, padding: str, name: str | None = None
) -> jax.Array:
    """Returns every window of the images as one vector. TF: `tf.image.extract_patches`."""
    images = convert_to_tensor(images)
    depth = images.shape[-1]
    patches = lax.conv_general_dilated_patches(
        images,
        list(sizes[1:3]),
        list(strides[1:3]),
        padding.upper(),
        rhs_dilation=list(rates[1:3]),
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    )
    # JAX has the channel first, TensorFlow last.
    by_channel = patches.reshape((*patches.shape[:-1], depth, -1))
    return jnp.swapaxes(by_channel, -1, -2).reshape(patches.shape)


# -- resizing ------------------------------------------------------------------------------


class ResizeMethod(enum.StrEnum):
    """The interpolation of a resized image. TF: `tf.image.ResizeMethod`."""

    AREA = "area"
    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    GAUSSIAN = "gaussian"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
    MITCHELLCUBIC = "mitchellcubic"
    NEAREST_NEIGHBOR = "nearest"


def resize(
    images: Any,
    size: Any,
    method: str = ResizeMethod.BILINEAR,
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the images in another size, as float32; "nearest" keeps their dtype.

    Args:
        images: `[height, width, channels]`, or a batch.
        size: The new height and width.
        method: One of `ResizeMethod`'s values.
        preserve_aspect_ratio: Whether to keep the proportions; `size` is then the most.
        antialias: Whether to average over the pixels that a smaller image leaves out.
        name: Without effect.

    TF: `tf.image.resize`.
    """
    if isinstance(images, PendingImage) and not preserve_aspect_ratio:
        rows, columns = sizes(size)
        return images.resized(
            lambda pixels, steps: _resized_after(
                steps, pixels, rows, columns, ResizeMethod(method), antialias
            )
        )
    images = _image(images)
    height, width = images.shape[-3:-1]
    rows, columns = sizes(size)
    if preserve_aspect_ratio:
        scale = min(rows / height, columns / width)
        rows, columns = (max(round(scale * length), 1) for length in (height, width))
    return _resized(images, rows, columns, ResizeMethod(method), antialias)


def _is_for_cpu() -> bool:
    """Whether what is computed is computed on a CPU, which is quick to gather.

    Accelerators are quicker to multiply matrices.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"


def _resized(images: Any, rows: Any, columns: Any, method: ResizeMethod, antialias: bool) -> Any:
    """Returns images, an array of NumPy's or JAX's, in another size; see `resize`."""
    height, width = images.shape[-3:-1]
    lengths = ((height, rows), (width, columns))
    if method == ResizeMethod.NEAREST_NEIGHBOR:
        at = [nearest_pixels(before, after) for before, after in lengths]
        return images[..., at[0], :, :][..., at[1], :]
    if (rows, columns) == (height, width):
        return images.astype(jnp.float32)
    is_on_host = isinstance(images, np.ndarray)
    terms = _terms(images, rows, columns, method, antialias)
    if terms is not None and is_on_host and images.ndim == 3:
        return scaled_on_host(images, *terms)
    if terms is not None and not is_on_host and _is_for_cpu():
        down, across = terms
        rows_scaled = scaled(images.astype(jnp.float32), images.ndim - 3, down)
        return scaled(rows_scaled, images.ndim - 2, across)
    xp = np if is_on_host else jnp
    of_rows, of_columns = (
        xp.asarray(scaling_weights(before, after, method.value, antialias), np.float32)
        for before, after in lengths
    )
    return scaled_by_products(images.astype(np.float32), of_rows, of_columns)


def _terms(
    images: Any, rows: Any, columns: Any, method: ResizeMethod, antialias: bool
) -> tuple[Terms, Terms] | None:
    """Returns the terms of the height and the width; None if the images in the other size are no
    weighted sums of few pixels, or the sizes are not known.
    """
    height, width = images.shape[-3:-1]
    if method == ResizeMethod.NEAREST_NEIGHBOR or (rows, columns) == (height, width):
        return None
    lengths = ((height, rows), (width, columns))
    if any(is_symbolic_size(length) for pair in lengths for length in pair):
        return None
    down, across = (scaling_terms(*pair, method.value, antialias) for pair in lengths)
    return None if down is None or across is None else (down, across)


def _resized_after(
    steps: Sequence[PixelStep],
    pixels: np.ndarray,
    rows: int,
    columns: int,
    method: ResizeMethod,
    antialias: bool,
) -> np.ndarray:
    """Returns the pixels of an image file in another size, after steps that were put off."""
    terms = _terms(pixels, rows, columns, method, antialias) if pixels.ndim == 3 else None
    if terms is None:
        return _resized(computed(steps, pixels), rows, columns, method, antialias)
    before, functions = with_functions_apart(steps)
    return scaled_on_host(computed(before, pixels), *terms, functions)


def resize_with_pad(
    image: Any,
    target_height: int,
    target_width: int,
    method: str = ResizeMethod.BILINEAR,
    antialias: bool = False,
) -> jax.Array:
    """Resizes with the proportions kept, and fills up with zeros.

    TF: `tf.image.resize_with_pad`.
    """
    image = _image(image)
    height, width = image.shape[-3:-1]
    rows, columns = sizes([target_height, target_width])
    ratio = max(height / rows, width / columns)
    exact = height / ratio, width / ratio
    inner = math.floor(exact[0]), math.floor(exact[1])
    top, left = (
        max(0, math.floor((size - length) / 2))
        for size, length in zip((rows, columns), exact, strict=True)
    )
    return pad_to_bounding_box(
        resize(image, inner, method, antialias=antialias), top, left, rows, columns
    )


def crop_and_resize(
    image: Any,
    boxes: Any,
    box_indices: Any,
    crop_size: Any,
    method: str = "bilinear",
    extrapolation_value: float = 0.0,
    name: str | None = None,
) -> jax.Array:
    """Returns boxes of the images, all in one size.

    Args:
        image: A batch of images.
        boxes: Rows of `[y1, x1, y2, x2]`, where 0 and 1 are the image's edges.
        box_indices: The image of every box.
        crop_size: The height and width of the results.
        method: "bilinear" or "nearest".
        extrapolation_value: What is outside the images.
        name: Without effect.

    TF: `tf.image.crop_and_resize`.
    """
    if method not in ("bilinear", "nearest"):
        raise InvalidArgumentError(
            message=f"method must be 'bilinear' or 'nearest'. Received: {method!r}"
        )
    images = convert_to_tensor(image).astype(jnp.float32)
    height, width = images.shape[1:3]
    rows, columns = sizes(crop_size)

    def places(start: Any, end: Any, length: int, count: int) -> jax.Array:
        if count == 1:
            return 0.5 * (start + end)[None] * (length - 1)
        return (start + (end - start) * jnp.arange(count) / (count - 1)) * (length - 1)

    def crop(box: jax.Array, index: jax.Array) -> jax.Array:
        ys = places(box[0], box[2], height, rows)
        xs = places(box[1], box[3], width, columns)
        is_inside = ((ys >= 0) & (ys <= height - 1))[:, None] & ((xs >= 0) & (xs <= width - 1))
        order = 1 if method == "bilinear" else 0
        grid = jnp.meshgrid(ys, xs, indexing="ij")
        channels = jnp.moveaxis(images[index], -1, 0)
        found = jax.vmap(
            lambda channel: jax.scipy.ndimage.map_coordinates(channel, grid, order, mode="nearest")
        )(channels)
        return jnp.where(is_inside[..., None], jnp.moveaxis(found, 0, -1), extrapolation_value)

    return jax.vmap(crop)(
        convert_to_tensor(boxes).astype(jnp.float32), convert_to_tensor(box_indices)
    )


# -- colours -------------------------------------------------------------------------------


def convert_image_dtype(
    image: Any, dtype: Any, saturate: bool = False, name: str | None = None
) -> jax.Array:
    """Returns an image in another dtype, scaled to its range: 0 to 1 for floating dtypes.

    TF: `tf.image.convert_image_dtype`.
    """
    if not isinstance(image, PendingImage):
        image = convert_to_tensor(image)
    source, target = dtypes.as_dtype(image.dtype), dtypes.as_dtype(dtype)
    if source == target:
        return image
    convert = saturate_cast if saturate else cast
    if source.is_integer and target.is_integer:
        if source.max > target.max:
            return convert(image // ((source.max + 1) // (target.max + 1)), target)
        return convert(image, target) * ((target.max + 1) // (source.max + 1))
    if source.is_floating and target.is_floating:
        return cast(image, target)
    if source.is_integer:
        return cast(image, target) * (1.0 / source.max)
    return convert(image * (target.max + 0.5), target)


def _as_floats(image: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies a function of floating images to one of any dtype."""
    if jnp.issubdtype(image.dtype, jnp.floating):
        return function(image)
    floats = convert_image_dtype(image, dtypes.float32)
    return convert_image_dtype(function(floats), image.dtype, saturate=True)


def rgb_to_grayscale(images: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.rgb_to_grayscale`."""
    images = convert_to_tensor(images)
    if images.dtype not in (jnp.float32, jnp.float64):
        floats = convert_image_dtype(images, dtypes.float32)
        return convert_image_dtype(rgb_to_grayscale(floats), images.dtype)
    return images @ jnp.array([[0.2989], [0.5870], [0.1140]], images.dtype)


def grayscale_to_rgb(images: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.grayscale_to_rgb`."""
    return jnp.repeat(convert_to_tensor(images), 3, axis=-1)


def adjust_brightness(image: Any, delta: Any) -> jax.Array:
    """Adds `delta`, on the scale from 0 to 1. TF: `tf.image.adjust_brightness`."""
    return _as_floats(convert_to_tensor(image), lambda floats: floats + delta)


def adjust_contrast(images: Any, contrast_factor: Any) -> jax.Array:
    """Scales every channel's distance from its mean. TF: `tf.image.adjust_contrast`."""

    def adjusted(floats: jax.Array) -> jax.Array:
        mean = jnp.mean(floats, (-3, -2), keepdims=True)
        return (floats - mean) * contrast_factor + mean

    return _as_floats(_image(images), adjusted)


def adjust_gamma(image: Any, gamma: Any = 1, gain: Any = 1) -> jax.Array:
    """Returns `gain * image ** gamma`. TF: `tf.image.adjust_gamma`."""
    if not isinstance(gamma, jax.Array) and gamma < 0:
        raise ValueError(f"Gamma should be a non-negative real number. Received: {gamma}")
    return _as_floats(convert_to_tensor(image), lambda floats: gain * floats**gamma)


def rgb_to_hsv(images: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.rgb_to_hsv`."""
    red, green, blue = jnp.moveaxis(convert_to_tensor(images), -1, 0)
    value = jnp.maximum(jnp.maximum(red, green), blue)
    span = value - jnp.minimum(jnp.minimum(red, green), blue)
    divisor = jnp.where(span > 0, 6 * span, 1)
    hue = jnp.where(
        value == red,
        (green - blue) / divisor,
        jnp.where(value == green, (blue - red) / divisor + 2 / 6, (red - green) / divisor + 4 / 6),
    )
    hue = jnp.where(span > 0, hue % 1, 0)
    saturation = jnp.where(value > 0, span / jnp.where(value > 0, value, 1), 0)
    return jnp.stack([hue, saturation, value], -1)


def hsv_to_rgb(images: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.hsv_to_rgb`."""
    hue, saturation, value = jnp.moveaxis(convert_to_tensor(images), -1, 0)

    def channel(offset: float) -> jax.Array:
        step = jnp.abs((hue * 6 + offset) % 6 - 3)
        return value * (1 - saturation + saturation * jnp.clip(step - 1, 0, 1))

    return jnp.stack([channel(0), channel(4), channel(2)], -1)


def adjust_hue(image: Any, delta: Any, name: str | None = None) -> jax.Array:
    """Rotates the hue, by a fraction of the full circle. TF: `tf.image.adjust_hue`."""

    def adjusted(floats: jax.Array) -> jax.Array:
        hsv = rgb_to_hsv(floats)
        return hsv_to_rgb(hsv.at[..., 0].set((hsv[..., 0] + delta) % 1))

    return _as_floats(convert_to_tensor(image), adjusted)


def adjust_saturation(image: Any, saturation_factor: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.adjust_saturation`."""

    def adjusted(floats: jax.Array) -> jax.Array:
        hsv = rgb_to_hsv(floats)
        scaled = jnp.clip(hsv[..., 1] * saturation_factor, 0, 1)
        return hsv_to_rgb(hsv.at[..., 1].set(scaled))

    return _as_floats(convert_to_tensor(image), adjusted)


_YIQ = np.array(
    [
        [0.299, 0.59590059, 0.2115],
        [0.587, -0.27455667, -0.52273617],
        [0.114, -0.32134392, 0.31119955],
    ]
)
_YUV = np.array(
    [
        [0.299, -0.14714119, 0.61497538],
        [0.587, -0.28886916, -0.51496512],
        [0.114, 0.43601035, -0.10001026],
    ]
)
# Not quite the inverses: TensorFlow has them with these digits.
_FROM_YIQ = np.array(
    [[1, 1, 1], [0.95598634, -0.27201283, -1.10674021], [0.6208248, -0.64720424, 1.70423049]]
)
_FROM_YUV = np.array([[1, 1, 1], [0, -0.394642334, 2.03206185], [1.13988303, -0.58062185, 0]])


def _transformed(images: Any, matrix: np.ndarray) -> jax.Array:
    images = convert_to_tensor(images)
    return images @ jnp.asarray(matrix, images.dtype)


def rgb_to_yiq(images: Any) -> jax.Array:
    """TF: `tf.image.rgb_to_yiq`."""
    return _transformed(images, _YIQ)


def yiq_to_rgb(images: Any) -> jax.Array:
    """TF: `tf.image.yiq_to_rgb`."""
    return _transformed(images, _FROM_YIQ)


def rgb_to_yuv(images: Any) -> jax.Array:
    """TF: `tf.image.rgb_to_yuv`."""
    return _transformed(images, _YUV)


def yuv_to_rgb(images: Any) -> jax.Array:
    """TF: `tf.image.yuv_to_rgb`."""
    return _transformed(images, _FROM_YUV)


def per_image_standardization(image: Any) -> jax.Array:
    """Scales every image to mean 0 and variance 1. TF: `tf.image.per_image_standardization`."""
    image = _image(image)
    floats = image if jnp.issubdtype(image.dtype, jnp.floating) else image.astype(jnp.float32)
    axes = (-3, -2, -1)
    deviation = standard_deviation(floats, axes, keepdims=True)
    # An image of one colour has no deviation: at least that of a single pixel.
    least = 1 / math.sqrt(math.prod(floats.shape[-3:]))
    return (floats - jnp.mean(floats, axes, keepdims=True)) / jnp.maximum(deviation, least)


# -- measures ------------------------------------------------------------------------------


def total_variation(images: Any, name: str | None = None) -> jax.Array:
    """Returns the sum of the differences between neighbours. TF: `tf.image.total_variation`."""
    images = _image(images)
    axes = (-3, -2, -1)
    down = magnitude(jnp.diff(images, axis=-3)).sum(axes)
    return down + magnitude(jnp.diff(images, axis=-2)).sum(axes)


def psnr(a: Any, b: Any, max_val: Any, name: str | None = None) -> jax.Array:
    """Returns the peak signal-to-noise ratio, in decibels. TF: `tf.image.psnr`."""
    a, b, highest = _compared(a, b, max_val)
    error = jnp.mean(jnp.square(a - b), (-3, -2, -1))
    return 20 * jnp.log10(highest) - 10 * jnp.log10(error)


def ssim(
    img1: Any,
    img2: Any,
    max_val: Any,
    filter_size: int = 11,
    filter_sigma: float = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
    return_index_map: bool = False,
) -> jax.Array:
    """Returns the structural similarity of images, -1 to 1: the mean over windows and channels.

    With `return_index_map`, a map of it; `image_quality` describes the other arguments.

    TF: `tf.image.ssim`.
    """
    a, b, highest = _compared(img1, img2, max_val)
    similar, _ = structural_similarities(a, b, highest, filter_size, filter_sigma, k1, k2)
    return jnp.mean(similar, -1) if return_index_map else jnp.mean(similar, (-3, -2, -1))


def ssim_multiscale(
    img1: Any,
    img2: Any,
    max_val: Any,
    power_factors: Any = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333),
    filter_size: int = 11,
    filter_sigma: float = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
) -> jax.Array:
    """Returns the structural similarity of images at as many scales as there are factors.

    Each scale has half the size of the one before. TF: `tf.image.ssim_multiscale`.
    """
    a, b, highest = _compared(img1, img2, max_val)
    structures: list[jax.Array] = []
    for scale in range(len(power_factors)):
        a, b = (halved(a), halved(b)) if scale else (a, b)
        maps = structural_similarities(a, b, highest, filter_size, filter_sigma, k1, k2)
        similar, structure = (jnp.mean(each, (-3, -2)) for each in maps)
        structures.append(structure)
    by_channel = product_of_scales(power_factors, structures[:-1], similar)
    return jnp.mean(by_channel, -1)


def _compared(a: Any, b: Any, max_val: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two images, and the highest value that they may have, as float32."""
    highest = jnp.asarray(max_val, convert_to_tensor(a).dtype)
    a, b, highest = (convert_image_dtype(each, dtypes.float32) for each in (a, b, highest))
    return a, b, highest


def image_gradients(image: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the differences to the pixel below and to the right.

    TF: `tf.image.image_gradients`.
    """
    image = _image(image)
    rows = jnp.zeros_like(image[..., :1, :, :])
    columns = jnp.zeros_like(image[..., :, :1, :])
    down = jnp.concatenate([jnp.diff(image, axis=-3), rows], -3)
    return down, jnp.concatenate([jnp.diff(image, axis=-2), columns], -2)


def sobel_edges(image: Any) -> jax.Array:
    """Returns Sobel's derivatives down and to the right, in a new last axis.

    TF: `tf.image.sobel_edges`.
    """
    image = convert_to_tensor(image)
    padded = jnp.pad(image, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")
    height, width = image.shape[1:3]

    def weighted(kernel: list[list[int]]) -> jax.Array:
        total = jnp.zeros_like(image)
        for row, weights in enumerate(kernel):
            for column, weight in enumerate(weights):
                total += weight * padded[:, row : row + height, column : column + width]
        return total

    down = [[-1, -2, -1], [0, 0, 0], [1, 2, 1]]
    return jnp.stack([weighted(down), weighted([list(row) for row in zip(*down, strict=True)])], -1)


# -- at random -----------------------------------------------------------------------------


def _coins(image: jax.Array, key: jax.Array) -> jax.Array:
    """Draws one truth value an image."""
    batch = image.shape[:-3]
    return jax.random.bernoulli(key, shape=batch).reshape((*batch, 1, 1, 1))


def _flipped(flip: Callable[[Any], jax.Array], image: Any, key: jax.Array) -> jax.Array:
    image = _image(image)
    return jnp.where(_coins(image, key), flip(image), image)


def random_flip_left_right(image: Any, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_flip_left_right`."""
    return _flipped(flip_left_right, image, next_key(seed))


def stateless_random_flip_left_right(image: Any, seed: Any) -> jax.Array:
    """TF: `tf.image.stateless_random_flip_left_right`."""
    return _flipped(flip_left_right, image, key_of(seed))


def random_flip_up_down(image: Any, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_flip_up_down`."""
    return _flipped(flip_up_down, image, next_key(seed))


def stateless_random_flip_up_down(image: Any, seed: Any) -> jax.Array:
    """TF: `tf.image.stateless_random_flip_up_down`."""
    return _flipped(flip_up_down, image, key_of(seed))


def random_brightness(image: Any, max_delta: float, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_brightness`."""
    return _brightened(image, max_delta, next_key(seed))


def stateless_random_brightness(image: Any, max_delta: float, seed: Any) -> jax.Array:
    """TF: `tf.image.stateless_random_brightness`."""
    return _brightened(image, max_delta, key_of(seed))


def _brightened(image: Any, max_delta: float, key: jax.Array) -> jax.Array:
    if max_delta < 0:
        raise ValueError(f"max_delta must be non-negative. Received: {max_delta}")
    return adjust_brightness(image, jax.random.uniform(key, minval=-max_delta, maxval=max_delta))


def random_contrast(image: Any, lower: float, upper: float, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_contrast`."""
    return adjust_contrast(image, _between(lower, upper, next_key(seed)))


def stateless_random_contrast(image: Any, lower: float, upper: float, seed: Any) -> jax.Array:
    """TF: `tf.image.stateless_random_contrast`."""
    return adjust_contrast(image, _between(lower, upper, key_of(seed)))


def random_saturation(image: Any, lower: float, upper: float, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_saturation`."""
    return adjust_saturation(image, _between(lower, upper, next_key(seed)))


def stateless_random_saturation(
    image: Any, lower: float, upper: float, seed: Any = None
) -> jax.Array:
    """TF: `tf.image.stateless_random_saturation`."""
    return adjust_saturation(image, _between(lower, upper, key_of(seed)))


def _between(lower: float, upper: float, key: jax.Array) -> jax.Array:
    if not 0 <= lower < upper:
        raise ValueError(f"Expected 0 <= lower < upper. Received: lower={lower}, upper={upper}")
    return jax.random.uniform(key, minval=lower, maxval=upper)


def random_hue(image: Any, max_delta: float, seed: int | None = None) -> jax.Array:
    """TF: `tf.image.random_hue`."""
    return _hued(image, max_delta, next_key(seed))


def stateless_random_hue(image: Any, max_delta: float, seed: Any) -> jax.Array:
    """TF: `tf.image.stateless_random_hue`."""
    return _hued(image, max_delta, key_of(seed))


def _hued(image: Any, max_delta: float, key: jax.Array) -> jax.Array:
    if not 0 <= max_delta <= 0.5:
        raise ValueError(f"max_delta must be between 0 and 0.5. Received: {max_delta}")
    return adjust_hue(image, jax.random.uniform(key, minval=-max_delta, maxval=max_delta))


def random_crop(value: Any, size: Any, seed: int | None = None, name: str | None = None) -> Any:
    """Returns a part of a tensor with the shape `size`. TF: `tf.image.random_crop`."""
    return _cropped(value, size, next_key(seed))


def stateless_random_crop(value: Any, size: Any, seed: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.image.stateless_random_crop`."""
    return _cropped(value, size, key_of(seed))


def _cropped(value: Any, size: Any, key: jax.Array) -> jax.Array:
    tensor = convert_to_tensor(value)
    shape = tuple(
        whole if part == -1 else part for part, whole in zip(sizes(size), tensor.shape, strict=True)
    )
    room = np.array(tensor.shape) - np.array(shape)
    if (room < 0).any():
        raise InvalidArgumentError(
            message=f"Need value.shape >= size, got {tensor.shape} and {shape}"
        )
    starts = jax.random.randint(key, room.shape, 0, jnp.asarray(room + 1))
    return lax.dynamic_slice(tensor, list(starts), shape)
