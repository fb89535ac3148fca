"""A worker under TensorFlow's `MultiWorkerMirroredStrategy`: `... FOLDER WORK`.

It goes on from the latest checkpoint, as TensorFlow's tutorials on fault tolerance show it for a
loop of one's own: what `BackupAndRestore(save_freq=10)` does for `fit`.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks import cluster, training_examples
from benchmarks.contestants.training_keras import Loop
from benchmarks.steps_done import StepLog
from benchmarks.workloads import TrainingWork, from_json

#: How many different batches there are.
_BATCHES = 40


def main(folder: str, work: str) -> None:
    of_work = from_json(json.loads(work))
    rank = cluster.from_environment().rank
    log = StepLog(pathlib.Path(folder), rank, of_work)
    training = TrainingWork("recovery", of_work.model, of_work.workers, of_work.batch, _BATCHES)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # A collective takes one; with a single thread nothing would run beside it.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    loop = Loop(tf, strategy, training)
    batches = [
        (tf.constant(images), tf.constant(labels))
        for images, labels in training_examples.batches_of(training, rank)
    ]
    done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer, done=done)
    kept = os.path.join(folder, "checkpoint")
    # All save, as TensorFlow asks for, and one where it is looked for.
    own = kept if rank == 0 else os.path.join(folder, f"checkpoint-{rank}")
    manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=1)
    checkpoint.restore(tf.train.latest_checkpoint(kept))
    for step in itertools.count(int(done) + 1):
        loop.step(*batches[step % _BATCHES]).numpy()
        log.done(step)
        if step % of_work.checkpoint_every == 0:
            done.assign(step)
            manager.save(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
