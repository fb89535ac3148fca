"""The cluster of the processes that LSF's `jsrun` has started."""

from __future__ import annotations

import os

from unison.net.addresses import LOOPBACK
from unison.runtime.cluster_resolvers.allocations import lsf_hosts
from unison.runtime.cluster_resolvers.ranks import (
    RankedClusterResolver,
    Ranks,
    derived_port,
    local_number,
    number,
)

_LAUNCHER = "jsrun"
_RANK = "JSM_NAMESPACE_RANK"
_SIZE = "JSM_NAMESPACE_SIZE"


class LSFClusterResolver(RankedClusterResolver):
    """The processes of LSF's `jsrun`; all are workers, in the order of their ranks.

    The first one is expected on the first compute host of the job: the first of the hosts in
    `LSB_DJOB_RANKFILE` (or `LSB_MCPU_HOSTS`) is the launch node, if there are several. Processes
    that `mpirun` starts in an LSF job have the resolver of that `mpirun`.

    Args:
        host: The address of the machine of rank 0. Default: see above.
        port: A free port there. Default: derived from `LSB_JOBID`.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` so that the processes of a
            machine share its GPUs equally; `jsrun` does so itself by resource sets.

    Raises:
        RuntimeError: `jsrun` has not started this process, or the job's hosts are unknown.
        ValueError: A variable is malformed.

    Source: the variables that PyTorch Lightning's `LSFEnvironment` reads.
    """

    environment = "lsf"

    def __init__(
        self, host: str | None = None, port: int | None = None, auto_set_gpu: bool = False
    ):
        local = ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
        local_index, local_count = (local_number(name, _LAUNCHER) for name in local)
        ranks = Ranks(number(_RANK, _LAUNCHER), number(_SIZE, _LAUNCHER), local_index, local_count)
        if host is None:
            host = LOOPBACK if ranks.share_a_machine else _first_compute_host()
        if port is None:
            port = derived_port(f"LSF {os.environ.get('LSB_JOBID', '')}")
        super().__init__(_LAUNCHER, ranks, host, port, auto_set_gpu)

    @staticmethod
    def is_here() -> bool:
        """Returns whether `jsrun` has started this process."""
        return bool(os.environ.get(_RANK) and os.environ.get(_SIZE))


def _first_compute_host() -> str:
    hosts = lsf_hosts()
    if not hosts:
        raise RuntimeError(
            "Expected the hosts of the job in LSB_DJOB_RANKFILE or LSB_MCPU_HOSTS. Neither is set. "
            "Pass the address of rank 0's machine: LSFClusterResolver(host=...)."
        )
    return hosts[1] if len(hosts) > 1 else hosts[0]
