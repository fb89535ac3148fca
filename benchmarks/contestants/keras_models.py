"""The Keras models, and the round that all Keras contestants share: `fit` of one epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from benchmarks import images
from benchmarks.protocol import Contestant
from benchmarks.workloads import GPT_SIZES, FitWork


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def wide_mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


MODELS = {"mlp": mlp, "wide_mlp": wide_mlp, "cnn": cnn}


def compiled(name: str, device: str = "cpu") -> keras.Model:
    """Returns the model `name`, compiled for training; call it in the strategy's scope."""
    if name == "gpt":
        from benchmarks.networks import gpt  # which needs JAX, which not all of Keras' users have

        if device == "gpu":
            keras.config.set_dtype_policy(gpt.POLICY)
        model = gpt.model(GPT_SIZES[device], keras.initializers.RandomNormal(stddev=0.02))
    else:
        model = MODELS[name]()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class KerasFit(Contestant):
    """A round is one call of `fit`, with all that it does before and after the steps."""

    def __init__(
        self,
        model: keras.Model,
        work: FitWork,
        libraries: dict[str, str],
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ):
        self._model = model
        self._work = work
        self._libraries = libraries
        self._callbacks = callbacks
        self._images, self._labels = images.load(work)
        self._history: dict[str, list[float]] = {}

    @property
    def versions(self) -> dict[str, str]:
        return {"keras": keras.__version__, **self._libraries}

    def round(self) -> float:
        begin = time.perf_counter()
        history = self._model.fit(
            self._images,
            self._labels,
            batch_size=self._work.batch,
            epochs=1,
            verbose=self._work.verbose,
            callbacks=list(self._callbacks),
        )
        seconds = time.perf_counter() - begin
        self._history = history.history
        return self._work.examples / seconds

    def facts(self) -> dict[str, Any]:
        logs = {name: self._history[name][-1] for name in ("loss", "accuracy")}
        return logs | {"state_bytes": _state_bytes(self._model)}


def _state_bytes(model: keras.Model) -> int:
    """Returns the bytes of one copy of the parameters and the optimizer's state."""
    # By shapes: reading a value could make a copy, and the memory is what is measured.
    return sum(
        math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        for variable in (*model.variables, *model.optimizer.variables)
    )
