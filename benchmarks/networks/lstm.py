"""A language model of two LSTMs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.networks import Batch, cross_entropy

WIDTH, LENGTH, WORDS = 1024, 64, 16384
EXAMPLES = 32
OPTIMIZER = "adam"
POLICY = "float32"


def batch(examples: int) -> Batch:
    tokens = jax.ShapeDtypeStruct((examples, LENGTH), "int32")
    return Batch(tokens, tokens)


def model() -> keras.Model:
    zeros: Any = {"kernel_initializer": "zeros", "recurrent_initializer": "zeros"}
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, WIDTH, embeddings_initializer="zeros"),
            keras.layers.LSTM(WIDTH, return_sequences=True, unit_forget_bias=False, **zeros),
            keras.layers.LSTM(WIDTH, return_sequences=True, unit_forget_bias=False, **zeros),
            keras.layers.Dense(WORDS, kernel_initializer="zeros"),
        ]
    )


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parameters() -> Any:
    layer = {
        "kernel": (WIDTH, 4 * WIDTH),
        "recurrent": (WIDTH, 4 * WIDTH),
        "bias": (4 * WIDTH,),
    }
    return {
        "words": (WORDS, WIDTH),
        "layers": [layer, layer],
        "out": {"kernel": (WIDTH, WORDS), "bias": (WORDS,)},
    }


def statistics() -> Any:
    return []


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    def run(own: Any, x: Any) -> Any:
        """Runs a layer over the steps of `x`, which is (steps, examples, width)."""

        def step(state: Any, x: Any) -> Any:
            carried, hidden = state
            z = x @ own["kernel"] + hidden @ own["recurrent"] + own["bias"]
            into, forget, new, out = jnp.split(z, 4, axis=1)
            carried = jax.nn.sigmoid(forget) * carried + jax.nn.sigmoid(into) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(carried)
            return (carried, hidden), hidden

        zeros = jnp.zeros((x.shape[1], WIDTH))
        return jax.lax.scan(step, (zeros, zeros), x)[1]

    x = jnp.swapaxes(jnp.take(parameters["words"], batch.x, axis=0), 0, 1)
    for own in parameters["layers"]:
        x = run(own, x)
    out = parameters["out"]
    logits = jnp.swapaxes(x, 0, 1) @ out["kernel"] + out["bias"]
    return cross_entropy(logits, batch.y), statistics
