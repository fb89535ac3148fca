"""The time in which devices sum their gradients: latency and bandwidth of rings and trees.

With n devices on m machines, messages of latency a inside and A between machines, and links of
b bytes per second between the devices of a machine and B between machines:

- ring: 2 (n - m) a + 2 (m - 1) A of latency, and 2 (n - 1) / n of the bytes over the slowest link.
  Sources: Patarasu and Yuan 2009 (doi:10.1016/j.jpdc.2008.09.002); the count of messages is that
  of NCCL (commit 01afd20, src/graph/tuning.cc), with its 8.4 us to begin.
- tree: 2 (n / m - 1) a + 2 log2(m) A, and twice the bytes at nine tenths of the bandwidth. Sources:
  Sanders, Speck, Traeff 2009 (two trees, doi:10.1016/j.parco.2009.09.001); NCCL, as above.
- hierarchical: reduce-scatter within machines, a ring of those devices that have the same part, and
  all-gather within. Source: Jia et al. 2018, arXiv:1807.11205.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from unison.planning.clusters import Cluster
from unison.planning.collectives import Collective

#: The collectives that rings implement, and their cost relative to an all-reduce.
PART_OF_SUM = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.5}

#: The fixed latency of a collective; NCCL, baseLat of ring, Simple.
_BEGIN_SECONDS = 8.4e-6
#: Messages of a ring between machines take so many times as long where they fill the links.
#: NCCL, ncclTopoGetAlgoTime, from n / 16 chunks of 64 KiB on.
_PLATEAU = 1.9
_PLATEAU_BYTES = 65536 / 16
#: Of the bandwidth of a ring; NCCL.
_TREE_RATE = 0.9


class Sent(NamedTuple):
    """The bytes that cross each kind of link for one sum.

    Attributes:
        inside: What a device sends to others of its machine.
        network: What a machine sends to others.
    """

    inside: float
    network: float


def all_reduce_seconds(size: float, cluster: Cluster, algorithm: str = "ring") -> float:
    """Returns how long the devices of a cluster take to sum arrays of `size` bytes.

    Args:
        size: The bytes on each device.
        cluster: Where they are.
        algorithm: A key of `ALGORITHMS`.

    Examples:
        >>> from unison.planning import cluster_named
        >>> round(1e3 * all_reduce_seconds(100e6, cluster_named("p100:8")), 2)
        2.43
    """
    if cluster.num_devices == 1:
        return 0.0
    seconds = ALGORITHMS[algorithm](size, cluster)
    return (seconds + _BEGIN_SECONDS) * cluster.turns


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Returns how long neighbouring devices of a cluster take for all runs of a collective.

    Args:
        collective: What they run, each after the one before.
        cluster: Where they are; where it has fewer devices, those take part.
    """
    is_permutation = collective.kind == "collective-permute"
    count = collective.span if is_permutation else collective.group_size
    part = cluster.of(min(count, cluster.num_devices))
    if part.num_devices == 1:
        return 0.0
    if collective.kind in PART_OF_SUM:
        seconds = PART_OF_SUM[collective.kind] * all_reduce_seconds(collective.bytes, part)
    else:
        link = part.network if part.machines > 1 else part.inside
        sent = collective.sent_bytes / collective.runs
        seconds = (_BEGIN_SECONDS + link.latency + sent / part.slowest_rate) * part.turns
    return collective.runs * seconds


def sent_bytes(size: float, cluster: Cluster) -> Sent:
    """Returns the bytes over each kind of link: those of a ring, which a hierarchy sends as well.

    Args:
        size: The bytes on each device.
        cluster: Where they are.
    """
    n, m, k = cluster.num_devices, cluster.machines, cluster.per_machine
    around = 2 * (n - 1) / n * size
    return Sent(inside=around if k > 1 else 0.0, network=around if m > 1 else 0.0)


def _ring(size: float, cluster: Cluster) -> float:
    n, m = cluster.num_devices, cluster.machines
    between = 2 * (m - 1) * cluster.network.latency if m > 1 else 0.0
    latency = 2 * (n - m) * cluster.inside.latency + between
    if m > 1 and size >= n * _PLATEAU_BYTES:
        latency *= _PLATEAU
    return latency + 2 * (n - 1) / n * size / cluster.slowest_rate


def _tree(size: float, cluster: Cluster) -> float:
    k, m = cluster.per_machine, cluster.machines
    latency = 2 * (k - 1) * cluster.inside.latency + 2 * math.log2(m) * cluster.network.latency
    return latency + 2 * size / (_TREE_RATE * cluster.slowest_rate)


def _hierarchical(size: float, cluster: Cluster) -> float:
    k, m = cluster.per_machine, cluster.machines
    inside = 2 * (k - 1) * cluster.inside.latency + 2 * (k - 1) / k * size / cluster.inside.rate
    if m == 1:
        return inside
    # The k rings between machines share the network of their machine.
    between = 2 * (m - 1) * cluster.network.latency + 2 * (m - 1) / m * size / cluster.network.rate
    return inside + between


#: The methods by which devices may sum: the seconds for an array's bytes on a cluster's devices.
ALGORITHMS: dict[str, Callable[[float, Cluster], float]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
