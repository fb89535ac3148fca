"""The cluster of the processes that `torchrun`, or a launcher with its variables, has started."""

from __future__ import annotations

import os

from unison.runtime.cluster_resolvers.ranks import (
    RankedClusterResolver,
    Ranks,
    derived_port,
    local_number,
    number,
)

_LAUNCHER = "torchrun"

#: The variables of the processes of `torchrun`, and those with which Kubeflow Trainer configures it
#: in pods, where a program may also run without it, one process a pod.
_OF_PROCESSES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_PODS = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")

#: Set to "True" if `torchrun` itself listens at `MASTER_PORT`.
_AGENT_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"


class TorchrunClusterResolver(RankedClusterResolver):
    """The processes that `torchrun` has started; all are workers, in the order of their ranks.

    Accelerate, DeepSpeed, Kubeflow's PyTorchJob and others set the same variables. The first
    process listens at `MASTER_ADDR` and `MASTER_PORT`; where `torchrun` itself listens at that
    port (`TORCHELASTIC_USE_AGENT_STORE`), at a port from 61000 to 64999 that is derived from it.

    Args:
        port: A free port of the first process's machine. Default: see above.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` so that the processes of a
            machine share its GPUs equally.

    Raises:
        RuntimeError: A variable is not set: this process was not started in this way.
        ValueError: A variable is malformed.

    Source: PyTorch, `torch.distributed.run` ("Environment Variables") and
    `torch.distributed.elastic.agent.server.local_elastic_agent`; Kubeflow Trainer,
    `pkg/runtime/framework/plugins/torch`.
    """

    environment = "torchrun"

    def __init__(self, port: int | None = None, auto_set_gpu: bool = True):
        rank, size, host, master_port = _OF_PODS if _is_pod() else _OF_PROCESSES
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        local_index, local_count = (local_number(name, _LAUNCHER) for name in local)
        ranks = Ranks(number(rank, _LAUNCHER), number(size, _LAUNCHER), local_index, local_count)
        address = os.environ.get(host)
        if not address:
            raise RuntimeError(
                f"The environment variable {host} is not set: {_LAUNCHER} has not started this "
                "process."
            )
        if port is None:
            port = number(master_port, _LAUNCHER)
            if os.environ.get(_AGENT_LISTENS) == "True":
                port = derived_port(f"{port} {os.environ.get('TORCHELASTIC_RUN_ID', '')}")
        super().__init__(_LAUNCHER, ranks, address.strip("[]"), port, auto_set_gpu)

    @staticmethod
    def is_here() -> bool:
        """Returns whether the variables of `torchrun` are set."""
        return all(os.environ.get(name) for name in _OF_PROCESSES) or _is_pod()


def _is_pod() -> bool:
    """Returns whether only the variables for `torchrun` are set, which was not used."""
    return "RANK" not in os.environ and all(os.environ.get(name) for name in _OF_PODS)
