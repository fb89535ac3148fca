"""How large a step must be for `fit` to run steps one by one: the threshold of grouped steps.

Launching a step costs the host some time, which small steps do not hide. `fit` therefore runs small
steps in groups, as one program; the check measures steps of several sizes both ways.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import keras
import numpy as np

import unison
from benchmarks.gpu.findings import Finding, Note, Row, Setting, Wrong
from unison.keras import step
from unison.keras.grouping import group_size_of
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
    ends = time.monotonic() + 0.8 * setting.seconds
    worth: list[float] = []
    for width, batch in _WIDTHS if setting.on_gpus else _WIDTHS_ON_CPU:
        if time.monotonic() > ends:
            yield Note(f"Grouping: no time for layers of {width}.")
            break
        operations = 6.0 * batch * (_LAYERS * width * width + width * _CLASSES)
        steps = 320 if setting.on_gpus else 2 * _GROUP
        chosen: list[int] = []
        alone = _seconds_a_step(strategy, width, batch, steps, 1, chosen)
        in_groups = _seconds_a_step(strategy, width, batch, steps, _GROUP, chosen)
        gain = alone / in_groups
        yield Row(
            "Grouping: microseconds a step of `fit`",
            {
                "": f"{_LAYERS} layers of {width}, batch {batch}",
                "operations of a replica": operations / strategy.num_replicas_in_sync,
                "one by one": 1e6 * alone,
                f"groups of {_GROUP}": 1e6 * in_groups,
                "gain": gain,
                "fit takes": min(chosen, default=1),
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


def _seconds_a_step(
    strategy: unison.Strategy, width: int, batch: int, steps: int, group: int, chosen: list[int]
) -> float:
    """Trains with groups of a size; adds to `chosen` the size that `fit` itself would take."""
    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(_LAYERS)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(_CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)
    generator = np.random.default_rng(0)
    images = generator.random((batch, width), np.float32)
    labels = generator.integers(0, _CLASSES, batch, dtype=np.int32)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(steps):
            yield images, labels

    def given(*args: object) -> int:
        chosen.append(group_size_of(*args))  # type: ignore[arg-type]
        return group

    with mock.patch.object(step, "group_size_of", given):
        model.fit(batches(), verbose=0)  # compiles
        begin = time.perf_counter()
        model.fit(batches(), verbose=0)
        return (time.perf_counter() - begin) / steps
