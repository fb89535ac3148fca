"""Unison's replicas, on logical CPU devices or on GPUs."""

from __future__ import annotations

import unison
from benchmarks.workloads import REPLICAS, FitWork, RunWork


def mirrored_strategy(work: FitWork | RunWork) -> unison.MirroredStrategy:
    if work.device == "cpu":
        unison.set_logical_cpu_devices(REPLICAS)
    return unison.MirroredStrategy()
