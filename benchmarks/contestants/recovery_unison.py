"""A worker of a job that goes on when one is lost: `... FOLDER WORK loop|fit`."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import keras
import numpy as np

import unison
from benchmarks import training_examples
from benchmarks.contestants.training_keras import Loop, model_of, optimizer
from benchmarks.steps_done import StepLog
from benchmarks.workloads import TrainingWork, from_json
from unison import tf
from unison.data import Dataset
from unison.runtime.elastic.environment import elastic_environment

#: How many different batches there are.
_BATCHES = 40
_EPOCHS = 1_000_000


def main(folder: str, work: str, kind: str) -> None:
    of_work = from_json(json.loads(work))
    environment = elastic_environment()
    if environment is None:
        worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    else:
        worker = environment.slot
    log = StepLog(pathlib.Path(folder), worker, of_work)
    training = TrainingWork("recovery", of_work.model, of_work.workers, of_work.batch, _BATCHES)
    {"loop": _loop, "fit": _fit}[kind](training, log, of_work.megabytes)


def _loop(work: TrainingWork, log: StepLog, megabytes: int) -> None:
    strategy = unison.MultiWorkerMirroredStrategy()
    loop = Loop(tf, strategy, work)
    dataset = Dataset.from_tensor_slices(training_examples.examples(work)).repeat()

    @unison.elastic.run
    def train(state: unison.elastic.State) -> None:
        batches = strategy.experimental_distribute_dataset(dataset.batch(work.batch))
        for images, labels in state.iterate(batches):
            loop.step_uncompiled(images, labels)
            state.step += 1
            state.commit()
            log.done(state.step)

    with strategy.scope():
        further = [unison.Variable(array) for array in _further_state(megabytes)]
    state = unison.elastic.State(
        steps_are_one_program=True,
        step=0,
        model=loop.model,
        optimizer=loop.optimizer,
        further=further,
    )
    train(state)


def _fit(work: TrainingWork, log: StepLog, megabytes: int) -> None:
    strategy = unison.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = model_of(work)
        model.further = [keras.Variable(array) for array in _further_state(megabytes)]
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images, labels = training_examples.examples(work)

    class Log(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # which is there when the step has been done
            log.done(self.epoch * work.steps + batch + 1)

    model.fit(
        images,
        labels,
        batch_size=work.batch,
        epochs=_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Log()],
    )


def _further_state(megabytes: int) -> list[np.ndarray]:
    return [np.ones((2500, 2500), np.float32) for _ in range(megabytes // 25)]


if __name__ == "__main__":
    main(*sys.argv[1:])
