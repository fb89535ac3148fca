"""The round that all contestants of `DividedWork` share, and the tokens that they train on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import peak_resident_bytes, resident_bytes
from benchmarks.protocol import Contestant
from benchmarks.workloads import DividedWork

RATE, EPSILON = 1e-3, 1e-7

_SEED = 5


def tokens(work: DividedWork) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, and the next ones; int32[steps * batch, length] each."""
    shape = (work.steps * work.batch, work.size.length + 1)
    drawn = np.random.default_rng(_SEED).integers(0, work.size.words, shape, np.int32)
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


class DividedTraining(Contestant):
    """Trains for a round.

    What it tells of memory is that of a process: the state between steps, and how much more than
    after its imports it has ever had.

    Args:
        work: The workload.
        build: Returns a function that trains for the steps of a round and returns the last loss,
            and one that returns the bytes of the state on this process's device.
        versions: The versions of the libraries that matter.
    """

    def __init__(
        self,
        work: DividedWork,
        build: Callable[[DividedWork], tuple[Callable[[], float], Callable[[], int]]],
        versions: dict[str, str],
    ):
        self._work = work
        self._versions = versions
        self._begun = resident_bytes() or 0
        self._train, self._state_bytes = build(work)
        self._loss = 0.0

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        begin = time.perf_counter()
        self._loss = self._train()
        return self._work.steps / (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        return {
            "loss": self._loss,
            "state_bytes": self._state_bytes(),
            "growth_bytes": peak_resident_bytes() - self._begun,
        }
