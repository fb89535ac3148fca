"""What the workers of a job find in their environments: their cluster, devices and threads."""

from __future__ import annotations

import contextlib
import json
import os
import socket

from unison.runtime.addresses import LOOPBACK
from unison.runtime.cluster import ClusterSpec
from unison.runtime.devices import CPU_DEVICES_VARIABLE, available_cores

#: The variables that say how many threads a process computes with: XLA's, OpenMP's and OpenBLAS'.
THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def cluster_on_this_machine(workers: int, address: str = LOOPBACK) -> ClusterSpec:
    """Returns a cluster of `workers` workers at free ports of this machine.

    The ports are free now; nothing keeps others from taking them before the workers do.

    Args:
        workers: How many, at least 1.
        address: Where the workers listen.

    Raises:
        ValueError: There is no worker.
        OSError: `address` is none of this machine's.
    """
    if workers < 1:
        raise ValueError(f"Expected at least 1 worker. Received: {workers}")
    with contextlib.ExitStack() as open_sockets:
        # All are open at once, so that all ports differ.
        sockets = [open_sockets.enter_context(_listening(address)) for _ in range(workers)]
        ports = [each.getsockname()[1] for each in sockets]
    host = f"[{address}]" if ":" in address else address
    return ClusterSpec({"worker": [f"{host}:{port}" for port in ports]})


def _listening(address: str) -> socket.socket:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family)


def worker_environments(
    cluster: ClusterSpec, devices_per_worker: int | None = None, cores: int | None = None
) -> list[dict[str, str]]:
    """Returns what is added to the environment of each worker of a cluster.

    Args:
        cluster: The cluster, whose tasks are workers.
        devices_per_worker: Into how many logical devices each splits its CPU. None: as it is set.
        cores: With how many threads each computes. None: the workers share this machine's cores,
            at least one each; more threads would only take turns. What the user has set stays.

    Examples:
        >>> cluster = ClusterSpec({"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]})
        >>> second = worker_environments(cluster, devices_per_worker=4)[1]
        >>> second["UNISON_CPU_DEVICES"], json.loads(second["TF_CONFIG"])["task"]
        ('4', {'type': 'worker', 'index': 1})
    """
    workers = cluster.num_tasks("worker")
    if cores is None:
        threads = max(1, available_cores() // workers)
        shared = {name: str(threads) for name in THREAD_VARIABLES if name not in os.environ}
    else:
        shared = dict.fromkeys(THREAD_VARIABLES, str(cores))
    if devices_per_worker is not None:
        shared[CPU_DEVICES_VARIABLE] = str(devices_per_worker)
    return [
        {**shared, "TF_CONFIG": _tf_config(cluster, index)}
        for index in cluster.task_indices("worker")
    ]


def _tf_config(cluster: ClusterSpec, index: int) -> str:
    return json.dumps({"cluster": cluster.as_dict(), "task": {"type": "worker", "index": index}})
