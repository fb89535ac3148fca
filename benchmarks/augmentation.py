"""Random crop, flip and brightness of colour images, written in four ways.

The key of an element is two random numbers; what is drawn is made of their bits, so that all
ways give the same images and only the arithmetic is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_PADDING = 4
_PLACES = 2 * _PADDING + 1
_BRIGHTEST = np.float32(0.1)
_SCALE = np.float32(1 / 255)

Drawn = tuple[Any, Any, Any, Any]


def of_element(image: np.ndarray, label: np.ndarray, key: np.ndarray) -> tuple[Any, Any]:
    """Augments one image, uint8[height, width, 3]."""
    top, left, is_flipped, brightness = _drawn(key)
    height, width, colours = image.shape
    padded = np.zeros((height + 2 * _PADDING, width + 2 * _PADDING, colours), np.uint8)
    padded[_PADDING:-_PADDING, _PADDING:-_PADDING] = image
    cut = padded[top : top + height, left : left + width]
    return (cut[:, ::-1] if is_flipped else cut) * _SCALE + brightness, label


def of_block(images: np.ndarray, labels: np.ndarray, keys: np.ndarray) -> tuple[Any, Any]:
    """Augments stacked images, with a key for each."""
    tops, lefts, are_flipped, brightness = _drawn(keys.T)
    count, height, width, colours = images.shape
    padded = np.zeros((count, height + 2 * _PADDING, width + 2 * _PADDING, colours), np.uint8)
    padded[:, _PADDING:-_PADDING, _PADDING:-_PADDING] = images
    cuts = np.empty_like(images)
    drawn = zip(tops.tolist(), lefts.tolist(), are_flipped.tolist(), strict=True)
    for cut, image, (top, left, is_flipped) in zip(cuts, padded, drawn, strict=True):
        part = image[top : top + height, left : left + width]
        cut[...] = part[:, ::-1] if is_flipped else part
    scaled = cuts * _SCALE
    scaled += brightness[:, None, None, None]
    return scaled, labels


def of_batch(images: np.ndarray, labels: np.ndarray, key: np.ndarray) -> tuple[Any, Any]:
    """Augments a batch, with one key for all."""
    keys = np.random.default_rng(key).integers(0, 2**32, (len(images), 2), np.uint32)
    return of_block(images, labels, keys)


def jitted() -> Callable[..., tuple[Any, Any]]:
    """Returns a function as `of_batch`, compiled by JAX."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def one(image: jax.Array, key: jax.Array) -> jax.Array:
        top, left, is_flipped, brightness = _drawn(key)
        padding = ((_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0))
        padded = jnp.pad(image.astype(jnp.float32) * _SCALE, padding)
        cut = lax.dynamic_slice(padded, (top, left, 0), image.shape)
        return jnp.where(is_flipped, cut[:, ::-1], cut) + brightness

    @jax.jit
    def all_of(images: jax.Array, key: jax.Array) -> jax.Array:
        return jax.vmap(one)(images, jax.random.bits(key, (len(images), 2), jnp.uint32))

    def function(images: np.ndarray, labels: np.ndarray, key: np.ndarray) -> tuple[Any, Any]:
        return np.asarray(all_of(images, key)), labels

    return function


def _drawn(bits: Any) -> Drawn:
    """Returns top, left, whether it is flipped, and brightness, of uint32[2, ...]."""
    places, others = bits[0], bits[1]
    brightness = (others >> 1).astype(np.float32) * np.float32(2**-31)
    top = (places % _PLACES).astype(np.int32)
    left = (places // _PLACES % _PLACES).astype(np.int32)
    return top, left, others % 2 == 1, (2 * brightness - 1) * _BRIGHTEST
