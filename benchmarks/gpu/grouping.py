"""How large a step must be for `fit` to run steps one by one: the threshold of grouped steps.

Launching a step costs the host some time, which small steps do not hide. `fit` therefore runs small
steps in groups, as one program; the check measures steps of several sizes both ways.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import jax
import keras
import numpy as np

import unison
from benchmarks.gpu.findings import Finding, Note, Row, Setting, Wrong
from unison.keras import step
from unison.keras.grouping import Trial
from unison.runtime.devices import prepare_backend

#: The widths of the layers of a network, and the batch: 6 * batch * parameters operations a step.
_WIDTHS = ((64, 64), (256, 256), (512, 1024), (1024, 2048), (2048, 4096), (4096, 4096))
_WIDTHS_ON_CPU = ((16, 32), (64, 64))
_LAYERS = 3
_CLASSES = 10

_GROUP = 16

#: A gain that is worth a group.
_WORTH = 1.05


def threshold(setting: Setting) -> Iterator[Finding]:
    """Trains networks of several sizes, their steps one by one and in groups."""
    prepare_backend()
    strategy = unison.MirroredStrategy()
    if not setting.on_gpus:
        strategy.placement.is_host = False  # the way of accelerators, to show that it works
    ends = time.monotonic() + 0.8 * setting.seconds
    worth: list[float] = []
    for width, batch in _WIDTHS if setting.on_gpus else _WIDTHS_ON_CPU:
        if time.monotonic() > ends:
            yield Note(f"Grouping: no time for layers of {width}.")
            break
        operations = 6.0 * batch * (_LAYERS * width * width + width * _CLASSES)
        steps = 320 if setting.on_gpus else 2 * _GROUP
        training = _Training(strategy, width, batch, steps)
        alone, in_groups = training.in_groups_of(1), training.in_groups_of(_GROUP)
        as_measured, chosen = training.as_measured()
        gain = alone / in_groups
        yield Row(
            "Grouping: microseconds a step of `fit`",
            {
                "": f"{_LAYERS} layers of {width}, batch {batch}",
                "operations of a replica": operations / strategy.num_replicas_in_sync,
                "one by one": 1e6 * alone,
                f"groups of {_GROUP}": 1e6 * in_groups,
                "gain": gain,
                "fit chooses groups of": chosen,
                "as fit chooses": 1e6 * as_measured,
            },
        )
        if gain > _WORTH:
            worth.append(operations / strategy.num_replicas_in_sync)
        if not np.isfinite(gain):
            yield Wrong(f"Layers of {width}: the time of a step is not a number.")
    if worth:
        yield Note(f"Groups are worth it up to {max(worth):.1e} operations of a replica a step.")
    else:
        yield Note("Groups were worth it at no size.")


class _Training:
    """The training of a network, timed.

    Args:
        strategy: Whose replicas train it.
        width: The width of its layers.
        batch: The examples of a step.
        steps: The steps that are timed.
    """

    def __init__(self, strategy: unison.Strategy, width: int, batch: int, steps: int):
        self._strategy = strategy
        self._width = width
        self._steps = steps
        generator = np.random.default_rng(0)
        images = generator.random((batch, width), np.float32)
        labels = generator.integers(0, _CLASSES, batch, dtype=np.int32)
        # On the devices: what is measured is the launch of steps, not the copies of their batches.
        self._batch = tuple(strategy.placement.divide([images, labels]))

    def in_groups_of(self, size: int) -> float:
        """Returns the seconds of a step in groups of a size."""
        with (
            mock.patch.object(step, "group_size_of", return_value=size),
            mock.patch.object(step, "is_measured", return_value=False),
        ):
            return self._seconds_a_step()

    def as_measured(self) -> tuple[float, int]:
        """Returns the seconds of a step as `fit` runs them, and the size of its groups."""
        sizes = [1]
        group_size, pays_off = Trial.group_size, Trial.pays_off

        def noted_size(trial: Trial) -> int:
            sizes.append(group_size(trial))
            return sizes[-1]

        def noted_choice(trial: Trial, size: int) -> bool:
            is_kept = pays_off(trial, size)
            sizes.append(size if is_kept else 1)
            return is_kept

        with (
            mock.patch.object(Trial, "group_size", noted_size),
            mock.patch.object(Trial, "pays_off", noted_choice),
        ):
            return self._seconds_a_step(), sizes[-1]

    def _seconds_a_step(self) -> float:
        with self._strategy.scope():
            width = self._width
            layers = [keras.layers.Dense(width, activation="relu") for _ in range(_LAYERS)]
            model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(_CLASSES)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(1e-3), loss)
        model.fit(self._batches(), verbose=0)  # compiles
        begin = time.perf_counter()
        model.fit(self._batches(), verbose=0)
        return (time.perf_counter() - begin) / self._steps

    def _batches(self) -> Iterator[tuple[jax.Array, ...]]:
        for _ in range(self._steps):
            yield self._batch
