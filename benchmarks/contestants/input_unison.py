"""Unison: a CNN that is trained from a dataset, and in turn from one batch that is there already.

Both are measured in one process, because the difference is smaller than that of two processes.
"""

from __future__ import annotations

import abc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

import unison
from benchmarks import examples
from benchmarks.contestants import keras_models
from benchmarks.protocol import Contestant
from benchmarks.workloads import InputWork
from unison.data import AUTOTUNE, Dataset

_EXAMPLES = 60_000

#: How often a round trains with input and without.
_PAIRS = 3


def build(work: InputWork) -> Contestant:
    if work.device == "cpu":
        unison.set_logical_cpu_devices(work.replicas)
    return {"fit": _Fit, "run": _Loop}[work.way](work)


class _Times(NamedTuple):
    """Seconds: those of the clock, and those of all threads together."""

    wall: float
    cpu: float


class _Input(Contestant):
    """A round trains from the dataset and without it in turn; it tells what the input adds."""

    def __init__(self, work: InputWork):
        self._work = work
        self._strategy = unison.MirroredStrategy()
        images = Dataset.from_tensor_slices(examples.images(_EXAMPLES))
        batches = images.shuffle(_EXAMPLES).batch(work.batch, drop_remainder=True)
        batches = batches.map(_as_floats)
        self._dataset = (batches.prefetch(AUTOTUNE) if work.prefetches else batches).repeat()
        self._pairs: list[tuple[_Times, _Times]] = []

    @property
    def versions(self) -> dict[str, str]:
        versions = {"jax": jax.__version__, "keras": keras.__version__}
        return {"unison": unison.__version__, **versions}

    def round(self) -> float:
        if len(self._pairs) == _PAIRS:  # this was to warm up
            self._pairs.clear()
        for index in range(_PAIRS):
            if index % 2:
                without, with_input = _timed(self._without_input), _timed(self._with_input)
            else:
                with_input, without = _timed(self._with_input), _timed(self._without_input)
            self._pairs.append((with_input, without))
        latest = [with_input.wall for with_input, _ in self._pairs[-_PAIRS:]]
        return statistics.median(latest) / self._work.steps * 1e6

    def facts(self) -> dict[str, Any]:
        """The medians of all rounds up to now."""
        without = statistics.median(without.wall for _, without in self._pairs)
        added = [_added_percent(*pair) for pair in self._pairs]
        return {
            "without": without / self._work.steps * 1e6,
            "added %": statistics.median(times.wall for times in added),
            "added CPU %": statistics.median(times.cpu for times in added),
        }

    @abc.abstractmethod
    def _with_input(self) -> None:
        """Trains from the dataset."""

    @abc.abstractmethod
    def _without_input(self) -> None:
        """Trains from the batch that is there."""


class _Fit(_Input):
    """Keras' `fit`. Without input, it takes the same batch from the host's memory every time."""

    def __init__(self, work: InputWork):
        super().__init__(work)
        with self._strategy.scope():
            self._model = keras_models.compiled("cnn")
        self._batch = next(iter(self._dataset))

    def _with_input(self) -> None:
        self._fit(self._dataset)

    def _without_input(self) -> None:
        self._fit(batch for batch in itertools.repeat(self._batch))  # Keras asks for one

    def _fit(self, batches: Iterable[Any]) -> None:
        self._model.fit(batches, steps_per_epoch=self._work.steps, shuffle=False, verbose=0)


class _Loop(_Input):
    """A loop around `strategy.run`. Without input, the batch is on the devices."""

    def __init__(self, work: InputWork):
        super().__init__(work)
        with self._strategy.scope():
            self._model = keras_models.cnn()
            self._optimizer = keras.optimizers.Adam(1e-3)
            self._optimizer.build(self._model.trainable_variables)
        self._batches = iter(self._strategy.experimental_distribute_dataset(self._dataset))
        self._resident = next(self._batches)

    def _with_input(self) -> None:
        self._train(self._batches)

    def _without_input(self) -> None:
        self._train(itertools.repeat(self._resident))

    def _train(self, batches: Iterable[Any]) -> None:
        for batch in itertools.islice(batches, self._work.steps):
            losses = self._strategy.run(self._step, args=(batch,))
        jax.block_until_ready(self._strategy.experimental_local_results(losses))

    def _step(self, batch: tuple[Any, Any]) -> Any:
        images, labels = batch
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def mean_loss(trainable: list[Any]) -> Any:
            logits, _ = self._model.stateless_call(trainable, [], images, training=True)
            # The optimizer sums the gradients of the replicas.
            return loss_of(labels, logits) / self._work.batch

        trainable = [variable.value for variable in self._model.trainable_variables]
        loss, gradients = jax.value_and_grad(mean_loss)(trainable)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss


def _timed(train: Callable[[], None]) -> _Times:
    wall, cpu = time.perf_counter(), time.process_time()
    train()
    return _Times(time.perf_counter() - wall, time.process_time() - cpu)


def _added_percent(with_input: _Times, without: _Times) -> _Times:
    wall, cpu = with_input.wall / without.wall, with_input.cpu / without.cpu
    return _Times(100 * (wall - 1), 100 * (cpu - 1))


def _as_floats(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pixels = images.astype(np.float32) * np.float32(1 / 255)
    return pixels[..., np.newaxis], labels.astype(np.int32)
