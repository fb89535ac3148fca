"""Unison: Keras' `fit` under a `MirroredStrategy`."""

from __future__ import annotations

import unison
from benchmarks.contestants import keras_models
from benchmarks.contestants.keras_on_jax import KerasOnJax
from benchmarks.protocol import Contestant
from benchmarks.workloads import REPLICAS, FitWork


def build(work: FitWork) -> Contestant:
    unison.set_logical_cpu_devices(REPLICAS)
    strategy = unison.MirroredStrategy()
    with strategy.scope():
        model = keras_models.compiled(work.model)
    return KerasOnJax(model, work, {"unison": unison.__version__})
