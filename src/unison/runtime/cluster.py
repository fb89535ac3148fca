"""`ClusterSpec`: which tasks a job has, and at which addresses they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ClusterSpec:
    """The jobs of a cluster, and the network address of each of their tasks.

    Args:
        cluster: For every job its addresses: a list, whose places are the tasks' indices, or a
            dictionary from index to address where some indices are not used. Or another
            `ClusterSpec`.

    Raises:
        TypeError: Something in `cluster` is neither.
        ValueError: A task's index is no integer.

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
        """Returns the cluster as the constructor takes it.

        A job whose indices run from 0 without a gap is a list.
        """
        return {
            job: list(tasks.values())
            if tasks and list(tasks) == [*range(len(tasks))]
            else {**tasks}
            for job, tasks in self._tasks.items()
        }

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
        """Returns the address at every index of the job, None where there is no task.

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


def _tasks(job: str, described: Any) -> dict[int, str]:
    if isinstance(described, Mapping):
        addresses = {int(index): address for index, address in described.items()}
    elif isinstance(described, Sequence) and not isinstance(described, str | bytes):
        addresses = dict(enumerate(described))
    else:
        raise TypeError(
            f"The tasks of job {job!r} must be a list of addresses, or a dictionary from indices "
            f"to addresses. Received: {described!r}"
        )
    what = f"The address of a task of job {job!r}"
    return {index: _text(address, what) for index, address in sorted(addresses.items())}


def _text(value: Any, what: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text. Received: {value!r}")
    return value
