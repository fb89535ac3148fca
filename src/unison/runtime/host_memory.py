"""The memory in which the workers of a host keep their state, and which outlives them.

The process that starts the workers owns it: a pair of slots for each worker (`MemorySlots`). The
workers open all of their host's slots, since what is equal on all of them is kept once.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from unison.errors import UnavailableError
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

    Attributes:
        slots: Each worker's.
        former: The slots of all workers of a run before, if there were others, with the records
            that the workers go on from.
        is_copied: Whether another machine gets a copy of each record.
        at_start: The number of workers of the whole job at its start, if it may go on with another
            number; otherwise None.

    Raises:
        UnimplementedError: The system has no such memory.

    Examples:
        >>> with HostMemory(2) as memory:
        ...     len(memory.slots), sorted(memory.environment(1))
        (2, ['UNISON_HOST_MEMORY'])
    """

    def __init__(self, workers: int, overhead: float = DEFAULT_OVERHEAD):
        self._overhead = overhead
        self.is_copied = False
        self.at_start: int | None = None
        self.slots: list[MemorySlots] = []
        self.former: list[MemorySlots] = []
        for worker in range(workers):
            self.slots.append(MemorySlots.create(f"state {worker}"))

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *error: object) -> None:
        for slots in self.slots:
            slots.close()

    def environment(self, worker: int) -> dict[str, str]:
        """Returns the additional environment variables of a worker, by its place on this host."""
        told = {
            "owner": os.getpid(),
            "slots": [_told_files(slots) for slots in self.slots],
            "former": [_told_files(slots) for slots in self.former],
            "own": worker,
            "overhead": self._overhead,
            "is_copied": self.is_copied,
            "at_start": self.at_start,
        }
        return {VARIABLE: json.dumps(told)}


def _told_files(slots: MemorySlots) -> list[tuple[int, int]]:
    """Returns the file descriptors of slots, each with the number of its file."""
    return [(descriptor, os.fstat(descriptor).st_ino) for descriptor in slots.descriptors]


class WorkerMemory(NamedTuple):
    """The memory of a worker's host, in that worker.

    Attributes:
        slots: The slots of all of the host's workers.
        place: The worker's place among them.
        overhead: See `HostMemory`.
        is_copied: See `HostMemory`.
        at_start: See `HostMemory`.
        former: See `HostMemory`.
    """

    slots: Sequence[MemorySlots]
    place: int
    overhead: float = DEFAULT_OVERHEAD
    is_copied: bool = False
    at_start: int | None = None
    former: Sequence[MemorySlots] = ()

    @property
    def own(self) -> MemorySlots:
        """The worker's own slots."""
        return self.slots[self.place]

    def forget_former(self) -> None:
        """Closes the slots of a run before, from which this worker needs nothing any more."""
        for slots in self.former:
            slots.close()

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


def has_worker_memory() -> bool:
    """Returns whether this process is a worker, or stands by for one, with memory of its host.

    A process that a worker has started has none.
    """
    given = os.environ.get(VARIABLE)
    return bool(given and json.loads(given)["owner"] == os.getppid())


@functools.cache
def worker_memory() -> WorkerMemory | None:
    """Returns the memory of this process's host; None if it is not a worker that has one.

    The program of a worker calls this: to one that stands by, there is no such memory yet.

    Raises:
        UnavailableError: The process that has started this one does not have it any more.
    """
    if not has_worker_memory():
        return None
    told = json.loads(os.environ[VARIABLE])
    owner = told["owner"]
    slots, former = ([_opened(owner, pair) for pair in told[name]] for name in ("slots", "former"))
    return WorkerMemory(
        slots, told["own"], told["overhead"], told["is_copied"], told["at_start"], former
    )


def _opened(owner: int, files: Sequence[Sequence[int]]) -> MemorySlots:
    """Returns the slots of another process, opened in this one.

    They are not inherited, since a process that has stood by was started before some of them.

    Args:
        owner: The process that has them open.
        files: Its file descriptors, each with the number of its file.

    Raises:
        UnavailableError: It has ended, or has other files there.
    """
    opened = []
    for descriptor, number in files:
        try:
            opened.append(os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR))
        except OSError as error:
            raise UnavailableError(
                message=f"The memory of this host cannot be opened: {error}. Expected the process "
                f"{owner}, which has started the workers, to be there, and /proc to show its files."
            ) from error
        if os.fstat(opened[-1]).st_ino != number:
            raise UnavailableError(message=f"Process {owner} has other files than it has told.")
    first, second = opened
    return MemorySlots((first, second))


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
