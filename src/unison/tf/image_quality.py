"""The structural similarity of two images, at one scale and at several."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.errors import InvalidArgumentError


def structural_similarities(
    a: jax.Array,
    b: jax.Array,
    highest: jax.Array,
    filter_size: int,
    filter_sigma: float,
    k1: float,
    k2: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns maps of the similarity of images, and of their contrast and structure alone.

    Args:
        a: Images of shape `[..., height, width, channels]`, of a floating dtype.
        b: Images of the same shape.
        highest: The difference between the highest and the lowest value.
        filter_size: The size of the window, a normal density.
        filter_sigma: Its standard deviation.
        k1: What stabilizes the quotient of the means.
        k2: What stabilizes the quotient of the deviations.

    Raises:
        InvalidArgumentError: The shapes differ, or the images are smaller than the window.

    Wang et al., *Image Quality Assessment: From Error Visibility to Structural Similarity*, 2004.
    """
    if a.shape[-3:] != b.shape[-3:] or min(a.shape[-3:-1]) < filter_size:
        raise InvalidArgumentError(
            message="Expected images of one size that is not smaller than the filter. Received: "
            f"shapes {a.shape} and {b.shape}, a filter of size {filter_size}."
        )
    window = _window(filter_size, filter_sigma)
    mean_a, mean_b = _blurred(a, window), _blurred(b, window)
    of_means = mean_a * mean_b * 2.0
    squares_of_means = jnp.square(mean_a) + jnp.square(mean_b)
    c1, c2 = jnp.square(k1 * highest), jnp.square(k2 * highest)
    luminance = (of_means + c1) / (squares_of_means + c1)
    products = _blurred(a * b, window) * 2.0
    squares = _blurred(jnp.square(a) + jnp.square(b), window)
    structure = (products - of_means + c2) / (squares - squares_of_means + c2)
    return luminance * structure, structure


def halved(images: jax.Array) -> jax.Array:
    """Returns images of half the size: the means of 2 x 2 pixels, the last repeated if odd."""
    odd = [(0, size % 2) for size in images.shape[-3:-1]]
    padded = jnp.pad(images, [(0, 0)] * (images.ndim - 3) + [*odd, (0, 0)], mode="symmetric")
    *batch, height, width, channels = padded.shape
    parts = padded.reshape(*batch, height // 2, 2, width // 2, 2, channels)
    return parts.mean((-4, -2))


def product_of_scales(
    factors: Sequence[float], structures: Sequence[jax.Array], similarity: jax.Array
) -> jax.Array:
    """Returns the similarity at several scales: structures of all but the last, and all of that.

    Wang et al., *Multiscale Structural Similarity for Image Quality Assessment*, 2003.
    """
    by_scale = jnp.stack([*map(jax.nn.relu, structures), jax.nn.relu(similarity)], -1)
    return jnp.prod(by_scale ** jnp.asarray(factors), -1)


def _window(size: int, sigma: float) -> np.ndarray:
    distances = np.arange(size) - (size - 1) / 2
    density = np.exp(-np.square(distances) / (2 * sigma**2))
    return (density / density.sum()).astype(np.float32)


def _blurred(images: jax.Array, window: np.ndarray) -> jax.Array:
    """The weighted means of all windows that lie in the images, of each channel."""
    *batch, height, width, channels = images.shape
    planes = jnp.moveaxis(images, -1, -3).reshape(-1, 1, height, width)
    kernel = jnp.asarray(window, images.dtype)
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        planes = lax.conv_general_dilated(planes, kernel.reshape(shape), (1, 1), "VALID")
    return jnp.moveaxis(planes.reshape(*batch, channels, *planes.shape[-2:]), -3, -1)
