"""The results as tables and text."""

from __future__ import annotations

from collections.abc import Sequence

from unison.benching import scaling
from unison.benching.points import Point
from unison.benching.results import Results
from unison.benching.scaling import Line, Summary

#: The meanings of the columns, in one or two sentences each.
MEANINGS = (
    "Replicas: on the devices of one process, or as workers × devices of each.",
    "Examples a second (steps, where the examples of a batch cannot be counted), while the program "
    "runs as it does: the median of the rounds, and ± half of what lies between the slowest and "
    "the fastest one.",
    "p50, p90, p99: within so many milliseconds, 50, 90 and 99 % of the steps were done after the "
    "one before. Small steps that Keras' fit runs together have the mean of their group.",
    "Strong and weak: the rate as part of what the fewest replicas' would become if every further "
    "one added as much; with the global batch kept, and with each replica's part of it kept.",
    "Communication: the part of a step's time in which replicas exchange and wait for each other. "
    "That is what a step takes longer that starts when the one before it is done (on the worker "
    "that starts it last) than its slowest replica computes of it without exchanging anything, "
    "while the others do the same. One replica exchanges nothing.",
    "Input: the part of the time in which the loop waited for its next batch. The devices may have "
    "worked on earlier steps meanwhile, and where they did, the picture counts that as computing.",
    "Memory: the most that the process of a worker had in memory at any time, and of devices that "
    "tell, the most that one had in use.",
)


def summaries_of(results: Results) -> list[Summary]:
    """Returns the results of each point."""
    return [Summary.of(point, records) for point, records in results.rounds.items()]


def about(results: Results) -> str:
    """Describes the machine, the number of rounds, and the versions."""
    records = [record for of_point in results.rounds.values() for record in of_point]
    rounds = max(map(len, results.rounds.values()))
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return (
        f"{results.machine}; {records[0].device}; {rounds} round{'s' if rounds > 1 else ''}; "
        f"{versions}."
    )


def numbers(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Returns a table's header, and a row for each point."""
    strong, weak = scaling.strong(summaries), scaling.weak(summaries)
    columns: dict[str, list[str]] = {
        "replicas": [_replicas(s.point) for s in summaries],
        "batch": [str(s.point.batch or s.batch or "?") for s in summaries],
        "data": [str(s.point.examples or "?") for s in summaries],
        f"{summaries[0].unit}/s": [f"{s.rate:,.0f}" for s in summaries],
        "±": [_noise(s) for s in summaries],
        "p50 ms": [_milliseconds(s.percentiles[0]) for s in summaries],
        "p90": [_milliseconds(s.percentiles[1]) for s in summaries],
        "p99": [_milliseconds(s.percentiles[2]) for s in summaries],
        "strong": [_efficiency(strong, s) for s in summaries],
        "weak": [_efficiency(weak, s) for s in summaries],
        "comm.": ["?" if (c := s.communication) is None else f"{c:.0%}" for s in summaries],
        "input": [f"{s.waiting:.0%}" for s in summaries],
        "MiB": [_memory(s) for s in summaries],
    }
    if len(set(columns["data"])) == 1:
        del columns["data"]
    for name in ("±", "strong", "weak"):
        if not any(columns[name]):
            del columns[name]
    return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]


def short_names(points: Sequence[Point]) -> tuple[list[str], str]:
    """Returns short names of the points, for the axis of a bar plot, and their meaning.

    Examples:
        >>> short_names([Point(1, 1, 64, 9000), Point(1, 2, 64, 9000)])
        (['1 / 64', '2 / 64'], 'replicas / batch')
    """
    parts: dict[str, list[int] | list[int | None]] = {
        "replicas": [point.replicas for point in points],
        "batch": [point.batch for point in points],
        "data": [point.examples for point in points],
    }
    shown = {
        name: sizes
        for name, sizes in parts.items()
        if None not in sizes and (name != "data" or len(set(sizes)) > 1)
    }
    names = [" / ".join(map(str, sizes)) for sizes in zip(*shown.values(), strict=True)]
    return names, " / ".join(shown)


def _replicas(point: Point) -> str:
    if point.workers == 1:
        return str(point.replicas)
    return f"{point.workers}×{point.devices}"


def _noise(summary: Summary) -> str:
    slowest, fastest = summary.spread
    return f"{(fastest - slowest) / 2 / summary.rate:.0%}" if slowest < fastest else ""


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _efficiency(lines: Sequence[Line], summary: Summary) -> str:
    found = [line.efficiency(summary) for line in lines if summary in line.members]
    return f"{found[0]:.0%}" if found else ""


def _memory(summary: Summary) -> str:
    host = "?" if summary.memory is None else f"{summary.memory / 2**20:,.0f}"
    if summary.device_memory is None:
        return host
    return f"{host} + {summary.device_memory / 2**20:,.0f}"
