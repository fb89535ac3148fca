"""An MLP of 12 square layers: its gradients are 192 MiB."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.networks import Batch

LAYERS, WIDTH = 12, 2048
EXAMPLES = 256
OPTIMIZER = "sgd"
POLICY = "float32"


def batch(examples: int) -> Batch:
    x = jax.ShapeDtypeStruct((examples, WIDTH), "float32")
    return Batch(x, x)


def model() -> keras.Model:
    hidden = [
        keras.layers.Dense(WIDTH, "tanh", use_bias=False, kernel_initializer="zeros")
        for _ in range(LAYERS)
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden])


def loss() -> Any:
    return keras.losses.MeanSquaredError()


def parameters() -> Any:
    return [(WIDTH, WIDTH)] * LAYERS


def statistics() -> Any:
    return []


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    x = batch.x
    for weight in parameters:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - batch.y) ** 2, axis=-1), statistics
