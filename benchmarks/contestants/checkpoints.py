"""The round that all contestants of `CheckpointWork` share: a save between steps of training."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import CheckpointWork

#: Steps whose median is that of an undisturbed one, and steps behind a save that it may disturb.
_STEPS = 5

_FLOATS_A_MEGABYTE = 250_000
_MEGABYTES_AN_ARRAY = 16


def arrays(work: CheckpointWork) -> list[np.ndarray]:
    """Returns the state: arrays of at most 16 MB."""
    count = max(work.megabytes // _MEGABYTES_AN_ARRAY, 1)
    size = work.megabytes * _FLOATS_A_MEGABYTE // count
    return [np.random.default_rng(i).random(size, np.float32) for i in range(count)]


class Saving(Contestant):
    """Saves once a round, and trains on: steps overwrite the whole state where it lies.

    A library may copy in the call, or let the next steps wait: what counts is what the call and
    the steps behind it take longer than as many undisturbed steps.

    Args:
        work: The workload.
        name: The contestant's name, for its files.
        step: Changes the state, and waits until that is done.
        save: Saves the state under a path.
        wait: Waits until it is written.
        versions: The versions of the libraries that matter.
    """

    def __init__(
        self,
        work: CheckpointWork,
        name: str,
        step: Callable[[], Any],
        save: Callable[[str], Any],
        wait: Callable[[], Any],
        versions: dict[str, str],
    ):
        self._folder = os.path.join(work.folder, f"{work.megabytes} MB {name}")
        self._step = step
        self._save = save
        self._wait = wait
        self._versions = versions
        self._count = 0
        self._facts: dict[str, float] = {}

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        os.makedirs(self._folder)
        usual = statistics.median(_milliseconds(self._step) for _ in range(_STEPS))
        begin = time.perf_counter()
        self._count += 1
        call = _milliseconds(self._save, os.path.join(self._folder, f"save-{self._count}"))
        steps = sum(_milliseconds(self._step) for _ in range(_STEPS))
        self._wait()
        written = (time.perf_counter() - begin) * 1e3
        shutil.rmtree(self._folder)
        late = steps - _STEPS * usual
        self._facts = {"call ms": call, "steps late ms": late, "a step ms": usual, "in ms": written}
        return max(call + late, call)

    def facts(self) -> dict[str, Any]:
        return self._facts


def _milliseconds(function: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    function(*args)
    return (time.perf_counter() - begin) * 1e3
