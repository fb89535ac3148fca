"""The cluster of the processes of a job of `jax.distributed`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from unison.runtime.cluster_resolvers.launchers import launched_among_others
from unison.runtime.cluster_resolvers.ranks import (
    RankedClusterResolver,
    Ranks,
    coordinator,
    local_number,
    number,
)
from unison.runtime.private_jax import coordinator_address, initialized_processes

_LAUNCHER = "JAX"

#: The variables with the coordinator's address, which may lack a port, and with its port.
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
_PORT = "JAX_COORDINATOR_PORT"
_DEFAULT_PORT = 1234

#: The variables with the number of processes, and with a process's index, of several launchers.
_COUNTS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
_INDICES = ("JAX_PROCESS_ID",)

#: XPK's variables of a pod of a JobSet: its job's index, its own index there, and how many there
#: are.
_OF_A_POD = ("JOB_INDEX", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")

#: MaxText's variables of a node.
_OF_A_NODE = ("NNODES", "NODE_RANK")

#: The variables of the Kubeflow Training Operator's JAXJob: too generic unless all are set.
_OF_A_JAX_JOB = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")


class JAXClusterResolver(RankedClusterResolver):
    """The processes of a job of `jax.distributed`; all are workers, in the order of their ids.

    If this process has called `jax.distributed.initialize`, they are those of that job, which a
    strategy adopts. Otherwise they are as the environment describes them:

    - the address of process 0: `JAX_COORDINATOR_ADDRESS` or `JAX_COORDINATOR_IP`, and
      `JAX_COORDINATOR_PORT` if that has no port (default: 1234);
    - their number: `JAX_NUM_PROCESSES`, `JAX_PROCESS_COUNT` or `NNODES`;
    - the index of this one: `JAX_PROCESS_ID`, or `JOB_INDEX`, `PROCESSES_IN_JOB` and
      `JOB_COMPLETION_INDEX`, or `NODE_RANK`;
    - `COORDINATOR_ADDRESS`, `COORDINATOR_PORT`, `NUM_PROCESSES` and `PROCESS_ID`, if all are set.

    Where only the address is set, number and index are those of the launcher that has started this
    process, such as `mpirun` or `srun`.

    Raises:
        RuntimeError: The process has not been initialized, and the variables do not describe a job.
        ValueError: A variable is malformed.

    Source: `jax.distributed.initialize`; Kubeflow Trainer, `pkg/runtime/framework/plugins/jax`;
    Kubeflow Training Operator, `pkg/controller.v1/jax/envvar.go`; MaxText's `max_utils.py`, which
    reads what XPK sets.
    """

    environment = "jax"

    def __init__(self) -> None:
        initialized = initialized_processes()
        if initialized is not None:
            host, port = _of_initialized()
            ranks = Ranks(initialized[1], initialized[0])
        else:
            host, port = _address()
            ranks = _ranks()
        super().__init__(_LAUNCHER, ranks, host, port, auto_set_gpu=initialized is None)

    @staticmethod
    def is_here() -> bool:
        """Returns whether this process is initialized, or has the address of a coordinator."""
        if initialized_processes() is not None:
            return True
        return _first(_ADDRESSES) is not None or _has_jax_job()


def _of_initialized() -> tuple[str, int]:
    """Returns the coordinator's address; a placeholder if that is a local socket."""
    try:
        return coordinator(coordinator_address() or "", "the coordinator's address")
    except ValueError:
        return "rank-0", _DEFAULT_PORT


def _address() -> tuple[str, int]:
    variable = _first(_ADDRESSES)
    if variable is not None:
        return coordinator(os.environ[variable], variable, number(_PORT, _LAUNCHER, _DEFAULT_PORT))
    if _has_jax_job():
        return os.environ[_OF_A_JAX_JOB[0]], number(_OF_A_JAX_JOB[1], _LAUNCHER)
    raise RuntimeError(
        "Expected jax.distributed.initialize() to have been called, or an address in "
        "JAX_COORDINATOR_ADDRESS. Received: neither."
    )


def _ranks() -> Ranks:
    count, index = _count(), _index()
    if count is None and index is None:
        others = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        launch = launched_among_others(others)
        if launch is not None:
            count, index = launch.count, launch.place
    missing = [
        " or ".join(names)
        for value, names in ((count, (*_COUNTS, "NNODES")), (index, (*_INDICES, "NODE_RANK")))
        if value is None
    ]
    if count is None or index is None:
        found = ", ".join(_found(os.environ))
        raise RuntimeError(
            f"Expected {' and '.join(missing)}, beside the address of JAX's coordinator. Received: "
            f"{found}"
        )
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Ranks(index, count, *(local_number(name, _LAUNCHER) for name in local))


def _count() -> int | None:
    variable = _first(_COUNTS)
    if variable is None and all(os.environ.get(name) for name in _OF_A_NODE):
        variable = _OF_A_NODE[0]
    if variable is None and _has_jax_job():
        variable = _OF_A_JAX_JOB[2]
    return None if variable is None else number(variable, _LAUNCHER)


def _index() -> int | None:
    variable = _first(_INDICES)
    if variable is None and all(os.environ.get(name) for name in _OF_A_POD):
        job, index, in_job = (number(name, _LAUNCHER) for name in _OF_A_POD)
        return job * in_job + index
    if variable is None and all(os.environ.get(name) for name in _OF_A_NODE):
        variable = _OF_A_NODE[1]
    if variable is None and _has_jax_job():
        variable = _OF_A_JAX_JOB[3]
    return None if variable is None else number(variable, _LAUNCHER)


def _first(names: tuple[str, ...]) -> str | None:
    """Returns the first of the variables that is set."""
    return next((name for name in names if os.environ.get(name)), None)


def _has_jax_job() -> bool:
    return all(os.environ.get(name) for name in _OF_A_JAX_JOB)


def _found(environment: Mapping[str, str]) -> Iterator[str]:
    for name in (*_ADDRESSES, _PORT, *_COUNTS, *_INDICES, *_OF_A_POD, *_OF_A_NODE):
        if environment.get(name):
            yield f"{name}={environment[name]}"
