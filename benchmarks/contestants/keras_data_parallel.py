"""Keras 3's own data parallelism: `fit` under `keras.distribution.DataParallel` on JAX."""

from __future__ import annotations

import os

import keras

from benchmarks.contestants import keras_models
from benchmarks.contestants.keras_on_jax import KerasOnJax
from benchmarks.protocol import Contestant
from benchmarks.workloads import REPLICAS, FitWork

#: XLA gets stuck, and ends the process, if more steps are in flight than it takes and its pool has
#: less than two threads a device.
_STEPS_IN_FLIGHT = 32


def build(work: FitWork) -> Contestant:
    if work.device == "cpu" and work.steps > _STEPS_IN_FLIGHT:
        os.environ["NPROC"] = str(2 * REPLICAS)
    devices = keras.distribution.list_devices(work.device)
    if work.device == "cpu":
        assert len(devices) == REPLICAS, f"Expected {REPLICAS} devices. Received: {devices}"
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return KerasOnJax(keras_models.compiled(work.model, work.device), work, {})
