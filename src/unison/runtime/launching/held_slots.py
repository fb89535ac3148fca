"""`HeldSlots`: the slots in which a machine holds records, those of its own workers and copies."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator

from unison.storage.memory_slots import MemorySlots


class HeldSlots:
    """Slots by the index of the worker whose records are in them; thread-safe.

    Slots that are not needed any more are closed as soon as no thread uses them.

    Examples:
        >>> held = HeldSlots()
        >>> [slots] = held.of([3], spare=[])
        >>> _ = slots.begin(10)
        >>> slots.commit(5, {})
        >>> held.all_steps(), held.common_steps([3]), held.common_steps([3, 4])
        ({3: [5]}, [5], [])
        >>> held.close(kept=[])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, MemorySlots] = {}
        self._unneeded: list[MemorySlots] = []
        self._users: collections.Counter[MemorySlots] = collections.Counter()

    @contextlib.contextmanager
    def using(self, worker: int) -> Iterator[MemorySlots | None]:
        """Yields a worker's slots, which stay open inside; None if there are none."""
        with self._lock:
            slots = self._slots.get(worker)
            if slots is not None:
                self._users[slots] += 1
        try:
            yield slots
        finally:
            if slots is not None:
                with self._lock:
                    self._users[slots] -= 1
                    self._close_unneeded()

    def steps(self, worker: int) -> list[int]:
        """Returns the steps of a worker's records, the newest first."""
        with self.using(worker) as slots:
            return [] if slots is None else slots.steps()

    def all_steps(self) -> dict[int, list[int]]:
        """Returns the steps of all records, by worker."""
        with self._lock:
            steps = {worker: slots.steps() for worker, slots in self._slots.items()}
        return {worker: found for worker, found in steps.items() if found}

    def common_steps(self, workers: Iterable[int]) -> list[int]:
        """Returns the steps of which there are records of all of some workers, the newest first."""
        found = [set(self.steps(worker)) for worker in workers]
        return sorted(set.intersection(*found), reverse=True) if found else []

    def of(self, workers: Iterable[int], spare: list[MemorySlots]) -> list[MemorySlots]:
        """Returns the slots of workers, in their order.

        Args:
            workers: Their indices.
            spare: Empty slots for those who have none yet; what is left of them is closed. Others
                are created.

        Raises:
            OSError: There is no memory, or no file descriptor.
            UnimplementedError: The system has no such memory.
        """
        with self._lock:
            found = []
            for worker in workers:
                if worker not in self._slots:
                    made = spare.pop(0) if spare else MemorySlots.create(f"state {worker}")
                    self._slots[worker] = made
                found.append(self._slots[worker])
            self._unneeded += spare
            self._close_unneeded()
            return found

    def discard_after(self, step: int) -> None:
        """Discards the records of later steps; -1: all."""
        with self._lock:
            for slots in self._slots.values():
                slots.discard_after(step)

    def take_all(self) -> list[MemorySlots]:
        """Removes, and returns, all slots."""
        with self._lock:
            taken = list(self._slots.values())
            self._slots.clear()
            return taken

    def keep_only(self, workers: Collection[int]) -> None:
        """Closes the slots of others than some workers."""
        with self._lock:
            for worker in [worker for worker in self._slots if worker not in workers]:
                self._unneeded.append(self._slots.pop(worker))
            self._close_unneeded()

    def abandon_used(self, workers: Iterable[int]) -> None:
        """Gives up the slots of workers that another thread uses now."""
        with self._lock:
            for worker in workers:
                if worker in self._slots and self._users[self._slots[worker]]:
                    self._unneeded.append(self._slots.pop(worker))

    def close(self, kept: Collection[MemorySlots]) -> None:
        """Closes all slots except some."""
        taken = self.take_all()
        with self._lock:
            self._unneeded += [slots for slots in taken if slots not in kept]
            self._close_unneeded()

    def _close_unneeded(self) -> None:
        for slots in [slots for slots in self._unneeded if not self._users[slots]]:
            self._unneeded.remove(slots)
            del self._users[slots]
            slots.close()
