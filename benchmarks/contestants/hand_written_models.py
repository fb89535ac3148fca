"""The models as plain JAX functions, with the initializers of Keras' layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.by_hand import is_shape
from benchmarks.networks import gpt
from benchmarks.workloads import GPT_SIZES, FitWork

Parameters = dict[str, Any]


class Model(NamedTuple):
    """A model.

    Attributes:
        initial: Makes the parameters from a key.
        logits: Maps parameters, a batch of images and a key for dropout to a row of logits each.
    """

    initial: Callable[[jax.Array], Parameters]
    logits: Callable[[Parameters, jax.Array, jax.Array], jax.Array]


def _initial(key: jax.Array, **shapes: tuple[int, ...]) -> Parameters:
    glorot = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(key, len(shapes))
    return {
        name: (glorot(key, shape), jnp.zeros(shape[-1]))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _dense(parameters: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    kernel, bias = parameters
    return x @ kernel + bias


def _dropout(key: jax.Array, rate: float, x: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def _convolution(parameters: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    kernel, bias = parameters
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout) + bias


def _max_pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def _initial_mlp(key: jax.Array) -> Parameters:
    return _initial(key, hidden=(784, 512), out=(512, 10))


def _mlp(parameters: Parameters, x: jax.Array, key: jax.Array) -> jax.Array:
    x = jax.nn.relu(_dense(parameters["hidden"], x))
    return _dense(parameters["out"], _dropout(key, 0.2, x))


def _initial_wide_mlp(key: jax.Array) -> Parameters:
    return _initial(key, first=(784, 4096), second=(4096, 4096), out=(4096, 10))


def _wide_mlp(parameters: Parameters, x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    x = jax.nn.relu(_dense(parameters["first"], x))
    x = jax.nn.relu(_dense(parameters["second"], x))
    return _dense(parameters["out"], x)


def _initial_cnn(key: jax.Array) -> Parameters:
    return _initial(
        key,
        first=(3, 3, 1, 32),
        second=(3, 3, 32, 64),
        hidden=(5 * 5 * 64, 128),
        out=(128, 10),
    )


def _cnn(parameters: Parameters, x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    x = _max_pool(jax.nn.relu(_convolution(parameters["first"], x)))
    x = _max_pool(jax.nn.relu(_convolution(parameters["second"], x)))
    x = jax.nn.relu(_dense(parameters["hidden"], x.reshape(len(x), -1)))
    return _dense(parameters["out"], x)


def _gpt(device: str) -> Model:
    dtype = jnp.bfloat16 if device == "gpu" else jnp.float32

    def initial(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(gpt.parameters(GPT_SIZES[device]), is_leaf=is_shape)
        keys = jax.random.split(key, len(leaves))
        drawn = [0.02 * jax.random.normal(*pair) for pair in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def logits(parameters: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        del key
        return gpt.logits(parameters, tokens, dtype).astype(jnp.float32)

    return Model(initial, logits)


MODELS = {
    "mlp": Model(_initial_mlp, _mlp),
    "wide_mlp": Model(_initial_wide_mlp, _wide_mlp),
    "cnn": Model(_initial_cnn, _cnn),
}


def model_of(work: FitWork) -> Model:
    return _gpt(work.device) if work.model == "gpt" else MODELS[work.model]
