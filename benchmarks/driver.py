"""Lets contestants work in turn, A B C D B C D A ..., each in a process of its own, or several.

Every wait has a bound. A contestant that fails or is late is ended and left out of the rest of
its workload; none outlives the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.contestants import Entry
from benchmarks.namespaces import THIS_MACHINE, Host
from benchmarks.processes import (
    AnsweringProcess,
    ProcessEndedError,
    python_path,
    signals_deferred,
)
from benchmarks.protocol import Ready, Round, of_all_processes
from benchmarks.workloads import TrainingWork, Work, to_json
from unison.runtime.launching.environments import cluster_on_this_machine

#: Environment variables that would change a contestant's devices, threads or backend.
_NOT_INHERITED = ("NPROC", "XLA_FLAGS", "UNISON_CPU_DEVICES", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")

#: A part of the GPUs' memory, unless the user gives another one: JAX takes three quarters, and
#: TensorFlow all of it, when they start.
_MEMORY_OF_GPUS = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}

#: TensorFlow with logical devices was seen to crash now and then while it starts.
_ATTEMPTS_TO_START = 2


class ContestantError(RuntimeError):
    """A contestant ended, or did not answer in time."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds.

    Attributes:
        start: How long a contestant may take to start.
        round: How long its round may take.
        all: For everything. The first round is always measured; a later one is left out if it would
            not end in time.
    """

    start: float = 180
    round: float = 60
    all: float = math.inf


@dataclasses.dataclass
class Result:
    """What was measured of one workload.

    Attributes:
        work: The workload.
        rounds: For every contestant that finished, its rounds, in order.
        versions: For every contestant, the versions of its libraries.
        failures: For every contestant that did not finish, why.
    """

    work: Work
    rounds: dict[str, list[Round]] = dataclasses.field(default_factory=dict)
    versions: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


class RunningContestant:
    """A contestant's processes: as many as the workload says, or as it takes at most.

    Args:
        entry: What to run.
        python: The interpreter that runs it.
        work: The workload that it builds for.
        limits: How long it may take.
        hosts: Where the processes run, in turn.
    """

    def __init__(
        self, entry: Entry, python: str, work: Work, limits: Limits, hosts: Sequence[Host]
    ):
        self.name = entry.name
        self._limits = limits
        self._slowest = min if work.higher_is_better else max
        count = min(work.processes, entry.most_processes or work.processes)
        places = [hosts[rank % len(hosts)] for rank in range(count)]
        free = cluster_on_this_machine(count).as_dict()["worker"]
        ports = [address.rpartition(":")[2] for address in free]
        addresses = [f"{host.address}:{port}" for host, port in zip(places, ports, strict=True)]
        self._processes: list[AnsweringProcess] = []
        try:
            for rank, host in enumerate(places):
                cluster = Cluster(addresses, rank)
                self._processes.append(_process(entry, python, work, limits, host, cluster))
        except BaseException:
            self.end()
            raise

    def wait_until_ready(self) -> Ready:
        return Ready(**self._answers(self._limits.start)[0])

    def work_round(self, index: int) -> Round:
        for process in self._processes:
            process.tell({"round": index})
        rounds = [Round(**answer) for answer in self._answers(self._limits.round)]
        return rounds[0] if len(rounds) == 1 else of_all_processes(rounds, self._slowest)

    def end(self) -> None:
        """Kills the processes and what they started, and waits for them."""
        for process in self._processes:
            process.end()

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """Waits until all have answered; one that cannot is not waited for."""
        deadline = time.monotonic() + seconds
        answers: dict[AnsweringProcess, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.output, selectors.EVENT_READ, process)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = next(each for each in self._processes if each not in answers)
                    raise ContestantError(f"no answer in {seconds:.0f} s{late.last_errors()}")
                for key, _ in ready:
                    try:
                        read = key.data.read_answers()
                    except ProcessEndedError as error:
                        raise ContestantError(str(error)) from None
                    if read:
                        answers[key.data] = read[0]
                        selector.unregister(key.fileobj)
        return [answers[process] for process in self._processes]


def _process(
    entry: Entry, python: str, work: Work, limits: Limits, host: Host, cluster: Cluster
) -> AnsweringProcess:
    """Starts a process of a contestant; the arguments are those of `RunningContestant`."""
    builder = f"benchmarks.contestants.{entry.module}:{entry.function}"
    # It ends by itself a little later than we would end it: if we are killed, say.
    own_limit = str(max(limits.start, limits.round) + 10)
    worker = [python, "-m", "benchmarks.worker", builder, json.dumps(to_json(work)), own_limit]
    return AnsweringProcess(
        [*host.command, *worker],
        _environment(entry, work, cluster) | host.environment() | cluster.environment(),
        f"process {cluster.rank} of {cluster.size}: " if cluster.size > 1 else "",
    )


def measure(
    work: Work,
    contestants: Sequence[tuple[Entry, str]],
    rounds: int,
    limits: Limits,
    say: Callable[[str], None],
    hosts: Sequence[Host] = (THIS_MACHINE,),
) -> Result:
    """Measures a workload: `rounds` rounds of every contestant, in turn.

    Args:
        work: The workload.
        contestants: The entries, each with the interpreter that runs it.
        rounds: How often each contestant works; whose turn is first changes from round to round.
        limits: How long a contestant may take.
        say: Told what goes on, a line at a time.
        hosts: Where the processes of a contestant run, in turn.
    """
    result = Result(work)
    running: list[RunningContestant] = []
    ends = time.monotonic() + limits.all
    longest = 0.0
    with contextlib.ExitStack() as stack:
        for entry, python in contestants:
            for _ in range(_ATTEMPTS_TO_START):
                with signals_deferred():
                    contestant = RunningContestant(entry, python, work, limits, hosts)
                    stack.callback(contestant.end)
                try:
                    result.versions[contestant.name] = contestant.wait_until_ready().versions
                except ContestantError as error:
                    _give_up(contestant, result, str(error), say)
                    continue
                result.failures.pop(contestant.name, None)
                result.rounds[contestant.name] = []
                running.append(contestant)
                break
        for index in range(rounds):
            begin = time.monotonic()
            if index and begin + longest > ends:
                say(f"  no time for more than {index} of {rounds} rounds")
                break
            first = index % max(1, len(running))
            for contestant in running[first:] + running[:first]:
                try:
                    result.rounds[contestant.name].append(contestant.work_round(index))
                except ContestantError as error:
                    _give_up(contestant, result, str(error), say)
                    running.remove(contestant)
            if running:
                say(_round_line(index, rounds, result))
            longest = max(longest, time.monotonic() - begin)
    return result


def _give_up(
    contestant: RunningContestant, result: Result, reason: str, say: Callable[[str], None]
) -> None:
    contestant.end()
    result.rounds.pop(contestant.name, None)
    result.failures[contestant.name] = reason
    say(f"  {contestant.name} is out: {reason}")


def _round_line(index: int, rounds: int, result: Result) -> str:
    values = (f"{name} {done[-1].value:,.0f}" for name, done in result.rounds.items() if done)
    return f"  round {index + 1}/{rounds}: {', '.join(values)}"


def _environment(entry: Entry, work: Work, cluster: Cluster) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    devices = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    if getattr(work, "device", "cpu") == "gpu":
        # JAX may go on with CPUs where it finds no GPU: `benchmarks.worker` does not.
        # Contestants live at the same time: each has its part of the GPUs' memory.
        devices = {"JAX_PLATFORMS": "cuda,cpu"}
        kept = _MEMORY_OF_GPUS | kept
        if isinstance(work, TrainingWork):
            visible = kept.get("CUDA_VISIBLE_DEVICES")
            gpus = visible.split(",") if visible else [str(rank) for rank in range(cluster.size)]
            devices["CUDA_VISIBLE_DEVICES"] = gpus[cluster.rank]
    return kept | {
        "PYTHONPATH": python_path(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **devices,
        **entry.environment,
    }
