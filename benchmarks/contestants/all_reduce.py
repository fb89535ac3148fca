"""The round that the contestants of `AllReduceWork` share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import AllReduceWork


class AllReduce(Contestant):
    """Sums again and again, one sum after the other, as steps of training do.

    Args:
        work: The workload.
        call: Sums once, and waits for it.
        versions: The versions of the libraries that matter.
    """

    def __init__(self, work: AllReduceWork, call: Callable[[], Any], versions: dict[str, str]):
        self._work = work
        self._call = call
        self._versions = versions

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        begin = time.perf_counter()
        for _ in range(self._work.calls):
            self._call()
        return (time.perf_counter() - begin) / self._work.calls * 1e6


def array_of(work: AllReduceWork, rank: int) -> np.ndarray:
    """Returns what a process gives, float32[elements]."""
    return np.full(work.kibibytes * 256, rank + 1, np.float32)


def check(work: AllReduceWork, total: Any) -> None:
    """Raises unless `total` is the sum of what all processes give."""
    np.testing.assert_array_equal(total, work.processes * (work.processes + 1) / 2)
