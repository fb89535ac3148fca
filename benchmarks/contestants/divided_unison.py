"""Unison: `fit` under a `ModelParallelStrategy` that divides the state over the processes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras

import unison
from benchmarks.contestants import keras_models
from benchmarks.contestants.divided import EPSILON, RATE, DividedTraining, tokens
from benchmarks.contestants.live_arrays import bytes_on_fullest_device
from benchmarks.contestants.training_unison import VERSIONS
from benchmarks.networks import gpt
from benchmarks.protocol import Contestant
from benchmarks.workloads import DividedWork


def zero3(work: DividedWork) -> Contestant:
    """Parameters, gradients and slots are divided."""
    return _contestant(work, 3)


def zero2(work: DividedWork) -> Contestant:
    """Gradients and slots are divided."""
    return _contestant(work, 2)


def _contestant(work: DividedWork, zero: int) -> Contestant:
    return DividedTraining(work, functools.partial(_build, zero=zero), VERSIONS)


def _build(work: DividedWork, zero: int) -> tuple[Callable[[], float], Callable[[], int]]:
    strategy = unison.ModelParallelStrategy(mesh={}, zero=zero)
    with strategy.scope():
        model = keras_models.gpt(work.size, keras.initializers.RandomNormal(stddev=0.02))
        model.compile(keras.optimizers.Adam(RATE, epsilon=EPSILON), gpt.loss())
    inputs, labels = tokens(work)

    def train() -> float:
        history = model.fit(inputs, labels, batch_size=work.batch, shuffle=False, verbose=0)
        return float(history.history["loss"][-1])

    return train, bytes_on_fullest_device
