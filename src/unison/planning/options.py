"""Options of a strategy for a step: the time and memory that it would take, and whether it fits."""

from __future__ import annotations

from typing import NamedTuple

from unison.planning.clusters import Cluster
from unison.planning.communication import ALGORITHMS
from unison.planning.division import Division
from unison.planning.memory import StepMemory
from unison.planning.scaling import Exchange, Workload, best_algorithm, step_time
from unison.runtime.placement import OPTIMIZER, WEIGHTS

MIB = 2**20
_BUCKETS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
#: The compression ratio relative to float32: see docs/compression.md.
_COMPRESSIONS = {
    "bfloat16": 32 / 16,
    "int8": 32 / (8 + 32 / 256),
    "int4": 32 / (4 + 32 / 64),
}
#: The number of parts of a batch whose gradients are accumulated.
_PARTS = 2
#: A way must be so much faster to be preferred to one that asks for less.
_WORTH = 0.98


class Choice(NamedTuple):
    """A way to run the step on all devices of the target.

    Attributes:
        name: What it is called.
        how: What to write for it.
        seconds: What the step takes.
        efficiency: What part of that is computing.
        memory: Bytes on each device.
        fits: Whether a device has so many.
        is_exact: Whether the sums are those of the plain step.
    """

    name: str
    how: str
    seconds: float
    efficiency: float
    memory: int
    fits: bool
    is_exact: bool = True


class Step(NamedTuple):
    """The properties of a step that `choices` uses.

    Attributes:
        workload: What a device does.
        memory: What it takes there.
        exchange: How the step, as it is, sums its gradients.
        division: What its replicas divide of a model's state.
    """

    workload: Workload
    memory: StepMemory
    exchange: Exchange
    division: Division


def choices(step: Step, cluster: Cluster) -> list[Choice]:
    """Returns ways to run a step on a cluster: unchanged, and with options for speed or memory.

    Args:
        step: What is known of it.
        cluster: The cluster.
    """
    size = step.workload.gradient_bytes
    ways = [_choice("as it is", "", step, cluster, step.exchange)]
    if not size or cluster.num_devices == 1:
        return ways + _smaller(step, cluster)
    replicas = cluster.of_replicas(step.workload.cores)
    algorithm = best_algorithm(size / step.exchange.compression, replicas)
    if algorithm != step.exchange.algorithm and cluster.sums_by_nccl:
        other = step.exchange._replace(algorithm=algorithm)
        how = _how(other, step.exchange)
        ways.append(_choice(f"{algorithm} instead of ring", how, step, cluster, other))
    best = step.exchange
    is_mirrored = len(step.division.mesh) == 1 and not step.division.stage
    if cluster.sums_by_nccl and is_mirrored:
        every = [
            step.exchange._replace(bucket_bytes=bucket, algorithm=algorithm)
            for bucket in _BUCKETS
            if bucket < size
            for algorithm in ALGORITHMS
        ]
        best = min(every, key=lambda one: _seconds(step, cluster, one), default=best)
        if best is not step.exchange:
            name = f"buckets of {best.bucket_bytes // MIB:.0f} MiB, {best.algorithm}"
            ways.append(_choice(name, _how(best, step.exchange), step, cluster, best))
    # Replicas divide no update whose gradients are compressed.
    for name, factor in ({} if step.division.stage else _COMPRESSIONS).items():
        smaller = best._replace(compression=factor)
        how = _how(smaller, step.exchange, f"with_compression(optimizer, {name}())")
        ways.append(
            _choice(f"{name} on the wire", how, step, cluster, smaller)._replace(is_exact=False)
        )
    return ways + _smaller(step, cluster)


def _seconds(step: Step, cluster: Cluster, exchange: Exchange) -> float:
    return step_time(step.workload, cluster, exchange).seconds


def preferred(ways: list[Choice]) -> Choice:
    """Returns the option to prefer: it fits, is exact, and is faster than simpler ones."""
    best = None
    for way in sorted(ways, key=lambda way: (not way.fits, not way.is_exact)):
        if best is None or (
            (way.fits, way.is_exact) == (best.fits, best.is_exact)
            and way.seconds < best.seconds * _WORTH
        ):
            best = way
    assert best is not None
    return best


def _how(exchange: Exchange, plain: Exchange, *others: str) -> str:
    """Returns the source code and the settings of a method of communication."""
    asked = [*others]
    if exchange.bucket_bytes != plain.bucket_bytes:
        options = f"CommunicationOptions(bytes_per_pack={exchange.bucket_bytes:.0f})"
        asked.append(f"communication_options={options}")
    if exchange.algorithm != plain.algorithm:
        asked.append(_HOW[exchange.algorithm])
    return "; ".join(asked)


_HOW = {
    "tree": "NCCL_ALGO=Tree",
    "hierarchical": "NCCL sums inside machines first where it finds that faster; see NCCL_ALGO",
}


def _smaller(step: Step, cluster: Cluster) -> list[Choice]:
    """Returns ways that take less memory."""
    ways = []
    saved, saved_at_most = (
        step.division.saved(step.memory.state, stage) for stage in (OPTIMIZER, WEIGHTS)
    )
    if saved:
        how = step.division.strategy(OPTIMIZER)
        if len(step.division.mesh) == 1:
            how += ", or TPUStrategy(sharded_update=True)"
        kept = step.memory.total - saved
        ways.append(_choice("sharded update", how, step, cluster, step.exchange, kept))
    if saved_at_most > saved:
        # Weights are gathered twice, and gradients scattered: half as much again as a sum.
        workload = step.workload._replace(gradient_bytes=1.5 * step.workload.gradient_bytes)
        how, kept = step.division.strategy(WEIGHTS), step.memory.total - saved_at_most
        gathering = step._replace(workload=workload)
        ways.append(_choice("divided weights", how, gathering, cluster, step.exchange, kept))
    in_parts = _accumulated(step.memory, _PARTS)
    if step.memory.gradients and in_parts < step.memory.total:
        # Every part sums its gradients: Keras accumulates the aggregated gradient.
        seconds = max(step.workload.seconds / _PARTS, step.workload.least)
        way = _choice(
            f"batch in {_PARTS} parts",
            f"a batch {_PARTS} times smaller, gradient_accumulation_steps={_PARTS}",
            step._replace(workload=step.workload._replace(seconds=seconds)),
            cluster,
            step.exchange,
            in_parts,
        )
        ways.append(way._replace(seconds=way.seconds * _PARTS))
    return ways


def _accumulated(memory: StepMemory, parts: int) -> int:
    """Returns the bytes where the batch is in parts, and an accumulator keeps the gradients."""
    divided = memory.batch + memory.activations
    return memory.total - divided + divided // parts + memory.gradients


def _choice(
    name: str,
    how: str,
    step: Step,
    cluster: Cluster,
    exchange: Exchange,
    memory: int | None = None,
) -> Choice:
    time = step_time(step.workload, cluster, exchange)
    taken = step.memory.total if memory is None else memory
    return Choice(name, how, time.seconds, time.efficiency, taken, taken <= cluster.device.memory)
