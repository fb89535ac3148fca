"""Memory that the two ends of a connection on one machine share.

Who sends puts arrays into a slot and names it in the message; who receives uses them where they
lie. The slot is free again when nobody at the receiving end refers to them any more: its first byte
says so. Where no slot is free, arrays go through the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import numpy as np

#: The first byte says whether the slot is taken; arrays begin behind, where programs can take them
#: as they lie.
_HEAD_BYTES = 64

#: What is sent with fewer bytes costs less through the socket, and with more takes too much memory.
_FEWEST_BYTES = 1 << 14
_MOST_BYTES = 1 << 26

#: One that is written, one whose arrays a program still uses, and one whose arrays wait for theirs.
_MOST_SLOTS = 3


class Slot:
    """A piece of memory that two processes share.

    Args:
        number: Its number.
        file: Its memory as an open file, which is not needed later.
    """

    def __init__(self, number: int, file: int):
        self.number = number
        self._memory = mmap.mmap(file, os.fstat(file).st_size)

    @property
    def capacity(self) -> int:
        """For how many bytes there is room."""
        return len(self._memory) - _HEAD_BYTES

    @property
    def is_free(self) -> bool:
        """Whether nobody uses what it holds."""
        return self._memory[0] == 0

    def taken(self) -> np.ndarray:
        """Returns its room, for who sends; it is not free from now on."""
        self._memory[0] = 1
        return np.frombuffer(self._memory, np.uint8, offset=_HEAD_BYTES)

    def free(self) -> None:
        """Lets it be used again."""
        self._memory[0] = 0

    def lent(self) -> np.ndarray:
        """Returns its room, for who receives; it is free when nobody refers to that any more."""
        room = (ctypes.c_ubyte * self.capacity).from_buffer(self._memory, _HEAD_BYTES)
        weakref.finalize(room, self.free).atexit = False
        return np.frombuffer(memoryview(room), np.uint8)


class Outbox:
    """The slots of who sends."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._is_possible = hasattr(os, "memfd_create")

    def slot(self, size: int) -> tuple[Slot, int | None] | None:
        """Returns a slot for `size` bytes, and its file if the other end does not know it yet.

        None: there is none, or it is better to do without. Who gets the file closes it.
        """
        if not self._is_possible or not _FEWEST_BYTES <= size <= _MOST_BYTES:
            return None
        free = [slot for slot in self._slots if slot.is_free]
        fitting = [slot for slot in free if slot.capacity >= size]
        if fitting:
            return min(fitting, key=lambda slot: slot.capacity), None
        if len(self._slots) < _MOST_SLOTS:
            return self._made(len(self._slots), size)
        return self._made(free[0].number, size) if free else None

    def _made(self, number: int, size: int) -> tuple[Slot, int | None] | None:
        """Returns a new slot, which takes the place of that with its number."""
        try:
            file = os.memfd_create("unison")
        except OSError:
            self._is_possible = False
            return None
        try:
            os.ftruncate(file, _HEAD_BYTES + (1 << (size - 1).bit_length()))
            slot = Slot(number, file)
        except (OSError, ValueError):  # no memory for it: there are sockets
            os.close(file)
            return None
        self._slots[number : number + 1] = [slot]
        return slot, file


class Inbox:
    """The slots of the other end."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def add(self, number: int, file: int) -> None:
        """Takes a slot that is new."""
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, file)
            self._slots[number] = Slot(number, file)

    def lent(self, number: int) -> np.ndarray:
        """Returns what the other end has put into a slot.

        Raises:
            KeyError: There is no such slot.
        """
        return self._slots[number].lent()
