"""Workers and servers that grow in number: what a step costs, and a model of it.

A step has a time, from one to the next of the same worker when it is alone, and takes processor
time in all processes together. Of s servers, both are

    fixed + a_server * s + operations / speed + bytes / bandwidth

seconds: calls and messages, those of every server, the model's arithmetic, and what parameters and
gradients cost that are copied and updated. A step of w workers waits for the steps of the others,
of which the cores do `cores` at a time:

    steps a second = w / (time + (w - 1) * processor time / cores)

which is w / time while there are cores to spare, and cores / processor time where there are none
(the asymptotes of a closed queueing network: Lazowska et al., Quantitative System Performance,
1984, chapter 5).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.driver import Result
from benchmarks.protocol import Round
from benchmarks.server_loads import LOADS, Dense
from benchmarks.tables import OURS
from benchmarks.workloads import SERVERS_SCALED, WORKERS_SCALED, ServerWork


class Measured(NamedTuple):
    """A workload, of dense layers, as it was measured.

    Attributes:
        work: The workload.
        steps_a_second: How many steps all workers made together.
        processor: Seconds of processor time of a step, in all processes.
    """

    work: ServerWork
    steps_a_second: float
    processor: float


class Price(NamedTuple):
    """What a step takes, in seconds.

    Attributes:
        fixed: Whatever it is.
        a_server: For every server.
        an_operation: For a floating-point operation.
        a_byte: For a byte of parameters or gradients.
    """

    fixed: float
    a_server: float
    an_operation: float
    a_byte: float

    def of(self, work: ServerWork) -> float:
        return float(np.dot(_terms(work), self))

    def __str__(self) -> str:
        speed = f"{1e-9 / self.an_operation:.0f} GFLOP/s" if self.an_operation else "no time"
        bandwidth = f"{1e-9 / self.a_byte:.1f} GB/s" if self.a_byte else "no time"
        return (
            f"{self.fixed * 1e3:.2f} ms + {self.a_server * 1e3:.2f} ms a server + operations at "
            f"{speed} + bytes at {bandwidth}"
        )


class Model(NamedTuple):
    """A fitted model of steps.

    Attributes:
        time: Of a step of a worker that is alone.
        processor: Of all processes, for a step.
        cores: How many cores there are.
    """

    time: Price
    processor: Price
    cores: int

    def steps_a_second(self, work: ServerWork) -> float:
        """Returns how many steps all workers make."""
        waits = (work.workers - 1) * self.processor.of(work) / self.cores
        return work.workers / (self.time.of(work) + waits)


def fitted(measured: Sequence[Measured], cores: int) -> Model:
    """Returns the model with the least squares of relative residuals.

    Args:
        measured: Workloads; some of one worker, with 1 and more servers.
        cores: How many cores the processes share.
    """
    alone = [(each.work, 1 / each.steps_a_second) for each in measured if each.work.workers == 1]
    return Model(_price(alone), _price([(each.work, each.processor) for each in measured]), cores)


def _price(measured: Sequence[tuple[ServerWork, float]]) -> Price:
    from scipy.optimize import nnls

    # Divided by what was measured, so that fast steps count as much as slow ones.
    terms = np.array([_terms(work) / seconds for work, seconds in measured])
    scale = terms.max(axis=0)  # operations are many, and servers few
    found, _ = nnls(terms / scale, np.ones(len(measured)))
    return Price(*(float(value) for value in found / scale))


def summary(results: Iterable[Result], cores: int) -> str:
    """Returns the table of workers and servers, and the model; "" if it was not measured."""
    measured = [
        _measured(result.work, result.rounds[OURS])
        for result in results
        if isinstance(result.work, ServerWork)
        and result.work.task == "scaling"
        and result.rounds.get(OURS)
    ]
    if not measured:
        return ""
    model = fitted(measured, cores)
    first = measured[0].work
    beside = {
        each.work: _beside_model(each.steps_a_second, model.steps_a_second(each.work))
        for each in measured
    }
    table = {
        (work.servers, work.workers): text
        for work, text in beside.items()
        if (work.load, work.batch) == (first.load, first.batch)
    }
    errors = [model.steps_a_second(each.work) / each.steps_a_second - 1 for each in measured]
    lines = [
        f"time of a step alone: {model.time}",
        f"processor time of a step: {model.processor}; {cores} cores",
        f"relative residuals: {np.sqrt(np.mean(np.square(errors))):.0%} (root mean square)",
        "steps/s (and the model's):",
        " " * 12 + "".join(f"{_count(n, 'worker'):>22}" for n in WORKERS_SCALED),
    ]
    for servers in SERVERS_SCALED:
        row = "".join(f"{table.get((servers, n), ''):>22}" for n in WORKERS_SCALED)
        lines.append(f"  {_count(servers, 'server'):<10}{row}")
    lines += [
        f"  {work.load}, batch {work.batch}, 1 worker, 1 server: {text}"
        for work, text in beside.items()
        if (work.load, work.batch) != (first.load, first.batch)
    ]
    return "\n".join(lines)


def _measured(work: ServerWork, rounds: Sequence[Round]) -> Measured:
    """Returns the medians of a workload's rounds."""
    milliseconds = statistics.median(done.facts["CPU ms"] for done in rounds)
    return Measured(work, statistics.median(done.value for done in rounds), milliseconds / 1e3)


def _terms(work: ServerWork) -> np.ndarray:
    load = LOADS[work.load]
    assert isinstance(load, Dense)
    return np.array([1.0, work.servers, load.operations(work.batch), load.moved_bytes])


def _beside_model(measured: float, model: float) -> str:
    return f"{measured:,.0f} ({model:,.0f}, {model / measured - 1:+.0%})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
