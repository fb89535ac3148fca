"""Convolutions in the forms that run fastest on XLA:CPU.

XLA:CPU (jaxlib 0.10) dispatches a convolution either to YNNPACK, which multiplies a matrix of
patches (im2col), or to Eigen. If the patches fit into the cache and the shape suits the kernel,
both come close to the machine's limit, and we keep them. Four cases are far from it. Times are in
milliseconds, on two logical devices of two cores: Zen 5 (matrix products reach 440 GFLOP/s in
total), and below the line an Intel Xeon with 2 MiB of L2 cache for a core. The batch is that of one
device, and the image has channels last. They are minima on a shared machine, with glibc configured
to keep freed memory: without that, page faults of new buffers hide the differences.

| form | equation | batch | XLA | here |
| --- | --- | --- | --- | --- |
| in chunks | forward, unpadded, 13x13x32, 3x3 to 64 | 128, 512 | 5.3, 21 | 3.5, 14 |
| | forward, unpadded, 32x32x64, 3x3 to 64 | 32 | 17.6 | 13.1 |
| by columns | input gradient, 13x13x32, 3x3 to 64 | 32, 128, 512 | 1.4, 5.3, 22 | 0.95, 4.1, 16 |
| | input gradient, 14x14x16, 5x5 to 32 | 128 | 6.1 | 2.9 |
| by patches | filter gradient, unpadded, 13x13x32, 3x3 to 64 | 32, 128 | 1.6, 7.3 | 1.1, 4.6 |
| | filter gradient, 28x28x1, 3x3 to 32 | 32, 128 | 0.33, 4.0 | 0.14, 1.1 |
| | filter gradient, 16x16x128, 1x1 to 128 | 8 | 1.5 | 0.44 |
| --- | --- | --- | --- | --- |
| | filter gradient, 28x28x128, 1x1 to 512 | 32 | 308 | 44 |
| by examples | filter gradient, 56x56x64, 3x3 to 64 | 16 | 99 | 52 |
| | filter gradient, 14x14x256, 3x3 to 256 | 32 | 119 | 71 |
| | filter gradient, 32x32x64, 3x3 to 128, stride 2 | 32 | 31 | 20 |
| | filter gradient, 224x224x3, 7x7 to 64, stride 2 | 16 | 157 | 137 |
| plain | in a loop: filter gradient, 32x32x32, 3x3 to 32 | 8 | 105 | 1.9 |
| | in a loop: input gradient, 32x32x32, 3x3 to 32 | 8 | 45 | 1.1 |

XLA's filter gradient reads all cotangents again for each channel: it is fast while they stay in the
cache, so large ones are cut by examples. Patches of padded images (3x3, 32x32x32 to 32, batch 8)
take 4.2 ms where XLA takes 1.8.

XLA brings convolutions with other dimension numbers, such as all gradients, into the form that its
fast kernels take (`ConvCanonicalization`), but only at the top of a program. Inside a loop or a
branch (steps that run in groups, `tf.while_loop`, `jax.lax.scan`) its slow ones compute them. Here
each gets that form by explicit transpositions.

Left to XLA, because nothing tried was faster: forward and input gradient with `SAME` padding (390
to 420 GFLOP/s), input gradients of strided convolutions.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

Form = Callable[[jax.Array, jax.Array], jax.Array]

# The patches of one chunk stay near a core's L2 cache, 1 MiB here: 0.5 to 2 MiB measure alike.
_CHUNK_BYTES = 3 << 19
# The cotangents of one chunk are read again for each channel, so they stay in that cache.
_COTANGENT_BYTES = 1 << 20
# Above this size, the patches of the whole batch miss the last-level cache.
_LARGE_PATCHES_BYTES = 8 << 20
# Every tap of a filter becomes one slice: beyond 3x3 they cost more than the product gains.
_MAX_TAPS = 9


def faster_form(equation: JaxprEqn) -> Form | None:
    """Returns the faster form of a `conv_general_dilated` equation, or None to keep XLA's.

    The three kinds of convolution in a training step are distinguished by their sizes. A filter
    gradient contracts the batch and the output's space, so its "window" is larger than its output,
    which has the filter's size. The input gradient of an unstrided, unpadded convolution pads by
    more than `SAME`, so its output is larger than its image.
    """
    params = equation.params
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    lhs, rhs, out = avals
    if (
        params["feature_group_count"] != 1
        or params["batch_group_count"] != 1
        or 0 in (*lhs.shape, *rhs.shape, *out.shape)
    ):
        return None
    conv = _Convolution(**{name: params[name] for name in _Convolution.__dataclass_fields__})
    plain = None if conv.is_canonical else conv.form(conv.plain(out.dtype), out.dtype)
    if (
        len(params["window_strides"]) not in (1, 2)
        or any(dilation != 1 for dilation in params["lhs_dilation"])
        or not {lhs.dtype, rhs.dtype} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    ):
        return plain
    batch, features, *image = (lhs.shape[d] for d in conv.dimension_numbers.lhs_spec)
    _, _, *window = (rhs.shape[d] for d in conv.dimension_numbers.rhs_spec)
    _, _, *places = (out.shape[d] for d in conv.dimension_numbers.out_spec)
    if math.prod(places) < math.prod(window):
        return conv.filter_gradient(lhs, rhs, out) or plain
    unstrided = all(stride == 1 for stride in conv.window_strides)
    if unstrided and window[-1] > 1 and places[-1] > image[-1]:
        return conv.form(conv.by_columns, out.dtype)
    unpadded = not any(pad for pads in conv.padding for pad in pads)
    patch_bytes = math.prod(places) * math.prod(window) * lhs.dtype.itemsize
    large = patch_bytes * features * batch > _LARGE_PATCHES_BYTES
    images = _chunk_size(batch, patch_bytes * features)
    if unpadded and large and images and math.prod(window) > 1:
        return conv.form(lambda x, w: conv.in_chunks(x, w, images), out.dtype)
    return plain


@dataclass(frozen=True)
class _Convolution:
    """The parameters of an equation, and its forms on arrays with channels last.

    Every form takes an image of shape (batch, *space, features) and a filter of shape
    (*window, features, outputs) and returns float32 of shape (batch, *places, outputs).
    """

    dimension_numbers: lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    precision: Any

    @property
    def is_canonical(self) -> bool:
        """Whether images are (batch, *space, features), filters (*window, features, outputs)."""
        rank = len(self.window_strides) + 2
        image = (0, rank - 1, *range(1, rank - 1))
        filters = (rank - 1, rank - 2, *range(rank - 2))
        return self.dimension_numbers == lax.ConvDimensionNumbers(image, filters, image)

    def form(self, channels_last: Form, dtype: Any) -> Form:
        """Wraps a form on arrays with channels last for the equation's own dimension numbers."""
        lhs_spec, rhs_spec, out_spec = self.dimension_numbers
        n, c, *space = lhs_spec
        o, i, *window = rhs_spec
        order = [out_spec[0], *out_spec[2:], out_spec[1]]

        def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            out = channels_last(lhs.transpose(n, *space, c), rhs.transpose(*window, i, o))
            return out.transpose([order.index(d) for d in range(out.ndim)]).astype(dtype)

        return convolve

    def filter_gradient(self, lhs: Any, rhs: Any, out: Any) -> Form | None:
        """Returns the faster form of a filter gradient, or None; the arguments are its avals."""
        # The features are the training batch, and the batch the image's channels.
        channels, features, *_ = (lhs.shape[d] for d in self.dimension_numbers.lhs_spec)
        outputs, _, *window = (rhs.shape[d] for d in self.dimension_numbers.rhs_spec)
        _, _, *places = (out.shape[d] for d in self.dimension_numbers.out_spec)
        taps = math.prod(places)
        unpadded = not any(pad for pads in self.padding for pad in pads)
        if taps == 1 or (taps <= _MAX_TAPS and (unpadded or channels == 1)):
            # If the patches are smaller than the cotangent, copying that in chunks does not pay.
            small = taps * channels < outputs
            patch_bytes = taps * math.prod(window) * channels * lhs.dtype.itemsize
            examples = features if small else _chunk_size(features, patch_bytes) or features
            return self.form(lambda x, w: self.by_patches(x, w, places, examples), out.dtype)
        cotangent_bytes = math.prod(window) * outputs * rhs.dtype.itemsize
        examples = _chunk_size(features, cotangent_bytes, _COTANGENT_BYTES) or features
        if examples == features:
            return None
        return self.form(lambda x, w: self.by_examples(x, w, places, examples), out.dtype)

    def plain(self, dtype: Any) -> Form:
        """Returns XLA's own convolution of arrays with channels last."""
        return functools.partial(self._xla, padding=self.padding, dtype=dtype)

    def in_chunks(self, image: jax.Array, filters: jax.Array, chunk: int) -> jax.Array:
        """Applies XLA's own convolution to a few images at a time."""

        def convolve(images: jax.Array) -> jax.Array:
            return self._xla(images, filters, self.padding)

        out = lax.map(convolve, _split(image, chunk))
        return out.reshape(-1, *out.shape[2:])

    def by_examples(
        self, image: jax.Array, filters: jax.Array, places: Sequence[int], chunk: int
    ) -> jax.Array:
        """Adds up the filter gradients of a few examples, which are the features, at a time."""

        def gradient(examples: jax.Array, cotangents: jax.Array) -> jax.Array:
            image, filters = jnp.moveaxis(examples, 0, -1), jnp.moveaxis(cotangents, 0, -2)
            return self._xla(image, filters, self.padding)

        shape = (image.shape[0], *places, filters.shape[-1])
        return _sum_of_chunks(gradient, shape, *_by_features(image, filters), chunk)

    def by_columns(self, image: jax.Array, filters: jax.Array) -> jax.Array:
        """Folds the window's columns into the outputs, then adds the shifted results.

        One convolution along the other dimensions computes the result of each column of the filter
        at each column of the image; the sum puts them in place. It never multiplies the padding of
        the last dimension, and its matrix product is `columns` times wider.
        """
        *rows, columns, features, outputs = filters.shape
        by_column = jnp.moveaxis(filters, -3, -2).reshape(*rows, 1, features, columns * outputs)
        products = self._xla(image, by_column, (*self.padding[:-1], (0, 0)))
        (low, high), dilation = self.padding[-1], self.rhs_dilation[-1]
        unpadded = [(0, 0, 0)] * (image.ndim - 2)
        terms = []
        for column in range(columns):
            before = low - column * dilation
            after = high - (columns - 1 - column) * dilation
            term = products[..., column * outputs : (column + 1) * outputs]
            terms.append(_pad(term, [*unpadded, (before, after, 0), (0, 0, 0)]))
        return sum(terms[1:], terms[0])

    def by_patches(
        self, image: jax.Array, filters: jax.Array, places: Sequence[int], chunk: int
    ) -> jax.Array:
        """Computes one matrix product of patches, for a large contraction with few outputs.

        In a filter gradient the features are the training batch, which is contracted: the patches
        of `chunk` examples at a time, laid out as (place and channel, example and space), multiply
        the cotangent.
        """
        *window, _, outputs = filters.shape
        examples, cotangents = _by_features(image, filters)

        def product(examples: jax.Array, cotangents: jax.Array) -> jax.Array:
            channels = examples.swapaxes(0, 1)
            padded = _pad(
                channels, [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in self.padding]
            )
            taps = []
            for place in itertools.product(*map(range, places)):
                first = [p * s for p, s in zip(place, self.window_strides, strict=True)]
                last = [
                    f + (n - 1) * d + 1
                    for f, n, d in zip(first, window, self.rhs_dilation, strict=True)
                ]
                start, stop = [0, 0, *first], [*padded.shape[:2], *last]
                taps.append(lax.slice(padded, start, stop, [1, 1, *self.rhs_dilation]))
            patches = jnp.stack(taps).reshape(len(taps) * channels.shape[0], -1)
            return lax.dot(
                patches,
                cotangents.reshape(-1, outputs),
                precision=self.precision,
                preferred_element_type=jnp.float32,
            )

        if chunk == examples.shape[0]:
            total = product(examples, cotangents)
        else:
            shape = (math.prod(places) * image.shape[0], outputs)
            total = _sum_of_chunks(product, shape, examples, cotangents, chunk)
        return jnp.moveaxis(total.reshape(*places, image.shape[0], outputs), -2, 0)

    def _xla(
        self,
        image: jax.Array,
        filters: jax.Array,
        padding: Sequence[tuple[int, int]],
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        space = "DHW"[: image.ndim - 2]
        return lax.conv_general_dilated(
            image,
            filters,
            self.window_strides,
            padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
            precision=self.precision,
            preferred_element_type=dtype,
        )


def _by_features(image: jax.Array, filters: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an image and a filter with their features, the examples of a gradient, first."""
    return jnp.moveaxis(image, -1, 0), jnp.moveaxis(filters, -2, 0)


def _sum_of_chunks(
    function: Form, shape: Sequence[int], left: jax.Array, right: jax.Array, chunk: int
) -> jax.Array:
    """Returns the float32 sum of what a function returns for each `chunk` rows of two arrays."""
    # It varies over every mesh axis that either operand varies over.
    zeros_of_left, zeros_of_right = (lax.full_like(x, 0, jnp.float32, shape) for x in (left, right))
    total, _ = lax.scan(
        lambda total, chunks: (total + function(*chunks), None),
        zeros_of_left + zeros_of_right,
        (_split(left, chunk), _split(right, chunk)),
    )
    return total


def _chunk_size(count: int, item_bytes: int, most: int = _CHUNK_BYTES) -> int | None:
    """Returns the largest divisor of `count` whose items fit `most` bytes; None if it is tiny."""
    fitting = max(most // item_bytes, 1)
    chunk = max(d for d in range(1, min(fitting, count) + 1) if count % d == 0)
    return chunk if 4 * chunk > min(fitting, count) else None


def _split(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(-1, chunk, *x.shape[1:])


def _pad(x: jax.Array, config: list[tuple[int, int, int]]) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), config)
