"""`launch`: calls a Python function in several worker processes, and returns the results."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from unison.runtime import uncaught
from unison.runtime.launching import watching
from unison.runtime.launching.distinct_tracebacks import DistinctTracebacks
from unison.runtime.launching.elastic import TIMEOUT_EXIT_CODE
from unison.runtime.launching.environments import (
    cluster_on_this_machine,
    cores_of_workers,
    with_own_gpus,
    worker_environments,
)
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.ray_cluster import Room
from unison.runtime.launching.ray_nodes import RayNodes
from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Start
from unison.tracebacks import filter_traceback, is_filtering

#: The module that a worker runs.
_CALLING = "unison.runtime.launching.calling"


class WorkerError(RuntimeError):
    """A worker of a launched function has failed; the message contains its error.

    Attributes:
        worker: Its index.
        exit_code: The exit code of its process.
    """

    def __init__(self, message: str, worker: int, exit_code: int):
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code


@filter_traceback
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
    progress: bool = False,
) -> list[Any]:
    """Calls a function in worker processes of one cluster, on this machine or on a Ray cluster.

    Each worker is a fresh Python process that finds the cluster in `TF_CONFIG`. When one fails,
    the others are terminated.

    Args:
        function: The function that every worker calls; a function of a notebook or a lambda is
            allowed. On a Ray cluster, the modules that it imports must be installed.
        workers: The number of workers. Default: 2 on this machine, one per node of a Ray cluster.
        args: The arguments of the function.
        devices_per_worker: The number of logical devices into which each worker splits its CPU.
        environment: Further variables for the workers' environment.
        timeout: Seconds after which workers that are still running are terminated; None for no
            limit.
        on_line: Called with a worker's index and each line that it prints. Default: prints it.
        address: The Ray cluster: `"auto"`, `"HOST:PORT"` from one of its nodes, or
            `"ray://HOST:PORT"` from elsewhere. Default: this machine, without Ray. A program that
            has called `ray.init` uses the cluster that it has joined, whatever the address.
        cpus_per_worker: The number of Ray's CPUs for each worker. Default: an equal share of a
            node's.
        gpus_per_worker: The same for GPUs.
        monitor: Whether `unison top` may monitor the workers, as it may those of `unison run`.
        progress: Whether to show how far they are, in a line that is kept up to date: below their
            output in a terminal, or as an output of a notebook's cell.

    Returns:
        The results of the function, by worker.

    Raises:
        WorkerError: A worker has failed. The message contains its error, and its traceback if
            `on_line` is given.
        TimeoutError: Some workers took longer than `timeout`.
        TypeError: The function, an argument or a result cannot be pickled.
        UnavailableError: The Ray cluster cannot be reached, or lacks resources.
        ImportError: Ray is not installed, and `address` is given.

    Examples:
        >>> import json, os
        >>> launch(lambda: json.loads(os.environ["TF_CONFIG"])["task"]["index"], workers=2)
        [0, 1]
    """
    uncaught.install()
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
            cores = cores_of_workers(environments)
            start: Start = ProcessWorker
            shared = _import_path()
        else:
            room = Room(workers, cpus_per_worker, gpus_per_worker)
            nodes = places.enter_context(RayNodes(address, room))
            environments = worker_environments(nodes.cluster, devices_per_worker, nodes.cores)
            start, shared, cores = nodes.start, {}, [None] * len(environments)
        programs = [
            Program(["-m", _CALLING], {**shared, **own, **(environment or {})}, call, cores=near)
            for own, near in zip(environments, cores, strict=True)
        ]
        ended: Callable[[int], None] = _nobody_watches
        show = on_line or places.enter_context(contextlib.closing(DistinctTracebacks(_printed)))
        if monitor or progress:
            names = [f"worker {index}" for index in range(len(programs))]
            name = getattr(function, "__qualname__", repr(function))
            watched = places.enter_context(
                watching.watched(name, "workers", names, monitor, progress)
            )
            programs, ended = watched.programs(programs), watched.ended
            if progress:
                show = places.enter_context(watched.progress()).above(show)
        with Job(programs, show, start=start) as job:
            failure = _outcome(job, timeout, ended)
        if failure is not None:
            raise WorkerError(
                _described(failure, is_printed=on_line is None), failure.worker, failure.exit_code
            )
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
    """Returns the failure of the first worker that failed, if any; reports the job's end."""
    try:
        failure = job.wait(timeout)
    except TimeoutError:
        ended(TIMEOUT_EXIT_CODE)
        raise
    ended(0 if failure is None else failure.exit_code)
    return failure


def _described(failure: Failure, is_printed: bool) -> str:
    """Returns the message for a failure, with its traceback unless that is printed."""
    if is_printed and failure.error and is_filtering():
        return f"{failure}: {failure.error} (its traceback is in the output)"
    return "\n".join([str(failure), *failure.last_lines])


def _nobody_watches(exit_code: int) -> None:
    """Ignores how a job has ended."""


def _import_path() -> dict[str, str]:
    """Returns the variables with which a worker can import the modules that this process can."""
    return {"PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}


def _printed(worker: int, line: str) -> None:
    print(f"[worker {worker}] {line}", flush=True)
