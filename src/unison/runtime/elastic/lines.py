"""A connection on which two processes tell each other lines of JSON, without ever waiting."""

from __future__ import annotations

import contextlib
import json
import socket

from unison.runtime.elastic.protocol import MOST_BYTES, Message


class Line:
    """One end of a connection.

    Args:
        connection: The socket, which becomes non-blocking.

    Attributes:
        is_open: Whether there is more to expect; whoever finds that there is not calls `close`.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.is_open = True
        self._received = bytearray()
        self._waiting = bytearray()

    @property
    def has_more_to_say(self) -> bool:
        """Whether something is still to be sent, once the other end takes it."""
        return self.is_open and bool(self._waiting)

    def say(self, message: Message) -> None:
        """Sends a message, or as much of it as the other end takes now; see `go_on`."""
        self._waiting += json.dumps(message).encode() + b"\n"
        if len(self._waiting) > MOST_BYTES:
            self.is_open = False  # nobody reads it
        self.go_on()

    def go_on(self) -> None:
        """Sends what is still to be sent, as far as the other end takes it."""
        if not self.has_more_to_say:
            return
        try:
            del self._waiting[: self.connection.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # What the other end said before it went is still to be read; that finds the end, too.
            self._waiting.clear()

    def hear(self) -> list[Message]:
        """Returns the messages that have come; their end, and nonsense, end the connection."""
        try:
            received = self.connection.recv(1 << 16)
            has_ended = not received
            self._received += received
        except BlockingIOError:
            return []
        except OSError:
            has_ended = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        messages: list[Message] = []
        try:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message["is"], str):
                    raise TypeError(message["is"])
                messages.append(message)
        except (ValueError, KeyError, TypeError, RecursionError):
            has_ended = True
        if has_ended or len(rest) > MOST_BYTES:
            self.is_open = False
        return messages

    def say_no_more(self) -> None:
        """Tells the other end that nothing more will be said."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self.connection.close()
