"""Image files: `tf.io.decode_jpeg` and its kin, by Pillow."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from unison.errors import InvalidArgumentError, OpError
from unison.tf import dtypes
from unison.tf.tensors import convert_to_tensor, tensor_dtype
from unison.tf.text import StringTensor, is_text

#: Pillow's name of the pixels of so many channels.
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Image files are read and written by Pillow, which is not installed. Install it with "
            "pip install 'unison[image]', or pip install pillow."
        ) from error
    return Image


#: A code of GIF's compression takes 12 bits and stands for at most 4,095 pixels. Smaller images may
#: have a frame that fills a part of them only.
_GIF_PIXELS_OF_A_BYTE = 4095 * 8 // 12
_SMALL_IMAGE = 1 << 20


def _contents(value: Any) -> bytes:
    if not is_text(value) or StringTensor(value).ndim:
        raise InvalidArgumentError(
            message=f"Expected the bytes of one image file. Received: {value!r}"
        )
    return StringTensor(value).item()


def _opened(contents: Any, *formats: str) -> Any:
    data = _contents(contents)
    image_module = _pillow()
    try:
        with _decoding():
            return image_module.open(io.BytesIO(data), formats=formats or None)
    except image_module.UnidentifiedImageError as error:
        expected = " or ".join(formats) if formats else "JPEG, PNG, GIF, BMP or WebP"
        raise InvalidArgumentError(
            message=f"Expected the bytes of an image file: {expected}. They begin with {data[:8]!r}"
        ) from error


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Inside, Pillow's errors for invalid bytes become one error.

    Raises:
        InvalidArgumentError: The image is corrupt, or larger than Pillow's `MAX_IMAGE_PIXELS`.
    """
    image_module = _pillow()
    try:
        yield
    except (OpError, MemoryError, image_module.UnidentifiedImageError):
        raise
    except Exception as error:
        raise InvalidArgumentError(message=f"The image is corrupt: {error}") from error


def _pixels(image: Any, channels: int | None, dtype: Any = dtypes.uint8) -> jax.Array:
    """Returns the pixels, of the shape `[height, width, channels]`."""
    if channels not in (None, 0, *_MODES):
        raise InvalidArgumentError(message=f"channels must be 0, 1, 3 or 4. Received: {channels}")
    is_deep = image.mode.startswith("I")
    with _decoding():
        if channels:
            image = image if is_deep and channels == 1 else image.convert(_MODES[channels])
        elif image.mode not in ("L", "LA", "RGB", "RGBA") and not is_deep:
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    array = array.astype(np.uint16 if is_deep else np.uint8)
    return _as_dtype(array, dtype)


def _as_dtype(array: np.ndarray, dtype: Any) -> jax.Array:
    """Returns pixels of 8 or 16 bits in another dtype that images may have."""
    wanted = dtypes.as_dtype(dtype)
    depth = np.iinfo(array.dtype)
    if wanted == dtypes.uint16 and depth.bits == 8:
        array = array.astype(np.uint16) * 257
    elif wanted == dtypes.uint8 and depth.bits == 16:
        array = (array >> 8).astype(np.uint8)
    elif wanted.is_floating:
        array = array.astype(np.float32) / depth.max
    return convert_to_tensor(array.astype(tensor_dtype(wanted)))


def decode_jpeg(
    contents: Any,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> jax.Array:
    """Returns the pixels of a JPEG file, as uint8.

    Args:
        contents: The bytes of the file.
        channels: 0 for those of the file, 1 for grey, 3 for RGB.
        ratio: 1, 2, 4 or 8: the factor by which the image is reduced.
        fancy_upscaling: Without effect.
        try_recover_truncated: Without effect.
        acceptable_fraction: Without effect.
        dct_method: Without effect.
        name: Without effect.

    TF: `tf.io.decode_jpeg`.
    """
    image = _opened(contents, "JPEG", "PNG", "GIF", "BMP")
    if ratio != 1:
        image.draft(image.mode, (image.width // ratio, image.height // ratio))
    return _pixels(image, channels)


def decode_and_crop_jpeg(
    contents: Any,
    crop_window: Any,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> jax.Array:
    """Returns the window `[y, x, height, width]` of a JPEG file's pixels.

    TF: `tf.io.decode_and_crop_jpeg`.
    """
    y, x, height, width = np.asarray(crop_window).tolist()
    return decode_jpeg(contents, channels, ratio)[y : y + height, x : x + width]


def decode_png(
    contents: Any, channels: int = 0, dtype: Any = dtypes.uint8, name: str | None = None
) -> jax.Array:
    """Returns the pixels of a PNG file, as uint8 or uint16. TF: `tf.io.decode_png`."""
    return _pixels(_opened(contents, "PNG", "JPEG", "GIF", "BMP"), channels, dtype)


def decode_bmp(contents: Any, channels: int = 0, name: str | None = None) -> jax.Array:
    """TF: `tf.io.decode_bmp`."""
    return _pixels(_opened(contents, "BMP"), channels)


def decode_webp(
    contents: Any, channels: int = 0, dtype: Any = dtypes.uint8, name: str | None = None
) -> jax.Array:
    """TF: `tf.io.decode_webp`."""
    return _pixels(_opened(contents, "WEBP"), channels, dtype)


def decode_gif(contents: Any, name: str | None = None) -> jax.Array:
    """Returns the frames of a GIF file, `[frames, height, width, 3]`. TF: `tf.io.decode_gif`."""
    image = _opened(contents, "GIF")
    frames = []
    most = _pillow().MAX_IMAGE_PIXELS or math.inf
    size = len(_contents(contents))
    with _decoding():
        if image.width * image.height > max(_SMALL_IMAGE, size * _GIF_PIXELS_OF_A_BYTE):
            raise ValueError(
                f"{size} bytes cannot hold the pixels of its size, {image.width} x {image.height}"
            )
        if image.n_frames * image.width * image.height > most:
            raise ValueError(f"{image.n_frames} frames have more than {most} pixels together")
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
        stacked = np.stack(frames)  # of a corrupt file, they may differ in size
    return convert_to_tensor(stacked)


def decode_image(
    contents: Any,
    channels: int | None = None,
    dtype: Any = dtypes.uint8,
    name: str | None = None,
    expand_animations: bool = True,
) -> jax.Array:
    """Returns the pixels of a BMP, GIF, JPEG, PNG or WebP file.

    Args:
        contents: The bytes of the file.
        channels: 0 or None for those of the file, 1, 3 or 4.
        dtype: uint8, uint16, or a floating dtype for numbers from 0 to 1.
        name: Without effect.
        expand_animations: Whether a GIF gives all its frames, along a new first axis.

    TF: `tf.io.decode_image`.
    """
    image = _opened(contents)
    if image.format == "GIF":
        frames = np.asarray(decode_gif(contents))
        return _as_dtype(frames if expand_animations else frames[0], dtype)
    return _pixels(image, channels, dtype)


def encode_png(image: Any, compression: int = -1, name: str | None = None) -> StringTensor:
    """Returns a PNG file with these pixels, of uint8 or (one channel) uint16.

    TF: `tf.io.encode_png`.
    """
    level = {} if compression < 0 else {"compress_level": compression}
    return _encoded(image, "PNG", **level)


def encode_jpeg(
    image: Any,
    format: str = "",
    quality: int = 95,
    progressive: bool = False,
    optimize_size: bool = False,
    chroma_downsampling: bool = True,
    density_unit: str = "in",
    x_density: int = 300,
    y_density: int = 300,
    xmp_metadata: str = "",
    name: str | None = None,
) -> StringTensor:
    """Returns a JPEG file with these pixels, of uint8.

    Args:
        image: Of the shape `[height, width, 1 or 3]`.
        format: Ignored: the number of channels determines it.
        quality: From 0 to 100.
        progressive: Whether the file can be shown before all of it is there.
        optimize_size: Whether to spend time on a smaller file.
        chroma_downsampling: Whether colours have half the resolution.
        density_unit: "in" or "cm".
        x_density: Pixels per unit.
        y_density: Pixels per unit.
        xmp_metadata: Without effect.
        name: Without effect.

    TF: `tf.io.encode_jpeg`.
    """
    per_inch = 2.54 if density_unit == "cm" else 1
    return _encoded(
        image,
        "JPEG",
        quality=quality,
        progressive=progressive,
        optimize=optimize_size,
        subsampling=2 if chroma_downsampling else 0,
        dpi=(x_density * per_inch, y_density * per_inch),
    )


def _encoded(image: Any, kind: str, **options: Any) -> StringTensor:
    pixels = np.asarray(convert_to_tensor(image))
    if pixels.ndim != 3 or pixels.shape[-1] not in _MODES:
        raise InvalidArgumentError(
            message="image must be of the shape [height, width, channels]. Received: "
            f"{pixels.shape}"
        )
    file = io.BytesIO()
    flat = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    _pillow().fromarray(flat).save(file, kind, **options)
    return StringTensor(file.getvalue())


def is_jpeg(contents: Any, name: str | None = None) -> jax.Array:
    """Whether the bytes begin as a JPEG file does. TF: `tf.io.is_jpeg`."""
    return convert_to_tensor(_contents(contents).startswith(b"\xff\xd8\xff"))


def extract_jpeg_shape(
    contents: Any, output_type: Any = dtypes.int32, name: str | None = None
) -> jax.Array:
    """Returns `[height, width, channels]` without reading the pixels.

    TF: `tf.io.extract_jpeg_shape`.
    """
    image = _opened(contents, "JPEG")
    shape = [image.height, image.width, len(image.getbands())]
    return convert_to_tensor(np.array(shape, dtypes.named(output_type)))
