"""The cluster of a Slurm job step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.gpus import VISIBLE_GPUS, visible_gpus
from unison.runtime.cluster_resolvers.hostlists import expand_hostlist
from unison.runtime.cluster_resolvers.launchers import is_interactive_step
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

#: The variables that are set for the tasks of a job step, but not for the batch script.
_OF_A_STEP = ("PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE")


class SlurmClusterResolver(ClusterResolver):
    """The tasks of a Slurm job step, as `srun` starts them.

    A task's number in the step (`SLURM_PROCID`) is its position in the cluster: the nodes are in
    the order of `SLURM_STEP_NODELIST`, each with its tasks, at consecutive ports from `port_base`
    on. Tasks must be distributed in blocks, which is Slurm's default.

    Args:
        jobs: The number of tasks of each job; jobs are filled in the order of their names. Default:
            all tasks are workers.
        port_base: The port of the first task of each node.
        gpus_per_node: The number of GPUs of a node. Default: as given by `CUDA_VISIBLE_DEVICES` or
            `nvidia-smi`.
        gpus_per_task: The number of GPUs of a task. Default: equal shares.
        tasks_per_node: The number of tasks of a node: one number for all nodes, or a dictionary by
            node name. Default: `SLURM_STEP_TASKS_PER_NODE`.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to the GPUs of this
            process.
        rpc_layer: The protocol that addresses are prefixed with.

    Raises:
        RuntimeError: This is not a job step, its number of tasks differs from that of the jobs, or
            a node has fewer GPUs than its tasks need.
        ValueError: A Slurm variable cannot be parsed.

    TF: `tf.distribute.cluster_resolver.SlurmClusterResolver` (which sorts the nodes by name: n10 is
    before n9, and the positions differ from Slurm's).
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ):
        self._rank = int(_slurm("PROCID"))
        self.rpc_layer = rpc_layer
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self._tasks_per_node = _tasks_of_nodes(tasks_per_node)
        count = sum(self._tasks_per_node.values())
        self._jobs = dict(sorted((jobs or {"worker": int(_slurm("STEP_NUM_TASKS"))}).items()))
        if sum(self._jobs.values()) != count:
            raise RuntimeError(
                f"The jobs {self._jobs} have {sum(self._jobs.values())} tasks, and Slurm has "
                f"started {count}. Pass the number of tasks to srun, or as `jobs`."
            )
        if not 0 <= self._rank < count:
            raise RuntimeError(f"SLURM_PROCID must be below {count}. Received: {self._rank}")
        most = max(self._tasks_per_node.values())
        self._gpus = visible_gpus()
        gpus = len(self._gpus) if gpus_per_node is None else gpus_per_node
        if len(self._gpus) < gpus:
            self._gpus = [str(index) for index in range(gpus)]
        self._gpus_per_task = gpus // most if gpus_per_task is None else gpus_per_task
        if most * self._gpus_per_task > gpus:
            raise RuntimeError(
                f"{most} tasks of a node need {self._gpus_per_task} GPUs each. The node has: {gpus}"
            )
        self.task_type, self.task_id = self._task()

    @staticmethod
    def is_here() -> bool:
        """Returns whether `srun` has started this process, and not a shell that it runs in."""
        is_step = all(f"SLURM_{name}" in os.environ for name in _OF_A_STEP)
        return is_step and not is_interactive_step(os.environ)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns this process's job and its index in the job."""
        return self.task_type, self.task_id

    def cluster_spec(self) -> ClusterSpec:
        addresses: list[str] = []
        gpus: list[str] = []
        for node, count in self._tasks_per_node.items():
            for place in range(count):
                addresses.append(f"{node}:{self._port_base + place}")
                first = place * self._gpus_per_task
                gpus.append(",".join(self._gpus[first : first + self._gpus_per_task]))
        if self._auto_set_gpu and self._gpus_per_task:
            os.environ[VISIBLE_GPUS] = gpus[self._rank]
        remaining = iter(addresses)
        return ClusterSpec(
            {job: [next(remaining) for _ in range(count)] for job, count in self._jobs.items()}
        )

    def num_accelerators(self) -> dict[str, int]:
        return {"GPU": self._gpus_per_task}

    def _task(self) -> tuple[str, int]:
        tasks = [(job, index) for job, count in self._jobs.items() for index in range(count)]
        return tasks[self._rank]


def _slurm(name: str) -> str:
    variable = f"SLURM_{name}"
    if variable not in os.environ:
        raise RuntimeError(
            f"The environment variable {variable} is not set: this process does not belong to a "
            "Slurm job step. Start the program with srun."
        )
    return os.environ[variable]


def _tasks_of_nodes(given: int | Mapping[str, int] | None) -> dict[str, int]:
    if isinstance(given, Mapping):
        return dict(given)
    nodes = expand_hostlist(_slurm("STEP_NODELIST"))
    if given is not None:
        return dict.fromkeys(nodes, given)
    counts = expand_tasks_per_node(_slurm("STEP_TASKS_PER_NODE"))
    if len(counts) != len(nodes):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE lists {len(counts)} nodes, SLURM_STEP_NODELIST lists "
            f"{len(nodes)}."
        )
    return dict(zip(nodes, counts, strict=True))


def expand_tasks_per_node(counts: str) -> list[int]:
    """Returns the numbers in Slurm's compact list of task counts.

    Raises:
        ValueError: The list is malformed.

    Examples:
        >>> expand_tasks_per_node("3(x2),2,1")
        [3, 3, 2, 1]
    """
    expanded: list[int] = []
    for text in counts.split(","):
        found = _TASKS.fullmatch(text)
        if found is None:
            raise ValueError(f"Expected numbers of tasks such as 3(x2),1. Received: {counts!r}")
        expanded += [int(found[1])] * int(found[2] or 1)
    return expanded
