"""TensorFlow: a loop of one's own under a `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks import cluster, training_examples
from benchmarks.contestants.training import Training
from benchmarks.contestants.training_keras import Loop
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork


def build(work: TrainingWork) -> Contestant:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # A collective takes one; with a single thread nothing would run beside it.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    loop = Loop(tf, tf.distribute.MultiWorkerMirroredStrategy(), work)
    rank = cluster.from_environment().rank
    batches = [
        (tf.constant(images), tf.constant(labels))
        for images, labels in training_examples.batches_of(work, rank)
    ]

    def train() -> None:
        for images, labels in batches:
            loss = loop.step(images, labels)
        loss.numpy()

    return Training(work, train, loop.parameters, {"tensorflow": tf.__version__})
