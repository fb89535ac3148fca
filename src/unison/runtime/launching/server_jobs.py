"""`ParameterServerJob`: a program with workers and parameter servers that serve it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Sequence

from unison.net.secret import KEY_VARIABLE
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import THREAD_VARIABLES
from unison.runtime.launching.jobs import Failure, Job
from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Start, Worker

#: The module that a worker or server runs.
SERVING = "unison.parameter_server"

#: Seconds between two polls of the processes.
_LOOK_EVERY = 0.05


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
    if task.job == "ps":
        environment["JAX_PLATFORMS"] = "cpu"  # the host has the memory for large variables
        if checkpoints is not None:
            environment["UNISON_PS_CHECKPOINTS"] = checkpoints
    return environment


class ParameterServerJob(Job):
    """A job that runs as long as its first program, the chief.

    Lost workers are restarted, and so are servers, if they write checkpoints.

    Args:
        programs: The tasks' programs.
        tasks: The tasks; the first is the chief.
        on_line: Called for every line that a task prints, in threads.
        start: Starts a task.
        restarts: The maximum number of restarts in the whole job.
        restarts_servers: Whether servers are restarted.
        say: Called with a message about each event.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        tasks: Sequence[Task],
        on_line: OnLine,
        start: Start = ProcessWorker,
        restarts: int = 10,
        restarts_servers: bool = False,
        say: Callable[[str], None] = print,
    ):
        super().__init__(programs, on_line, start=start)
        self._tasks = tasks
        self._restarts = restarts
        self._restarts_servers = restarts_servers
        self._say = say

    def wait(self, timeout: float | None = None) -> Failure | None:
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
                raise TimeoutError(f"Expected the job to end within {timeout:g} s. It was ended.")
            for place, worker in enumerate(self._workers):
                if place and worker.exit_code is not None:
                    self._bring_back(place, worker)
            time.sleep(_LOOK_EVERY)
        self.end()
        if chief.exit_code:
            self.failure = Failure(0, chief.exit_code, chief.last_lines())
        return self.failure

    def interrupt(self) -> None:
        """Sends Ctrl-C to the chief: it may still save variables, so servers keep running."""
        self._workers[0].signal(signal.SIGINT)

    def _bring_back(self, place: int, worker: Worker) -> None:
        task = self._tasks[place]
        may_return = self._restarts > 0 and (task.job != "ps" or self._restarts_servers)
        if worker.exit_code == 0 or worker.ended_at < 0 or not may_return:
            return
        self._restarts -= 1
        how = Failure(place, worker.exit_code or 0, ()).how
        self._say(f"{task} has ended ({how}); it is started again")
        worker.close()
        try:
            self._workers[place] = self._start(place, self._programs[place], self._on_line)
        except Exception as error:  # Ray raises many types: its node may be lost
            self._say(f"{task} cannot be started again: {error}")
            worker.ended_at = -1.0
