"""A GPT of 12 layers of Keras, with the policy `mixed_bfloat16`; or of another size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from benchmarks.contestants import keras_models
from benchmarks.networks import Batch, cross_entropy
from benchmarks.workloads import GPT_EPSILON, GPT_POLICY, GPT_SIZES, GPTSize

SIZE = GPT_SIZES["gpu"]
EXAMPLES = 8
OPTIMIZER = "adam"
POLICY = GPT_POLICY


def batch(examples: int) -> Batch:
    tokens = jax.ShapeDtypeStruct((examples, SIZE.length), "int32")
    return Batch(tokens, tokens)


def model() -> keras.Model:
    return keras_models.gpt(SIZE, "zeros")


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parameters(size: GPTSize = SIZE) -> Any:
    width, of_head = size.width, size.width // size.heads
    norm = {"scale": (width,), "offset": (width,)}
    into = {"kernel": (width, size.heads, of_head), "bias": (size.heads, of_head)}
    block = {
        "before_attention": norm,
        "query": into,
        "key": into,
        "value": into,
        "attended": {"kernel": (size.heads, of_head, width), "bias": (width,)},
        "before_dense": norm,
        "wide": {"kernel": (width, 4 * width), "bias": (4 * width,)},
        "narrow": {"kernel": (4 * width, width), "bias": (width,)},
    }
    return {
        "words": (size.words, width),
        "positions": (size.length, width),
        "blocks": [block] * size.layers,
        "norm": norm,
        "out": (width, size.words),
    }


def statistics() -> Any:
    return []


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    computed = logits(parameters, batch.x, jnp.bfloat16)
    return cross_entropy(computed.astype(jnp.float32), batch.y), statistics


def _attention(dtype: Any) -> Any:
    """Returns the fastest implementation: cuDNN's, which JAX does not choose by itself."""
    is_cudnn = jax.default_backend() == "gpu" and dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if is_cudnn else None


def logits(parameters: Any, tokens: Any, dtype: Any) -> Any:
    """Returns the logits of each token's successor, computed in a dtype."""
    parameters = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters)

    def normed(own: Any, x: Any) -> Any:
        """In float32, as Keras normalizes, and everybody else."""
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, -1, keepdims=True)
        variance = jnp.var(x32, -1, keepdims=True)
        scale = jax.lax.rsqrt(variance + GPT_EPSILON) * own["scale"].astype(jnp.float32)
        return (x32 * scale + (own["offset"].astype(jnp.float32) - mean * scale)).astype(x.dtype)

    def attended(own: Any, x: Any) -> Any:
        query, key, value = (
            jnp.einsum("btd,dhs->bths", x, own[name]["kernel"]) + own[name]["bias"]
            for name in ("query", "key", "value")
        )
        heads = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=_attention(dtype)
        )
        out = own["attended"]
        return jnp.einsum("bths,hsd->btd", heads, out["kernel"]) + out["bias"]

    x = jnp.take(parameters["words"], tokens, axis=0) + parameters["positions"]
    for own in parameters["blocks"]:
        x = x + attended(own, normed(own["before_attention"], x))
        y = normed(own["before_dense"], x)
        y = jax.nn.gelu(y @ own["wide"]["kernel"] + own["wide"]["bias"], approximate=False)
        x = x + y @ own["narrow"]["kernel"] + own["narrow"]["bias"]
    return normed(parameters["norm"], x) @ parameters["out"]
