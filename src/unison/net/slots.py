"""Shared memory between the two ends of a connection on one machine.

The sender puts arrays into a slot and names it in the message; the receiver uses them in place. The
slot is free again when the receiver has no references to them any more, which its first byte shows.
If no slot is free, arrays are sent through the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import numpy as np

#: The first byte shows whether the slot is taken; arrays start after this many bytes, aligned so
#: that programs can use them in place.
_HEAD_BYTES = 64

#: Fewer bytes are cheaper to send through the socket, and more would take too much memory.
_FEWEST_BYTES = 1 << 14
_MOST_BYTES = 1 << 26

#: One slot being written, one whose arrays a program is using, and one that waits for its program.
MOST_SLOTS = 3


class Slot:
    """A block of memory that two processes share.

    Args:
        number: Its index.
        file: The file descriptor of its memory, which is not needed later.
    """

    def __init__(self, number: int, file: int):
        self.number = number
        self._memory = mmap.mmap(file, os.fstat(file).st_size)

    @property
    def capacity(self) -> int:
        """The number of bytes that fit."""
        return len(self._memory) - _HEAD_BYTES

    @property
    def is_free(self) -> bool:
        """Whether its content is no longer used."""
        return self._memory[0] == 0

    def taken(self) -> np.ndarray:
        """Returns its memory for the sender, and marks it as taken."""
        self._memory[0] = 1
        return np.frombuffer(self._memory, np.uint8, offset=_HEAD_BYTES)

    def free(self) -> None:
        """Marks it as free."""
        self._memory[0] = 0

    def lent(self) -> np.ndarray:
        """Returns its memory for the receiver; it is freed when no references to that are left."""
        room = (ctypes.c_ubyte * self.capacity).from_buffer(self._memory, _HEAD_BYTES)
        weakref.finalize(room, self.free).atexit = False
        return np.frombuffer(memoryview(room), np.uint8)


class Outbox:
    """The slots of the sender.

    Args:
        most_slots: The maximum number of slots.
    """

    def __init__(self, most_slots: int = MOST_SLOTS) -> None:
        self._most_slots = most_slots
        self._slots: list[Slot] = []
        self._is_possible = hasattr(os, "memfd_create")

    def slot(self, size: int) -> tuple[Slot, int | None] | None:
        """Returns a slot for `size` bytes, and its file descriptor if it is new to the receiver.

        None if there is no free slot, or the socket is better. The caller must close the file
        descriptor.
        """
        if not self._is_possible or not _FEWEST_BYTES <= size <= _MOST_BYTES:
            return None
        free = [slot for slot in self._slots if slot.is_free]
        fitting = [slot for slot in free if slot.capacity >= size]
        if fitting:
            return min(fitting, key=lambda slot: slot.capacity), None
        if len(self._slots) < self._most_slots:
            return self._made(len(self._slots), size)
        return self._made(free[0].number, size) if free else None

    def _made(self, number: int, size: int) -> tuple[Slot, int | None] | None:
        """Returns a new slot, which replaces the one with its index."""
        try:
            file = os.memfd_create("unison")
        except OSError:
            self._is_possible = False
            return None
        try:
            os.ftruncate(file, _HEAD_BYTES + (1 << (size - 1).bit_length()))
            slot = Slot(number, file)
        except (OSError, ValueError):  # no memory for it: use the socket
            os.close(file)
            return None
        self._slots[number : number + 1] = [slot]
        return slot, file


class Inbox:
    """The slots of the receiver."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def add(self, number: int, file: int) -> None:
        """Adds a new slot."""
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, file)
            self._slots[number] = Slot(number, file)

    def lent(self, number: int) -> np.ndarray:
        """Returns what the sender has put into a slot.

        Raises:
            KeyError: There is no such slot.
        """
        return self._slots[number].lent()
