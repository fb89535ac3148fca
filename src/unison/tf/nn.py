"""`tf.nn`: activations, dropout, normalization and embeddings; the losses and convolutions are
in `cross_entropy` and `convolution`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.tf import random
from unison.tf.convolution import (
    atrous_conv2d,
    avg_pool,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    conv1d,
    conv1d_transpose,
    conv2d,
    conv2d_transpose,
    conv3d,
    conv3d_transpose,
    conv_transpose,
    convolution,
    depth_to_space,
    depthwise_conv2d,
    max_pool,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    max_pool_with_argmax,
    pool,
    separable_conv2d,
    space_to_depth,
)
from unison.tf.cross_entropy import (
    compute_average_loss,
    log_poisson_loss,
    scale_regularization_loss,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    sparse_softmax_cross_entropy_with_logits,
    weighted_cross_entropy_with_logits,
)
from unison.tf.ctc import ctc_loss
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.math import (
    clip_by_norm,
    in_top_k,
    l2_normalize,
    log_softmax,
    sigmoid,
    softmax,
    softplus,
    softsign,
    tanh,
    top_k,
    zero_fraction,
)
from unison.tf.missing import names_missing_from
from unison.tf.selecting import gather
from unison.tf.shaping import space_to_batch
from unison.tf.tensors import axes as _axes
from unison.tf.tensors import convert_to_tensor, operands, sizes
from unison.tf.ties import larger, smaller

__all__ = [
    "atrous_conv2d",
    "avg_pool",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_normalization",
    "bias_add",
    "compute_average_loss",
    "conv1d",
    "conv1d_transpose",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "conv3d_transpose",
    "conv_transpose",
    "convolution",
    "crelu",
    "ctc_loss",
    "depth_to_space",
    "depthwise_conv2d",
    "dropout",
    "elu",
    "embedding_lookup",
    "gelu",
    "in_top_k",
    "l2_loss",
    "l2_normalize",
    "leaky_relu",
    "local_response_normalization",
    "log_poisson_loss",
    "log_softmax",
    "lrn",
    "max_pool",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool_with_argmax",
    "moments",
    "normalize_moments",
    "pool",
    "relu",
    "relu6",
    "scale_regularization_loss",
    "selu",
    "separable_conv2d",
    "sigmoid",
    "sigmoid_cross_entropy_with_logits",
    "silu",
    "softmax",
    "softmax_cross_entropy_with_logits",
    "softplus",
    "softsign",
    "space_to_batch",
    "space_to_depth",
    "sparse_softmax_cross_entropy_with_logits",
    "sufficient_statistics",
    "swish",
    "tanh",
    "top_k",
    "weighted_cross_entropy_with_logits",
    "weighted_moments",
    "zero_fraction",
]

__getattr__ = names_missing_from(__name__)

# -- activations ---------------------------------------------------------------------------


def relu(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.relu`."""
    return jax.nn.relu(convert_to_tensor(features))


def relu6(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.relu6`."""
    return smaller(6.0, larger(0.0, convert_to_tensor(features)))


def crelu(features: Any, axis: int = -1, name: str | None = None) -> jax.Array:
    """Returns the positive and the negative part, side by side. TF: `tf.nn.crelu`."""
    features = convert_to_tensor(features)
    return jax.nn.relu(jnp.concatenate([features, -features], axis))


def leaky_relu(features: Any, alpha: float = 0.2, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.leaky_relu`."""
    features = convert_to_tensor(features)
    if jnp.issubdtype(features.dtype, jnp.integer):
        features = features.astype(jnp.float32)
    return jax.nn.leaky_relu(features, alpha)


def elu(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.elu`."""
    return jax.nn.elu(convert_to_tensor(features))


def selu(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.selu`."""
    return jax.nn.selu(convert_to_tensor(features))


def gelu(features: Any, approximate: bool = False, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.gelu`."""
    return jax.nn.gelu(convert_to_tensor(features), approximate=approximate)


def silu(features: Any, beta: float = 1.0) -> jax.Array:
    """Returns `features * sigmoid(beta * features)`. TF: `tf.nn.silu`."""
    features = convert_to_tensor(features)
    return features * jax.nn.sigmoid(beta * features)


swish = silu


def dropout(
    x: Any, rate: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> jax.Array:
    """Sets elements to 0 with the probability `rate` and scales the others up to keep the mean.

    Args:
        x: Of a floating dtype.
        rate: At least 0, less than 1.
        noise_shape: The shape of the draws, which are broadcast: equal draws along axes of 1.
        seed: As for `tf.random.uniform`.
        name: Without effect.

    Raises:
        ValueError: `rate` is out of range, or `x` has no floating dtype.

    TF: `tf.nn.dropout`.
    """
    x = convert_to_tensor(x)
    _check_rate(x, rate)
    return _dropped(
        x, rate, noise_shape, lambda shape: random.uniform(shape, dtype=x.dtype, seed=seed)
    )


def stateless_dropout(
    x: Any,
    rate: Any,
    seed: Any,
    rng_alg: Any = None,
    noise_shape: Any = None,
    name: str | None = None,
) -> jax.Array:
    """Drops elements as determined by the two integers of `seed`.

    TF: `tf.nn.experimental.stateless_dropout`.
    """
    x = convert_to_tensor(x)
    _check_rate(x, rate)
    return _dropped(
        x, rate, noise_shape, lambda shape: random.stateless_uniform(shape, seed, dtype=x.dtype)
    )


def _check_rate(x: jax.Array, rate: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x.dtype` must be a floating point tensor. Received: {x.dtype}")
    if not isinstance(rate, jax.Array) and not 0 <= rate < 1:
        raise ValueError(f"`rate` must be at least 0 and less than 1. Received: rate={rate}")


def _dropped(x: jax.Array, rate: Any, noise_shape: Any, draw: Any) -> jax.Array:
    if not isinstance(rate, jax.Array) and rate == 0:
        return x
    given = sizes(noise_shape) if noise_shape is not None else x.shape
    shape = [whole if size == -1 else size for size, whole in zip(given, x.shape, strict=True)]
    is_kept = draw(shape) >= rate
    return jnp.where(is_kept, x / (1 - jnp.asarray(rate, x.dtype)), jnp.zeros((), x.dtype))


# -- normalization -------------------------------------------------------------------------


def moments(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance. TF: `tf.nn.moments`."""
    x = convert_to_tensor(x)
    chosen = _axes(axes)
    # Halves are averaged as floats.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, chosen, keepdims=True)
    variance = jnp.mean(jnp.square(wide - lax.stop_gradient(mean)), chosen, keepdims=keepdims)
    mean = mean if keepdims else jnp.squeeze(mean, chosen)
    return mean.astype(x.dtype), variance.astype(x.dtype)


def weighted_moments(
    x: Any, axes: Any, frequency_weights: Any, keepdims: bool = False, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted mean and variance. TF: `tf.nn.weighted_moments`."""
    x, weights = operands(convert_to_tensor(x), convert_to_tensor(frequency_weights))
    chosen = _axes(axes)
    weights = jnp.broadcast_to(weights, x.shape)
    total = jnp.sum(weights, chosen, keepdims=True)
    mean = jnp.sum(weights * x, chosen, keepdims=True) / total
    variance = jnp.sum(weights * jnp.square(x - mean), chosen, keepdims=True) / total
    if keepdims:
        return mean, variance
    return jnp.squeeze(mean, chosen), jnp.squeeze(variance, chosen)


def sufficient_statistics(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[Any, Any, Any, Any]:
    """Returns the count, the sum, the sum of squares (both of `x - shift`), and `shift`.

    TF: `tf.nn.sufficient_statistics`.
    """
    x = convert_to_tensor(x)
    chosen = _axes(axes)
    picked = (chosen,) if isinstance(chosen, int) else chosen
    count = jnp.asarray(np.prod([x.shape[axis] for axis in picked]), x.dtype)
    shifted = x if shift is None else x - convert_to_tensor(shift)
    total = jnp.sum(shifted, chosen, keepdims=keepdims)
    squares = jnp.sum(jnp.square(shifted), chosen, keepdims=keepdims)
    return count, total, squares, shift if shift is None else convert_to_tensor(shift)


def normalize_moments(
    counts: Any, mean_ss: Any, variance_ss: Any, shift: Any, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of the sufficient statistics. TF: `tf.nn.normalize_moments`."""
    counts, total, squares = (convert_to_tensor(part) for part in (counts, mean_ss, variance_ss))
    shifted = total / counts
    mean = shifted if shift is None else shifted + convert_to_tensor(shift)
    return mean, squares / counts - jnp.square(shifted)


def batch_normalization(
    x: Any,
    mean: Any,
    variance: Any,
    offset: Any,
    scale: Any,
    variance_epsilon: Any,
    name: str | None = None,
) -> jax.Array:
    """Returns `scale * (x - mean) / sqrt(variance + variance_epsilon) + offset`, the last two of
    which may be None.

    TF: `tf.nn.batch_normalization`.
    """
    x = convert_to_tensor(x)
    factor = lax.rsqrt(convert_to_tensor(variance) + variance_epsilon)
    if scale is not None:
        factor *= convert_to_tensor(scale)
    start = 0 if offset is None else convert_to_tensor(offset)
    return x * factor.astype(x.dtype) + (start - convert_to_tensor(mean) * factor).astype(x.dtype)


def local_response_normalization(
    input: Any,
    depth_radius: int = 5,
    bias: float = 1,
    alpha: float = 1,
    beta: float = 0.5,
    name: str | None = None,
) -> jax.Array:
    """Divides by `(bias + alpha * sum(neighbours ** 2)) ** beta`, over the channels nearby.

    TF: `tf.nn.local_response_normalization`.
    """
    input = convert_to_tensor(input)
    window = (1,) * (input.ndim - 1) + (2 * depth_radius + 1,)
    zero = np.zeros((), input.dtype)[()]
    squares = lax.reduce_window(jnp.square(input), zero, lax.add, window, (1,) * input.ndim, "SAME")
    return input / (bias + alpha * squares) ** beta


lrn = local_response_normalization


def l2_loss(t: Any, name: str | None = None) -> jax.Array:
    """Returns half the sum of squares. TF: `tf.nn.l2_loss`."""
    return jnp.sum(jnp.square(convert_to_tensor(t))) / 2


# -- layers' parts -------------------------------------------------------------------------


def bias_add(
    value: Any, bias: Any, data_format: str | None = None, name: str | None = None
) -> jax.Array:
    """Adds one number a channel; channels are last, or second if `data_format` begins "NC".

    TF: `tf.nn.bias_add`.
    """
    value, bias = operands(convert_to_tensor(value), convert_to_tensor(bias))
    if data_format is not None and data_format.startswith("NC"):
        bias = bias.reshape((-1,) + (1,) * (value.ndim - 2))
    return value + bias


def embedding_lookup(
    params: Any, ids: Any, max_norm: float | None = None, name: str | None = None
) -> jax.Array:
    """Returns the rows of `params` at `ids`, scaled down to the norm `max_norm` if it is given.

    TF: `tf.nn.embedding_lookup`.
    """
    if isinstance(params, list | tuple) and len(params) > 1:
        raise ValueError(
            "tf.nn.embedding_lookup takes one table in Unison. Received: "
            f"{len(params)}. Join them: tf.concat(params, 0) for contiguous parts."
        )
    table = params[0] if isinstance(params, list | tuple) else params
    rows = gather(table, ids)
    if max_norm is None:
        return rows
    return clip_by_norm(rows, max_norm, range(1 - jnp.ndim(table), 0))


dispatch_on_ragged(globals())
