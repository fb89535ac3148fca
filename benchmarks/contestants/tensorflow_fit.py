"""TensorFlow: Keras' `fit` under a `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

from benchmarks.contestants import keras_models, tensorflow_devices
from benchmarks.protocol import Contestant
from benchmarks.workloads import FitWork


def build(work: FitWork) -> Contestant:
    with tensorflow_devices.mirrored_strategy(work).scope():
        model = keras_models.compiled(work.model, work.device)
    return keras_models.KerasFit(model, work, tensorflow_devices.versions())
