"""Jobs with workers and parameter servers: what the contestants of `ServerWork` share.

The contestant is the coordinator. It starts the other processes, which end with it.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.cluster import free_addresses
from benchmarks.protocol import Contestant
from benchmarks.workloads import ServerWork


class Job(NamedTuple):
    """What the coordinator has started.

    Attributes:
        cluster: The addresses of all processes, its own included.
        processes: The workers and servers.
    """

    cluster: dict[str, list[str]]
    processes: list[subprocess.Popen]

    def cpu_seconds(self) -> float | None:
        """Returns the processor time of all processes so far; None where the system hides it."""
        total = time.process_time()
        for process in self.processes:
            try:
                stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:
                return None
            user, system = stat.rpartition(")")[2].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return total


def start_others(module: str, work: ServerWork) -> Job:
    """Starts the workers and servers of a job.

    Args:
        module: The module of this package that each runs; it finds its task in TF_CONFIG.
        work: The workload.
    """
    counts = {"worker": work.workers, "ps": work.servers, "chief": 1}
    free = iter(free_addresses(sum(counts.values())))
    cluster = {job: [next(free) for _ in range(count)] for job, count in counts.items()}
    processes = []
    for job in ("worker", "ps"):
        for index in range(counts[job]):
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.contestants.{module}"],
                env=os.environ | {"TF_CONFIG": json.dumps(config)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            atexit.register(process.kill)
            processes.append(process)
    return Job(cluster, processes)


def end_with_coordinator() -> None:
    """Has this process end when its standard input does, which the coordinator holds."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class Scheduling(Contestant):
    """Schedules the steps of a round, and waits for them.

    Args:
        work: The workload.
        job: The other processes.
        coordinator: A `ClusterCoordinator`.
        step: What is scheduled.
        iterator: Its argument.
        versions: The versions of the libraries that matter.
        totals: Returns sums, from the beginning: bytes that the servers have sent and received,
            seconds that workers have waited for them, and seconds that the busiest has worked.
    """

    def __init__(
        self,
        work: ServerWork,
        job: Job,
        coordinator: Any,
        step: Callable[..., Any],
        iterator: Any,
        versions: dict[str, str],
        totals: Callable[[], tuple[int, float, float]] | None = None,
    ):
        self._work = work
        self._job = job
        self._coordinator = coordinator
        self._step = step
        self._iterator = iterator
        self._versions = versions
        self._totals = totals
        self._facts: dict[str, float] = {}

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        before = self._totals() if self._totals else None
        cpu_before = self._job.cpu_seconds()
        begin = time.perf_counter()
        for _ in range(self._work.steps):
            value = self._coordinator.schedule(self._step, args=(self._iterator,))
        self._coordinator.join()
        seconds = time.perf_counter() - begin
        self._facts = {"loss": float(value.fetch())}
        if cpu_before is not None and (cpu := self._job.cpu_seconds()) is not None:
            self._facts["CPU ms"] = 1e3 * (cpu - cpu_before) / self._work.steps
        if self._totals and before:
            moved, waited, busy = (
                now - then for now, then in zip(self._totals(), before, strict=True)
            )
            of_workers = seconds * self._work.workers
            self._facts |= {
                "step_bytes": moved / self._work.steps,
                "transport": (waited - busy) / of_workers,
                "servers": busy / of_workers,
            }
        return self._work.steps / seconds

    def facts(self) -> dict[str, Any]:
        return self._facts
