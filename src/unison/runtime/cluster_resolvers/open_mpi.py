"""The cluster of the processes that Open MPI's `mpirun` has started."""

from __future__ import annotations

import os
import re
import zlib

from unison.net.addresses import LOOPBACK
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.gpus import VISIBLE_GPUS, share_of_gpus
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"

#: The variable with the address of `mpirun`, which Open MPI 4 sets and later versions do not.
_ADDRESS_OF_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_HOST = re.compile(r"tcp://([^,:]+)|tcp6://\[([^],]+)")

#: The variable with the job's name, from which its port is derived, and the range of ports: above
#: the ephemeral ports of Linux.
_JOB = "PMIX_NAMESPACE"
_PORTS = range(61_000, 65_000)


class OpenMPIClusterResolver(ClusterResolver):
    """The processes of an Open MPI `mpirun`; all are workers, in the order of their ranks.

    Only the address of rank 0 must be known: the other ranks connect to it. On one machine, that is
    the loopback address. On several, it is the machine of `mpirun`, whose address Open MPI 4 sets;
    start `mpirun` on the machine of rank 0, or pass the address. Open MPI does not provide the
    addresses of the other ranks: their hosts in the cluster are the placeholders `rank-1`,
    `rank-2`, ...

    Args:
        host: The address of rank 0's machine. Default: see above.
        port: A free port there. Default: derived from the job's name.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` so that the processes of a
            machine share its GPUs equally.

    Raises:
        RuntimeError: Open MPI has not started this process, or does not provide the address of rank
            0.
    """

    environment = "open-mpi"

    def __init__(self, host: str | None = None, port: int | None = None, auto_set_gpu: bool = True):
        if not self.is_here():
            raise RuntimeError(
                f"The environment variable {_RANK} is not set: Open MPI has not started this "
                "process. Start the program with mpirun."
            )
        self.task_type = "worker"
        self.task_id = int(os.environ[_RANK])
        count, local_count = int(os.environ[_SIZE]), int(os.environ[_LOCAL_SIZE])
        host = host or (LOOPBACK if count == local_count else _host_of_mpirun())
        if port is None:
            port = _PORTS[zlib.crc32(os.environ.get(_JOB, "").encode()) % (len(_PORTS) - count)]
        hosts = [host, *(host if count == local_count else f"rank-{i}" for i in range(1, count))]
        self._cluster = ClusterSpec({"worker": [f"{h}:{port + i}" for i, h in enumerate(hosts)]})
        shares = auto_set_gpu and local_count > 1
        self._gpus = share_of_gpus(int(os.environ[_LOCAL_RANK]), local_count) if shares else None

    @staticmethod
    def is_here() -> bool:
        """Returns whether Open MPI has started this process."""
        return _RANK in os.environ

    def cluster_spec(self) -> ClusterSpec:
        if self._gpus is not None:
            os.environ[VISIBLE_GPUS] = self._gpus
        return self._cluster


def _host_of_mpirun() -> str:
    found = _HOST.search(os.environ.get(_ADDRESS_OF_MPIRUN, ""))
    if found is None:
        raise RuntimeError(
            "Open MPI does not provide the address of rank 0 (its version 4 does). Pass the "
            "address of rank 0's machine: OpenMPIClusterResolver(host=...)."
        )
    return found[1] or f"[{found[2]}]"
