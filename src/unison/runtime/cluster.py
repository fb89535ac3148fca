"""`ClusterSpec`: the tasks of a cluster's jobs, and their addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

#: The job names that TensorFlow's strategies accept.
JOBS = ("chief", "worker", "ps", "evaluator")

#: The jobs with at most one task.
_SINGLE_JOBS = ("chief", "evaluator")

#: A host's name or address, an IPv6 address in brackets, and its port.
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^\s:\[\]/]+):(\d{1,5})", re.ASCII)


class ClusterSpec:
    """The jobs of a cluster, and the network address of each of their tasks.

    Args:
        cluster: The addresses of each job: a list, ordered by task index, or a dictionary from
            index to address if some indices are not used. Or another `ClusterSpec`.

    Raises:
        TypeError: Something in `cluster` is neither.
        ValueError: A task's index is not an integer.

    Examples:
        >>> cluster = ClusterSpec({"worker": ["one:2222", "two:2222"], "ps": {1: "three:2222"}})
        >>> cluster.num_tasks("worker"), cluster.task_address("ps", 1), cluster.task_indices("ps")
        (2, 'three:2222', [1])

    TF: `tf.train.ClusterSpec`.
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec):
        self._tasks: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._tasks = {job: dict(tasks) for job, tasks in cluster._tasks.items()}
        elif isinstance(cluster, Mapping):
            self._tasks = {_text(job, "A job's name"): _tasks(job, cluster[job]) for job in cluster}
        else:
            raise TypeError(
                "A cluster is described by a dictionary from job names to lists of addresses. "
                f"Received: {cluster!r}"
            )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the cluster in the form that the constructor accepts.

        A job whose indices run from 0 without a gap is a list.
        """
        return {
            job: list(tasks.values())
            if tasks and list(tasks) == [*range(len(tasks))]
            else {**tasks}
            for job, tasks in self._tasks.items()
        }

    def as_cluster_def(self) -> Any:
        """Refused: there are no protocol buffers of clusters.

        TF: `tf.train.ClusterSpec.as_cluster_def`.
        """
        raise NotImplementedError(
            "A ClusterSpec has no protocol buffer. Use as_dict(), which json.dumps writes and "
            "ClusterSpec(...) reads."
        )

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks the job has.

        Raises:
            ValueError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the job's tasks, in order.

        Raises:
            ValueError: There is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
            ValueError: There is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"Job {job_name!r} has the tasks {list(tasks)}. Received: task_index={task_index!r}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the address at every index of the job, or None if there is no such task.

        Raises:
            ValueError: There is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._tasks:
            raise ValueError(f"The cluster has the jobs {self.jobs}. Received: {name!r}")
        return self._tasks[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._tasks == other._tasks

    __hash__ = None  # type: ignore[assignment]  # as TensorFlow's: it is compared, not looked up

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"


def check_cluster(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Raises an error if processes could not form a cluster from this description.

    Args:
        cluster: The cluster.
        task_type: The job of this process.
        task_id: Its index in the job.

    Raises:
        ValueError: A job is unknown, has no task or too many, an address is invalid or occurs
            twice, or this process is not a task of the cluster. An evaluator need not be: it does
            not train with the other tasks.

    Examples:
        >>> check_cluster(ClusterSpec({"worker": ["one:2222", "two:2222"]}), "worker", 1)

    TF: `multi_worker_util._validate_cluster_spec`, and the errors of its servers.
    """
    tasks = [(job, index) for job in cluster.jobs for index in cluster.task_indices(job)]
    for job in cluster.jobs:
        _check_job(job, cluster.num_tasks(job))
    task_at: dict[str, tuple[str, int]] = {}
    for task in tasks:
        address = cluster.task_address(*task)
        _check_address(task, address)
        if address in task_at:
            raise ValueError(
                f"Expected a different address for each task. {_name(task_at[address])} and "
                f"{_name(task)} have: {address!r}. {_CORRECT}"
            )
        task_at[address] = task
    if task_type is None and len(tasks) < 2:
        return
    if task_type not in JOBS:
        raise ValueError(
            f"Expected this process to be a task of one of the jobs {list(JOBS)}. Received: task "
            f"type {task_type!r}. {_CORRECT_TASK}"
        )
    if task_type == "evaluator" or not tasks:
        return
    if (task_type, task_id) not in tasks:
        raise ValueError(
            f"Expected this process to be one of {tasks}. Received: task type {task_type!r}, "
            f"index {task_id!r}. {_CORRECT_TASK}"
        )


#: The final sentences of the errors of `check_cluster`.
_CORRECT = "Correct `cluster` in TF_CONFIG, or the resolver's cluster."
_CORRECT_TASK = "Correct `task` in TF_CONFIG, or the resolver's task_type and task_id."


def _check_job(job: str, tasks: int) -> None:
    if job not in JOBS:
        raise ValueError(
            f"Expected the jobs to be some of {list(JOBS)}. Received: {job!r}. {_CORRECT}"
        )
    if not tasks:
        raise ValueError(
            f"Expected an address for at least one task of job {job!r}. Received: none. {_CORRECT}"
        )
    if job in _SINGLE_JOBS and tasks > 1:
        raise ValueError(f"Expected at most one task of job {job!r}. Received: {tasks}. {_CORRECT}")


def _check_address(task: tuple[str, int], address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ValueError(
            f"Expected the address of {_name(task)} to be host:port, with a port from 1 to 65535. "
            f"Received: {address!r}. {_CORRECT}"
        )


def _name(task: tuple[str, int]) -> str:
    job, index = task
    return f"{job} {index}"


def _tasks(job: str, described: Any) -> dict[int, str]:
    if isinstance(described, Mapping):
        addresses = {_index(index, job): address for index, address in described.items()}
    elif isinstance(described, Sequence) and not isinstance(described, str | bytes):
        addresses = dict(enumerate(described))
    else:
        raise TypeError(
            f"The tasks of job {job!r} must be a list of addresses, or a dictionary from indices "
            f"to addresses. Received: {described!r}"
        )
    what = f"The address of a task of job {job!r}"
    return {index: _text(address, what) for index, address in sorted(addresses.items())}


def _index(value: Any, job: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"The index of a task of job {job!r} must be an integer. Received: {value!r}"
        ) from None


def _text(value: Any, what: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text. Received: {value!r}")
    return value
