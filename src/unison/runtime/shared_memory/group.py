"""The groups of replicas that share memory, and their segments."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from unison.runtime import liveness
from unison.runtime.cores import available_cores
from unison.runtime.process_group import all_gather_json
from unison.runtime.shared_memory.library import CHUNK_BYTES, SPINS, Ticket, library
from unison.runtime.shared_memory.rewriting import Ticketed

_of_devices: dict[tuple[jax.Device, ...], SharedMemory] = {}


def shared_memory_of(replica_devices: tuple[jax.Device, ...]) -> SharedMemory | None:
    """Returns the shared memory of the replicas on these devices; None if there is none."""
    return _of_devices.get(replica_devices)


def share_memory(
    replica_devices: Sequence[jax.Device], names: Sequence[str], seconds: float
) -> SharedMemory | None:
    """Makes replicas on one machine communicate through shared memory. All processes must call.

    Args:
        replica_devices: The devices of all replicas, in order; those of a process are contiguous.
        names: The processes' names, for messages.
        seconds: How long a replica waits for another.

    Returns:
        The shared memory; None if processes do not share a machine, some machines have more
        replicas than others, or a process cannot share memory (the native extension is not
        installed, memory is insufficient, or one container cannot see the processes of another).
    """
    key = tuple(replica_devices)
    if key in _of_devices:
        return _of_devices[key]
    hosts = all_gather_json(host_identity(key), "The machine that a process runs on")
    teams: dict[str, list[int]] = {}
    for replica, device in enumerate(key):
        teams.setdefault(hosts[device.process_index], []).append(replica)
    sizes = {len(team) for team in teams.values()}
    spans = {len({key[replica].process_index for replica in team}) for team in teams.values()}
    if None in hosts or len(sizes) > 1 or spans == {1}:
        return None
    segment = _common_segment(hosts, sizes.pop())
    if segment is None:
        return None
    labels = [_label(key, replica, names) for replica in range(len(key))]
    memory = SharedMemory(key, list(teams.values()), segment, labels, seconds)
    liveness.on_failure(lambda error: memory.abort(str(error)))
    _of_devices[key] = memory
    return memory


class SharedMemory:
    """The memory that the replicas on each machine share.

    Args:
        replica_devices: The devices of all replicas.
        hosts: The replicas of every machine; the same number on each.
        segment: The memory of this machine's replicas.
        labels: The replicas' names.
        seconds: How long a replica waits for another.

    Attributes:
        hosts: The replicas of every machine.
        segment_address: The address of the memory in this process.
    """

    def __init__(
        self,
        replica_devices: tuple[jax.Device, ...],
        hosts: Sequence[Sequence[int]],
        segment: mmap.mmap,
        labels: Sequence[str],
        seconds: float,
    ):
        self.hosts = tuple(map(tuple, hosts))
        self._devices = replica_devices
        own = jax.process_index()
        team = next(
            host
            for host in self.hosts
            if any(replica_devices[r].process_index == own for r in host)
        )
        # Never unmapped: a thread of XLA may be in an exchange when Python exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(segment))
        compiled = library()
        assert compiled is not None
        self._library = compiled
        self.segment_address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        has_own_core = available_cores() >= len(team)
        self._number = compiled.unison_exchange_join(
            self.segment_address,
            len(team),
            CHUNK_BYTES,
            SPINS if has_own_core else 0,
            seconds,
            "\n".join(labels[replica] for replica in team).encode(),
        )

    def abort(self, reason: str) -> None:
        """Aborts all present and future waits for other replicas, with the error `reason`."""
        self._library.unison_exchange_abort(self._number, reason.encode(errors="replace"))

    def program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a ticket and the arguments of `function`, to be called where the
        replica axis is bound: it returns the next ticket, and the results of `function`. Its
        collective operations use the memory.
        """
        return Ticketed(function, self.hosts)

    @functools.cached_property
    def ticket(self) -> jax.Array:
        """The replicas' next ticket, of shape `(num_replicas, len(Ticket))`.

        Every program consumes it and stores the next one, so that programs run in the order in
        which they are launched, which is the same in all processes.
        """
        mesh = jax.sharding.Mesh(np.array(self._devices), ("replica",))
        sharding = NamedSharding(mesh, PartitionSpec("replica"))
        rank_of = {replica: rank for host in self.hosts for rank, replica in enumerate(host)}
        first = np.zeros((len(self._devices), len(Ticket)), np.uint32)
        first[:, Ticket.RANK] = [rank_of[replica] for replica in range(len(self._devices))]
        first[:, Ticket.GROUP] = self._number
        return jax.make_array_from_callback(first.shape, sharding, lambda index: first[index])


def host_identity(replica_devices: Sequence[jax.Device]) -> str | None:
    """Returns a unique id of this machine; None if this process cannot share memory.

    Processes in different network namespaces (usually containers) count as on different machines.
    """
    is_on_cpu = replica_devices[0].platform == "cpu"
    if not is_on_cpu or library() is None:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat()
    except OSError:
        return None
    return f"{boot} {network.st_ino} {os.getuid()}"


def _common_segment(hosts: Sequence[str], size: int) -> mmap.mmap | None:
    """Returns memory that the processes on this machine share; None if that failed.

    It has no name in any file system, so that nothing is left behind when processes are killed, at
    any time: the others open it through the file descriptors of the process that creates it.
    """
    compiled = library()
    assert compiled is not None
    num_bytes = compiled.unison_exchange_bytes(size, CHUNK_BYTES)
    own = jax.process_index()
    first = hosts.index(hosts[own])
    file = _new_memory(num_bytes) if own == first else None
    try:
        place = None if file is None else [os.getpid(), file, os.fstat(file).st_ino]
        places = all_gather_json(place, "The memory that processes share")
        if own != first and places[first] is not None:
            file = _memory_of(*places[first])
        segment = None if file is None else _mapped(file, num_bytes)
        # It stays open in the process that created it until all have mapped it.
        all_have = all(all_gather_json(segment is not None, "Whether processes share memory"))
    finally:
        if file is not None:
            os.close(file)
    return segment if all_have else None


def _new_memory(num_bytes: int) -> int | None:
    """Returns a file in memory, filled with zeros; None if there is not enough memory."""
    file = os.memfd_create("unison", os.MFD_CLOEXEC)
    try:
        # Unlike `truncate`, this fails here if there is not enough memory, not later on a write.
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


def _memory_of(process: int, number: int, inode: int) -> int | None:
    """Opens a file in memory of another process of this user; None if that is impossible.

    Args:
        process: The process.
        number: Its file descriptor of the file.
        inode: The inode of the file, which identifies it.
    """
    path = f"/proc/{int(process)}/fd/{int(number)}"
    try:
        if not os.readlink(path).startswith("/memfd:unison"):
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # processes of other containers are not visible
        return None
    about = os.fstat(file)
    if (about.st_uid, about.st_ino) != (os.getuid(), inode):
        os.close(file)
        return None
    return file


def _mapped(file: int, num_bytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(file, num_bytes)
    except (OSError, ValueError):  # the latter: the file is shorter
        return None


def _label(replica_devices: Sequence[jax.Device], replica: int, names: Sequence[str]) -> str:
    process = replica_devices[replica].process_index
    of_process = [r for r, d in enumerate(replica_devices) if d.process_index == process]
    if len(of_process) == 1:
        return names[process]
    return f"replica {of_process.index(replica)} of {names[process]}"
