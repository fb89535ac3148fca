"""The features that are tested, and the program that each is part of.

A feature is a generator. It builds its models up to its `yield`, in the first scope of a program,
by whatever brings Keras there, and trains them behind it, when that scope is closed. What it
returns is the same on one device without a strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Generator, Iterable
from types import ModuleType
from typing import Any

import numpy as np

import unison

#: The devices that a program needs.
DEVICES = 3
EXAMPLES, BATCH = 16, 8
#: Of so many examples, the last batch has 5: 3 on a replica, 2 on the other.
UNEVEN = 13

_numbers = np.random.default_rng(5)
X = _numbers.normal(size=(EXAMPLES, 6)).astype("float32")
Y = np.sin(X.sum(axis=1, keepdims=True)).astype("float32")
CLASSES = (X @ _numbers.normal(size=(6, 3))).argmax(axis=1).astype("int32")
WEIGHTS = np.linspace(0.2, 2.0, EXAMPLES, dtype="float32")
FIT = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that a feature is part of.

    Attributes:
        keras: Keras, as it comes to the program.
        folder: A folder for the feature's files.
        face: `unison.tf` in a program of that form, otherwise `unison`.
        strategy: The strategy of the program's scopes. None: it has none, and one device.
        other: Another strategy, for what is loaded under another one.
    """

    keras: ModuleType
    folder: pathlib.Path
    face: ModuleType = unison
    strategy: Any = None
    other: Any = None

    @property
    def is_tensorflows(self) -> bool:
        """Whether it is written for TensorFlow."""
        return self.face is not unison

    def scope(self, strategy: Any = None) -> contextlib.AbstractContextManager[Any]:
        """A scope of the program's strategy, or of another one."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return (strategy or self.strategy).scope()

    def dense(self, *hidden: Any, outputs: int = 1) -> Any:
        """A small model."""
        layers = self.keras.layers
        return self.keras.Sequential(
            [
                self.keras.Input((6,)),
                layers.Dense(4, activation="tanh"),
                *hidden,
                layers.Dense(outputs),
            ]
        )

    def compiled(self, *hidden: Any, **arguments: Any) -> Any:
        """A small model, compiled."""
        model = self.dense(*hidden)
        model.compile(self.keras.optimizers.Adam(0.05), "mse", **arguments)
        return model


Feature = Callable[[Program], Generator[None, None, Any]]
FEATURES: dict[str, Feature] = {}


def feature(function: Feature) -> Feature:
    """Adds a feature to those that are tested."""
    FEATURES[function.__name__] = function
    return function


def state_of(model: Any) -> dict[str, Any]:
    """The weights of a model and the variables of its optimizer."""
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "optimizer": [np.asarray(variable).tolist() for variable in model.optimizer.variables],
    }


def as_numbers(names: Iterable[str]) -> list[list[int]]:
    """Names as numbers, which are compared as the other results are."""
    return [[*name.encode()] for name in sorted(names)]


def history_of(history: Any) -> dict[str, list[float]]:
    return {name: [float(value) for value in values] for name, values in history.history.items()}


def fitted(model: Any, *data: Any, **arguments: Any) -> dict[str, Any]:
    """Trains a model; returns the history and the state."""
    history = model.fit(*(data or (X, Y)), **{**FIT, **arguments})
    return {"history": history_of(history), **state_of(model)}
