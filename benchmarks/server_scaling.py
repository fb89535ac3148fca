"""Workers and servers that grow in number: what a step costs, and a model of it.

A step of one worker and s servers takes

    fixed + a_server * s + operations / speed + bytes / bandwidth

seconds of some core: calls and messages, those of every server, the model's arithmetic, and what
parameters and gradients cost that are copied and updated. Of w workers, min(w, cores) work at a
time: it is taken to be the only thing that their number changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.driver import Result
from benchmarks.server_loads import LOADS, Dense
from benchmarks.tables import OURS
from benchmarks.workloads import SERVERS_SCALED, WORKERS_SCALED, ServerWork


class Cost(NamedTuple):
    """A fitted model of steps.

    Attributes:
        fixed: Seconds of a step whatever it is.
        a_server: Seconds for every server.
        an_operation: Seconds of a floating-point operation.
        a_byte: Seconds of a byte of parameters or gradients.
        cores: How many cores there are.
        error: The root of the mean of the squares of the relative residuals.
    """

    fixed: float
    a_server: float
    an_operation: float
    a_byte: float
    cores: int
    error: float

    def steps_a_second(self, work: ServerWork) -> float:
        """Returns how many steps all workers make."""
        of_one = np.dot(_terms(work), (self.fixed, self.a_server, self.an_operation, self.a_byte))
        return min(work.workers, self.cores) / float(of_one)


def fitted(measured: Iterable[tuple[ServerWork, float]], cores: int) -> Cost:
    """Returns the model with the least squares of relative residuals.

    Args:
        measured: Workloads, of dense layers, and steps a second.
        cores: How many cores the processes share.
    """
    from scipy.optimize import nnls

    points = list(measured)
    # Divided by what was measured, so that fast steps count as much as slow ones.
    terms = np.array(
        [
            _terms(work) * steps_a_second / min(work.workers, cores)
            for work, steps_a_second in points
        ]
    )
    scale = terms.max(axis=0)  # operations are many, and servers few
    found, norm = nnls(terms / scale, np.ones(len(points)))
    return Cost(*(float(value) for value in found / scale), cores, norm / len(points) ** 0.5)


def summary(results: Iterable[Result], cores: int) -> str:
    """Returns the table of workers and servers, and the model; "" if it was not measured."""
    measured = [
        (result.work, statistics.median(done.value for done in result.rounds[OURS]))
        for result in results
        if isinstance(result.work, ServerWork)
        and result.work.task == "scaling"
        and result.rounds.get(OURS)
    ]
    if not measured:
        return ""
    cost = fitted(measured, cores)
    speed = f"{1e-9 / cost.an_operation:.1f} GFLOP/s" if cost.an_operation else "no time"
    bandwidth = f"{1e-9 / cost.a_byte:.2f} GB/s" if cost.a_byte else "no time"
    lines = [
        f"a step takes {cost.fixed * 1e3:.2f} ms + {cost.a_server * 1e3:.2f} ms a server + its "
        f"operations at {speed} + its bytes at {bandwidth}; at most {cores} workers work at a "
        f"time; relative residuals: {cost.error:.0%} (root mean square)",
        "steps/s (and the model's):",
    ]
    first = measured[0][0]
    table = {
        (work.servers, work.workers): _beside_model(value, cost.steps_a_second(work))
        for work, value in measured
        if (work.load, work.batch) == (first.load, first.batch)
    }
    lines.append(" " * 12 + "".join(f"{_count(n, 'worker'):>22}" for n in WORKERS_SCALED))
    for servers in SERVERS_SCALED:
        row = "".join(f"{table.get((servers, n), ''):>22}" for n in WORKERS_SCALED)
        lines.append(f"  {_count(servers, 'server'):<10}{row}")
    lines += [
        f"  {work.load}, batch {work.batch}, 1 worker, 1 server: "
        f"{_beside_model(value, cost.steps_a_second(work))}"
        for work, value in measured
        if (work.load, work.batch) != (first.load, first.batch)
    ]
    return "\n".join(lines)


def _terms(work: ServerWork) -> np.ndarray:
    load = LOADS[work.load]
    assert isinstance(load, Dense)
    return np.array([1.0, work.servers, load.operations(work.batch), load.moved_bytes])


def _beside_model(measured: float, model: float) -> str:
    return f"{measured:,.0f} ({model:,.0f}, {model / measured - 1:+.0%})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
