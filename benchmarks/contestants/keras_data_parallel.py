"""Keras 3's own data parallelism: `fit` under `keras.distribution.DataParallel` on JAX."""

from __future__ import annotations

import os

import keras

from benchmarks.contestants import XLA_POOL, keras_models
from benchmarks.contestants.keras_on_jax import KerasOnJax
from benchmarks.protocol import Contestant
from benchmarks.workloads import REPLICAS, FitWork

#: The most that XLA takes, whatever its pool.
_STEPS_IN_FLIGHT = 32


def build(work: FitWork) -> Contestant:
    if work.device == "cpu" and work.steps > _STEPS_IN_FLIGHT:
        os.environ.update(XLA_POOL)
    devices = keras.distribution.list_devices(work.device)
    if work.device == "cpu":
        assert len(devices) == REPLICAS, f"Expected {REPLICAS} devices. Received: {devices}"
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return KerasOnJax(keras_models.compiled(work.model, work.device), work, {})
