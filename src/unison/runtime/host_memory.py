"""The memory in which the workers of a host keep their state, and which outlives them.

The process that starts the workers owns it: a pair of slots for each worker (`MemorySlots`). The
workers inherit the file descriptors of all of their host's slots, since what is equal on all of
them is kept once.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unison.storage.memory_slots import MemorySlots

#: The variable with the file descriptors of a host's slots and the place of the worker's own.
VARIABLE = "UNISON_HOST_MEMORY"

#: The prefixes of variables that libraries read while they are imported.
_OF_LIBRARIES = ("JAX_", "KERAS_", "MKL_", "OMP_", "OPENBLAS_", "TF_CPP_", "XLA_")

#: The name of what a worker tells about its process in its records: `about_process`, as text.
PROCESS = "process"

#: The share of the training's time that keeping the state may take.
DEFAULT_OVERHEAD = 0.01


class HostMemory:
    """The slots of a host's workers, in the process that starts them; as a context manager.

    Args:
        workers: The number of workers.
        overhead: The share of the training's time that keeping the state may take.
        is_copied: Whether another machine gets a copy of each record.

    Attributes:
        slots: Each worker's.
        at_start: The number of workers of the whole job at its start; None: as many as there are.

    Raises:
        UnimplementedError: The system has no such memory.

    Examples:
        >>> with HostMemory(2) as memory:
        ...     len(memory.descriptors), sorted(memory.environment(1))
        (4, ['UNISON_HOST_MEMORY'])
    """

    def __init__(self, workers: int, overhead: float = DEFAULT_OVERHEAD, is_copied: bool = False):
        self._told = {"overhead": overhead, "is_copied": is_copied}
        self.at_start: int | None = None
        self.slots: list[MemorySlots] = []
        for worker in range(workers):
            self.slots.append(MemorySlots.create(f"state {worker}"))

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *error: object) -> None:
        for slots in self.slots:
            slots.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that each worker inherits."""
        return tuple(descriptor for slots in self.slots for descriptor in slots.descriptors)

    def environment(self, worker: int) -> dict[str, str]:
        """Returns the additional environment variables of a worker, by its place on this host."""
        pairs = [slots.descriptors for slots in self.slots]
        told = {"slots": pairs, "own": worker, "at_start": self.at_start, **self._told}
        return {VARIABLE: json.dumps(told)}


class WorkerMemory(NamedTuple):
    """The memory of a worker's host, in that worker.

    Attributes:
        slots: The slots of all of the host's workers.
        place: The worker's place among them.
        overhead: See `HostMemory`.
        is_copied: See `HostMemory`.
        at_start: See `HostMemory`.
    """

    slots: Sequence[MemorySlots]
    place: int
    overhead: float = DEFAULT_OVERHEAD
    is_copied: bool = False
    at_start: int | None = None

    @property
    def own(self) -> MemorySlots:
        """The worker's own slots."""
        return self.slots[self.place]

    def discard_after(self, step: int) -> None:
        """Discards the records of later steps: the worker's own, and if it is the first one of the
        host, those of workers that are not there any more.
        """
        for slots in self.slots if self.place == 0 else [self.own]:
            slots.discard_after(step)

    def allocate_own(self, size: int) -> None:
        """Allocates the worker's own memory, one worker of the host after the other.

        Together, they could request more than there is, though each finds enough.

        Args:
            size: The bytes of the data of a record.

        Raises:
            ResourceExhaustedError: The host has no more memory.
        """
        shared = self.slots[0].descriptors[0]
        fcntl.lockf(shared, fcntl.LOCK_EX)
        try:
            self.own.allocate(size)
        finally:
            fcntl.lockf(shared, fcntl.LOCK_UN)


@functools.cache
def worker_memory() -> WorkerMemory | None:
    """Returns the memory of this process's host; None if it is not a worker that has one."""
    return _found(os.environ)


def _found(environment: Mapping[str, str]) -> WorkerMemory | None:
    given = environment.get(VARIABLE)
    if not given:
        return None
    told = json.loads(given)
    for pair in told["slots"]:
        for descriptor in pair:
            os.set_inheritable(descriptor, False)
    slots = [MemorySlots(tuple(pair)) for pair in told["slots"]]
    return WorkerMemory(slots, told["own"], told["overhead"], told["is_copied"], told["at_start"])


_takes_part = False


def take_part() -> None:
    """Notes that this worker's program has come to the loop of which there may be a state."""
    global _takes_part
    _takes_part = True


def may_regroup() -> bool:
    """Returns whether the job may go on with another number of workers, from its hosts' memory."""
    memory = worker_memory()
    return memory is not None and memory.at_start is not None


def workers_at_start() -> int | None:
    """Returns the number of workers with which the job began, until this one takes part.

    None afterwards, and in jobs that do not keep their state in memory.
    """
    memory = worker_memory()
    return None if memory is None or _takes_part else memory.at_start


def about_process() -> dict[str, Any]:
    """Returns what another process needs that is to run the same program soon.

    Returns:
        The `modules` that are imported, without the program's own, in order, and the variables of
        the `environment` that the program has set, of those that libraries read.
    """
    modules = [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith("__") and not _is_of_program(module)
    ]
    at_start = _environment_at_start()
    set_here = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_OF_LIBRARIES) and at_start.get(name) != value
    }
    return {"modules": modules, "environment": set_here}


def _is_of_program(module: Any) -> bool:
    """Whether a module was found in the program's folder: the first one of `sys.path`."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if not isinstance(origin, str):
        return False
    folders = [folder for folder in sys.path if origin.startswith(os.path.join(folder, ""))]
    return max(folders, key=len, default=None) == sys.path[0]


def _environment_at_start() -> dict[str, str]:
    """Returns the variables with which this process was started, on Linux."""
    with open("/proc/self/environ", "rb") as file:
        variables = os.fsdecode(file.read()).split("\0")
    return {name: value for name, _, value in (each.partition("=") for each in variables)}
