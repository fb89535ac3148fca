"""The scaling of one axis of an image: which old pixels a new one is made of.

With NumPy, so that a compiled program has the result as a constant; with JAX where a length is a
symbol, in the layers of a model of unknown sizes.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unison.native import library_or_none, loaded_library
from unison.tf.tensor_spec import is_symbolic_size

#: NumPy, or JAX's module of the same functions.
_Module = Any

#: An axis is scaled by a product of matrices if new pixels have more terms, or if it has less than
#: so many pixels a term.
_MOST_TERMS = 16
_PIXELS_OF_A_TERM = 4

_FILE = Path(__file__).with_name("_scaling.so")

#: The most values of a pixel for which the library is made.
_MOST_CHANNELS = 4


def nearest_pixels(before: Any, after: Any) -> Any:
    """Returns the index of the old pixel that each of `after` new ones is."""
    xp = _module_for(before, after)
    places = (xp.arange(after) + 0.5) * _number(before, xp) / _number(after, xp)
    return xp.minimum(places.astype(int), before - 1)


def scaling_weights(before: Any, after: Any, method: str, antialias: bool) -> Any:
    """Returns the matrix that maps an axis of `before` pixels to one of `after`.

    Args:
        before: The old length.
        after: The new length.
        method: The value of a `tf.image.ResizeMethod`, except "nearest".
        antialias: Whether to average over the pixels that a smaller image leaves out.
    """
    xp = _module_for(before, after)
    if method == "area":
        covered = _covered(before, after, xp)
        return covered / covered.sum(1, keepdims=True)
    radius, kernel = _KERNELS[method]
    ratio = _number(before, xp) / _number(after, xp)
    stretch = xp.maximum(ratio, 1.0) if antialias else 1.0
    middles = (xp.arange(after) + 0.5) * ratio
    distances = xp.abs(middles[:, None] - (xp.arange(before) + 0.5)[None, :]) / stretch
    if method == "bicubic" and not antialias:
        distances = xp.round(distances * 1024) / 1024  # TensorFlow reads the kernel off a table
    weights = xp.where(distances < radius, kernel(distances, xp), 0)
    totals = weights.sum(1, keepdims=True)
    return weights / xp.where(totals == 0, 1, totals)


class Terms(NamedTuple):
    """The old pixels of which each new one is the weighted sum.

    Attributes:
        places: Their indices, `[new, terms]`.
        weights: Their weights, float32, of the same shape.
    """

    places: np.ndarray
    weights: np.ndarray


@functools.lru_cache(maxsize=256)
def scaling_terms(before: int, after: int, method: str, antialias: bool) -> Terms | None:
    """Returns the terms of the new pixels of an axis; None if they are many.

    Args:
        before: See `scaling_weights`.
        after: Likewise.
        method: Likewise.
        antialias: Likewise.
    """
    weights = scaling_weights(before, after, method, antialias)
    count = max(int(np.count_nonzero(weights, axis=1).max(initial=1)), 1)
    if count > _MOST_TERMS or count * _PIXELS_OF_A_TERM > before:
        return None
    # The weights that are not zero come first; then the pixels are put in order again.
    places = np.sort(np.argpartition(weights == 0, count - 1, axis=1)[:, :count], axis=1)
    parts = np.take_along_axis(weights, places, axis=1).astype(np.float32)
    return Terms(np.ascontiguousarray(places, np.int64), np.ascontiguousarray(parts))


def scaled(images: jax.Array, axis: int, terms: Terms) -> jax.Array:
    """Returns images, of float32, of which one axis is scaled."""
    shape = [1] * images.ndim
    shape[axis] = -1
    pairs = zip(terms.places.T, terms.weights.T, strict=True)
    return functools.reduce(
        operator.add,
        [jnp.take(images, at, axis=axis) * weights.reshape(shape) for at, weights in pairs],
    )


class PixelFunction(NamedTuple):
    """A function of each value of an image of floats, and a number.

    Attributes:
        name: NumPy's name of the function: "add", "subtract", "multiply" or "divide".
        number: The number.
        is_first: Whether the number is the first operand.
    """

    name: str
    number: float
    is_first: bool = False

    def __call__(self, pixels: Any) -> Any:
        """Returns the result for an array of JAX's."""
        return getattr(jnp, self.name)(*self._operands(pixels))

    def on_host(self, pixels: np.ndarray) -> np.ndarray:
        """Returns the result for an array of NumPy's, which it overwrites."""
        with np.errstate(all="ignore"):  # as in a program
            return getattr(np, self.name)(*self._operands(pixels), out=pixels)

    def _operands(self, pixels: Any) -> tuple[Any, Any]:
        return (self.number, pixels) if self.is_first else (pixels, self.number)


#: The numbers of the functions in `scaling.cc`: of a pixel and a number, and the other way around.
_FUNCTIONS = {
    ("add", False): 0,
    ("add", True): 0,
    ("subtract", False): 1,
    ("subtract", True): 2,
    ("multiply", False): 3,
    ("multiply", True): 3,
    ("divide", False): 4,
}


def scaled_on_host(
    image: np.ndarray,
    down: Terms,
    across: Terms,
    functions: Sequence[PixelFunction] = (),
) -> np.ndarray:
    """Returns an image `[height, width, channels]` in another size, as float32.

    It is computed as by `scaled`, in one pass by the compiled library where it was built.

    Args:
        image: The image.
        down: The terms of its height.
        across: Those of its width.
        functions: What is computed of its values, as float32, before.
    """
    _, width, channels = image.shape
    compiled = library()
    if compiled is None or not 1 <= channels <= _MOST_CHANNELS:
        return scaled_by_numpy(image, down, across, functions)
    kinds, numbers = _packed(functions)
    pixels = np.ascontiguousarray(image, None if image.dtype == np.uint8 else np.float32)
    result = np.empty((len(down.places), len(across.places), channels), np.float32)
    room = np.empty(2 * width * channels + _MOST_CHANNELS, np.float32)
    compiled.unison_scaling_scale(
        *(pixels.ctypes.data, pixels.dtype == np.uint8, width * channels, channels),
        *(kinds.ctypes.data, numbers.ctypes.data, len(kinds)),
        *(down.places.ctypes.data, down.weights.ctypes.data, *down.places.shape),
        *(across.places.ctypes.data, across.weights.ctypes.data, *across.places.shape),
        *(room.ctypes.data, result.ctypes.data),
    )
    return result


def _packed(given: Sequence[PixelFunction]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the library's numbers of functions, and their operands."""
    with np.errstate(over="ignore"):
        numbers = np.array([each.number for each in given]).astype(np.float32)
    return np.array([_FUNCTIONS[each.name, each.is_first] for each in given], np.uint8), numbers


def scaled_by_numpy(
    image: np.ndarray, down: Terms, across: Terms, functions: Sequence[PixelFunction] = ()
) -> np.ndarray:
    """`scaled_on_host` without a compiler. It makes few arrays: memory costs more than sums."""
    if functions:
        image = image.astype(np.float32)
    for function in functions:
        image = function.on_host(image)
    channels = image.shape[-1]
    values = across.places[:, None] * channels + np.arange(channels)[:, None]
    of_values = Terms(values.reshape(-1, values.shape[-1]), across.weights.repeat(channels, axis=0))
    pixels = image.reshape(len(image), -1)
    for axis, terms in enumerate((down, of_values)):
        total: Any = None
        for at, weights in zip(terms.places.T, terms.weights.T, strict=True):
            term = pixels.take(at, axis).astype(np.float32, copy=False)
            term *= weights if axis else weights[:, None]
            total = term if total is None else np.add(total, term, out=total)
        pixels = total
    return pixels.reshape(len(down.places), len(across.places), channels)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the library of `scaling.cc`; None if it was not built, or cannot be used."""
    return library_or_none(_FILE, _loaded, "Images are resized by NumPy")


def _loaded(file: Path) -> ctypes.CDLL:
    loaded = loaded_library(file)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    terms = (pointer, pointer, size, size)
    loaded.unison_scaling_scale.restype = None
    loaded.unison_scaling_scale.argtypes = [
        *(pointer, ctypes.c_int, size, size),
        *(pointer, pointer, size),
        *terms,
        *terms,
        *(pointer, pointer),
    ]
    return loaded


def scaled_by_products(images: Any, of_rows: Any, of_columns: Any) -> Any:
    """Returns images `[..., height, width, channels]` in another size, by products of matrices.

    Args:
        images: An array of NumPy's or JAX's, of float32.
        of_rows: The result of `scaling_weights` for the height, in float32.
        of_columns: That for the width.
    """
    *batch, height, width, channels = images.shape
    down = of_rows @ images.reshape((*batch, height, width * channels))
    return of_columns @ down.reshape((*batch, of_rows.shape[0], width, channels))


def _covered(before: Any, after: Any, xp: _Module) -> Any:
    """Returns how much of every old pixel each new one covers."""
    edges = xp.arange(after + 1) * _number(before, xp) / _number(after, xp)
    starts, ends = edges[:-1, None], edges[1:, None]
    pixels = xp.arange(before)[None, :]
    return xp.clip(xp.minimum(ends, pixels + 1) - xp.maximum(starts, pixels), 0, 1)


#: The kernels by their half width and formula: those of TensorFlow's `ScaleAndTranslate`.
_KERNELS: dict[str, tuple[float, Callable[[Any, _Module], Any]]] = {
    "bilinear": (1, lambda x, xp: xp.maximum(0, 1 - x)),
    "bicubic": (2, lambda x, xp: _cubic(x, xp, 0.0, 0.5)),
    "mitchellcubic": (2, lambda x, xp: _cubic(x, xp, 1 / 3, 1 / 3)),
    "lanczos3": (3, lambda x, xp: xp.where(x < 3, xp.sinc(x) * xp.sinc(x / 3), 0)),
    "lanczos5": (5, lambda x, xp: xp.where(x < 5, xp.sinc(x) * xp.sinc(x / 5), 0)),
    "gaussian": (1.5, lambda x, xp: xp.where(x < 1.5, xp.exp(-(x**2) / (2 * 0.5**2)), 0)),
}


def _cubic(x: Any, xp: _Module, b: float, c: float) -> Any:
    """The family of Mitchell and Netravali, 1988."""
    near = ((12 - 9 * b - 6 * c) * x**3 + (-18 + 12 * b + 6 * c) * x**2 + (6 - 2 * b)) / 6
    far = (-b - 6 * c) * x**3 + (6 * b + 30 * c) * x**2 + (-12 * b - 48 * c) * x + 8 * b + 24 * c
    return xp.where(x < 1, near, xp.where(x < 2, far / 6, 0))


def _module_for(*lengths: Any) -> _Module:
    return jnp if any(map(is_symbolic_size, lengths)) else np


def _number(length: Any, xp: _Module) -> Any:
    """Returns a length as a number to calculate with."""
    return xp.asarray(length, dtype=jnp.float32 if xp is jnp else np.float64)
