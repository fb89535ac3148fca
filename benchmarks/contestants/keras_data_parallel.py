"""Keras 3's own data parallelism: `fit` under `keras.distribution.DataParallel` on JAX."""

from __future__ import annotations

import keras

from benchmarks.contestants import keras_models
from benchmarks.contestants.keras_on_jax import KerasOnJax
from benchmarks.protocol import Contestant
from benchmarks.workloads import REPLICAS, FitWork


def build(work: FitWork) -> Contestant:
    devices = keras.distribution.list_devices(work.device)
    if work.device == "cpu":
        assert len(devices) == REPLICAS, f"Expected {REPLICAS} devices. Received: {devices}"
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return KerasOnJax(keras_models.compiled(work.model, work.device), work, {})
