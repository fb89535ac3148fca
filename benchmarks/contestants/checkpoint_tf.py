"""TensorFlow: its asynchronous checkpoint, beside a step that updates variables in place."""

from __future__ import annotations

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks.contestants.checkpoints import Saving, arrays
from benchmarks.workloads import CheckpointWork


def build(work: CheckpointWork) -> Saving:
    state = [tf.Variable(array) for array in arrays(work)]
    checkpoint = tf.train.Checkpoint(state=state)
    options = tf.train.CheckpointOptions(enable_async=True)

    @tf.function
    def step() -> None:
        for variable in state:
            variable.assign_sub(variable * 1e-4)

    return Saving(
        work,
        "tf",
        step,
        save=lambda path: checkpoint.save(path, options),
        wait=checkpoint.sync,
        versions={"tensorflow": tf.__version__},
    )
