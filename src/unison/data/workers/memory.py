"""Memory that one process writes and another one reads, without copies and without a name.

It is a file in memory (`memfd_create`) that both have open: it has no name that could be left
behind, and ends with the last process that uses it. The writer divides it into slots. The reader
sees a slot as an array, and the slot is free again when that array and all views of it are gone.
"""

from __future__ import annotations

import collections
import mmap
import os
import weakref
from collections.abc import Iterable

import numpy as np

#: Arrays begin at multiples of this, which XLA asks for where it takes an array as it is.
_ALIGNMENT = 64


class Slot:
    """A part of the memory that is given away as a whole."""

    def __init__(self, offset: int, array: np.ndarray):
        self.offset = offset
        self.array = array
        self.address = array.ctypes.data

    def holds(self, address: int) -> bool:
        """Whether something at this address is in it."""
        return self.address <= address < self.address + self.array.nbytes


class Outgoing:
    """The writer's side.

    Args:
        file: The number of the open file; it is the writer's from now on.
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
        """Returns an array of arbitrary values in a slot of its own."""
        count = int(np.prod(shape))
        slot = self.reserve(count * dtype.itemsize)
        return slot.array[: count * dtype.itemsize].view(dtype).reshape(shape)

    def slot_of(self, address: int) -> Slot | None:
        """Returns the slot in use in which an address is."""
        return next((slot for slot in self._used.values() if slot.holds(address)), None)

    def release(self, offsets: Iterable[int]) -> None:
        """Takes back the slots that begin there."""
        for offset in offsets:
            slot = self._used.pop(offset)
            self._free[slot.array.nbytes].append(slot)

    def _new(self, capacity: int) -> Slot:
        offset = self._end
        os.ftruncate(self._file, offset + capacity)
        self._end += capacity
        return Slot(offset, _mapped(self._file, offset, capacity))

    def close(self) -> None:
        """Lets go of the file; what is mapped stays as long as arrays need it."""
        os.close(self._file)


class Incoming:
    """The reader's side.

    Args:
        file: The number of the open file; it is the reader's from now on.
    """

    def __init__(self, file: int):
        self._file = file
        self._mapped: dict[int, np.ndarray] = {}
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}
        self._returned: collections.deque[int] = collections.deque()

    def open(self, offset: int, capacity: int) -> np.ndarray:
        """Returns the slot that begins there, as bytes."""
        if offset not in self._mapped:
            self._mapped[offset] = _mapped(self._file, offset, capacity)
        # Views of it hold this array, and not the one that stays; only so its end can be seen.
        lent = np.frombuffer(self._mapped[offset].data, np.uint8)
        returned = self._returned
        self._lent[offset] = weakref.ref(lent, lambda _: returned.append(offset))
        return lent

    def returned(self) -> list[int]:
        """Returns where the slots begin that nobody reads any more, each once."""
        offsets = []
        while self._returned:
            offsets.append(self._returned.popleft())
        return offsets

    def close(self) -> None:
        """Lets go of the file; what is mapped stays as long as arrays need it."""
        os.close(self._file)


def new_file() -> int:
    """Returns the number of a new file in memory."""
    return os.memfd_create("unison-data")


def aligned(size: int) -> int:
    """Returns the first place from `size` on where an array may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _capacity(size: int) -> int:
    """Returns a size of slots: four to every power of 2, so that few are nearly of one size."""
    size = max(size, mmap.PAGESIZE)
    step = max(1 << size.bit_length() - 3, mmap.PAGESIZE)
    return -(-size // step) * step


def _mapped(file: int, offset: int, capacity: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, capacity, offset=offset), np.uint8)
