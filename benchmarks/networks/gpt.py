"""A GPT of 12 layers of Keras, with the policy `mixed_bfloat16`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.networks import Batch, cross_entropy

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 12, 768, 12, 512, 32768
EXAMPLES = 8
OPTIMIZER = "adam"
POLICY = "mixed_bfloat16"

_EPSILON = 1e-5


def batch(examples: int) -> Batch:
    tokens = jax.ShapeDtypeStruct((examples, LENGTH), "int32")
    return Batch(tokens, tokens)


class Positions(keras.layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: Any) -> None:
        self.embeddings = self.add_weight(shape[1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.embeddings


def _norm() -> keras.layers.Layer:
    return keras.layers.LayerNormalization(epsilon=_EPSILON)


def model() -> keras.Model:
    zeros: Any = {"kernel_initializer": "zeros"}
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, embeddings_initializer="zeros")(tokens)
    x = Positions()(x)
    for _ in range(LAYERS):
        y = _norm()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, **zeros)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * WIDTH, "gelu", **zeros)(_norm()(x))
        x = x + keras.layers.Dense(WIDTH, **zeros)(y)
    logits = keras.layers.Dense(WORDS, use_bias=False, dtype="mixed_bfloat16", **zeros)(_norm()(x))
    return keras.Model(tokens, logits)


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parameters() -> Any:
    size = WIDTH // HEADS
    norm = {"scale": (WIDTH,), "offset": (WIDTH,)}
    into = {"kernel": (WIDTH, HEADS, size), "bias": (HEADS, size)}
    block = {
        "before_attention": norm,
        "query": into,
        "key": into,
        "value": into,
        "attended": {"kernel": (HEADS, size, WIDTH), "bias": (WIDTH,)},
        "before_dense": norm,
        "wide": {"kernel": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,)},
        "narrow": {"kernel": (4 * WIDTH, WIDTH), "bias": (WIDTH,)},
    }
    return {
        "words": (WORDS, WIDTH),
        "positions": (LENGTH, WIDTH),
        "blocks": [block] * LAYERS,
        "norm": norm,
        "out": (WIDTH, WORDS),
    }


def statistics() -> Any:
    return []


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    parameters = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters)

    def normed(own: Any, x: Any) -> Any:
        """In float32, as Keras normalizes, and everybody else."""
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, -1, keepdims=True)
        variance = jnp.var(x32, -1, keepdims=True)
        scale = jax.lax.rsqrt(variance + _EPSILON) * own["scale"].astype(jnp.float32)
        return (x32 * scale + (own["offset"].astype(jnp.float32) - mean * scale)).astype(x.dtype)

    def attended(own: Any, x: Any) -> Any:
        query, key, value = (
            jnp.einsum("btd,dhs->bths", x, own[name]["kernel"]) + own[name]["bias"]
            for name in ("query", "key", "value")
        )
        heads = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        out = own["attended"]
        return jnp.einsum("bths,hsd->btd", heads, out["kernel"]) + out["bias"]

    x = jnp.take(parameters["words"], batch.x, axis=0) + parameters["positions"]
    for own in parameters["blocks"]:
        x = x + attended(own, normed(own["before_attention"], x))
        y = normed(own["before_dense"], x)
        y = jax.nn.gelu(y @ own["wide"]["kernel"] + own["wide"]["bias"], approximate=False)
        x = x + y @ own["narrow"]["kernel"] + own["narrow"]["bias"]
    logits = normed(parameters["norm"], x) @ parameters["out"]
    return cross_entropy(logits.astype(jnp.float32), batch.y), statistics
