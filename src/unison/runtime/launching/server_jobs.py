"""`ParameterServerJob`: a program with workers and parameter servers that serve it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Self

from unison.net.secret import KEY_VARIABLE
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import THREAD_VARIABLES
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.restarts import Restarts
from unison.runtime.launching.workers import (
    POLL_INTERVAL,
    OnEvent,
    OnLine,
    ProcessWorker,
    Program,
    Start,
    Worker,
)

#: The module that a worker or server runs.
SERVING = "unison.parameter_server"

#: A task that has run for this many seconds counts as one that has joined the job.
_SECONDS_TO_JOIN = 10.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A process of the job.

    Attributes:
        job: "chief", "worker" or "ps".
        index: Its index in the job.
    """

    job: str
    index: int

    def __str__(self) -> str:
        return self.job if self.job == "chief" else f"{self.job} {self.index}"


def tasks_of(cluster: ClusterSpec) -> list[Task]:
    """Returns the tasks of a cluster: the chief first, then workers, then servers."""
    served = [Task(job, index) for job in ("worker", "ps") for index in cluster.task_indices(job)]
    return [Task("chief", 0), *served]


def task_environment(
    cluster: ClusterSpec, task: Task, key: str, threads: int, checkpoints: str | None = None
) -> dict[str, str]:
    """Returns the additional environment variables of a task.

    Args:
        cluster: The cluster.
        task: The task.
        key: The job's key, which all processes must know.
        threads: The number of threads of a worker.
        checkpoints: The folder in which servers periodically save their variables; None if they do
            not.

    Examples:
        >>> cluster = ClusterSpec({"worker": ["127.0.0.1:2222"], "ps": ["127.0.0.1:2223"]})
        >>> task_environment(cluster, Task("ps", 0), "00", 1)["JAX_PLATFORMS"]
        'cpu'
    """
    environment = {
        "TF_CONFIG": json.dumps(
            {"cluster": cluster.as_dict(), "task": {"type": task.job, "index": task.index}}
        ),
        KEY_VARIABLE: key,
    }
    for name in THREAD_VARIABLES:
        if name not in os.environ:
            environment[name] = str(threads)
    if task.job != "worker":
        # Accelerators are the workers'; the host has the memory for large variables.
        environment["JAX_PLATFORMS"] = "cpu"
    if task.job == "ps" and checkpoints is not None:
        environment["UNISON_PS_CHECKPOINTS"] = checkpoints
    return environment


class ParameterServerJob(Job):
    """A job that runs as long as its first program, the chief.

    Lost workers are restarted, and so are servers, if they write checkpoints. Those of a lost
    machine are not: the others have their addresses there.

    Args:
        programs: The tasks' programs.
        tasks: The tasks; the first is the chief.
        on_line: Called for every line that a task prints, in threads.
        start: Starts a task.
        restarts: Decides whether a task is restarted. Default: up to 10 times in the whole job.
        restarts_servers: Whether servers are restarted.
        on_event: Called with an event for each lost task; `worker` is its place in `tasks`.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        tasks: Sequence[Task],
        on_line: OnLine,
        start: Start = ProcessWorker,
        restarts: Restarts | None = None,
        restarts_servers: bool = False,
        on_event: OnEvent = lambda event: None,
    ):
        super().__init__(programs, on_line, start=start)
        self._tasks = tasks
        self._restarts = Restarts(at_most=10) if restarts is None else restarts
        self._restarts_servers = restarts_servers
        self._on_event = on_event
        self._started_at = [0.0] * len(tasks)
        #: The time at which each task that has ended is restarted; None if it is not.
        self._starts_at: dict[int, float | None] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self._started_at = [time.monotonic()] * len(self._tasks)
        return self

    def wait(self, timeout: float | None = None, of: float | None = None) -> Failure | None:
        """Waits until the chief is done; then terminates the others.

        Returns:
            The failure of the chief, or None.

        Raises:
            TimeoutError: It took longer. The running tasks are terminated.
        """
        last = None if timeout is None else time.monotonic() + timeout
        chief = self._workers[0]
        while chief.exit_code is None:
            if last is not None and time.monotonic() > last:
                self.end()
                raise TimeoutError(
                    "Timed out: expected the job to end within "
                    f"{timeout if of is None else of:g} s, and its program still ran. All tasks "
                    "were ended. Give it a longer timeout, or see in the output what it was "
                    "waiting for."
                )
            self._restart_lost_tasks()
            time.sleep(POLL_INTERVAL)
        self.end()
        if chief.exit_code:
            self.failure = Failure(0, chief.exit_code, chief.last_lines())
        return self.failure

    def interrupt(self) -> None:
        """Sends Ctrl-C to the chief: it may still save variables, so servers keep running."""
        self._workers[0].signal(signal.SIGINT)

    def _restart_lost_tasks(self) -> None:
        """Decides about the tasks that have ended, and starts those that are due."""
        for place, worker in enumerate(self._workers[1:], 1):
            if worker.exit_code is None:
                continue
            if place not in self._starts_at:
                self._starts_at[place] = self._restart_time(place, worker)
            starts_at = self._starts_at[place]
            if starts_at is not None and time.monotonic() >= starts_at:
                self._restart(place, worker)

    def _restart_time(self, place: int, worker: Worker) -> float | None:
        """Returns when a task that has ended is restarted; None if it is not."""
        is_kept_down = self._tasks[place].job == "ps" and not self._restarts_servers
        if worker.exit_code == 0 or is_kept_down:
            return None
        how = Failure(place, worker.exit_code or 0, (), lost_with=worker.lost_with).how
        if worker.lost_with:
            why_not = "the program knows its address there only"
            lost = {"event": "process lost", "worker": place, "why": how, "given_up": why_not}
            self._on_event(lost)
            return None
        return self._after_loss(place, how, worker.ended_at - self._started_at[place])

    def _after_loss(self, place: int, how: str, lived: float) -> float | None:
        event = self._restarts.lost(place, how, lived, has_joined=lived > _SECONDS_TO_JOIN)
        self._on_event(event)
        return None if "given_up" in event else time.monotonic() + event["again_in"]

    def _restart(self, place: int, worker: Worker) -> None:
        worker.signal(signal.SIGKILL)  # its children
        worker.close()
        self._started_at[place] = time.monotonic()
        try:
            self._workers[place] = self._start(place, self._programs[place], self._on_line)
        except Exception as error:  # Ray raises many types: its node may be lost
            self._starts_at[place] = self._after_loss(place, str(error), lived=0.0)
        else:
            del self._starts_at[place]
