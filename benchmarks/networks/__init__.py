"""Networks that people train, in Keras and by hand in plain JAX, for the same mathematics."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

#: The modules of this package that have one.
NAMES = ("mlp", "resnet50", "gpt", "lstm", "recommender")


class Batch(NamedTuple):
    """Examples without values.

    Attributes:
        x: The inputs: a `jax.ShapeDtypeStruct`.
        y: The targets, likewise.
    """

    x: Any
    y: Any


class Network(Protocol):
    """A module with a network.

    Attributes:
        EXAMPLES: The examples of each replica.
        OPTIMIZER: A key of `benchmarks.by_hand.OPTIMIZERS`.
        POLICY: The dtype policy of Keras' layers.
    """

    EXAMPLES: int
    OPTIMIZER: str
    POLICY: str

    def batch(self, examples: int) -> Batch:
        """Returns a batch of so many examples."""

    def model(self) -> Any:
        """Returns the Keras model, not compiled."""

    def loss(self) -> Any:
        """Returns the loss for Keras' `compile`."""

    def parameters(self) -> Any:
        """Returns the shapes of the float32 weights that are trained, as a pytree."""

    def statistics(self) -> Any:
        """Returns the shapes of those that are not: moving averages."""

    def forward(self, parameters: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
        """Returns the loss of each example, or of each token, and the new statistics."""


def network(name: str) -> Network:
    """Returns the network with a name of `NAMES`."""
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Returns the loss of each example, or token, with integer labels, as Keras computes it."""
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1)
