"""The round that all contestants of `TrainingWork` share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork


class Training(Contestant):
    """Trains for a round.

    Args:
        work: The workload.
        train: Trains for the steps of a round, and waits until they are done.
        parameters: Returns the parameters as they are.
        versions: The versions of the libraries that matter.
    """

    def __init__(
        self,
        work: TrainingWork,
        train: Callable[[], Any],
        parameters: Callable[[], Iterable[Any]],
        versions: dict[str, str],
    ):
        self._work = work
        self._train = train
        self._parameters = parameters
        self._versions = versions

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        begin = time.perf_counter()
        self._train()
        return self._work.steps / (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        squares = (np.vdot(array, array) for array in map(np.asarray, self._parameters()))
        return {"norm": float(np.sqrt(sum(map(float, squares))))}
