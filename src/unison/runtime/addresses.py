"""The choice of the local address at which the collectives of a process listen."""

from __future__ import annotations

from unison.net.addresses import address_towards, own_address, split_address
from unison.runtime.cluster import ClusterSpec
from unison.runtime.private_jax import backend_is_started, listen_for_collectives_at


def listen_at_own_address(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Makes the collectives of this process, a task of a cluster, listen at its address only.

    By default they listen at the address that the machine's host name resolves to. That address may
    be reachable from the network even if all workers share the machine, or unreachable for workers
    on other machines (Debian resolves the host name to 127.0.1.1). If the cluster's address for the
    task does not belong to this machine, as behind a router, the local address from which the first
    task is reached is used.

    Args:
        cluster: The cluster.
        task_type: The job of this process.
        task_id: Its index in the job.
    """
    if backend_is_started() or task_type is None or task_id is None:
        return
    own, _ = split_address(cluster.task_address(task_type, task_id))
    first_job = "chief" if "chief" in cluster.jobs else "worker"
    first = split_address(cluster.task_address(first_job, cluster.task_indices(first_job)[0]))
    address = own_address(own) or address_towards(*first)
    if address is not None:
        listen_for_collectives_at(address)
