"""Unison's loop by what `auto_tune` has chosen for it. The tuning itself is not measured."""

from __future__ import annotations

from collections.abc import Callable

import keras

import unison.train
from benchmarks.contestants.training_keras import Loop, optimizer
from benchmarks.contestants.training_unison import batches_on_device, custom_loop
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork
from unison import CommunicationOptions, compression, tf


def build(
    work: TrainingWork, make_optimizer: Callable[[], keras.optimizers.Optimizer] = optimizer
) -> Contestant:
    options = CommunicationOptions(auto_tune=True)
    strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
    loop = Loop(tf, strategy, work, make_optimizer)
    batches = batches_on_device(strategy, work)
    while not strategy.tuning.has_settled:
        for images, labels in batches:
            loop.step(images, labels)
    return custom_loop(work, make_optimizer, strategy.communication_options)


def compressed(work: TrainingWork) -> Contestant:
    """With a compression, which may be switched off."""
    return build(work, lambda: unison.train.with_compression(optimizer(), compression.int8()))
