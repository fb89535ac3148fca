"""Messages between the parent and a worker: small ones on a socket, their arrays in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from unison.data.workers.memory import Incoming, Outgoing, aligned

#: Up to so many bytes go through the socket, which holds some of them without a reader.
_MOST_IN_A_SOCKET = 16384

#: Where a buffer is: in which slot, how large that is, where in it, and how long.
_Place = tuple[int, int, int, int]


class Channel:
    """Both ends of what two processes say to each other.

    Args:
        connection: A socket.
        incoming: The memory that the other one writes.
        outgoing: The memory that the other one reads.
    """

    def __init__(self, connection: Connection, incoming: Incoming, outgoing: Outgoing):
        self.connection = connection
        self._incoming = incoming
        self.outgoing = outgoing

    def send(self, message: Any, dumps: Callable[..., bytes] = pickle.dumps) -> None:
        """Sends a message.

        Args:
            message: What `dumps` takes. Arrays in it that are in `outgoing` are not copied.
            dumps: `pickle.dumps`, or one like it.
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
        """Returns where the buffers are; those that are not yet there share a new slot."""
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
            EOFError: The other one has ended.
            ConnectionError: It has ended.
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
        """Lets go of the socket and of the memory."""
        self.connection.close()
        self._incoming.close()
        self.outgoing.close()
