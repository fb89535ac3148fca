"""The cluster of the processes of MPI launchers other than Open MPI's, of Horovod and of Flux."""

from __future__ import annotations

import dataclasses
import os

from unison.runtime.cluster_resolvers.ranks import (
    RankedClusterResolver,
    Ranks,
    derived_port,
    host_of_first,
    local_number,
    number,
)


@dataclasses.dataclass(frozen=True)
class _Variables:
    """The variables of a launcher.

    Attributes:
        launcher: Its name.
        index: The variable with the index of a process.
        count: The variable with the number of processes.
        local_index: The variable with the index on the machine.
        local_count: The variable with the number of processes of the machine.
        job: The variables that differ between jobs, from which the port is derived.
    """

    launcher: str
    index: str
    count: str
    local_index: str
    local_count: str
    job: tuple[str, ...]


#: Those of a launcher that another one starts are first.
_KINDS = (
    _Variables(
        "Horovod",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    _Variables(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        (),
    ),
    _Variables(
        "MPI (MPICH, Intel MPI)",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        (),
    ),
    _Variables(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        "",
        ("FLUX_JOB_ID",),
    ),
)

#: The variables of the batch systems with the number of a job.
_OF_BATCH_SYSTEMS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "LSB_JOBID", "PBS_JOBID")


class MPIClusterResolver(RankedClusterResolver):
    """The processes that MPICH, Intel MPI, MVAPICH, Horovod or Flux has started; all are workers.

    On one machine the first process listens at the loopback address. On several, it is expected on
    the first host of the allocation of Slurm, LSF or PBS; otherwise pass the address, or set
    `JAX_COORDINATOR_ADDRESS` for all processes. Processes of Open MPI have an
    `OpenMPIClusterResolver`.

    Args:
        host: The address of the machine of rank 0. Default: see above.
        port: A free port there. Default: derived from the job, where the launcher or a batch system
            gives it a number or an address; the same for all other jobs, so two of those on one
            machine need a port each.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` so that the processes of a
            machine share its GPUs equally.

    Raises:
        RuntimeError: None of these launchers has started this process, or the address of rank 0 is
            unknown.
        ValueError: A variable is malformed.

    Source: MPICH's Hydra process manager (`PMI_RANK`, `MPI_LOCALNRANKS`), MVAPICH's user guide
    (`MV2_COMM_WORLD_*`), Horovod's `horovod/runner/gloo_run.py`, and `flux-environment(7)`.
    """

    environment = "mpi"

    def __init__(self, host: str | None = None, port: int | None = None, auto_set_gpu: bool = True):
        kind = _kind()
        if kind is None:
            names = ", ".join(each.index for each in _KINDS)
            raise RuntimeError(
                f"Expected one of the environment variables {names}. None is set: no MPI launcher "
                "has started this process. Start the program with mpirun."
            )
        ranks = _ranks(kind)
        host = host or host_of_first(kind.launcher, ranks, type(self).__name__)
        if port is None:
            told = (os.environ.get(name, "") for name in (*kind.job, *_OF_BATCH_SYSTEMS))
            port = derived_port(f"{kind.launcher} {' '.join(told)}")
        super().__init__(kind.launcher, ranks, host, port, auto_set_gpu)

    @staticmethod
    def is_here() -> bool:
        """Returns whether one of these launchers has started this process."""
        return _kind() is not None


def _kind() -> _Variables | None:
    for kind in _KINDS:
        if os.environ.get(kind.index) and os.environ.get(kind.count):
            return kind
    return None


def _ranks(kind: _Variables) -> Ranks:
    index, count = (number(name, kind.launcher) for name in (kind.index, kind.count))
    local_index = local_number(kind.local_index, kind.launcher)
    local_count = local_number(kind.local_count, kind.launcher) if kind.local_count else None
    if os.environ.get("FLUX_JOB_NNODES") == "1":
        local_count = count
    return Ranks(index, count, local_index, local_count)
