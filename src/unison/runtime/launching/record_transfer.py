"""`RecordConnection`: sends and receives records in memory between machines, piece by piece.

Data goes directly from one machine's slots to the other's. A transfer:

    sender                                          receiver
    {"is": "record", worker, step, size, header}
                                                    {"is": "go"} or {"is": "refused", about}
    header, pieces of data (each with its length
    before it), a length of 0
    {"is": "end", checksum}
                                                    {"is": "kept"} or {"is": "discarded", about}

The sender gives no checksum if the record has been overwritten meanwhile, and the receiver keeps a
record only if its header and data have the checksum.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from unison.errors import ResourceExhaustedError
from unison.net.lines import MOST_BYTES, Message, decoded, encoded
from unison.net.tls import Stream
from unison.storage.decoding import parsed_json, whole_number
from unison.storage.memory_left import memory_in_words, memory_left
from unison.storage.memory_slots import MemorySlots

#: The channel of these connections.
CHANNEL = b"records-1"

#: The largest piece of data, and the longest header.
PIECE_BYTES = 1 << 22
_MOST_HEADER_BYTES = 1 << 26

#: Seconds in which the other end has to send or receive something, and the least bytes a second of
#: a whole transfer.
_SECONDS = 20.0
_LEAST_RATE = 4 << 20

_LENGTH = struct.Struct("<I")

#: The part of the memory that is left, of which a record takes at most so much.
_MOST_OF_MEMORY = 0.9

#: The reason for which a record is discarded that its worker overwrites while it is sent.
OVERWRITTEN = "it was overwritten meanwhile"


class Offer(NamedTuple):
    """A record that the other end can send.

    Attributes:
        worker: The index of its worker.
        step: Its step.
        size: The bytes of its data.
        header: The bytes of its header.
    """

    worker: int
    step: int
    size: int
    header: int


def parsed_offer(said: Message) -> Offer:
    """Returns the record that a message offers.

    Raises:
        ValueError: It offers none.
    """
    if said.get("is") != "record":
        raise ValueError(f"Expected a record. Received: {str(said.get('is'))[:30]}")
    return Offer(
        whole_number(said.get("worker")),
        whole_number(said.get("step")),
        whole_number(said.get("size")),
        whole_number(said.get("header"), most=_MOST_HEADER_BYTES),
    )


class RecordConnection:
    """An authenticated connection on which records are sent or received; every wait is bounded.

    All methods raise ConnectionError (or TimeoutError) if the connection fails, and ValueError if
    the other end sends something invalid.

    Args:
        stream: The connection, which becomes blocking.
    """

    def __init__(self, stream: Stream):
        stream.settimeout(_SECONDS)
        self._stream = stream

    def interrupt(self) -> None:
        """Ends what another thread does with it."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()

    def send(self, message: Message) -> None:
        """Sends a message."""
        line = encoded(message)
        self._send(_LENGTH.pack(len(line)) + line)

    def receive(self, seconds: float = _SECONDS) -> Message:
        """Returns the next message, which has to begin within `seconds`."""
        self._stream.settimeout(seconds)
        try:
            length = self._receive_length(MOST_BYTES)
        finally:
            self._stream.settimeout(_SECONDS)
        return decoded(self._receive_bytes(length))

    def send_record(
        self, worker: int, step: int, slots: MemorySlots, may_go_on: Callable[[], bool]
    ) -> str | None:
        """Sends a record; returns the reason why it was not kept, None if it was.

        Args:
            worker: The index of its worker.
            step: Its step.
            slots: Where it is.
            may_go_on: Called between pieces; the transfer is given up if it returns false.
        """

        def is_intact() -> bool:
            return may_go_on() and step in slots.steps()

        with slots.records() as records:
            found = [record for record in records if record.step == step]
            if not found:
                return OVERWRITTEN
            data, header = found[0].data, json.dumps(found[0].header).encode()
            offer = Offer(worker, step, len(data), len(header))
            self.send({"is": "record"} | offer._asdict())
            # Taking the memory for it may take long.
            answer = self.receive(_longest(offer.size))
            if answer.get("is") == "go":
                self._send(header)
                checksum = self._send_pieces(data, zlib.crc32(header), is_intact)
                # Looked at after the last byte was read: whoever overwrites the data discards the
                # record first.
                self.send({"is": "end", "checksum": checksum if is_intact() else None})
                answer = self.receive()
        if answer.get("is") == "kept":
            return None
        return str(answer.get("about"))[:1000]

    def receive_record(
        self,
        offer: Offer,
        slots: MemorySlots,
        keep: int | None,
        may_keep: Callable[[], bool],
    ) -> str | None:
        """Receives a record into slots; returns the reason why it was not kept, None if it was.

        Args:
            offer: The record.
            slots: Where it is put.
            keep: The step of a record there that is not replaced.
            may_keep: Called before it is completed, which is not done if it returns false.
        """
        refusal, memory = self._room(offer, slots, keep)
        if memory is None:
            self.refuse(refusal)
            return refusal
        self.send({"is": "go"})
        header = self._receive_bytes(offer.header)
        checksum = self._receive_pieces(memory, zlib.crc32(header))
        said = self.receive()
        reason: str | None = None
        if said.get("checksum") is None or checksum is None:
            reason = OVERWRITTEN
        elif said["checksum"] != checksum:
            reason = f"its checksum is {checksum}, but {said['checksum']!s:.20} was sent"
        elif not may_keep():
            reason = "the workers are started again"
        else:
            slots.commit(offer.step, parsed_json(header))
        self.send({"is": "discarded", "about": reason} if reason else {"is": "kept"})
        return reason

    def refuse(self, about: str) -> None:
        """Refuses a record that is offered."""
        self.send({"is": "refused", "about": about})

    def _room(
        self, offer: Offer, slots: MemorySlots, keep: int | None
    ) -> tuple[str, memoryview | None]:
        """Returns the memory for a record, or the reason why there is none."""
        left = memory_left()
        if (
            offer.size > slots.capacity
            and left is not None
            and offer.size > left[0] * _MOST_OF_MEMORY
        ):
            return f"{offer.size:,} bytes are too many. {memory_in_words()}", None
        try:
            return "", slots.begin(offer.size, keep)
        except ResourceExhaustedError as error:
            return str(error), None

    def _send_pieces(self, data: memoryview, checksum: int, is_intact: Callable[[], bool]) -> int:
        """Sends data; returns its checksum, which continues that of the header."""
        last = time.monotonic() + _longest(len(data))
        for start in range(0, len(data), PIECE_BYTES):
            if not is_intact():
                break
            if time.monotonic() > last:
                raise TimeoutError("the other machine receives too slowly")
            with data[start : start + PIECE_BYTES] as piece:
                checksum = zlib.crc32(piece, checksum)
                self._send(_LENGTH.pack(len(piece)))
                self._send(piece)
        self._send(_LENGTH.pack(0))
        return checksum

    def _receive_pieces(self, memory: memoryview, checksum: int) -> int | None:
        """Receives data; returns its checksum as `_send_pieces`, None if it is not complete."""
        last = time.monotonic() + _longest(len(memory))
        received = 0
        while length := self._receive_length(PIECE_BYTES):
            if length > len(memory) - received:
                raise ValueError(f"Expected {len(memory)} bytes of data. Received: more")
            if time.monotonic() > last:
                raise TimeoutError("the other machine sends too slowly")
            with memory[received : received + length] as piece:
                self._receive_into(piece)
                checksum = zlib.crc32(piece, checksum)
            received += length
        return checksum if received == len(memory) else None

    def _receive_length(self, most: int) -> int:
        (length,) = _LENGTH.unpack(self._receive_bytes(_LENGTH.size))
        if length > most:
            raise ValueError(f"Expected at most {most} bytes. Received: {length}")
        return int(length)

    def _receive_bytes(self, size: int) -> bytes:
        """Returns the next bytes; memory is taken as they arrive."""
        data = bytearray()
        while len(data) < size:
            piece = self._stream.recv(min(size - len(data), 1 << 16))
            if not piece:
                raise ConnectionResetError("the other end has closed the connection")
            data += piece
        return bytes(data)

    def _receive_into(self, piece: memoryview) -> None:
        received = 0
        while received < len(piece):
            with piece[received:] as rest:
                count = self._stream.recv_into(rest)
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            received += count

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._stream.sendall(data)
            return
        except TimeoutError:
            failure: OSError = TimeoutError("the other machine does not receive")
        except OSError as error:
            failure = ConnectionError(str(error))
        # Raised here, where no frame of the original error has a view of the memory any more.
        raise failure


def _longest(size: int) -> float:
    """Returns the seconds that a transfer takes at most."""
    return _SECONDS + size / _LEAST_RATE
