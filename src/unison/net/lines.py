"""JSON lines on a non-blocking connection.

Received lines are bounded before they are parsed: in length, nesting, and the size of integers.
Nothing that is received is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from typing import Any

from unison.net.tls import Stream

#: A message: a JSON object.
Message = dict[str, Any]

#: Bounds of a message: its length, nesting, and the absolute value of its integers.
MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_GREATEST = 2**63 - 1

#: The number of bytes received at a time: at least one TLS record, since selectors do not report
#: data in TLS' own buffer.
_RECEIVED_BYTES = 1 << 16

_MANY_DIGITS = re.compile(rb"\d{19}")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class Line:
    """One end of a connection.

    Args:
        stream: The connection, which becomes non-blocking.
        most_waiting: The size of the send buffer. The connection ends if the peer does not read and
            the buffer overflows. None: unlimited.

    Attributes:
        stream: The connection.
        is_open: Whether the connection can be used. The caller closes one that cannot.
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
        """The number of bytes in the send buffer."""
        return len(self._waiting) if self.is_open else 0

    def send(self, message: Message) -> None:
        """Sends a message. What cannot be sent now is buffered; see `flush`."""
        self.send_encoded(encoded(message))

    def send_encoded(self, line: bytes) -> None:
        """Sends a message that `encoded` has returned, e.g. the same one to several peers."""
        self._waiting += line
        if self._most_waiting is not None and len(self._waiting) > self._most_waiting:
            self.is_open = False  # the peer does not read
        self.flush()

    def flush(self) -> None:
        """Sends as much of the buffer as possible without blocking."""
        if not self.num_waiting:
            return
        try:
            del self._waiting[: self.stream.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # Messages that were received before are still to be read; `receive` finds the end.
            self._waiting.clear()

    def flush_within(self, seconds: float) -> None:
        """Sends the buffer, blocking for `seconds` at most."""
        self.stream.settimeout(seconds)
        with contextlib.suppress(OSError):
            self.stream.sendall(self._waiting)
        self._waiting.clear()
        self.stream.setblocking(False)

    def receive(self, most: int = -1) -> list[Message]:
        """Returns the messages that have been received. The end of the connection, and an invalid
        message, set `is_open` to false.

        Args:
            most: The most messages to return; -1: all. The others stay buffered for the next call,
                and selectors do not report them.
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
            # Messages before an invalid one are returned.
            messages.extend(decoded(bytes(line)) for line in lines)
        except ValueError:
            has_ended = True
        if has_ended or len(rest) > MOST_BYTES:
            self.is_open = False
        return messages

    def end_if_unanswered(self) -> None:
        """Has the system end the connection when the peer's machine does not answer any more.

        That is noticed within half a minute, also if nothing is sent.
        """
        options = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
        options["TCP_USER_TIMEOUT"] = 25_000  # milliseconds
        for name, value in options.items():
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            if hasattr(socket, name):
                self.stream.setsockopt(level, getattr(socket, name), value)

    def shutdown_sending(self) -> None:
        """Shuts down sending, so that the peer reads the end of the connection."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Closes the copy of the connection in a forked child."""
        self.is_open = False
        # Takes no lock: a thread of the parent may have held it at the fork.
        os.close(self.stream.detach())

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self.stream.close()


def encoded(message: Message) -> bytes:
    """Returns a message as a JSON line."""
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    r"""Parses a line.

    Raises:
        ValueError: It is not a JSON object, too long, nested too deeply, has integers that do not
            fit into 64 bits, or lone surrogates.

    Examples:
        >>> decoded(b'{"is": "beat", "step": 3}')
        {'is': 'beat', 'step': 3}
        >>> large, text = b'{"step": 99999999999999999999}', b'{"name": "\\ud800"}'
        >>> for line in (b"[1]", large, text, b"[" * 100):
        ...     try:
        ...         decoded(line)
        ...     except ValueError as error:
        ...         print(error)
        Expected a JSON object. Received: list
        Expected an integer of 64 bits. Received: 99999999999999999999
        Expected text in Unicode. Received: a lone surrogate
        Expected nesting of at most 32. Received: a deeper one
    """
    if len(line) > MOST_BYTES:
        raise ValueError(f"Expected at most {MOST_BYTES} bytes. Received: {len(line)}")
    if line.count(b"[") + line.count(b"{") > _MOST_DEPTH:
        _check_depth(line)
    # Fast path: most lines have short numbers only.
    decoder = _CAREFUL if _MANY_DIGITS.search(line) else _PLAIN
    message = decoder.decode(line.decode())
    if not isinstance(message, dict):
        raise ValueError(f"Expected a JSON object. Received: {type(message).__name__}")
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
    # Checked by length first: parsing takes quadratic time.
    if len(text) > 20 or not -_GREATEST <= (number := int(text)) <= _GREATEST:
        raise ValueError(f"Expected an integer of 64 bits. Received: {text[:30]}")
    return number


_PLAIN, _CAREFUL = json.JSONDecoder(), json.JSONDecoder(parse_int=_integer)
