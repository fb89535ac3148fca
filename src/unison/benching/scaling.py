"""Results of the measurements: rate, efficiency with more replicas, and parts of the time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from unison.benching.points import Point
from unison.benching.records import Record


@dataclasses.dataclass(frozen=True)
class Summary:
    """The summary of one point.

    Attributes:
        point: The point.
        batch: The number of examples in a step; None if it is unknown.
        unit: What is counted: examples, or steps where those are not known.
        rate: Examples per second: the median of the rounds.
        spread: The slowest and the fastest round.
        percentiles: The seconds within which 50, 90 and 99 % of the steps were done after the one
            before; of steps that Keras runs together, their mean.
        computing: The part of a step's time that computing takes, and that exchanging takes if
            `communication` is not known.
        communication: The part in which replicas exchange and wait for each other; None where that
            is not known.
        waiting: The part of the time that the loop waited for its input.
        memory: The bytes that a worker has used at most.
        device_memory: The maximum memory in use of a device in bytes; None if not reported.
    """

    point: Point
    batch: int | None
    unit: str
    rate: float
    spread: tuple[float, float]
    percentiles: tuple[float, float, float]
    computing: float
    communication: float | None
    waiting: float
    memory: int | None
    device_memory: int | None

    @classmethod
    def of(cls, point: Point, records: Sequence[Record]) -> Summary:
        """Returns the summary of the rounds of a point."""
        rates = [rate_of(record) for record in records]
        steps = [launch for record in records for launch in record.launches]
        seconds = np.repeat([s / n for n, s in steps], [n for n, _ in steps])
        p50, p90, p99 = map(float, np.percentile(seconds, [50, 90, 99]))
        shares = [communication_of(record) for record in records]
        known = [share for share in shares if share is not None]
        return cls(
            point=point,
            batch=records[0].examples,
            unit="steps" if records[0].examples is None else "examples",
            rate=statistics.median(rates),
            spread=(min(rates), max(rates)),
            percentiles=(p50, p90, p99),
            computing=statistics.median(map(computing_of, records)),
            communication=statistics.median(known) if known else None,
            waiting=statistics.median(record.waited / record.seconds for record in records),
            memory=max((r.memory for r in records if r.memory), default=None),
            device_memory=max((r.device_memory for r in records if r.device_memory), default=None),
        )


def rate_of(record: Record) -> float:
    """Returns the number of examples per second in a round; of steps, if that is unknown."""
    return (record.examples or 1) * record.paced_steps / record.seconds


def computing_of(record: Record) -> float:
    """Returns the part of a step's time that its slowest replica computes.

    Where that is not known, or there is one replica: the part that a step takes by itself.
    """
    seconds = record.alone if record.replicas > 1 else None
    if seconds is None:
        seconds = statistics.median(record.single) if record.single else 0.0
    return min(1.0, seconds * record.paced_steps / record.seconds)


def communication_of(record: Record) -> float | None:
    """Returns the part of a step's time in which replicas exchange and wait; None if not known.

    This is the time of a single step minus the time of its slowest replica alone. One replica
    exchanges nothing.
    """
    if record.replicas == 1:
        return 0.0
    if record.alone is None or not record.single:
        return None
    longer = statistics.median(record.single) - record.alone
    return min(max(0.0, longer * record.paced_steps / record.seconds), 1 - computing_of(record))


@dataclasses.dataclass(frozen=True)
class Line:
    """Points that differ in one size.

    Attributes:
        name: What they have in common.
        members: The points, by that size.
    """

    name: str
    members: list[Summary]

    def efficiency(self, summary: Summary) -> float:
        """Returns the rate relative to the first point's, scaled to the same number of replicas."""
        first = self.members[0]
        return (summary.rate / summary.point.replicas) / (first.rate / first.point.replicas)


def strong(summaries: Sequence[Summary]) -> list[Line]:
    """Returns the points that differ in the number of replicas, and have equal global batches."""
    return _lines(
        summaries,
        lambda p: (p.batch, p.examples),
        lambda p: p.replicas,
        lambda p: f"batch {p.batch}" if p.batch else "the program's batch",
    )


def weak(summaries: Sequence[Summary]) -> list[Line]:
    """Returns the points whose replicas have equal parts of the batches."""
    told = [summary for summary in summaries if summary.point.batch]
    return _lines(
        told,
        lambda p: ((p.batch or 0) / p.replicas, p.examples),
        lambda p: p.replicas,
        lambda p: f"batch {(p.batch or 0) // p.replicas} a replica",
    )


def by_batch(summaries: Sequence[Summary]) -> list[Line]:
    """Returns the points that differ in the global batch."""
    told = [summary for summary in summaries if summary.point.batch]
    return _lines(
        told,
        lambda p: (p.workers, p.devices, p.examples),
        lambda p: p.batch or 0,
        lambda p: f"{p.replicas} replica{'s' if p.replicas > 1 else ''}",
    )


def by_examples(summaries: Sequence[Summary]) -> list[Line]:
    """Returns the points that differ in the size of the data."""
    told = [summary for summary in summaries if summary.point.examples]
    return _lines(
        told,
        lambda p: (p.workers, p.devices, p.batch),
        lambda p: p.examples or 0,
        lambda p: str(dataclasses.replace(p, examples=None)),
    )


def _lines(
    summaries: Sequence[Summary],
    common: Callable[[Point], Hashable],
    size: Callable[[Point], float],
    name: Callable[[Point], str],
) -> list[Line]:
    groups: dict[Hashable, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(common(summary.point), []).append(summary)
    several_sizes = len({summary.point.examples for summary in summaries}) > 1
    lines = []
    for members in groups.values():
        members.sort(key=lambda summary: size(summary.point))
        if len({size(summary.point) for summary in members}) > 1:
            first = members[0].point
            differs = len({summary.point.examples for summary in members}) > 1
            of_data = f", {first.examples} examples" if several_sizes and not differs else ""
            lines.append(Line(name(first) + of_data, members))
    return lines
