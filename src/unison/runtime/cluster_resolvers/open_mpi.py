"""The cluster of the processes that Open MPI's `mpirun` has started."""

from __future__ import annotations

import os
import re

from unison.runtime.cluster_resolvers.ranks import (
    RankedClusterResolver,
    Ranks,
    derived_port,
    host_of_first,
    number,
)

_LAUNCHER = "Open MPI"

_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"

#: The variable with the address of `mpirun`, which Open MPI 4 sets and later versions do not.
_ADDRESS_OF_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_HOST = re.compile(r"tcp://([^,:]+)|tcp6://\[([^],]+)")

#: The variable with the job's name, from which its port is derived.
_JOB = "PMIX_NAMESPACE"


class OpenMPIClusterResolver(RankedClusterResolver):
    """The processes of an Open MPI `mpirun`; all are workers, in the order of their ranks.

    Only the address of rank 0 must be known: the other ranks connect to it. On one machine, that is
    the loopback address. On several, it is the machine of `mpirun`, whose address Open MPI 4 sets:
    start `mpirun` on the machine of rank 0. Open MPI 5 does not set it: rank 0 is expected on the
    first host of the allocation of Slurm, LSF or PBS; otherwise pass the address, or set
    `JAX_COORDINATOR_ADDRESS` for all processes.

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
        names = (_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE)
        ranks = Ranks(*(number(name, _LAUNCHER) for name in names))
        if host is None:
            host = None if ranks.share_a_machine else _host_of_mpirun()
            host = host or host_of_first(_LAUNCHER, ranks, type(self).__name__)
        if port is None:
            port = derived_port(os.environ.get(_JOB, ""))
        super().__init__(_LAUNCHER, ranks, host, port, auto_set_gpu)

    @staticmethod
    def is_here() -> bool:
        """Returns whether Open MPI has started this process."""
        return _RANK in os.environ


def _host_of_mpirun() -> str | None:
    found = _HOST.search(os.environ.get(_ADDRESS_OF_MPIRUN, ""))
    return None if found is None else found[1] or found[2]
