"""Trains one Keras model twice, without a strategy and under one, and compares what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import unison
from unison.runtime.devices import prepare_backend

# Training without a strategy may come first, and would start the backend with one device.
prepare_backend()

#: Several replicas add the same numbers in another order than one device, so each sum differs by
#: a few units in the last place of float32 (1.2e-7), and training for some steps multiplies that.
ROUND_OFF = {"rtol": 2e-4, "atol": 2e-5}

#: For facts that 2 replicas would only repeat: of 4, a batch of 3 leaves one idle.
on_four_replicas = pytest.mark.parametrize("strategy", [4], indirect=True, ids=["4-replicas"])

Weights = list[np.ndarray]


@dataclasses.dataclass
class Outcome:
    """What a training left behind.

    Attributes:
        result: What the training returned.
        weights: All weights of the model.
        optimizer: All variables of its optimizer.
    """

    result: Any
    weights: Weights
    optimizer: Weights


def mirrored(replicas: int) -> unison.MirroredStrategy:
    return unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def run_training(build: Callable[[], keras.Model], train: Callable[[keras.Model], Any]) -> Outcome:
    """Builds a model from seed 0 and trains it; a `History` becomes its dictionary."""
    keras.utils.set_random_seed(0)
    model = build()
    result = train(model)
    if isinstance(result, keras.callbacks.History):
        result = result.history
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return Outcome(result, model.get_weights(), [variable.numpy() for variable in optimizer])


def run_training_under(
    strategy: unison.Strategy,
    build: Callable[[], keras.Model],
    train: Callable[[keras.Model], Any],
) -> Outcome:
    """The same, with the model built in the scope of `strategy` and trained outside it."""

    def build_in_scope() -> keras.Model:
        with strategy.scope():
            return build()

    return run_training(build_in_scope, train)


def assert_same_outcome(together: Outcome, alone: Outcome) -> None:
    """The histories, the weights and the optimizer's variables agree to round-off."""
    assert_close(together.result, alone.result, "result")
    assert_close(together.weights, alone.weights, "weights")
    assert_close(together.optimizer, alone.optimizer, "optimizer")


def assert_close(
    received: Any, expected: Any, where: str = "value", round_off: dict[str, float] = ROUND_OFF
) -> None:
    """Two trees of arrays have one structure, and agree to round-off."""
    if isinstance(expected, dict):
        assert set(received) == set(expected), where
        for name, value in expected.items():
            assert_close(received[name], value, f"{where}[{name!r}]", round_off)
    elif isinstance(expected, list | tuple):
        assert len(received) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(received[index], value, f"{where}[{index}]", round_off)
    else:
        np.testing.assert_allclose(received, expected, **round_off, err_msg=where)


def regression_data(
    examples: int, features: int = 6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, and targets that depend on them."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(examples, features)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True)) + 0.1 * generator.normal(size=(examples, 1))
    return x, y.astype("float32")


def class_data(
    examples: int, features: int = 6, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, and integer labels that depend on them."""
    x, _ = regression_data(examples, features, seed)
    directions = np.random.default_rng(seed + 1).normal(size=(features, classes))
    return x, (x @ directions).argmax(axis=1).astype("int32")
