"""The time of a step on 1 to N devices: computation, and communication that is not hidden.

A step computes forward, then backward; gradients become ready during the backward pass and are
summed in buckets, each as soon as it is full and the one before has been summed. What is still to
be summed when the computing ends is waited for. With one bucket, nothing is hidden. Source of the
scheme: Li et al. 2020, arXiv:2006.15704, section 3.2.3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from unison.planning.clusters import Cluster
from unison.planning.communication import ALGORITHMS, Sent, all_reduce_seconds, sent_bytes

#: The backward pass's fraction of a step's computation: two products for each of the forward pass.
BACKWARD = 2 / 3


class Workload(NamedTuple):
    """The work of one device in a step.

    Attributes:
        seconds: The seconds for which it computes, and waits for the other devices of its replica.
        gradient_bytes: What is summed.
        ready: Points of the backward pass and the fraction of the gradients that is ready there,
            both from 0 to 1. Default: they become ready evenly.
        least: The part of `seconds` that does not depend on the number of examples.
        cores: The number of neighbouring devices that compute a replica.
    """

    seconds: float
    gradient_bytes: float
    ready: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))
    least: float = 0.0
    cores: int = 1


class Exchange(NamedTuple):
    """The method by which gradients are summed.

    Attributes:
        bucket_bytes: The approximate bytes that are summed together; 0: all of them, at the end.
        algorithm: One of `"ring"`, `"tree"`, `"hierarchical"`.
        compression: The compression ratio.
    """

    bucket_bytes: float = 0
    algorithm: str = "ring"
    compression: float = 1.0


class StepTime(NamedTuple):
    """The time of a step on a number of devices.

    Attributes:
        devices: The number of devices.
        computing: Seconds of computing; on shared cores, until all had their turn.
        waiting: Seconds in which devices wait for sums.
        sent: Bytes over each kind of link.
        turns: The number of devices that share a core.
    """

    devices: int
    computing: float
    waiting: float
    sent: Sent
    turns: float = 1.0

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting

    @property
    def efficiency(self) -> float:
        """The fraction of the time for which a device computes, when it has its core."""
        return self.computing / self.turns / self.seconds


def step_time(workload: Workload, cluster: Cluster, exchange: Exchange | None = None) -> StepTime:
    """Returns the time of a step on all devices of a cluster.

    Args:
        workload: A device's part, the same however many there are (weak scaling).
        cluster: The devices.
        exchange: How gradients are summed. Default: all at the end, by a ring.

    Examples:
        >>> from unison.planning import Exchange, Workload, cluster_named
        >>> resnet = Workload(seconds=0.292, gradient_bytes=102e6)
        >>> cluster = cluster_named("p100:32x8")
        >>> round(step_time(resnet, cluster).efficiency, 2)
        0.88
        >>> round(step_time(resnet, cluster, Exchange(bucket_bytes=25e6)).efficiency, 2)
        0.96
    """
    exchange = exchange or Exchange()
    computing = workload.seconds * cluster.turns
    size = workload.gradient_bytes / exchange.compression
    replicas = cluster.of_replicas(workload.cores)
    turns = cluster.turns / replicas.turns
    end = computing
    # On a CPU the cores that compute also exchange.
    buckets = _buckets(workload.gradient_bytes, exchange) if cluster.measured is None else 1
    begin = 0.0
    for bucket in range(1, buckets + 1):
        moment = _moment(workload.ready, bucket / buckets)
        ready = computing * (1 - BACKWARD * (1 - moment)) if buckets > 1 else computing
        begin = max(begin, ready)
        begin += all_reduce_seconds(size / buckets, replicas, exchange.algorithm) * turns
        end = max(end, begin)
    sent = sent_bytes(size, replicas)
    together = min(workload.cores, cluster.per_machine)
    return StepTime(
        cluster.num_devices,
        computing,
        end - computing,
        sent._replace(network=sent.network * together),
        cluster.turns,
    )


def scaling(
    workload: Workload, cluster: Cluster, exchange: Exchange | None = None
) -> list[StepTime]:
    """Returns the time of a step on growing parts of a cluster, each device with the same work.

    Args:
        workload: A device's part.
        cluster: The whole cluster; its parts are powers of two.
        exchange: How gradients are summed.
    """
    return [step_time(workload, cluster.of(count), exchange) for count in cluster.sizes()]


def best_algorithm(size: float, cluster: Cluster) -> str:
    """Returns the algorithm that sums arrays of `size` bytes fastest."""
    return min(ALGORITHMS, key=lambda name: all_reduce_seconds(size, cluster, name))


def _buckets(size: float, exchange: Exchange) -> int:
    return max(1, math.ceil(size / exchange.bucket_bytes)) if exchange.bucket_bytes else 1


def _moment(ready: tuple[tuple[float, float], ...], share: float) -> float:
    """Returns when a share of the gradients is ready, between the points that are known."""
    before = ready[0]
    for point in ready[1:]:
        if point[1] >= share:
            part = (share - before[1]) / (point[1] - before[1])
            return before[0] + part * (point[0] - before[0])
        before = point
    return 1.0
