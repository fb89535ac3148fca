"""Image files: `tf.io.decode_jpeg` and its kin.

Pillow decodes them, and simplejpeg JPEG files in half the time, to TensorFlow's pixels. In the
function of `tf.data`'s `map`, they are decoded before what is compiled: see `unison.tf.pending`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.errors import InvalidArgumentError, OpError
from unison.tf import dtypes
from unison.tf.pending import PendingImage, PendingText
from unison.tf.tensor_spec import TensorShape
from unison.tf.tensors import convert_to_tensor, tensor_dtype
from unison.tf.text import StringTensor, is_text
from unison.thread_local import ThreadLocal

#: Pillow's name of the pixels of so many channels.
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


_DCT_METHODS = ("", "INTEGER_FAST", "INTEGER_ACCURATE")


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


def _opened(data: bytes, *formats: str) -> Any:
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


def _pixels(image: Any, channels: int | None, dtype: np.dtype) -> np.ndarray:
    """Returns the pixels, of the shape `[height, width, channels]`."""
    is_deep = image.mode.startswith("I")  # grey, of 16 bits
    with _decoding():
        is_color = not is_deep and image.mode not in ("1", "L", "LA")
        if channels == 1 and image.format == "PNG" and is_color:
            return _as_dtype(_grey_as_libpng(np.asarray(image.convert("RGB"))), dtype)
        if channels and not is_deep:
            image = image.convert(_MODES[channels])
        elif image.mode not in ("L", "LA", "RGB", "RGBA") and not is_deep:
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    array = array.astype(np.uint16 if is_deep else np.uint8)
    if is_deep and channels in (3, 4):
        array = array.repeat(channels, axis=2)
        array[..., 3:] = np.iinfo(np.uint16).max  # nothing shines through
    return _as_dtype(array, dtype)


def _grey_as_libpng(colors: np.ndarray) -> np.ndarray:
    """Returns the brightness of colors, rounded down, in libpng's arithmetic with TensorFlow's
    weights; Pillow rounds to the nearest.
    """
    weights = np.array([9797, 19234, 3737], np.int32)  # of 2**15
    return (colors.astype(np.int32) @ weights >> 15).astype(np.uint8)[..., None]


def _as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns pixels of 8 or 16 bits in another dtype that images may have."""
    depth = np.iinfo(array.dtype)
    if dtype == np.uint16 and depth.bits == 8:
        array = array.astype(np.uint16) * 257
    elif dtype == np.uint8 and depth.bits == 16:
        array = (array >> 8).astype(np.uint8)
    elif dtypes.as_dtype(dtype).is_floating:
        array = array.astype(np.float32) / depth.max
    return array.astype(dtype, copy=False)


def _decoded(
    contents: Any,
    pixels: Callable[..., np.ndarray],
    channels: int | None,
    dtype: Any = dtypes.uint8,
    has_frames: bool = False,
) -> Any:
    """Returns the pixels of a file as a tensor.

    Args:
        contents: The bytes of the file.
        pixels: Returns a file's pixels; see `PendingImage.of_file`.
        channels: Their channels; 0 or None for those of the file.
        dtype: Their dtype.
        has_frames: Whether a file may hold several images, along a new first axis.
    """
    if channels not in (None, 0, *_MODES):
        raise InvalidArgumentError(message=f"channels must be 0, 1, 3 or 4. Received: {channels}")
    if isinstance(contents, PendingText):
        shape = TensorShape(None if has_frames else (None, None, channels or None))
        return PendingImage.of_file(contents, pixels, tensor_dtype(dtype), shape)
    return convert_to_tensor(pixels(_contents(contents)))


@functools.cache
def _simplejpeg() -> Any:
    """Returns simplejpeg; None if it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _jpeg_pixels(
    data: bytes,
    is_temporary: bool,
    channels: int,
    ratio: int = 1,
    is_smooth: bool = True,
    is_exact: bool = False,
) -> np.ndarray:
    """Returns the pixels of a JPEG file, or of one of the others that TensorFlow takes for one.

    Args:
        data: The content of the file.
        is_temporary: Whether the result is not used after the thread's next call. New memory for
            an image takes two thirds of the time of decoding it.
        channels: See `decode_jpeg`.
        ratio: Likewise.
        is_smooth: Its `fancy_upscaling`.
        is_exact: Whether its `dct_method` is "INTEGER_ACCURATE".
    """
    quick = _simplejpeg()
    if quick is not None and ratio == 1 and channels in (0, 1, 3) and is_jpeg_file(data):
        # What it refuses, Pillow decodes, or says what is wrong with.
        with contextlib.suppress(ValueError):
            height, width, space, _ = quick.decode_jpeg_header(data)
            own = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB"}.get(space)
            wanted = {0: own, 1: "GRAY", 3: "RGB"}[channels]
            if wanted and height * width <= (_pillow().MAX_IMAGE_PIXELS or math.inf):
                return quick.decode_jpeg(
                    data,
                    wanted,
                    fastdct=not is_exact,
                    fastupsample=not is_smooth,
                    buffer=_memory(height * width * 3) if is_temporary else None,
                )
    image = _opened(data, "JPEG", "PNG", "GIF", "BMP")
    if ratio != 1:
        image.draft(image.mode, (image.width // ratio, image.height // ratio))
    return _pixels(image, channels, np.dtype(np.uint8))


#: The memory of the thread's last temporary image.
_memory_here: ThreadLocal[bytearray | None] = ThreadLocal(None)


def _memory(size: int) -> bytearray:
    """Returns memory of at least so many bytes, which the thread's next call returns, too."""
    memory = _memory_here.value
    if memory is None or len(memory) < size:
        memory = _memory_here.value = bytearray(size)
    return memory


def is_jpeg_file(data: bytes) -> bool:
    """Whether bytes begin as a JPEG file does."""
    return data.startswith(b"\xff\xd8\xff")


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
        fancy_upscaling: Whether colours of half the resolution are interpolated.
        try_recover_truncated: Without effect.
        acceptable_fraction: Without effect.
        dct_method: "INTEGER_FAST", TensorFlow's default, or "INTEGER_ACCURATE". It and
            `fancy_upscaling` are without effect where simplejpeg is not installed: Pillow decodes
            accurately, and interpolates.
        name: Without effect.

    Raises:
        InvalidArgumentError: The file is corrupt, or is no image; or there is no such method.

    TF: `tf.io.decode_jpeg`.
    """
    if dct_method not in _DCT_METHODS:
        raise InvalidArgumentError(
            message=f"dct_method must be one of {_DCT_METHODS}. Received: {dct_method!r}"
        )
    is_exact = dct_method == "INTEGER_ACCURATE"

    def pixels(data: bytes, is_temporary: bool = False) -> np.ndarray:
        return _jpeg_pixels(data, is_temporary, channels, ratio, fancy_upscaling, is_exact)

    return _decoded(contents, pixels, channels)


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
    image = decode_jpeg(contents, channels, ratio, fancy_upscaling, dct_method=dct_method)
    return image[y : y + height, x : x + width]


def _decoded_as(contents: Any, formats: Sequence[str], channels: int, dtype: Any) -> jax.Array:
    def pixels(data: bytes, is_temporary: bool = False) -> np.ndarray:
        if "JPEG" in formats and is_jpeg_file(data):
            return _as_dtype(_jpeg_pixels(data, is_temporary, channels), tensor_dtype(dtype))
        return _pixels(_opened(data, *formats), channels, tensor_dtype(dtype))

    return _decoded(contents, pixels, channels, dtype)


def decode_png(
    contents: Any, channels: int = 0, dtype: Any = dtypes.uint8, name: str | None = None
) -> jax.Array:
    """Returns the pixels of a PNG file, as uint8 or uint16. TF: `tf.io.decode_png`."""
    return _decoded_as(contents, ("PNG", "JPEG", "GIF", "BMP"), channels, dtype)


def decode_bmp(contents: Any, channels: int = 0, name: str | None = None) -> jax.Array:
    """TF: `tf.io.decode_bmp`."""
    return _decoded_as(contents, ("BMP",), channels, dtypes.uint8)


def decode_webp(
    contents: Any, channels: int = 0, dtype: Any = dtypes.uint8, name: str | None = None
) -> jax.Array:
    """TF: `tf.io.decode_webp`."""
    return _decoded_as(contents, ("WEBP",), channels, dtype)


def decode_gif(contents: Any, name: str | None = None) -> jax.Array:
    """Returns the frames of a GIF file, `[frames, height, width, 3]`. TF: `tf.io.decode_gif`."""
    return convert_to_tensor(_frames(_contents(contents)))


def _frames(data: bytes) -> np.ndarray:
    image = _opened(data, "GIF")
    frames = []
    most = _pillow().MAX_IMAGE_PIXELS or math.inf
    size = len(data)
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
        return np.stack(frames)  # of a corrupt file, they may differ in size


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

    Raises:
        InvalidArgumentError: The file is none of these, or a GIF, and `channels` are not 3.

    TF: `tf.io.decode_image`.
    """

    def pixels(data: bytes, is_temporary: bool = False) -> np.ndarray:
        if is_jpeg_file(data):
            return _as_dtype(_jpeg_pixels(data, is_temporary, channels or 0), tensor_dtype(dtype))
        image = _opened(data)
        if image.format == "GIF":
            if channels not in (None, 0, 3):
                raise InvalidArgumentError(
                    message=f"channels must be 0 or 3 for GIF. Received: {channels}"
                )
            frames = _frames(data)
            return _as_dtype(frames if expand_animations else frames[0], tensor_dtype(dtype))
        return _pixels(image, channels, tensor_dtype(dtype))

    return _decoded(contents, pixels, channels, dtype, expand_animations)


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
    return convert_to_tensor(is_jpeg_file(_contents(contents)))


def extract_jpeg_shape(
    contents: Any, output_type: Any = dtypes.int32, name: str | None = None
) -> jax.Array:
    """Returns `[height, width, channels]` without reading the pixels.

    TF: `tf.io.extract_jpeg_shape`.
    """
    image = _opened(_contents(contents), "JPEG")
    shape = [image.height, image.width, len(image.getbands())]
    return convert_to_tensor(np.array(shape, dtypes.named(output_type)))
