"""A recommender: large embeddings of several features, and a small MLP over them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.networks import Batch

FEATURES, ROWS, WIDTH = 8, 200_000, 64
HIDDEN = (512, 256)
EXAMPLES = 1024
OPTIMIZER = "adam"
POLICY = "float32"


def batch(examples: int) -> Batch:
    return Batch(
        jax.ShapeDtypeStruct((examples, FEATURES), "int32"),
        jax.ShapeDtypeStruct((examples, 1), "float32"),
    )


def model() -> keras.Model:
    features = keras.Input((FEATURES,), dtype="int32")
    x = keras.layers.Concatenate()(
        [
            keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")(features[:, place])
            for place in range(FEATURES)
        ]
    )
    for width in HIDDEN:
        x = keras.layers.Dense(width, "relu", kernel_initializer="zeros")(x)
    return keras.Model(features, keras.layers.Dense(1, kernel_initializer="zeros")(x))


def loss() -> Any:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def parameters() -> Any:
    widths = (FEATURES * WIDTH, *HIDDEN, 1)
    return {
        "tables": [(ROWS, WIDTH)] * FEATURES,
        "dense": [{"kernel": shape, "bias": shape[-1:]} for shape in itertools.pairwise(widths)],
    }


def statistics() -> Any:
    return []


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    rows = [
        jnp.take(table, batch.x[:, place], axis=0)
        for place, table in enumerate(parameters["tables"])
    ]
    x = jnp.concatenate(rows, axis=-1)
    for place, own in enumerate(parameters["dense"]):
        x = x @ own["kernel"] + own["bias"]
        if place < len(HIDDEN):
            x = jax.nn.relu(x)
    logits = x[:, 0]
    labels = batch.y[:, 0]
    return jax.nn.softplus(logits) - labels * logits, statistics
