"""Codecs: blocks of numbers as words of few bits, and back.

A codec divides a vector into blocks, each with its own scale, so that a large element only affects
its neighbours' precision. An element that is not finite makes all of its block NaN, so that it is
noticed on all replicas. Source of the block scales: Dettmers 2016, "8-Bit Approximations for
Parallelism in Deep Learning".
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """Encodes blocks of numbers.

    Attributes:
        block_size: The number of elements that share a scale.
    """

    block_size: int

    #: The dtype of the words.
    word: ClassVar[Any] = jnp.uint8
    #: Block sizes are multiples of this.
    granularity: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % self.granularity:
            raise ValueError(
                f"block_size must be a positive multiple of {self.granularity}. Received: "
                f"block_size={self.block_size}"
            )

    def encode(
        self, rows: jax.Array, fractions: jax.Array | float, sizes: jax.Array | None = None
    ) -> jax.Array:
        """Returns the words of `rows`.

        Args:
            rows: Of shape (rows, blocks, block_size), float32 or float64.
            fractions: Added before rounding down, between 0 and 1 and of the shape of
                `rows`: 0.5 rounds to the nearest, random ones make the result unbiased.
            sizes: The number of elements of each block, of shape (rows, blocks); the others, at its
                end, are padding. Default: all.

        Returns:
            An array of shape (rows, words).
        """
        if sizes is None:
            sizes = jnp.full(rows.shape[:-1], self.block_size)
        scales = self._scales(rows, sizes)
        divisors = jnp.where(scales == 0, jnp.ones_like(scales), scales)
        words = self._words(rows / divisors[..., None], fractions)
        return jnp.concatenate([words.reshape(len(rows), -1), _as_words(scales, self.word)], axis=1)

    def decode(self, words: jax.Array, blocks: int, dtype: jnp.dtype) -> jax.Array:
        """Returns the numbers, of shape (rows, blocks, block_size), that `words` encode."""
        size = blocks * dtype.itemsize // jnp.dtype(self.word).itemsize
        payload, scales = words[:, :-size], words[:, -size:]
        numbers = self._numbers(payload.reshape(len(words), blocks, -1), dtype)
        return numbers * _as_numbers(scales, blocks, dtype)[..., None]

    @abc.abstractmethod
    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Returns the divisor of each block; 0 if all of the block is 0."""

    @abc.abstractmethod
    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        """Returns the words of scaled blocks."""

    @abc.abstractmethod
    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the scaled blocks that `words` encode."""


class BFloat16(Codec):
    """The upper half of a float32, rounded to the nearest; needs no scales."""

    word = jnp.uint16

    def encode(
        self, rows: jax.Array, fractions: jax.Array | float, sizes: jax.Array | None = None
    ) -> jax.Array:
        return self._words(rows, fractions).reshape(len(rows), -1)

    def decode(self, words: jax.Array, blocks: int, dtype: jnp.dtype) -> jax.Array:
        return self._numbers(words.reshape(len(words), blocks, -1), dtype)

    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.ones(rows.shape[:-1], rows.dtype)

    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        return lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.bitcast_convert_type(words, jnp.bfloat16).astype(dtype)


class Float16(Codec):
    """IEEE half precision, rounded to the nearest, after division by a power of two.

    The largest element of a block is scaled to between 1/2 and 1, so that none overflows, and
    elements down to a 16,000th of it keep eleven bits.
    """

    word = jnp.uint16

    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        peaks = _peaks(rows)
        _, exponents = jnp.frexp(peaks)
        powers = jnp.ldexp(jnp.ones_like(peaks), exponents)
        return jnp.where((peaks > 0) & jnp.isfinite(peaks), powers, peaks)

    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        return lax.bitcast_convert_type(rows.astype(jnp.float16), jnp.uint16)

    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.bitcast_convert_type(words, jnp.float16).astype(dtype)


class Int8(Codec):
    """Integers from -127 to 127; the largest element of a block becomes one of the two."""

    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return _peaks(rows) / 127

    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        return lax.bitcast_convert_type(_rounded(rows, fractions, 127), jnp.uint8)

    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.bitcast_convert_type(words, jnp.int8).astype(dtype)


class Int4(Codec):
    """Integers from -7 to 7, two in a byte."""

    granularity = 2

    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return _peaks(rows) / 7

    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        halves = _rounded(rows, fractions, 7) + 8
        low, high = jnp.split(halves.astype(jnp.uint8), 2, axis=-1)
        return low | (high << 4)

    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        halves = jnp.concatenate([words & 15, words >> 4], axis=-1)
        return halves.astype(dtype) - 8


class Sign(Codec):
    """One bit per element, eight in a byte: the sign, times the root of twice the mean square.

    With error feedback, an element oscillates around its value by the scale s if it is smaller, and
    lags behind more and more if it is larger. The residuals of the former are spread over -s to
    s, and has a mean square of s^2 / 3: so s settles where s^2 = 2 (m + s^2 / 3), six times the
    mean square m of the input. The mean of absolute values, which is nearest to a block, would make
    the large elements of an uneven block wait ten times as long; a factor of 3 would not settle.
    """

    granularity = 8

    def _scales(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        # 0 has no sign: other replicas' padding is not 0 after decoding, and is ignored.
        is_padding = lax.iota(sizes.dtype, self.block_size) >= sizes[..., None]
        rows = jnp.where(is_padding, jnp.zeros_like(rows), rows)
        peaks = _peaks(rows)
        parts = rows / jnp.where(peaks > 0, peaks, jnp.ones_like(peaks))[..., None]
        squares = jnp.square(parts).sum(axis=-1) / jnp.maximum(sizes, 1)
        return peaks * jnp.sqrt(2 * squares)

    def _words(self, rows: jax.Array, fractions: jax.Array | float) -> jax.Array:
        bits = (rows >= 0).reshape(*rows.shape[:-1], 8, -1).astype(jnp.uint8)
        weights = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))
        return (bits * weights[:, None]).sum(axis=-2, dtype=jnp.uint8)

    def _numbers(self, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        places = jnp.arange(8, dtype=jnp.uint8)[:, None]
        bits = (words[..., None, :] >> places) & 1
        return 2 * bits.reshape(*words.shape[:-1], -1).astype(dtype) - 1


def _peaks(rows: jax.Array) -> jax.Array:
    return jnp.abs(rows).max(axis=-1)


def _rounded(rows: jax.Array, fractions: jax.Array | float, most: int) -> jax.Array:
    return jnp.clip(jnp.floor(rows + fractions), -most, most).astype(jnp.int8)


def _as_words(scales: jax.Array, word: type) -> jax.Array:
    return lax.bitcast_convert_type(scales, word).reshape(len(scales), -1)


def _as_numbers(words: jax.Array, blocks: int, dtype: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(words.reshape(len(words), blocks, -1), dtype)
