"""Unison: Keras' `fit` under a `MirroredStrategy`."""

from __future__ import annotations

import unison
from benchmarks.contestants import keras_models
from benchmarks.contestants.keras_on_jax import KerasOnJax
from benchmarks.contestants.unison_devices import mirrored_strategy
from benchmarks.protocol import Contestant
from benchmarks.workloads import FitWork


def build(work: FitWork) -> Contestant:
    with mirrored_strategy(work).scope():
        model = keras_models.compiled(work.model, work.device)
    return KerasOnJax(model, work, {"unison": unison.__version__})
