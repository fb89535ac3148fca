"""Small typed messages with arrays, between processes with the same key.

A message is a JSON object followed by arrays, which are sent and received without copies; between
processes on one machine they are passed through shared memory. Received data is not unpickled.
Bytes that the receiver unpickles are sent with a signature by the key, which it checks first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from unison.errors import ResourceExhaustedError, UnavailableError
from unison.net.proof import sign, verified
from unison.net.secret import key
from unison.net.slots import MOST_SLOTS, Inbox, Outbox
from unison.net.tls import Stream
from unison.storage.alignment import ALIGNMENT, aligned, aligned_empty
from unison.storage.decoding import dtype_named
from unison.storage.memory_left import memory_in_words, memory_left

#: The beginning of a message: the length of its header, and the slot with its arrays (-1: they
#: follow). So the header's length does not depend on which slot is free.
_BEGINNING = struct.Struct("<Ii")
#: The kinds of the dtypes of arrays: numbers and times, which are plain bytes.
_KINDS = "biufcmM"
#: The maximum number of buffers in one system call.
_MOST_BUFFERS = 512
_LONGEST_HEADER = 1 << 26
#: For larger sizes, the available memory is checked first: if the system overcommits memory,
#: processes are killed later.
_LARGE_BYTES = 1 << 24
#: The size of the chunks in which data is skipped for which there is no memory.
_SKIPPED_BYTES = 1 << 20
#: Timeout in seconds for both ends to introduce themselves, once they have proved the key.
_SECONDS_TO_INTRODUCE = 20.0

#: The dtype and shape of an array.
_Kind = tuple[np.dtype, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that was received from a connection.

    Attributes:
        kind: Its type.
        fields: Numbers, text, and lists and dictionaries of them.
        arrays: The arrays, in order.
    """

    kind: str
    fields: dict[str, Any]
    arrays: list[np.ndarray]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class NoRoomError(ResourceExhaustedError):
    """There is not enough memory for the arrays of a message.

    Attributes:
        kind: The message's type.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(message=text)
        self.kind = kind

    def __reduce__(self) -> Any:
        return NoRoomError, (self.kind, str(self))


class Connection:
    """A connection to a process with the same key.

    Args:
        stream: The stream from `unison.net`.
        secret: The key. Default: this user's key.
        most_slots: The maximum number of messages whose arrays are in shared memory at a time.
    """

    def __init__(self, stream: Stream, secret: bytes | None = None, most_slots: int = MOST_SLOTS):
        self._socket = stream
        self._secret = key() if secret is None else secret
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        #: The number of bytes sent and received.
        self.sent_bytes = self.received_bytes = 0
        #: Whether the connection is open, as far as is known.
        self.is_open = True
        #: The same stream, if file descriptors can be sent with a message.
        self._local = (
            stream
            if isinstance(stream, socket.socket) and stream.family == socket.AF_UNIX
            else None
        )
        self._outbox = None if self._local is None else Outbox(most_slots)
        self._inbox = Inbox()
        stream.settimeout(_SECONDS_TO_INTRODUCE)

    def begin(self) -> None:
        """Ends the introductions: from now on, receiving has no timeout."""
        self._socket.settimeout(None)

    def signed(self, payload: bytes) -> np.ndarray:
        """Returns bytes with a signature, as an array for a message."""
        return np.frombuffer(sign(self._secret, payload), np.uint8)

    def verified(self, signed: np.ndarray) -> bytes:
        """Returns the bytes that the peer passed to `signed`.

        Raises:
            UnauthenticatedError: They were changed, or signed with another key.
        """
        return verified(self._secret, signed.tobytes())

    # -- messages -------------------------------------------------------------------------------

    def send(
        self, kind: str, arrays: Iterable[Any] = (), are_kept: bool = False, **fields: Any
    ) -> None:
        """Sends a message.

        Args:
            kind: Its type.
            arrays: Its arrays.
            are_kept: Whether the peer keeps the arrays: they must not be in memory that the next
                message reuses.
            fields: Numbers, text, and lists and dictionaries of them.

        Raises:
            UnavailableError: The peer has closed the connection.
        """
        parts = [_native(np.asarray(array)) for array in arrays]
        described = [[part.dtype.name, part.shape] for part in parts]
        size = sum(aligned(part.nbytes) for part in parts)
        with self._sending:
            found = None if are_kept or self._outbox is None else self._outbox.slot(size)
            slot, file = found or (None, None)
            number = -1 if slot is None else slot.number
            header = json.dumps([kind, fields, described], separators=(",", ":")).encode()
            buffers: list[Any] = [_BEGINNING.pack(len(header), number) + header]
            if slot is None:
                buffers += _buffers(parts)
            else:
                _fill(slot.taken(), parts)
                self.sent_bytes += size
            with contextlib.ExitStack() as closing:
                if file is not None:
                    closing.callback(os.close, file)
                    self._send_file(buffers, file)
                for start in range(0, len(buffers), _MOST_BUFFERS):
                    self._send_buffers(buffers[start : start + _MOST_BUFFERS])

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            UnavailableError: The peer has closed the connection.
            NoRoomError: There is not enough memory for its arrays. The next message can still be
                received.
        """
        length, slot, file = self._receive_beginning()
        with contextlib.ExitStack() as closing:
            if file is not None:
                closing.callback(os.close, file)
            if length > _LONGEST_HEADER:
                raise self._gone(f"a message header of {length} bytes is too long")
            header = bytes(self._receive_bytes(length))
            try:
                kind, fields, kinds = _described(header)
                if file is not None:
                    closing.pop_all()
                    self._inbox.add(slot, file)
            except (ValueError, TypeError, OverflowError, RecursionError, OSError) as error:
                raise self._gone(f"it has sent an invalid message ({error})") from error
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
        size = sum(map(aligned, sizes))
        if slot < 0:
            data = self._receive_arrays(kind, size, kinds)
        else:
            data = self._lent(slot, size)
            self.received_bytes += size
        arrays = []
        start = 0
        for (dtype, shape), own in zip(kinds, sizes, strict=True):
            arrays.append(data[start : start + own].view(dtype).reshape(shape))
            start += aligned(own)
        return Message(kind, fields, arrays)

    def wait(self, seconds: float | None) -> bool:
        """Waits until a message, or the closing of the connection, can be received.

        Args:
            seconds: The timeout. None: does not wait, and leaves it to `receive`.

        Returns:
            Whether `receive` can read the beginning of a message without waiting.
        """
        number = self._socket.fileno()
        if seconds is None or number < 0:  # closed: `receive` raises the error
            return True
        if not isinstance(self._socket, socket.socket) and self._socket.has_data:
            return True
        waiting = select.poll()
        waiting.register(number, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def ask(self, kind: str, arrays: Iterable[Any] = (), **fields: Any) -> Message:
        """Sends a message and returns the reply.

        Raises:
            UnavailableError: The peer has closed the connection.
            RuntimeError: The reply is an error.
        """
        with self._asking:
            self.send(kind, arrays, **fields)
            answer = self.receive()
        if answer.kind == "error":
            raise RuntimeError(answer["text"])
        return answer

    def shut_down(self) -> None:
        """Ends the waits of other threads, at either end, with an UnavailableError.

        The thread that uses the connection closes it: its file descriptor must not stand for
        another file while the thread waits for it.
        """
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; waits at either end raise an UnavailableError."""
        self.shut_down()
        self._socket.close()

    def _gone(self, why: object) -> UnavailableError:
        self.is_open = False
        return UnavailableError(message=f"Connection closed: {why}")

    def _send_file(self, buffers: list[Any], file: int) -> None:
        """Sends the first of `buffers`, and a file descriptor with it."""
        assert self._local is not None
        first = buffers.pop(0)
        try:
            sent = socket.send_fds(self._local, [first], [file])
        except OSError as error:
            raise self._gone(error) from error
        self.sent_bytes += sent
        if sent < len(first):
            buffers.insert(0, first[sent:])

    def _send_buffers(self, buffers: list[Any]) -> None:
        left = sum(len(buffer) for buffer in buffers)
        self.sent_bytes += left
        try:
            while left:
                sent = self._socket.sendmsg(buffers)
                left -= sent
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if buffers and sent:
                    buffers[0] = memoryview(buffers[0])[sent:]
        except OSError as error:
            raise self._gone(error) from error

    def _receive_beginning(self) -> tuple[int, int, int | None]:
        """Returns the length of the next message's header, the slot of its arrays, and the file
        descriptor that was sent with it, if any.
        """
        data = b""
        with contextlib.ExitStack() as closing:
            files: list[int] = []
            if self._local is not None:
                try:
                    data, files, _, _ = socket.recv_fds(
                        self._local, _BEGINNING.size, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                    )
                except OSError as error:
                    raise self._gone(error) from error
                for file in files:
                    closing.callback(os.close, file)
                if not data:
                    raise self._gone("the other end has closed it")
                self.received_bytes += len(data)
            data += bytes(self._receive_bytes(_BEGINNING.size - len(data)))
            closing.pop_all()
        length, slot = _BEGINNING.unpack(data)
        return length, slot, files[0] if files else None

    def _lent(self, slot: int, size: int) -> np.ndarray:
        """Returns the peer's data in a slot, which must have at least `size` bytes."""
        try:
            data = self._inbox.lent(slot)
        except KeyError as error:
            raise self._gone(f"it has named an unknown slot ({slot})") from error
        if len(data) < size:
            raise self._gone(f"it has put {size} bytes into a slot of {len(data)}")
        return data

    def _receive_arrays(self, kind: str, size: int, arrays: list[_Kind]) -> np.ndarray:
        """Returns the bytes of a message's arrays."""
        if size < _LARGE_BYTES or (left := memory_left()) is None or size <= left[0]:
            with contextlib.suppress(MemoryError):
                return self._receive_bytes(size)
        rest = size
        while rest:  # otherwise it would be read as the next message
            rest -= len(self._receive_bytes(min(rest, _SKIPPED_BYTES)))
        shapes = ", ".join(f"{dtype.name}{list(shape)}" for dtype, shape in arrays)
        raise NoRoomError(kind, f"Out of memory: {shapes}, {size:,} bytes. {memory_in_words()}")

    def _receive_bytes(self, count: int) -> np.ndarray:
        """Returns the next bytes, in memory that is aligned."""
        data = aligned_empty((count,), np.dtype(np.uint8))
        view = memoryview(data.data)
        received = 0
        try:
            while received < count:
                size = self._socket.recv_into(view[received:])
                if not size:
                    raise self._gone("the other end has closed it")
                received += size
        except OSError as error:
            if isinstance(error, UnavailableError):
                raise
            raise self._gone(error) from error
        self.received_bytes += count
        return data


def _native(part: np.ndarray) -> np.ndarray:
    """Returns an array in this machine's byte order, which the name of its dtype stands for."""
    return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))


def _buffers(parts: Iterable[np.ndarray]) -> list[Any]:
    """Returns the bytes of arrays, and the padding between them."""
    buffers: list[Any] = []
    for part in parts:
        if part.nbytes:
            buffers += [
                np.ascontiguousarray(part).reshape(-1).view(np.uint8),
                bytes(-part.nbytes % ALIGNMENT),
            ]
    return buffers


def _fill(room: np.ndarray, parts: Iterable[np.ndarray]) -> None:
    """Copies arrays to where the peer reads them."""
    start = 0
    for part in parts:
        room[start : start + part.nbytes].view(part.dtype).reshape(part.shape)[...] = part
        start += aligned(part.nbytes)


def _described(header: bytes) -> tuple[str, dict[str, Any], list[_Kind]]:
    """Returns a message's type, its fields, and the dtypes and shapes of its arrays.

    Raises:
        ValueError, TypeError, RecursionError: It is not the header of a message.
    """
    kind, fields, described = json.loads(header)
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise TypeError("expected a kind and fields")
    kinds = [(dtype_named(dtype, _KINDS), tuple(shape)) for dtype, shape in described]
    for _, shape in kinds:
        if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError(f"expected the shape of an array, received {shape}")
    return kind, fields, kinds
