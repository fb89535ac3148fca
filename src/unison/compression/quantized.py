"""Gradients in fewer bits: half floats, integers of 8 and 4 bits, signs.

The tensors are in one buffer, which is divided between the replicas. Each encodes it and sends
every other replica its part; each decodes and adds the parts, encodes the sum, and sends it to
all: a reduce-scatter and an all-gather of small words (an all-reduce would have
to add them, and XLA widens 16-bit floats on CPU before sending them). Sums are in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.collectives.packing import share_buffers
from unison.compression.base import (
    Compression,
    CompressionState,
    Exchange,
    Kinds,
)
from unison.compression.codecs import BFloat16, Codec, Float16, Int4, Int8, Sign
from unison.compression.rules import LARGE_MATRICES, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(Compression):
    """Sends tensors in the words of a codec.

    Attributes:
        codec: Encodes and decodes blocks.
        error_feedback: Whether the encoding errors are kept, and added to the next gradients. The
            rounding is then to the nearest.
        stochastic: Whether an element is rounded up with the probability that makes its
            expectation exact.
    """

    codec: Codec
    error_feedback: bool = False
    stochastic: bool = False

    def _own_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        return {"residual": tuple(tensors)} if self.error_feedback else {}

    def _compressed(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        if self.error_feedback:
            kept = state.of_replica["residual"]
            tensors = [tensor + residual for tensor, residual in zip(tensors, kept, strict=True)]
        sums, residuals = list(tensors), list(tensors)
        for indices in share_buffers(tensors, math.inf):
            group = [tensors[index] for index in indices]
            count = lax.axis_size(exchange.axis_name)
            blocks = _in_blocks(group, self.codec.block_size, count)
            sizes = _sizes_of_blocks(group, self.codec.block_size, count)
            total, residual = self._exchanged(blocks, sizes, exchange)
            for index, one, other in zip(
                indices,
                _out_of_blocks(total, group, self.codec.block_size),
                _out_of_blocks(residual, group, self.codec.block_size),
                strict=True,
            ):
                sums[index], residuals[index] = one, other
        own: Kinds = {"residual": tuple(residuals)} if self.error_feedback else {}
        return sums, own, {}

    def _exchanged(
        self, rows: jax.Array, sizes: jax.Array, exchange: Exchange
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of `rows` over the replicas, and this replica's residual.

        Args:
            rows: Of shape (replicas, blocks, block_size).
            sizes: The number of elements of each block.
            exchange: The current step.
        """
        axis, (count, blocks, _) = exchange.axis_name, rows.shape
        place = lax.axis_index(axis)
        words = self.codec.encode(rows, self._fractions(rows, exchange, 2 * place), sizes)
        received = lax.all_to_all(words, axis, split_axis=0, concat_axis=0)

        def with_that_of(distance: jax.Array, part: jax.Array) -> jax.Array:
            encoded = lax.dynamic_index_in_dim(received, (place + distance) % count)
            return part + self.codec.decode(encoded, blocks, rows.dtype)

        # A replica's own contribution to the part that it sums is not sent, and has no loss.
        # The others' are added in a loop: the program is as long for many replicas as for two.
        part = lax.dynamic_index_in_dim(rows, place)
        part = lax.fori_loop(1, count, with_that_of, part)
        part_sizes = lax.dynamic_index_in_dim(sizes, place)
        sent = self.codec.encode(part, self._fractions(part, exchange, 2 * place + 1), part_sizes)
        total = self.codec.decode(lax.all_gather(sent, axis, tiled=True), blocks, rows.dtype)
        # The encoding error of the sum stays with the replica.
        lost = part - lax.dynamic_index_in_dim(total, place)
        residual = rows - self.codec.decode(words, blocks, rows.dtype)
        return total, lax.dynamic_update_index_in_dim(residual, lost, place, 0)

    def _fractions(
        self, rows: jax.Array, exchange: Exchange, stream: jax.Array
    ) -> jax.Array | float:
        if not self.stochastic or self.error_feedback:
            return 0.5
        return random_fractions(rows.shape, exchange.step, stream).astype(rows.dtype)


def bfloat16(*, rule: Rule = LARGE_MATRICES, warmup_steps: int = 0) -> Quantized:
    """Sends the upper half of each float32: half the bytes, 8 bits of precision.

    Args:
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.

    Examples:
        >>> from unison import compression
        >>> compression.bfloat16().warmup_steps
        0
    """
    return Quantized(codec=BFloat16(8), rule=rule, warmup_steps=warmup_steps)


def float16(
    *, block_size: int = 1024, rule: Rule = LARGE_MATRICES, warmup_steps: int = 0
) -> Quantized:
    """Sends halves, scaled by powers of two: half the bytes, 11 bits of precision.

    Args:
        block_size: The number of elements that share a scale.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.
    """
    return Quantized(codec=Float16(block_size), rule=rule, warmup_steps=warmup_steps)


def int8(
    *,
    block_size: int = 256,
    error_feedback: bool = False,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
) -> Quantized:
    """Sends integers of 8 bits: a quarter of the bytes.

    An element x of a block with the largest absolute value m is sent as floor(127 x / m + u),
    with u uniform between 0 and 1, so that its expectation is x (stochastic rounding; Alistarh et
    al. 2017, "QSGD").

    Args:
        block_size: The number of elements that share a scale.
        error_feedback: Round to the nearest instead, keep the error, and add it to the next
            gradients.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.

    Raises:
        ValueError: The block size is not positive.

    Examples:
        >>> import numpy as np, unison
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> int8 = compression.int8()
        >>> def step(gradient):
        ...     return int8.apply(gradient, int8.init(gradient))[0]
        >>> sums = strategy.run(step, (unison.PerReplica([np.ones((64, 64)), np.ones((64, 64))]),))
        >>> float(sums.values[0].mean())
        2.0
    """
    return Quantized(
        codec=Int8(block_size),
        stochastic=True,
        error_feedback=error_feedback,
        rule=rule,
        warmup_steps=warmup_steps,
    )


def int4(
    *,
    block_size: int = 64,
    error_feedback: bool = False,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
) -> Quantized:
    """Sends integers of 4 bits, two in a byte: a seventh of the bytes. Otherwise like `int8`.

    Args:
        block_size: The number of elements that share a scale; even.
        error_feedback: Round to the nearest instead, keep the error, and add it to the next
            gradients.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.

    Raises:
        ValueError: The block size is not a positive even number.
    """
    return Quantized(
        codec=Int4(block_size),
        stochastic=True,
        error_feedback=error_feedback,
        rule=rule,
        warmup_steps=warmup_steps,
    )


def sign(
    *,
    momentum: float = 0.9,
    clipnorm: float | None = None,
    block_size: int = 512,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
) -> Quantized:
    """Sends signs, and a scale for each block: a thirtieth of the bytes.

    The scale is the root of twice the block's mean square.

    Each replica sends the momentum of its gradients, v = m v + g. The error is kept, and added
    to the next gradients (error feedback). Use an optimizer without momentum, such as plain SGD in
    place of SGD with momentum m. (Zheng et al. 2019, "Communication-Efficient Distributed
    Blockwise Momentum SGD with Error-Feedback"; Karimireddy et al. 2019, "Error Feedback Fixes
    SignSGD".)

    Args:
        momentum: The factor m, 0 or more and below 1. 0: the gradients themselves are sent.
        clipnorm: The norm to which the gradients are clipped before their momentum; see `topk`.
        block_size: The number of elements that share a scale; a multiple of 8.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.

    Raises:
        ValueError: The block size is not a positive multiple of 8.
    """
    return Quantized(
        codec=Sign(block_size),
        error_feedback=True,
        momentum=momentum,
        clipnorm=clipnorm,
        rule=rule,
        warmup_steps=warmup_steps,
    )


def random_fractions(shape: tuple[int, ...], step: jax.Array, stream: jax.Array) -> jax.Array:
    """Returns uniform float32 numbers between 0 and 1, both excluded.

    A hash of the index, the step and the stream: a thirtieth of the time of `jax.random.bits` on
    CPU, and sufficient for rounding. It is "lowbias32" of Wellons 2018.
    """
    key = _hash(_hash(step.astype(jnp.uint32) + 1) + stream.astype(jnp.uint32))
    places = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return ((_hash(places ^ key) >> 16).astype(jnp.float32) + 0.5) / 2**16


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _in_blocks(tensors: Sequence[jax.Array], block_size: int, count: int) -> jax.Array:
    """Returns the elements of `tensors`, each padded to whole blocks, in `count` equal parts.

    The barrier prevents XLA's CPU compiler from gathering elements where they are computed: it
    would read transposed gradients of kernels with a large stride, and
    compute those of biases again for each element.
    """
    blocks = sum(math.ceil(tensor.size / block_size) for tensor in tensors)
    part = math.ceil(blocks / count)
    pieces = []
    for vector in lax.optimization_barrier([tensor.reshape(-1) for tensor in tensors]):
        pieces += [vector, jnp.zeros(-vector.size % block_size, vector.dtype)]
    pieces.append(jnp.zeros((count * part - blocks) * block_size, tensors[0].dtype))
    buffer = jnp.concatenate(pieces)
    return buffer.reshape(count, part, block_size)


def _sizes_of_blocks(tensors: Sequence[jax.Array], block_size: int, count: int) -> jax.Array:
    """Returns the number of elements, without padding, of each block of `_in_blocks`."""
    blocks = [math.ceil(tensor.size / block_size) for tensor in tensors]
    part = math.ceil(sum(blocks) / count)
    last = np.cumsum(blocks) - 1
    of_last = np.asarray([(tensor.size - 1) % block_size + 1 for tensor in tensors])
    sizes = jnp.where(jnp.arange(count * part) <= last[-1], block_size, 0)
    return sizes.at[last].set(of_last).reshape(count, part)


def _out_of_blocks(rows: jax.Array, like: Sequence[jax.Array], block_size: int) -> list[jax.Array]:
    """Returns the tensors in `rows` of `_in_blocks`, in the shapes of `like`."""
    buffer = rows.reshape(-1)
    tensors = []
    start = 0
    for tensor in like:
        tensors.append(lax.slice(buffer, (start,), (start + tensor.size,)).reshape(tensor.shape))
        start += math.ceil(tensor.size / block_size) * block_size
    return tensors
