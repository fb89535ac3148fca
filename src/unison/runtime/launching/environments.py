"""The environment variables of a job's workers: their cluster or job, devices and threads."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence

from unison.net.addresses import LOOPBACK, joined_address
from unison.net.listening import listen
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.gpus import (
    VISIBLE_GPUS,
    gpus_of_jax,
    pci_devices,
    shares_of_gpus,
)
from unison.runtime.cores import available_cores, cores_near, equal_shares
from unison.runtime.devices import CPU_DEVICES_VARIABLE
from unison.runtime.elastic.environment import TOKEN_VARIABLE as ELASTIC_TOKEN
from unison.runtime.elastic.environment import VARIABLE as ELASTIC
from unison.runtime.elastic.environment import ElasticEnvironment
from unison.runtime.memory import variables_of_huge_pages

logger = logging.getLogger("unison")

#: The variables that set a process's number of threads: XLA's, OpenMP's and OpenBLAS'.
THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

#: JAX's variable for the fraction of each visible GPU's memory that a process allocates at start,
#: and its default.
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATED_BY_JAX = 0.75


def default_workers() -> int:
    """Returns how many workers `unison run` starts on this machine: one a GPU, otherwise one."""
    return len(gpus_of_jax()) or 1


def cluster_on_this_machine(workers: int, address: str = LOOPBACK) -> ClusterSpec:
    """Returns a cluster of `workers` workers at free ports of this machine.

    The ports are currently free; another process could still take them before the workers do.

    Args:
        workers: The number of workers, at least 1.
        address: The address at which the workers listen.

    Raises:
        ValueError: `workers` is less than 1.
        OSError: `address` does not belong to this machine.
    """
    if workers < 1:
        raise ValueError(f"Expected at least 1 worker. Received: {workers}")
    with contextlib.ExitStack() as open_sockets:
        # All are open simultaneously, so that the ports are distinct.
        sockets = [open_sockets.enter_context(listen(address, 0)) for _ in range(workers)]
        ports = [each.getsockname()[1] for each in sockets]
    return ClusterSpec({"worker": [joined_address(address, port) for port in ports]})


def worker_environments(
    cluster: ClusterSpec,
    devices_per_worker: int | None = None,
    cores: int | None = None,
    own: Sequence[int] | None = None,
) -> list[dict[str, str]]:
    """Returns the additional environment variables of each worker of a cluster.

    Args:
        cluster: The cluster, whose tasks are workers.
        devices_per_worker: The number of logical devices into which each worker splits its CPU.
            None: as configured.
        cores: The number of threads of each worker. None: the workers share this machine's cores,
            at least one each; more threads would only compete for them. Variables that the user has
            set are kept.
        own: The indices of the workers on this machine. None: all.

    Examples:
        >>> cluster = ClusterSpec({"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]})
        >>> second = worker_environments(cluster, devices_per_worker=4)[1]
        >>> second["UNISON_CPU_DEVICES"], json.loads(second["TF_CONFIG"])["task"]
        ('4', {'type': 'worker', 'index': 1})
    """
    indices = cluster.task_indices("worker") if own is None else own
    shared = _computing(len(indices), devices_per_worker, cores)
    return [{**shared, "TF_CONFIG": _tf_config(cluster, index)} for index in indices]


def with_own_gpus(environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns the environments of all workers on this machine, each with its share of the GPUs.

    If JAX would compute with GPUs, each worker sees an equal, disjoint share of those that this
    process may use. If there are fewer GPUs than workers, each worker sees all of them and takes
    its share of their memory (unless `XLA_PYTHON_CLIENT_MEM_FRACTION` is set), with a warning of
    the consequences; there is also a warning if some are left over. A single worker sees all.

    Args:
        environments: The additional environment variables of each worker.
    """
    own = [dict(environment) for environment in environments]
    names = gpus_of_jax() if len(own) > 1 else []
    if not names:
        return own
    shares = shares_of_gpus(names, len(own))
    if not shares:
        logger.warning(
            "%d workers, and fewer GPUs (%s): each worker sees all of them, and NCCL refuses two "
            "workers on one GPU. Start at most %d, or set JAX_PLATFORMS=cpu.",
            len(own),
            ",".join(names),
            len(names),
        )
        if MEMORY_FRACTION not in os.environ:
            # Otherwise, the first one would take what JAX allocates, and the others fail.
            fraction = math.floor(1000 * _ALLOCATED_BY_JAX / len(own)) / 1000
            for environment in own:
                environment[MEMORY_FRACTION] = str(fraction)
        return own
    if left := len(names) % len(own):
        logger.warning(
            "No worker has GPU %s: the %d workers have %d each.",
            ",".join(names[-left:]),
            len(own),
            len(names) // len(own),
        )
    for environment, share in zip(own, shares, strict=True):
        environment[VISIBLE_GPUS] = share
    return own


def cores_of_workers(environments: Sequence[Mapping[str, str]]) -> list[list[int] | None]:
    """Returns the cores on which each worker on this machine should run, by its environment.

    A worker with GPUs of its own gets cores of the NUMA node that they are connected to, which it
    shares with the other workers there: its copies to the GPUs do not cross to another node.
    None for workers without GPUs of their own, with GPUs on several nodes, where the system does
    not say, and where there are more workers than cores.
    """
    visible = [environment.get(VISIBLE_GPUS) for environment in environments]
    near: list[list[int] | None] = [None] * len(visible)
    if not any(visible):
        return near
    addresses = pci_devices()
    for worker, names in enumerate(visible):
        nodes = [
            cores_near(addresses[name]) if name in addresses else None
            for name in (names.split(",") if names else [])
        ]
        if nodes and all(node == nodes[0] for node in nodes):
            near[worker] = nodes[0]
    found: list[list[int] | None] = [None] * len(visible)
    for cores in {tuple(cores): cores for cores in near if cores is not None}.values():
        together = [worker for worker, own in enumerate(near) if own == cores]
        for worker, share in zip(together, equal_shares(cores, len(together)), strict=True):
            found[worker] = share or None
    return found


def elastic_environments(
    told: ElasticEnvironment,
    listen: Sequence[str],
    devices_per_worker: int | None = None,
    cores: int | None = None,
    added_by: str | None = None,
) -> list[dict[str, str]]:
    """Returns the additional environment variables of each worker of an elastic job.

    Args:
        told: The settings that all workers share; name, slot and listening address differ.
        listen: The address at which each listens for the others.
        devices_per_worker: The number of logical devices into which each worker splits its CPU.
            None: as configured.
        cores: The number of threads of each worker. None: they share this machine's cores.
        added_by: The name of the process that adds them to a running job. None: the supervisor
            starts them.

    Examples:
        >>> told = ElasticEnvironment("127.0.0.1:4000", "secret", "", None, "", 10.0, 60.0, None)
        >>> second = elastic_environments(told, ["127.0.0.1"] * 2)[1]["UNISON_ELASTIC"]
        >>> [json.loads(second)[about] for about in ("name", "slot", "listen", "register")]
        ['worker 1', 1, '127.0.0.1', '127.0.0.1:4000']
    """
    shared = _computing(len(listen), devices_per_worker, cores) | {ELASTIC_TOKEN: told.token}

    def own(index: int) -> str:
        name = f"worker {index}" if added_by is None else f"worker {index} of {added_by}"
        slot = index if added_by is None else None
        said = told._replace(name=name, slot=slot, listen=listen[index])._asdict()
        del said["token"]
        return json.dumps(said)

    return [{**shared, ELASTIC: own(index)} for index in range(len(listen))]


def listening_at(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """Returns the environment of an elastic worker, changed to one that listens at an address.

    That of another worker is returned as it is.

    Examples:
        >>> told = ElasticEnvironment("127.0.0.1:4000", "secret", "", None, "", 10.0, 60.0, None)
        >>> (own,) = elastic_environments(told, [""])
        >>> json.loads(listening_at(own, "10.0.0.2")["UNISON_ELASTIC"])["listen"]
        '10.0.0.2'
    """
    if ELASTIC not in environment:
        return dict(environment)
    said = {**json.loads(environment[ELASTIC]), "listen": address}
    return {**environment, ELASTIC: json.dumps(said)}


def _computing(workers: int, devices_per_worker: int | None, cores: int | None) -> dict[str, str]:
    """Returns the variables for the threads, devices and memory of each of `workers` workers."""
    if cores is None:
        threads = max(1, available_cores() // max(1, workers))
        shared = {name: str(threads) for name in THREAD_VARIABLES if name not in os.environ}
    else:
        shared = dict.fromkeys(THREAD_VARIABLES, str(cores))
    if devices_per_worker is not None:
        shared[CPU_DEVICES_VARIABLE] = str(devices_per_worker)
    return shared | variables_of_huge_pages()


def _tf_config(cluster: ClusterSpec, index: int) -> str:
    return json.dumps({"cluster": cluster.as_dict(), "task": {"type": "worker", "index": index}})
