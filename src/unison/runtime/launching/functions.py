"""`launch`: a Python function in several worker processes, and what each of them returned."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from unison.runtime.launching import watching
from unison.runtime.launching.elastic import TIMEOUT_EXIT_CODE
from unison.runtime.launching.environments import (
    cluster_on_this_machine,
    with_own_gpus,
    worker_environments,
)
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.ray_nodes import RayNodes, Room
from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Start

#: What a worker runs: see `calling`.
_CALLING = "unison.runtime.launching.calling"


class WorkerError(RuntimeError):
    """A worker of a launched function has failed; the message has its traceback.

    Attributes:
        worker: Its index.
        exit_code: How its process ended.
    """

    def __init__(self, message: str, worker: int, exit_code: int):
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code


def launch(
    function: Callable[..., Any],
    workers: int | None = None,
    args: Sequence[Any] = (),
    devices_per_worker: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_line: OnLine | None = None,
    address: str | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: int | None = None,
    monitor: bool = False,
) -> list[Any]:
    """Calls a function in worker processes of one cluster, on this machine or on a Ray cluster.

    Each worker is a fresh Python process that finds the cluster in `TF_CONFIG`. When one fails,
    the others are ended.

    Args:
        function: What every worker calls; a function of a notebook or a lambda will do. On a Ray
            cluster, the modules that it imports must be there.
        workers: How many there are. Default: 2 on this machine, one a node of a Ray cluster.
        args: What it is called with.
        devices_per_worker: Into how many logical devices each worker splits its CPU.
        environment: What else is added to the workers' environment.
        timeout: Seconds after which workers that still run are ended; None: none.
        on_line: Called with a worker's index and each line that it prints. Default: it is printed.
        address: The Ray cluster: `"auto"`, `"HOST:PORT"` from one of its nodes, or
            `"ray://HOST:PORT"` from elsewhere. Default: this machine, without Ray.
        cpus_per_worker: How many of Ray's CPUs a worker takes. Default: an equal share of a node's.
        gpus_per_worker: The same for GPUs.
        monitor: Whether `unison top` may watch the workers, as it may those of `unison run`.

    Returns:
        What the function returned, by worker.

    Raises:
        WorkerError: A worker has failed. Its traceback is in the message.
        TimeoutError: Some took longer than `timeout`.
        TypeError: The function, an argument or a result cannot be pickled.
        UnavailableError: The Ray cluster cannot be reached, or has no room.
        ImportError: Ray is not installed, and there is an `address`.

    Examples:
        >>> import json, os
        >>> launch(lambda: json.loads(os.environ["TF_CONFIG"])["task"]["index"], workers=2)
        [0, 1]
    """
    try:
        call = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        raise TypeError(
            f"launch sends the function and its arguments to other processes. {function!r} cannot "
            f"be pickled: {error}"
        ) from error
    with contextlib.ExitStack() as places:
        if address is None:
            cluster = cluster_on_this_machine(2 if workers is None else workers)
            environments = with_own_gpus(worker_environments(cluster, devices_per_worker))
            start: Start = ProcessWorker
            shared = _import_path()
        else:
            room = Room(workers, cpus_per_worker, gpus_per_worker)
            nodes = places.enter_context(RayNodes(address, room))
            environments = worker_environments(nodes.cluster, devices_per_worker, nodes.cores)
            start, shared = nodes.start, {}
        programs = [
            Program(["-m", _CALLING], {**shared, **own, **(environment or {})}, call)
            for own in environments
        ]
        ended: Callable[[int], None] = _nobody_watches
        if monitor:
            names = [f"worker {index}" for index in range(len(programs))]
            name = getattr(function, "__qualname__", repr(function))
            watched = places.enter_context(watching.watched(name, "workers", names))
            programs, ended = watched.programs(programs), watched.ended
        with Job(programs, on_line or _printed, start=start) as job:
            failure = _outcome(job, timeout, ended)
        if failure is not None:
            shown = "\n".join(failure.last_lines)
            raise WorkerError(f"{failure}\n{shown}", failure.worker, failure.exit_code)
        results = job.results()
        for worker, result in enumerate(results):
            if not result:
                raise WorkerError(
                    f"worker {worker} ended without returning from {function!r}: with exit code 0, "
                    "by sys.exit or os._exit perhaps. Let the function return instead.",
                    worker,
                    0,
                )
        return [cloudpickle.loads(result) for result in results]


def _outcome(job: Job, timeout: float | None, ended: Callable[[int], None]) -> Failure | None:
    """Returns how the first worker failed, if one did; those who watch hear how the job ended."""
    try:
        failure = job.wait(timeout)
    except TimeoutError:
        ended(TIMEOUT_EXIT_CODE)
        raise
    ended(0 if failure is None else failure.exit_code)
    return failure


def _nobody_watches(exit_code: int) -> None:
    """Tells nobody how a job has ended."""


def _import_path() -> dict[str, str]:
    """Returns the environment in which a worker finds the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}


def _printed(worker: int, line: str) -> None:
    print(f"[worker {worker}] {line}", flush=True)
