"""The models as plain JAX functions, with the initializers of Keras' layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.by_hand import is_shape
from benchmarks.networks import gpt
from benchmarks.workloads import (
    CLASSES,
    GPT_SIZES,
    GRAPH,
    ROWS_OF_EMBEDDING,
    SEQUENCE_SHAPE,
    FitWork,
)

Parameters = dict[str, Any]


class Model(NamedTuple):
    """A model.

    Attributes:
        initial: Makes the parameters from a key.
        outputs: Maps parameters, a batch of inputs and a key for dropout to outputs; those of a
            model that has statistics get these, too, and return the new ones.
        losses: Maps outputs and targets to a loss each.
        classifies: Whether the outputs are logits of classes.
        statistics: Makes what batch normalization keeps.
    """

    initial: Callable[[jax.Array], Parameters]
    outputs: Callable[..., Any]
    losses: Callable[[jax.Array, jax.Array], jax.Array] = (
        optax.softmax_cross_entropy_with_integer_labels
    )
    classifies: bool = True
    statistics: Callable[[], Any] | None = None


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


def _convolution(kernel: jax.Array, x: jax.Array, strides: int, padding: str) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (strides,) * 2, padding, dimension_numbers=layout)


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
    for name in ("first", "second"):
        kernel, bias = parameters[name]
        x = _max_pool(jax.nn.relu(_convolution(kernel, x, 1, "VALID") + bias))
    x = jax.nn.relu(_dense(parameters["hidden"], x.reshape(len(x), -1)))
    return _dense(parameters["out"], x)


#: The kernels of the convolutions, each of which is followed by a batch normalization.
_KERNELS_OF_RESNET = {
    "stem": (3, 3, 3, 16),
    "0a": (3, 3, 16, 16),
    "0b": (3, 3, 16, 16),
    "1a": (3, 3, 16, 32),
    "1b": (3, 3, 32, 32),
    "1s": (1, 1, 16, 32),
    "2a": (3, 3, 32, 64),
    "2b": (3, 3, 64, 64),
    "2s": (1, 1, 32, 64),
}


def _initial_resnet(key: jax.Array) -> Parameters:
    drawn = _initial(key, **_KERNELS_OF_RESNET, out=(64, CLASSES))
    convolutions = {
        name: (drawn[name][0], jnp.ones(shape[-1]), jnp.zeros(shape[-1]))
        for name, shape in _KERNELS_OF_RESNET.items()
    }
    return convolutions | {"out": drawn["out"]}


def _statistics_of_resnet() -> Any:
    return {
        name: (jnp.zeros(shape[-1]), jnp.ones(shape[-1]))
        for name, shape in _KERNELS_OF_RESNET.items()
    }


def _resnet(
    parameters: Parameters, x: jax.Array, key: jax.Array, statistics: Any
) -> tuple[jax.Array, Any]:
    del key
    new = {}

    def normalized(name: str, x: jax.Array, strides: int = 1) -> jax.Array:
        kernel, scale, offset = parameters[name]
        x = _convolution(kernel, x, strides, "SAME")
        mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        new[name] = jax.tree.map(
            lambda kept, value: 0.99 * kept + 0.01 * value, statistics[name], (mean, variance)
        )
        return (x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + offset

    x = jax.nn.relu(normalized("stem", x))
    for block, strides in (("0", 1), ("1", 2), ("2", 2)):
        y = jax.nn.relu(normalized(block + "a", x, strides))
        y = normalized(block + "b", y)
        shortcut = x if strides == 1 else normalized(block + "s", x, strides)
        x = jax.nn.relu(y + shortcut)
    return _dense(parameters["out"], x.mean((1, 2))), new


_FEATURES = SEQUENCE_SHAPE[1]
_HIDDEN = 128


def _initial_recurrent(key: jax.Array, gates: int) -> Parameters:
    given, drawn = jax.random.split(key)
    parameters = _initial(given, into=(_FEATURES, gates * _HIDDEN), out=(_HIDDEN, CLASSES))
    recurrent = jax.nn.initializers.orthogonal()(drawn, (_HIDDEN, gates * _HIDDEN))
    return parameters | {"recurrent": recurrent}


def _initial_lstm(key: jax.Array) -> Parameters:
    return _initial_recurrent(key, 4)


def _initial_gru(key: jax.Array) -> Parameters:
    return _initial_recurrent(key, 3) | {"bias": jnp.zeros(3 * _HIDDEN)}


def _lstm(parameters: Parameters, x: jax.Array, key: jax.Array) -> jax.Array:
    del key

    def step(state: Any, gates: jax.Array) -> Any:
        carried, hidden = state
        gates = gates + hidden @ parameters["recurrent"]
        into, forget, new, out = jnp.split(gates, 4, axis=1)
        carried = jax.nn.sigmoid(forget) * carried + jax.nn.sigmoid(into) * jnp.tanh(new)
        return (carried, jax.nn.sigmoid(out) * jnp.tanh(carried)), None

    gates = _dense(parameters["into"], jnp.swapaxes(x, 0, 1))
    zeros = jnp.zeros((len(x), _HIDDEN))
    (_, hidden), _ = lax.scan(step, (zeros, zeros), gates)
    return _dense(parameters["out"], hidden)


def _gru(parameters: Parameters, x: jax.Array, key: jax.Array) -> jax.Array:
    del key

    def step(hidden: jax.Array, gates: jax.Array) -> Any:
        inner = hidden @ parameters["recurrent"] + parameters["bias"]
        update, reset, new = jnp.split(gates, 3, axis=1)
        of_update, of_reset, of_new = jnp.split(inner, 3, axis=1)
        update = jax.nn.sigmoid(update + of_update)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new)
        return update * hidden + (1 - update) * new, None

    gates = _dense(parameters["into"], jnp.swapaxes(x, 0, 1))
    hidden, _ = lax.scan(step, jnp.zeros((len(x), _HIDDEN)), gates)
    return _dense(parameters["out"], hidden)


def _initial_recommender(key: jax.Array) -> Parameters:
    drawn, of_users, of_items = jax.random.split(key, 3)
    shape = (ROWS_OF_EMBEDDING, 32)
    return _initial(drawn, hidden=(64, 64), out=(64, 1)) | {
        "users": jax.random.uniform(of_users, shape, minval=-0.05, maxval=0.05),
        "items": jax.random.uniform(of_items, shape, minval=-0.05, maxval=0.05),
    }


def _recommender(parameters: Parameters, pairs: jax.Array, key: jax.Array) -> jax.Array:
    del key
    users, items = parameters["users"][pairs[:, 0]], parameters["items"][pairs[:, 1]]
    x = jax.nn.relu(_dense(parameters["hidden"], jnp.concatenate([users, items], axis=1)))
    return _dense(parameters["out"], x)[:, 0]


#: The blocks of the UNet, and the channels that go into and come out of each.
_BLOCKS_OF_UNET = {
    "fine": (3, 32),
    "middle": (32, 64),
    "coarse": (64, 64),
    "middle again": (128, 64),
    "fine again": (96, 32),
}


def _initial_unet(key: jax.Array) -> Parameters:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (into, filters) in _BLOCKS_OF_UNET.items():
        shapes |= {
            f"{name} a": (3, 3, into, filters),
            f"{name} b": (3, 3, filters, filters),
            f"{name} time": (64, filters),
        }
    shapes |= {"to middle": (3, 3, 32, 32), "to coarse": (3, 3, 64, 64)}
    shapes |= {"time": (1, 64), "out": (1, 1, 32, 3)}
    norms = {
        f"{name} {which} norm": (jnp.ones(filters), jnp.zeros(filters))
        for name, (_, filters) in _BLOCKS_OF_UNET.items()
        for which in "ab"
    }
    return _initial(key, **shapes) | norms


def _unet(parameters: Parameters, inputs: Any, key: jax.Array) -> jax.Array:
    del key
    images, share = inputs

    def convolved(name: str, x: jax.Array, strides: int = 1) -> jax.Array:
        kernel, bias = parameters[name]
        return _convolution(kernel, x, strides, "SAME") + bias

    def normed(name: str, x: jax.Array) -> jax.Array:
        scale, offset = parameters[name]
        groups = x.reshape(*x.shape[:3], 8, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = groups.var((1, 2, 4), keepdims=True)
        normal = (groups - mean) * lax.rsqrt(variance + 1e-3)
        return jax.nn.silu(normal.reshape(x.shape) * scale + offset)

    def block(name: str, x: jax.Array) -> jax.Array:
        y = normed(f"{name} a norm", convolved(f"{name} a", x))
        y = y + _dense(parameters[f"{name} time"], time)[:, None, None]
        return normed(f"{name} b norm", convolved(f"{name} b", y))

    time = jax.nn.silu(_dense(parameters["time"], share))
    fine = block("fine", images)
    middle = block("middle", convolved("to middle", fine, 2))
    x = block("coarse", convolved("to coarse", middle, 2))
    for name, skipped in (("middle again", middle), ("fine again", fine)):
        larger = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        x = block(name, jnp.concatenate([larger, skipped], axis=-1))
    return convolved("out", x)


def _initial_graph(key: jax.Array) -> Parameters:
    widths = (GRAPH.features, 64, 64)
    shapes: dict[str, tuple[int, ...]] = {"out": (64, CLASSES)}
    for layer, width in enumerate(widths):
        shapes |= {f"said {layer}": (2 * width, 64), f"heard {layer}": (width + 64, 64)}
    return _initial(key, **shapes)


def _graph(parameters: Parameters, inputs: Any, key: jax.Array) -> jax.Array:
    del key
    nodes, edges = inputs
    graphs, count = nodes.shape[:2]
    ends = (edges + count * jnp.arange(graphs)[:, None, None]).reshape(-1, 2)
    x = nodes.reshape(graphs * count, -1)
    for layer in range(3):
        from_ends = x[ends].reshape(len(ends), -1)
        said = jax.nn.relu(_dense(parameters[f"said {layer}"], from_ends))
        heard = jax.ops.segment_sum(said, ends[:, 1], graphs * count)
        both = jnp.concatenate([x, heard], axis=1)
        x = jax.nn.relu(_dense(parameters[f"heard {layer}"], both))
    return _dense(parameters["out"], x.reshape(graphs, count, -1).mean(1))


def _squared(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2, axis=(1, 2, 3))


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
    "resnet": Model(_initial_resnet, _resnet, statistics=_statistics_of_resnet),
    "lstm": Model(_initial_lstm, _lstm),
    "gru": Model(_initial_gru, _gru),
    "recommender": Model(
        _initial_recommender, _recommender, optax.sigmoid_binary_cross_entropy, classifies=False
    ),
    "unet": Model(_initial_unet, _unet, _squared, classifies=False),
    "graph": Model(_initial_graph, _graph),
}


def model_of(work: FitWork) -> Model:
    return _gpt(work.device) if work.model == "gpt" else MODELS[work.model]
