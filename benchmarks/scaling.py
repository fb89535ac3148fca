"""Weak scaling: what a step costs with more processes, and a model of it.

A sum over n processes of B bytes is taken to cost latency * f(n) + bytes(n) / bandwidth: a ring
and a tree let every process send and receive 2 (n - 1) / n * B bytes, and f(n) counts the messages
that wait for each other. Where n processes share fewer cores, both take n / cores times as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.driver import Result
from benchmarks.workloads import AllReduceWork, TrainingWork, gradient_bytes

#: How the number of messages that wait for each other may grow with the processes.
MESSAGES: dict[str, Callable[[int], float]] = {
    "2 (n - 1)": lambda n: 2 * (n - 1),
    "2 log2(n)": lambda n: 2 * math.log2(n),
    "1": lambda n: 1,
}


class Cost(NamedTuple):
    """A fitted model of sums.

    Attributes:
        messages: A key of `MESSAGES`.
        latency: Seconds a message.
        seconds_a_byte: The inverse of the bandwidth.
        cores: How many cores the processes share.
        error: The root of the mean of the squares of the relative residuals.
    """

    messages: str
    latency: float
    seconds_a_byte: float
    cores: int
    error: float

    def seconds(self, processes: int, size: float) -> float:
        """Returns what a sum of `size` bytes costs."""
        if processes == 1:
            return 0.0
        of_one = _terms(self.messages, processes, size, self.cores)
        return float(np.dot(of_one, (self.latency, self.seconds_a_byte)))


def fitted(measured: Iterable[tuple[int, float, float]], cores: int) -> Cost:
    """Returns the model with the least squares of relative residuals.

    Args:
        measured: Processes, bytes and seconds of sums.
        cores: How many cores the processes share.
    """
    from scipy.optimize import nnls

    points = list(measured)
    seconds = np.array([seconds for _, _, seconds in points])
    fits = []
    for messages in MESSAGES:
        terms = np.array([_terms(messages, n, size, cores) for n, size, _ in points])
        # Divided by what was measured, so that small sums count as much as large ones.
        (latency, seconds_a_byte), norm = nnls(terms / seconds[:, None], np.ones(len(points)))
        error = norm / math.sqrt(len(points))
        fits.append(Cost(messages, latency, seconds_a_byte, cores, error))
    return min(fits, key=lambda cost: cost.error)


def summary(results: Iterable[Result], cores: int) -> str:
    """Returns the tables of weak scaling, a block a contestant; "" if it was not measured."""
    results = list(results)
    blocks = []
    for family in ("unison", "torch"):
        sums = _medians(results, AllReduceWork, family)
        steps = _medians(results, TrainingWork, family)
        if not sums or not steps:
            continue
        points = [(w.processes, w.kibibytes * 1024, value * 1e-6) for w, value in sums]
        cost = fitted(points, cores)
        blocks.append("\n".join([*_cost_lines(family, cost, points), *_step_lines(steps, cost)]))
    return "\n\n".join(blocks)


def _terms(messages: str, processes: int, size: float, cores: int) -> tuple[float, float]:
    turns = max(1.0, processes / cores)
    moved = 2 * (processes - 1) / processes * size
    return MESSAGES[messages](processes) * turns, moved * turns


def _medians(results: Iterable[Result], kind: type, family: str) -> list[tuple]:
    found = []
    for result in results:
        if isinstance(result.work, kind) and result.work.task == "weak_scaling":
            for name, rounds in result.rounds.items():
                if rounds and name.split()[0] == family:
                    found.append((result.work, statistics.median(done.value for done in rounds)))
    return found


def _cost_lines(family: str, cost: Cost, points: list[tuple[int, float, float]]) -> list[str]:
    bandwidth = 1e-9 / cost.seconds_a_byte if cost.seconds_a_byte else math.inf
    lines = [
        f"{family}: a sum of B bytes over n processes takes {cost.latency * 1e6:.1f} us * "
        f"{cost.messages} + 2 (n - 1) / n * B / ({bandwidth:.2f} GB/s), times n / {cost.cores} "
        f"where n is more; relative residuals: {cost.error:.0%} (root mean square)"
    ]
    for processes, size, seconds in points:
        model = cost.seconds(processes, size)
        lines.append(
            f"  {processes} processes, {size / 1024:,.0f} KiB: {seconds * 1e6:,.0f} us, "
            f"model {model * 1e6:,.0f} us ({model / seconds - 1:+.0%})"
        )
    return lines


def _step_lines(steps: list[tuple[TrainingWork, float]], cost: Cost) -> list[str]:
    alone = {work.model: 1 / value for work, value in steps if work.processes == 1}
    lines = []
    for work, value in steps:
        if work.model not in alone:
            continue
        seconds = 1 / value
        limit = alone[work.model] * max(1.0, work.processes / cost.cores)
        model = limit + cost.seconds(work.processes, gradient_bytes(work.model))
        lines.append(
            f"  {work.model}, {work.processes} processes, batch {work.batch}: "
            f"{seconds * 1e3:,.2f} ms/step, limit of the cores {limit * 1e3:,.2f} ms, efficiency "
            f"{limit / seconds:.0%}; model {model * 1e3:,.2f} ms ({model / seconds - 1:+.0%})"
        )
    return lines
