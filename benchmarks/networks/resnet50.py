"""ResNet-50 for ImageNet, as in `keras.applications`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax

from benchmarks.networks import Batch, cross_entropy

EXAMPLES = 32
OPTIMIZER = "momentum"
POLICY = "float32"

_SIZE, _CLASSES = 224, 1000
_EPSILON, _MOMENTUM = 1.001e-5, 0.99
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


class _Block(NamedTuple):
    name: str
    filters: int
    stride: int
    is_first: bool


def _blocks() -> Iterator[_Block]:
    for stage, (filters, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for place in range(count):
            stride = 2 if place == 0 and stage > 0 else 1
            yield _Block(f"{stage}.{place}", filters, stride, place == 0)


def batch(examples: int) -> Batch:
    return Batch(
        jax.ShapeDtypeStruct((examples, _SIZE, _SIZE, 3), "float32"),
        jax.ShapeDtypeStruct((examples,), "int32"),
    )


def model() -> keras.Model:
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _convolutions() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"stem": (7, 7, 3, 64)}
    channels = 64
    for block in _blocks():
        if block.is_first:
            shapes[f"{block.name}.0"] = (1, 1, channels, 4 * block.filters)
        shapes[f"{block.name}.1"] = (1, 1, channels, block.filters)
        shapes[f"{block.name}.2"] = (3, 3, block.filters, block.filters)
        shapes[f"{block.name}.3"] = (1, 1, block.filters, 4 * block.filters)
        channels = 4 * block.filters
    return shapes


def parameters() -> Any:
    shapes: dict[str, Any] = {
        name: {
            "kernel": kernel,
            "bias": kernel[-1:],
            "scale": kernel[-1:],
            "offset": kernel[-1:],
        }
        for name, kernel in _convolutions().items()
    }
    return shapes | {"out": {"kernel": (2048, _CLASSES), "bias": (_CLASSES,)}}


def statistics() -> Any:
    return {
        name: {"mean": kernel[-1:], "variance": kernel[-1:]}
        for name, kernel in _convolutions().items()
    }


def forward(parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    new = {}

    def convolved(x: Any, name: str, stride: int = 1) -> Any:
        """A convolution, and the batch normalization behind it."""
        own, old = parameters[name], statistics[name]
        strides = (stride, stride)
        x = lax.conv_general_dilated(
            x, own["kernel"], strides, "SAME" if name != "stem" else "VALID",
            dimension_numbers=_DIMENSIONS,
        ) + own["bias"]  # fmt: skip
        mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        new[name] = {
            "mean": _MOMENTUM * old["mean"] + (1 - _MOMENTUM) * mean,
            "variance": _MOMENTUM * old["variance"] + (1 - _MOMENTUM) * variance,
        }
        scale = lax.rsqrt(variance + _EPSILON) * own["scale"]
        return x * scale + (own["offset"] - mean * scale)

    x = jnp.pad(batch.x, ((0, 0), (3, 3), (3, 3), (0, 0)))
    x = jax.nn.relu(convolved(x, "stem", 2))
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
    for name, _, stride, is_first in _blocks():
        shortcut = convolved(x, f"{name}.0", stride) if is_first else x
        x = jax.nn.relu(convolved(x, f"{name}.1", stride))
        x = jax.nn.relu(convolved(x, f"{name}.2"))
        x = jax.nn.relu(shortcut + convolved(x, f"{name}.3"))
    out = parameters["out"]
    logits = jnp.mean(x, (1, 2)) @ out["kernel"] + out["bias"]
    return cross_entropy(logits, batch.y), new
