"""Unison: `fit` under a `MultiWorkerMirroredStrategy`, with a function of each image."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import unison
from benchmarks import jpegs
from benchmarks.contestants.training_unison import VERSIONS
from benchmarks.protocol import Contestant
from benchmarks.workloads import ImageInputWork
from unison.data import Dataset


def build(work: ImageInputWork) -> Contestant:
    strategy = unison.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((jpegs.CROP, jpegs.CROP, 3)),
                keras.layers.Cropping2D(jpegs.BORDER),
                keras.layers.Flatten(),
                keras.layers.Dense(jpegs.CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(jpegs.RATE), loss)
    files, labels = jpegs.files_of(work)
    generator = np.random.default_rng()

    def decode(file: bytes, label: Any) -> Any:
        return jpegs.decoded(file, generator), label

    examples = Dataset.from_tensor_slices((np.array(files, object), labels))
    batches = examples.shuffle(work.images).map(decode).batch(work.batch)
    return jpegs.ImageTraining(work, lambda: model.fit(batches, verbose=0), VERSIONS)
