"""What one writes by hand: `psum` of the tree of gradients."""

from __future__ import annotations

from benchmarks.contestants.aggregation import Aggregation
from benchmarks.protocol import Contestant
from benchmarks.workloads import AggregationWork


def build(work: AggregationWork) -> Contestant:
    return Aggregation(work, None)
