"""The processes of a cluster: how they come together, and what they tell each other.

`join_cluster` makes this process one of a job of `jax.distributed`, in which every process sees the
devices of all. What the processes have to tell each other besides arrays goes through JAX's
coordination service, which the first process hosts.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from typing import Any

import jax

from unison.runtime.agreement import ConnectedWorkers, Talk
from unison.runtime.cluster import ClusterSpec
from unison.runtime.coordination import CoordinationStore
from unison.runtime.private_jax import backend_is_started
from unison.runtime.rendezvous import Place, meet

#: The jobs whose tasks train, in the order of their processes.
TRAINING_JOBS = ("chief", "worker")

#: Seconds that a process waits for the others, at the start and whenever they agree on something.
TIMEOUT = 300.0


def training_tasks(cluster: ClusterSpec) -> list[tuple[str, int]]:
    """Returns the tasks of a cluster that train together: the chief, then the workers.

    Examples:
        >>> training_tasks(ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"]}))
        [('chief', 0), ('worker', 0), ('worker', 1)]
    """
    jobs = [job for job in TRAINING_JOBS if job in cluster.jobs]
    return [(job, index) for job in jobs for index in cluster.task_indices(job)]


def join_cluster(
    cluster: ClusterSpec, task_type: str | None, task_id: int | None, timeout: float = TIMEOUT
) -> None:
    """Makes this process the given task of a cluster, and waits for the others.

    The first task hosts the coordination service at its address. Of one task, and where the
    process has joined already, nothing is done.

    Args:
        cluster: The cluster.
        task_type: The job of this process.
        task_id: Its index in the job.
        timeout: Seconds to wait for the others.

    Raises:
        ValueError: The cluster has no such training task, or this process belongs to a job of
            another size.
        RuntimeError: JAX's backend runs already, with the devices of this process only.
        UnavailableError: Not all came, two came as the same task, their software or clusters
            differ, or the first one's address cannot be listened at.
    """
    tasks = training_tasks(cluster)
    if len(tasks) < 2:
        return
    place = next((i for i, task in enumerate(tasks) if task == (task_type, task_id)), None)
    if place is None:
        raise ValueError(
            f"Expected this process to be one of {tasks}, which train together. Received: task "
            f"type {task_type!r}, index {task_id!r}. Set `task` in TF_CONFIG, or the resolver's "
            "task_type and task_id."
        )
    if jax.distributed.is_initialized():
        _check_joined(len(tasks), place)
        return
    if backend_is_started():
        raise RuntimeError(
            "A process joins its cluster before JAX starts. Create the strategy before the first "
            "JAX computation (and before jax.devices())."
        )
    address = cluster.task_address(*tasks[0])
    names = [f"{job} {index} ({cluster.task_address(job, index)})" for job, index in tasks]
    meet(address, Place(place, names), _software() | {"cluster": str(cluster.as_dict())}, timeout)
    # JAX's preemption service would keep SIGTERM from ending the process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address if place == 0 else None,
        num_processes=len(tasks),
        process_id=place,
        initialization_timeout=max(int(timeout), 1),
    )
    _leave_at_once_after_errors()


def _leave_at_once_after_errors() -> None:
    """Ends the process when its program ends by an error, without waiting for the others.

    At the end, JAX waits for all processes: they would wait for this one in a collective, and this
    one for them, until JAX gives up after minutes.
    """
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = leave


def _software() -> dict[str, str]:
    """Returns what all processes must have in common."""
    return {name: importlib.metadata.version(name) for name in ("unison", "jax", "jaxlib")}


def _check_joined(count: int, place: int) -> None:
    if (jax.process_count(), jax.process_index()) != (count, place):
        raise ValueError(
            f"Expected process {place} of {count}, as the cluster says. Received: a process that "
            f"has joined a job of jax.distributed as number {jax.process_index()} of "
            f"{jax.process_count()}."
        )


def all_gather_json(value: Any, what: str) -> list[Any]:
    """Returns the values of all processes, in order; each must call.

    Args:
        value: What JSON can say; a tuple comes back as a list.
        what: What the value is, for messages.

    Raises:
        DeadlineExceededError: A process did not come within `TIMEOUT`; the message names it.
        RuntimeError: The processes are at different places of their programs.
    """
    answers = _talk().ask([what, value])
    for process, (other, _) in enumerate(answers):
        if other != what:
            raise RuntimeError(
                f"All processes must do the same. Process {jax.process_index()} is at: {what}. "
                f"Process {process} is at: {other}."
            )
    return [given for _, given in answers]


_lock = threading.Lock()
_talks: dict[int, Talk] = {}


def _talk() -> Talk:
    """Returns where the processes of the job that this one has joined talk."""
    store = CoordinationStore()
    with _lock:
        if store.service not in _talks:
            count, index = jax.process_count(), jax.process_index()
            workers = ConnectedWorkers(count, index, store, "process group", TIMEOUT)
            _talks.clear()
            _talks[store.service] = workers.talk("values")
        return _talks[store.service]
