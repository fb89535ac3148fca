"""Lines of JSON on a connection, without ever waiting.

What may come in is bounded before anything is made of it: the length of a line, the depth of its
nesting, the size of its integers. Nothing that is received is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from typing import Any

from unison.net.tls import Stream

#: A message: an object of JSON.
Message = dict[str, Any]

#: A longer line is not a message; nor is one of deeper nesting, or with greater integers.
MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_GREATEST = 2**63 - 1

#: How much is received at once: more than a record of TLS, of which nothing may be left over, since
#: selectors do not know of it.
_RECEIVED_BYTES = 1 << 16

_MANY_DIGITS = re.compile(rb"\d{19}")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class Line:
    """One end of a connection.

    Args:
        stream: The connection, which becomes non-blocking.
        most_waiting: How many bytes may wait until the other end takes them; where there are more,
            it does not read, and the connection ends. None: any number.

    Attributes:
        stream: The connection.
        is_open: Whether more can be expected. Who finds that it cannot calls `close`.
    """

    def __init__(self, stream: Stream, most_waiting: int | None = MOST_BYTES):
        stream.setblocking(False)
        self.stream = stream
        self.is_open = True
        self._most_waiting = most_waiting
        self._received = bytearray()
        self._waiting = bytearray()

    @property
    def num_waiting(self) -> int:
        """How many bytes are still to be sent, once the other end takes them."""
        return len(self._waiting) if self.is_open else 0

    def send(self, message: Message) -> None:
        """Sends a message, or as much of it as the other end takes now; see `flush`."""
        self.send_encoded(encoded(message))

    def send_encoded(self, line: bytes) -> None:
        """Sends what `encoded` has returned: one message for several connections."""
        self._waiting += line
        if self._most_waiting is not None and len(self._waiting) > self._most_waiting:
            self.is_open = False  # the other end does not read
        self.flush()

    def flush(self) -> None:
        """Sends what is still to be sent, as far as the other end takes it."""
        if not self.num_waiting:
            return
        try:
            del self._waiting[: self.stream.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # What the other end has said before is still to be read; that finds the end, too.
            self._waiting.clear()

    def flush_within(self, seconds: float) -> None:
        """Sends what is still to be sent, and waits for so long that the other end takes it."""
        self.stream.settimeout(seconds)
        with contextlib.suppress(OSError):
            self.stream.sendall(self._waiting)
        self._waiting.clear()
        self.stream.setblocking(False)

    def receive(self, most: int = -1) -> list[Message]:
        """Returns the messages that have come. The connection's end, and what is not a message,
        make `is_open` false.

        Args:
            most: How many of them, at most; the others are returned by the next call, of which no
                selector tells. -1: all.
        """
        has_ended = False
        try:
            received = self.stream.recv(_RECEIVED_BYTES)
            has_ended = not received
            self._received += received
        except BlockingIOError:
            pass
        except OSError:
            has_ended = True
        *lines, rest = self._received.split(b"\n", most)
        self._received = rest
        messages: list[Message] = []
        try:
            # Those before one that is not a message count.
            messages.extend(decoded(bytes(line)) for line in lines)
        except ValueError:
            has_ended = True
        if has_ended or len(rest) > MOST_BYTES:
            self.is_open = False
        return messages

    def shutdown_sending(self) -> None:
        """Lets the other end read the end of the connection."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Closes this process's copy of the connection, in a child of the one that uses it."""
        self.is_open = False
        # No lock is taken: a thread that the child does not have may hold it.
        os.close(self.stream.detach())

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self.stream.close()


def encoded(message: Message) -> bytes:
    """Returns a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    r"""Returns the message that a line is.

    Raises:
        ValueError: It is not a message: not an object of JSON, too long, nested too deeply, with
            integers that do not fit into 64 bits, or with text that is not Unicode.

    Examples:
        >>> decoded(b'{"is": "beat", "step": 3}')
        {'is': 'beat', 'step': 3}
        >>> large, text = b'{"step": 99999999999999999999}', b'{"name": "\\ud800"}'
        >>> for line in (b"[1]", large, text, b"[" * 100):
        ...     try:
        ...         decoded(line)
        ...     except ValueError as error:
        ...         print(error)
        Expected an object of JSON. Received: list
        Expected an integer of 64 bits. Received: 99999999999999999999
        Expected text in Unicode. Received: a lone surrogate
        Expected nesting of at most 32. Received: a deeper one
    """
    if len(line) > MOST_BYTES:
        raise ValueError(f"Expected at most {MOST_BYTES} bytes. Received: {len(line)}")
    if line.count(b"[") + line.count(b"{") > _MOST_DEPTH:
        _check_depth(line)
    # Nearly all lines have short numbers only, and need no call for each.
    decoder = _CAREFUL if _MANY_DIGITS.search(line) else _PLAIN
    message = decoder.decode(line.decode())
    if not isinstance(message, dict):
        raise ValueError(f"Expected an object of JSON. Received: {type(message).__name__}")
    if b"\\u" in line:
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("Expected text in Unicode. Received: a lone surrogate") from error
    return message


def _check_depth(line: bytes) -> None:
    depth = 0
    for found in _BRACKETS.finditer(line):
        token = found.group()
        depth += (token in b"[{") - (token in b"]}")
        if depth > _MOST_DEPTH:
            raise ValueError(f"Expected nesting of at most {_MOST_DEPTH}. Received: a deeper one")


def _integer(text: str) -> int:
    # 20 characters, since long ones take a time that grows with their square.
    if len(text) > 20 or not -_GREATEST <= (number := int(text)) <= _GREATEST:
        raise ValueError(f"Expected an integer of 64 bits. Received: {text[:30]}")
    return number


_PLAIN, _CAREFUL = json.JSONDecoder(), json.JSONDecoder(parse_int=_integer)
