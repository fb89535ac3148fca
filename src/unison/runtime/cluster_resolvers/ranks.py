"""Resolvers of processes that a launcher numbers, and of which only the first one's address counts.

The first process listens at that address, and the others connect to it. The addresses of the others
are placeholders, which differ and are the same on all processes: `rank-1`, `rank-2`, ...
"""

from __future__ import annotations

import dataclasses
import os
import zlib

from unison.net.addresses import LOOPBACK, joined_address, split_address
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.allocations import first_host
from unison.runtime.cluster_resolvers.gpus import VISIBLE_GPUS, share_of_gpus
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

#: The ports at which a job's processes meet if none is given: above Linux's ephemeral ones.
PORTS = range(61_000, 65_000)

#: The variable with which JAX chooses a process's devices itself.
_JAX_DEVICES = "JAX_LOCAL_DEVICE_IDS"


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process's index among those of a job, and among those of its machine.

    Attributes:
        index: Its index in the job.
        count: The number of processes of the job.
        local_index: Its index on its machine; None if unknown.
        local_count: The number of processes of its machine; None if unknown.
    """

    index: int
    count: int
    local_index: int | None = None
    local_count: int | None = None

    @property
    def share_a_machine(self) -> bool:
        """Whether all processes are known to be on one machine."""
        return self.local_count == self.count


class RankedClusterResolver(ClusterResolver):
    """The processes of a launcher that gives each its index; all are workers.

    Args:
        launcher: The launcher's name, for messages.
        ranks: The index of this process.
        host: The host of the first process.
        port: The port at which it listens.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` so that the processes of a
            machine share its GPUs equally. Not if `JAX_LOCAL_DEVICE_IDS` is set.

    Raises:
        ValueError: The index is not below the number of processes, or there is no such port.
    """

    def __init__(self, launcher: str, ranks: Ranks, host: str, port: int, auto_set_gpu: bool):
        if not 0 <= ranks.index < ranks.count:
            raise ValueError(
                f"Expected the index of a process to be from 0 to {ranks.count - 1}, as {launcher} "
                f"has started {ranks.count}. Received: {ranks.index}"
            )
        if not 0 < port < 1 << 16:
            raise ValueError(f"Expected a port from 1 to 65535 from {launcher}. Received: {port}")
        self.task_type = "worker"
        self.task_id = ranks.index
        addresses = [joined_address(host, port)]
        for index in range(1, ranks.count):
            of_index = host if ranks.share_a_machine else f"rank-{index}"
            addresses.append(joined_address(of_index, 1 + (port + index - 1) % 0xFFFF))
        self._cluster = ClusterSpec({"worker": addresses})
        local = (ranks.local_index, ranks.local_count)
        self._gpus = None
        if auto_set_gpu and None not in local and local[1] != 1 and _JAX_DEVICES not in os.environ:
            self._gpus = share_of_gpus(*local)  # type: ignore[arg-type]

    def cluster_spec(self) -> ClusterSpec:
        if self._gpus is not None:
            os.environ[VISIBLE_GPUS] = self._gpus
        return self._cluster


def number(name: str, launcher: str, default: int | None = None) -> int:
    """Returns the number that an environment variable holds.

    Args:
        name: The variable.
        launcher: The launcher that sets it, for messages.
        default: The result if the variable is not set or empty. None: an error.

    Raises:
        RuntimeError: The variable is not set.
        ValueError: It is not a number.
    """
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not text:
        raise RuntimeError(
            f"The environment variable {name} is not set: {launcher} has not started this process."
        )
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"Expected a number in {name}, which {launcher} sets. Received: {text!r}")
    return int(text)


def local_number(name: str, launcher: str) -> int | None:
    """Returns the number that an environment variable holds; None if the variable is not set."""
    return number(name, launcher) if os.environ.get(name) else None


def derived_port(job: str) -> int:
    """Returns a port that is derived from the name of a job, for all its processes the same.

    Examples:
        >>> derived_port("job 1") == derived_port("job 1"), 61000 <= derived_port("job 2") < 65000
        (True, True)
    """
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def host_of_first(launcher: str, ranks: Ranks, resolver: str) -> str:
    """Returns the host of the first process, for a launcher that does not state it.

    It is the loopback address if all processes share a machine, else the first host of the batch
    system's allocation, where MPI launchers start rank 0.

    Args:
        launcher: The launcher's name, for messages.
        ranks: The index of this process.
        resolver: The name of the resolver's class, for messages.

    Raises:
        RuntimeError: There is no allocation.
    """
    if ranks.share_a_machine:
        return LOOPBACK
    host = first_host()
    if host is None:
        raise RuntimeError(
            f"{launcher} does not provide the address of rank 0, and there is no allocation of "
            "Slurm, LSF or PBS that lists the machines. Set JAX_COORDINATOR_ADDRESS to a free port "
            "of rank 0's machine, HOST:PORT, for all processes. Pass the address otherwise: "
            f"{resolver}(host=...)."
        )
    return host


def coordinator(text: str, variable: str, port: int | None = None) -> tuple[str, int]:
    """Returns the host and the port of an address in an environment variable.

    Args:
        text: The address: host:port, or a host if there is a default port.
        variable: The variable, for messages.
        port: The default port.

    Raises:
        ValueError: The address is malformed.

    Examples:
        >>> coordinator("[::1]:1234", "JAX_COORDINATOR_ADDRESS")
        ('::1', 1234)
        >>> coordinator("job-0.job", "JAX_COORDINATOR_ADDRESS", 1234)
        ('job-0.job', 1234)
    """
    host, colon, digits = text.rpartition(":")
    has_port = bool(colon) and digits.isascii() and digits.isdecimal()
    if has_port and (":" not in host or host.startswith("[")):
        return split_address(text)
    if port is not None and not has_port and not colon and text.strip():
        return text.strip(), port
    raise ValueError(f"Expected host:port in {variable}. Received: {text!r}")
