"""Compression of the arrays that workers push and pull.

A worker's program encodes the values that it pushes; the server decodes them, and then updates as
usual. Pulled values are encoded by the server, rounded to nearest. Each row of a divided variable
or a table is encoded separately, so that rows can be selected.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.compression import Compression
from unison.compression.codecs import BFloat16, Codec, Float16, Int4, Int8
from unison.compression.quantized import Quantized

_CODECS: dict[str, type[Codec]] = {kind.__name__: kind for kind in (BFloat16, Float16, Int8, Int4)}


class Encoding(NamedTuple):
    """The encoding of an array; represented as a list in messages.

    Attributes:
        codec: The name of the codec.
        block_size: The number of elements that share a scale.
        shape: The array's shape; for an array that is encoded by rows, the shape of a row.
        dtype: The name of the array's dtype.
        by_rows: Whether each row is encoded separately.
    """

    codec: str
    block_size: int
    shape: tuple[int, ...]
    dtype: str
    by_rows: bool

    @staticmethod
    def of_message(described: Any) -> Encoding:
        codec, block_size, shape, dtype, by_rows = described
        return Encoding(codec, block_size, tuple(shape), dtype, by_rows)


def check(compression: Any) -> None:
    """Rejects a compression that servers cannot decode without state.

    Raises:
        TypeError: It is not a compression.
        ValueError: It keeps state, or is of an unsupported kind.
    """
    if compression is None:
        return
    if not isinstance(compression, Compression):
        raise TypeError(
            "Expected a compression of unison.compression, such as int8(). Received: "
            f"{compression!r}"
        )
    is_stateless = (
        isinstance(compression, Quantized)
        and type(compression.codec).__name__ in _CODECS
        and not (compression.error_feedback or compression.warmup_steps or compression.momentum)
    )
    if not is_stateless:
        raise ValueError(
            "Workers keep nothing from step to step, so parameter servers take bfloat16, float16, "
            "int8 and int4, without error_feedback, warmup_steps and momentum. Received: "
            f"{compression!r}"
        )


def encoding_for(
    compression: Quantized | None, name: str, aval: Any, by_rows: bool
) -> Encoding | None:
    """Returns the encoding of an array; None if it is not encoded.

    Args:
        compression: The strategy's compression.
        name: The variable's name.
        aval: Its shape and dtype.
        by_rows: Whether rows of it are selected.
    """
    if compression is None or aval.dtype not in (jnp.float32, jnp.float64):
        return None
    if not compression.rule(name, aval):
        return None
    shape = tuple(aval.shape[1:] if by_rows else aval.shape)
    granularity = compression.codec.granularity
    size = -(-max(1, math.prod(shape)) // granularity) * granularity
    block_size = min(compression.codec.block_size, size)
    return Encoding(type(compression.codec).__name__, block_size, shape, aval.dtype.name, by_rows)


def encoded(array: Any, encoding: Encoding, is_stochastic: bool = False) -> jax.Array:
    """Returns the code words of an array, in one row, or in one row per row of the array.

    Args:
        array: The array.
        encoding: The encoding.
        is_stochastic: Whether to round stochastically, so that the expectation of an element is
            exact. The random bits are derived from the array itself: equal arrays have equal words.
    """
    codec = _CODECS[encoding.codec](encoding.block_size)
    array = jnp.asarray(array)
    rows = array.reshape(array.shape[0] if encoding.by_rows else 1, -1)
    blocks = _blocks(encoding)
    rows = jnp.pad(rows, ((0, 0), (0, blocks * encoding.block_size - rows.shape[1])))
    rows = rows.reshape(len(rows), blocks, encoding.block_size)
    fractions: Any = 0.5
    if is_stochastic:
        bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32)
        key = jax.random.key(jnp.sum(bits, dtype=jnp.uint32))
        fractions = jax.random.uniform(key, rows.shape, rows.dtype)
    return codec.encode(rows, fractions)


def decoded(words: Any, encoding: Encoding) -> jax.Array:
    """Returns the array whose code words `encoded` returned."""
    codec = _CODECS[encoding.codec](encoding.block_size)
    words = jnp.asarray(words)
    numbers = codec.decode(words, _blocks(encoding), jnp.dtype(encoding.dtype))
    rows = numbers.reshape(len(words), -1)[:, : max(1, math.prod(encoding.shape))]
    leading = (len(words),) if encoding.by_rows else ()
    return rows.reshape(*leading, *encoding.shape)


def sent(array: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Returns the code words of an array, outside a program."""
    return _outside(encoded, array, encoding)


def received(words: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Returns the array of received code words, outside a program."""
    return _outside(decoded, words, encoding)


def _outside(function: Any, array: np.ndarray, encoding: Encoding) -> np.ndarray:
    # Programs are compiled only for powers of two of rows; the padding is cut off.
    count = len(array)
    size = 1 << max(0, count - 1).bit_length() if encoding.by_rows else count
    if size != count:
        array = np.concatenate([array, np.zeros((size - count, *array.shape[1:]), array.dtype)])
    found = np.asarray(_compiled(function, encoding)(array))
    return found[:count] if encoding.by_rows else found


@functools.cache
def _compiled(function: Any, encoding: Encoding) -> Any:
    return jax.jit(lambda array: function(array, encoding))


def _blocks(encoding: Encoding) -> int:
    return -(-max(1, math.prod(encoding.shape)) // encoding.block_size)
