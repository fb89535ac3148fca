"""The programs of the checks of jobs: `python -m benchmarks.gpu.training PROGRAM FOLDER`.

- `job` trains with backups, or without (`--no-backup`), and writes down the steps that it has done;
  started again, it resumes.
- `save` trains, saves a checkpoint in each format, and trains on; `restore` reads each, and trains
  on.
- `repeat` trains twice as long as it needs to be timed, and tells the bits of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import unison
from benchmarks.gpu.jobs import EPOCHS, STEPS, formats
from benchmarks.machine import expect_device
from unison import train
from unison.storage.atomic import replacing

#: Steps before the checkpoint of `save`, and behind it.
_SAVED_STEPS = 10

_BATCH = 24
_WIDTH, _WORDS, _CLASSES = 32, 50, 10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=("job", "save", "restore", "repeat"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds behind each step of job")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="the epochs of job")
    parser.add_argument("--no-backup", action="store_true", help="without files of the job's state")
    parser.add_argument("--steps", type=int, default=100, help="the steps of repeat")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time")
    options = parser.parse_args(arguments)
    if options.deterministic:
        unison.enable_op_determinism()
    keras.utils.set_random_seed(1)
    strategy = _strategy()
    expect_device(options.device)
    {"job": _job, "save": _save, "restore": _restore, "repeat": _repeat}[options.program](
        strategy, options
    )


def _strategy() -> unison.Strategy:
    is_one_of_several = "TF_CONFIG" in os.environ
    return unison.MultiWorkerMirroredStrategy() if is_one_of_several else unison.MirroredStrategy()


def _model(strategy: unison.Strategy) -> keras.Model:
    """Returns a model with what GPUs may sum in any order: an embedding, a convolution."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((_WIDTH,), dtype="int32"),
                keras.layers.Embedding(_WORDS, 16),
                keras.layers.Conv1D(16, 3, activation="relu"),
                keras.layers.MaxPooling1D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(_CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss)
        model.optimizer.build(model.trainable_variables)  # so that `restore` has all at once
    return model


def _examples(steps: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    words = generator.integers(0, _WORDS, (steps * _BATCH, _WIDTH), dtype=np.int32)
    return words, (words.sum(axis=1) % _CLASSES).astype(np.int32)


def _fit(model: keras.Model, steps: int, **options: Any) -> None:
    words, labels = _examples(steps)
    model.fit(words, labels, batch_size=_BATCH, shuffle=False, verbose=0, **options)


def _job(strategy: unison.Strategy, options: argparse.Namespace) -> None:
    rank = strategy.cluster_resolver.task_id if "TF_CONFIG" in os.environ else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    log = open(options.folder / f"steps-{rank}", "a", buffering=1)  # noqa: SIM115 -- until the end
    log.write(f"process {os.getpid()}\n")

    class Log(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # which is there when the step has been done
            log.write(f"step {self.epoch * STEPS + batch + 1} {time.time():.3f}\n")
            time.sleep(options.pause)

    callbacks: list[keras.callbacks.Callback] = [Log()]
    if not options.no_backup:
        backup = keras.callbacks.BackupAndRestore(
            str(options.folder / "backup"), save_freq=5, delete_checkpoint=False
        )
        callbacks.insert(0, backup)
    model = _model(strategy)
    _fit(model, STEPS, epochs=options.epochs, callbacks=callbacks)
    if rank == 0:
        _write_weights(model, options.folder / "trained.npz")
    log.write("end\n")


def _save(strategy: unison.Strategy, options: argparse.Namespace) -> None:
    model = _model(strategy)
    _fit(model, _SAVED_STEPS)
    for name in formats():
        checkpoint = train.Checkpoint(model=model, optimizer=model.optimizer, format=name)
        checkpoint.write(str(options.folder / f"checkpoint-{name}"))
    _write_weights(model, options.folder / "saved.npz")
    keras.utils.set_random_seed(2)
    _fit(model, _SAVED_STEPS)
    _write_weights(model, options.folder / "straight.npz")


def _restore(strategy: unison.Strategy, options: argparse.Namespace) -> None:
    model = _model(strategy)
    checkpoint = train.Checkpoint(model=model, optimizer=model.optimizer)
    for name in formats():
        for variable in (*model.weights, *model.optimizer.variables):
            variable.assign(np.zeros(variable.shape, variable.dtype))
        checkpoint.read(str(options.folder / f"checkpoint-{name}")).assert_consumed()
        _write_weights(model, options.folder / f"restored-{name}.npz")
    keras.utils.set_random_seed(2)
    _fit(model, _SAVED_STEPS)
    _write_weights(model, options.folder / "continued.npz")


def _repeat(strategy: unison.Strategy, options: argparse.Namespace) -> None:
    model = _model(strategy)
    begin = time.perf_counter()
    _fit(model, options.steps)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    _fit(model, options.steps)
    seconds = time.perf_counter() - begin
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(np.ascontiguousarray(weight).tobytes())
    told = {
        "steps/s": options.steps / seconds,
        "compiling s": max(0.0, first - seconds),
        "bits": digest.hexdigest()[:16],
    }
    with replacing(str(options.folder / "told.json")) as file:
        file.write(json.dumps(told).encode())


def _write_weights(model: keras.Model, path: pathlib.Path) -> None:
    """Writes the weights and the optimizer's variables."""
    values = [np.asarray(variable.numpy()) for variable in model.weights]
    values += [np.asarray(variable.numpy()) for variable in model.optimizer.variables]
    with replacing(str(path)) as file:
        np.savez(file, *values)


if __name__ == "__main__":
    main()
