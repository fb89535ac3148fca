"""The base class of cluster resolvers, one for an explicit cluster, and the union of several."""

from __future__ import annotations

import abc
from typing import Any

from unison.runtime.cluster import ClusterSpec


class ClusterResolver(abc.ABC):
    """Determines a cluster's tasks, and which of them this process is.

    Attributes:
        task_type: The job of this process (`"worker"`, `"chief"`); None if it is not in a cluster.
        task_id: Its index in the job.
        rpc_layer: The protocol that addresses are prefixed with; None for no prefix.
        environment: Where the process runs (such as `"google"`); the empty string if unknown.

    TF: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks."""

    @property
    def is_chief(self) -> bool:
        """Whether this process does what only one should do: save, log, show progress.

        True for the chief, for worker 0 if there is no chief, for an evaluator, and for a process
        outside a cluster. TF: `multi_worker_util.is_chief`.
        """
        if self.task_type == "worker":
            return not self.task_id and "chief" not in self.cluster_spec().jobs
        return self.task_type in (None, "chief", "evaluator")

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of a task's accelerators by type, as far as the resolver knows."""
        return {}

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, this process's by default; "" outside a cluster."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        if task_type is None or task_id is None or not cluster.jobs:
            return ""
        address = cluster.task_address(task_type, task_id)
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol else address


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program itself describes.

    Args:
        cluster_spec: The cluster.
        master: The result of `master()` without a task.
        task_type: The job of this process.
        task_id: Its index in the job.
        environment: Where the process runs.
        num_accelerators: The number of a task's accelerators by type, such as `{"GPU": 2}`.
        rpc_layer: The protocol that addresses are prefixed with.

    TF: `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec. Received: {cluster_spec!r}")
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = num_accelerators or {}

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if task_type is None or task_id is None:
            return self._master
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of a task's accelerators by type."""
        return self._num_accelerators


class UnionClusterResolver(ClusterResolver):
    """The union of the clusters of several resolvers.

    A job that occurs in several of them has the tasks of all: lists are concatenated, and if one of
    them gives indices, no index may occur twice.

    Args:
        cluster_resolvers: At least one. All properties except the cluster are those of the first
            one.
        task_type: Overrides the first one's job.
        task_id: Overrides its index.
        rpc_layer: Overrides its protocol.

    Raises:
        TypeError: An argument is not a cluster resolver.
        ValueError: No resolver is given.

    TF: `tf.distribute.cluster_resolver.UnionResolver`.
    """

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ):
        if not cluster_resolvers:
            raise ValueError("Expected at least one cluster resolver. Received: none")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"Expected cluster resolvers. Received: {resolver!r}")
        first = cluster_resolvers[0]
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id
        self.rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self.environment = first.environment
        self._resolvers = cluster_resolvers

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks.

        Raises:
            KeyError: Two tasks of a job have the same index.
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for part in parts for job in part)
        return ClusterSpec({job: _union(job, [p[job] for p in parts if job in p]) for job in jobs})

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of a task's accelerators by type, according to the first resolver."""
        return self._resolvers[0].num_accelerators()


def _union(job: str, of_resolvers: list[Any]) -> Any:
    if all(isinstance(tasks, list) for tasks in of_resolvers):
        return [address for tasks in of_resolvers for address in tasks]
    united: dict[int, str] = {}
    for tasks in of_resolvers:
        indexed = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        if twice := sorted(united.keys() & indexed.keys()):
            raise KeyError(f"Tasks {twice} of job {job!r} have an address in several resolvers.")
        united |= indexed
    return united
