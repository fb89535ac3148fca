"""The Keras side of `unison demo`. Importing it imports Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import numpy as np

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.cli.demo_data import Images
from unison.strategies import Strategy

import keras  # isort: skip

_DROPOUT = 0.2
_SEED = 0
#: The maximum number of batches per epoch, and the number of epochs, of the comparison with one
#: device.
_COMPARED_STEPS = 200
_COMPARED_EPOCHS = 2
_EVALUATION_BATCH = 1000


@dataclasses.dataclass(frozen=True)
class Training:
    """The results of training.

    Attributes:
        images_per_second: The rate in the timed epochs.
        timed: A description of these epochs.
        training_accuracy: The accuracy of the trained model, without dropout, on all training
            images.
        test_accuracy: The accuracy on all test images.
    """

    images_per_second: float
    timed: str
    training_accuracy: float
    test_accuracy: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest absolute differences to the same training on one device.

    Attributes:
        steps: The number of steps after which they were measured.
        weight: The difference of any weight.
        loss: The difference of any epoch's loss.
    """

    steps: int
    weight: float
    loss: float


def train(strategy: Strategy, images: Images, batch: int, epochs: int) -> Training:
    """Trains the network with dropout on all replicas, showing Keras' progress bar."""
    with strategy.scope():
        model = _build(_DROPOUT)
    stopwatch = _Stopwatch()
    model.fit(
        images.x_train, images.y_train, batch_size=batch, epochs=epochs, callbacks=[stopwatch]
    )
    timed_epochs = max(epochs - 1, 1)
    return Training(
        images_per_second=timed_epochs * len(images.x_train) / stopwatch.seconds,
        timed="after the first epoch" if epochs > 1 else "compiling included",
        training_accuracy=_accuracy(model, images.x_train, images.y_train),
        test_accuracy=_accuracy(model, images.x_test, images.y_test),
    )


def compare_with_one_device(strategy: Strategy, images: Images, batch: int) -> Difference:
    """Trains the network without dropout for some steps, on all replicas and with Keras alone."""
    count = min(len(images.x_train), _COMPARED_STEPS * batch)
    losses, weights = [], []
    for scope in (strategy.scope(), contextlib.nullcontext()):
        with scope:
            model = _build(dropout=0)
        history = model.fit(
            images.x_train[:count],
            images.y_train[:count],
            batch_size=batch,
            epochs=_COMPARED_EPOCHS,
            shuffle=False,
            verbose=0,
        )
        losses.append(history.history["loss"])
        weights.append(model.get_weights())
    return Difference(
        steps=_COMPARED_EPOCHS * -(-count // batch),
        weight=max(_largest_difference(*pair) for pair in zip(*weights, strict=True)),
        loss=_largest_difference(*losses),
    )


def _build(dropout: float) -> keras.Model:
    """Returns the compiled network; its initial weights are always the same."""
    keras.utils.set_random_seed(_SEED)
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def _accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    _, accuracy = model.evaluate(images, labels, batch_size=_EVALUATION_BATCH, verbose=0)
    return accuracy


def _largest_difference(one: Any, other: Any) -> float:
    return float(np.max(np.abs(np.asarray(one) - np.asarray(other))))


class _Stopwatch(keras.callbacks.Callback):
    """Times the epochs after the first one, which includes compilation, if there are more."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = 0.0
        self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch <= 1:
            self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._begin
