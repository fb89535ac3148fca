"""Messages between the parent and a worker: on a socket, with arrays in shared memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from unison.data.workers.memory import Incoming, Outgoing
from unison.storage.alignment import aligned

#: Buffers up to this size are sent through the socket, which holds some of them without a reader.
_MOST_IN_A_SOCKET = 16384

#: The location of a buffer: the slot, its size, the offset in it, and the length.
_Place = tuple[int, int, int, int]


class Channel:
    """The connection of two processes, in both directions.

    Args:
        connection: A socket.
        incoming: The memory that the other process writes.
        outgoing: The memory that the other process reads.
    """

    def __init__(self, connection: Connection, incoming: Incoming, outgoing: Outgoing):
        self.connection = connection
        self._incoming = incoming
        self.outgoing = outgoing

    def send(self, message: Any, dumps: Callable[..., bytes] = pickle.dumps) -> None:
        """Sends a message.

        Args:
            message: An argument of `dumps`. Its arrays that are in `outgoing` are not copied.
            dumps: `pickle.dumps`, or a function like it.
        """
        buffers: list[pickle.PickleBuffer] = []
        head = dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [np.asarray(buffer.raw()) for buffer in buffers]
        in_socket = len(head) <= _MOST_IN_A_SOCKET
        if not in_socket:
            raw.insert(0, np.frombuffer(head, np.uint8))
        envelope = (head if in_socket else None, self._placed(raw), self._incoming.returned())
        self.connection.send_bytes(pickle.dumps(envelope))

    def _placed(self, buffers: list[np.ndarray]) -> list[_Place]:
        """Returns the locations of buffers; those outside of the memory share a new slot."""
        slots = [self.outgoing.slot_of(buffer.ctypes.data) for buffer in buffers]
        copied = [buffer for buffer, slot in zip(buffers, slots, strict=True) if slot is None]
        size = sum(aligned(buffer.nbytes) for buffer in copied)
        shared = self.outgoing.reserve(size) if copied else None
        places = []
        start = 0
        for buffer, slot in zip(buffers, slots, strict=True):
            if slot is not None:
                begin = buffer.ctypes.data - slot.address
                places.append((slot.offset, slot.array.nbytes, begin, buffer.nbytes))
                continue
            assert shared is not None
            shared.array[start : start + buffer.nbytes] = buffer
            places.append((shared.offset, shared.array.nbytes, start, buffer.nbytes))
            start += aligned(buffer.nbytes)
        return places

    def receive(self) -> Any:
        """Returns the next message.

        Raises:
            EOFError: The other process has ended.
            ConnectionError: The other process has ended.
        """
        head, places, returned = pickle.loads(self.connection.recv_bytes())
        self.outgoing.release(returned)
        slots: dict[int, np.ndarray] = {}
        buffers: list[Any] = []
        for offset, capacity, start, size in places:
            if offset not in slots:
                slots[offset] = self._incoming.open(offset, capacity)
            buffers.append(slots[offset][start : start + size].data)
        if head is None:
            head = buffers.pop(0)
        return pickle.loads(head, buffers=buffers)

    def close(self) -> None:
        """Closes the socket and the memory."""
        self.connection.close()
        self._incoming.close()
        self.outgoing.close()
