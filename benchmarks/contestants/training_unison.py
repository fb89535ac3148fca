"""Unison: a loop of one's own, and Keras' `fit`, under a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

import unison
from benchmarks import training_examples
from benchmarks.contestants.training import Training
from benchmarks.contestants.training_keras import Loop, model_of, optimizer
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork
from unison import tf

VERSIONS = {
    "jax": jax.__version__,
    "keras": keras.__version__,
    "unison": unison.__version__,
}


def custom_loop(
    work: TrainingWork,
    make_optimizer: Callable[[], keras.optimizers.Optimizer] = optimizer,
    options: unison.CommunicationOptions | None = None,
) -> Contestant:
    strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
    loop = Loop(tf, strategy, work, make_optimizer)
    batches = batches_on_device(strategy, work)

    def train() -> None:
        for images, labels in batches:
            loss = loop.step(images, labels)
        jax.block_until_ready(strategy.experimental_local_results(loss))

    return Training(work, train, loop.parameters, VERSIONS)


def fit(work: TrainingWork) -> Contestant:
    strategy = unison.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = model_of(work)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss)
    images, labels = training_examples.examples(work)

    def train() -> None:
        model.fit(images, labels, batch_size=work.batch, shuffle=False, verbose=0)

    def parameters() -> list[Any]:
        return [variable.numpy() for variable in model.trainable_variables]

    return Training(work, train, parameters, VERSIONS)


def batches_on_device(strategy: unison.Strategy, work: TrainingWork) -> list[tuple[Any, ...]]:
    """Returns this process's part of every batch, as distributed values."""
    [rank] = strategy.placement.local_replicas
    return [
        tuple(_on_device(strategy, part) for part in batch)
        for batch in training_examples.batches_of(work, rank)
    ]


def _on_device(strategy: unison.Strategy, part: Any) -> Any:
    device_part = jax.device_put(part)
    return strategy.experimental_distribute_values_from_function(lambda context: device_part)
