"""The round that all contestants of `RunWork` share: calls for some time, counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import RunWork

#: Calls between two looks at the clock.
_CALLS = 10


def addends_of(replicas: int) -> np.ndarray:
    """Returns what the replicas add to a variable; to the i-th variable each adds i more."""
    return np.arange(1, replicas + 1, dtype=np.float32)


class Calls(Contestant):
    """Calls `call` again and again; a round ends when all of its updates are done.

    Args:
        work: The workload.
        replicas: How many replicas there are.
        call: Updates all variables once.
        totals: Waits for the updates and returns the values of the variables.
        versions: The versions of the libraries that matter.
    """

    def __init__(
        self,
        work: RunWork,
        replicas: int,
        call: Callable[[], Any],
        totals: Callable[[], list[float]],
        versions: dict[str, str],
    ):
        self._work = work
        self._addends = addends_of(replicas)
        self._call = call
        self._totals = totals
        self._versions = versions
        self._calls = 0

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        begin = time.perf_counter()
        calls = 0
        while time.perf_counter() - begin < self._work.seconds:
            for _ in range(_CALLS):
                self._call()
            calls += _CALLS
        totals = self._totals()
        seconds = time.perf_counter() - begin
        self._calls += calls
        self._check(totals)
        return seconds / calls * 1e6

    def _check(self, totals: list[float]) -> None:
        a_call = [float(np.sum(self._addends + index)) for index in range(self._work.variables)]
        expected = [self._calls * addend for addend in a_call]
        if max(expected) < 2**24 and totals != expected:
            raise AssertionError(f"Expected the sums {expected}. Received: {totals}")
