"""Memory that one process writes and another one reads, without copies and without a name.

It is a file in memory (`memfd_create`) that both have open: it has no name that could be left
behind, and is freed with the last process that uses it. The writer divides it into slots. A slot
is an array for the reader, and is free again when that array and all its views are deleted.
"""

from __future__ import annotations

import collections
import mmap
import os
import weakref
from collections.abc import Iterable

import numpy as np


class Slot:
    """A part of the memory that is allocated as a whole."""

    def __init__(self, offset: int, array: np.ndarray):
        self.offset = offset
        self.array = array
        self.address = array.ctypes.data

    def holds(self, address: int) -> bool:
        """Whether an address is in it."""
        return self.address <= address < self.address + self.array.nbytes


class Outgoing:
    """The writer's side.

    Args:
        file: The file descriptor, which the writer takes over.
    """

    def __init__(self, file: int):
        self._file = file
        self._end = 0
        self._used: dict[int, Slot] = {}
        self._free: dict[int, list[Slot]] = collections.defaultdict(list)

    def reserve(self, size: int) -> Slot:
        """Returns a slot of `size` bytes or a few more."""
        capacity = _capacity(size)
        free = self._free[capacity]
        slot = free.pop() if free else self._new(capacity)
        self._used[slot.offset] = slot
        return slot

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialized array in a slot of its own."""
        count = int(np.prod(shape))
        slot = self.reserve(count * dtype.itemsize)
        return slot.array[: count * dtype.itemsize].view(dtype).reshape(shape)

    def slot_of(self, address: int) -> Slot | None:
        """Returns the slot in use that contains an address."""
        return next((slot for slot in self._used.values() if slot.holds(address)), None)

    def release(self, offsets: Iterable[int]) -> None:
        """Frees the slots that begin at these offsets."""
        for offset in offsets:
            slot = self._used.pop(offset)
            self._free[slot.array.nbytes].append(slot)

    def _new(self, capacity: int) -> Slot:
        offset = self._end
        os.ftruncate(self._file, offset + capacity)
        self._end += capacity
        return Slot(offset, _mapped(self._file, offset, capacity))

    def close(self) -> None:
        """Closes the file; the mapping stays as long as arrays use it."""
        os.close(self._file)


class Incoming:
    """The reader's side.

    Args:
        file: The file descriptor, which the reader takes over.
    """

    def __init__(self, file: int):
        self._file = file
        self._mapped: dict[int, np.ndarray] = {}
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        self._returned: collections.deque[int] = collections.deque()

    def open(self, offset: int, capacity: int) -> np.ndarray:
        """Returns the bytes of the slot at an offset."""
        if offset not in self._mapped:
            self._mapped[offset] = _mapped(self._file, offset, capacity)
        # Views reference this array, and not the permanent one; only so its end can be noticed.
        lent = np.frombuffer(self._mapped[offset].data, np.uint8)
        returned = self._returned
        self._lent[offset] = weakref.ref(lent, lambda _: returned.append(offset))
        return lent

    def returned(self) -> list[int]:
        """Returns the offsets of the slots that are no longer used, each once."""
        offsets = []
        while self._returned:
            offsets.append(self._returned.popleft())
        return offsets

    def close(self) -> None:
        """Closes the file; the mapping stays as long as arrays use it."""
        os.close(self._file)


def new_file() -> int:
    """Returns the descriptor of a new file in memory."""
    return os.memfd_create("unison-data")


def _capacity(size: int) -> int:
    """Returns a slot size: four per power of 2, so that few sizes are nearly equal."""
    size = max(size, mmap.PAGESIZE)
    step = max(1 << size.bit_length() - 3, mmap.PAGESIZE)
    return -(-size // step) * step


def _mapped(file: int, offset: int, capacity: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, capacity, offset=offset), np.uint8)
