"""The round that all contestants of `TrainingWork` share."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.namespaces import INTERFACE
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork

_SENT = pathlib.Path("/sys/class/net", INTERFACE, "statistics", "tx_bytes")


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
        self._sent = 0

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        if not self._work.link:  # those over links wait for the link, not for memory
            self._train()  # brings back what the kernel took from an idle process meanwhile
        sent = _sent_bytes()
        begin = time.perf_counter()
        self._train()
        seconds = time.perf_counter() - begin
        self._sent = _sent_bytes() - sent
        return self._work.steps / seconds

    def facts(self) -> dict[str, Any]:
        squares = (np.vdot(array, array) for array in map(np.asarray, self._parameters()))
        facts = {"norm": float(np.sqrt(sum(map(float, squares))))}
        if self._work.link:
            facts["MB sent a step"] = self._sent / self._work.steps / 1e6
        return facts


def _sent_bytes() -> int:
    """Returns what this host has sent over its link so far; 0 on a machine without one."""
    try:
        return int(_SENT.read_text())
    except FileNotFoundError:
        return 0
