"""Short messages between all processes of a job, which pass through the first one.

Each process keeps the connection over which it came to the meeting (`unison.runtime.rendezvous`).
The kernel closes the connections of a process that dies, however it dies: so the others know within
milliseconds, without having to wait for a heartbeat that does not come.

A message is one line of JSON. Nothing that is said is executed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

#: A process that says a longer line is none of ours.
_MOST_BYTES = 1 << 20

#: What only the first process is told: it does not pass this on.
REPORT = "report"

#: A process that has not taken so much yet is told only what it must know.
_MOST_WAITING = 1 << 20


class Star:
    """A process's place in the star.

    Args:
        index: Which of the processes this is.
        connections: The sockets to the others by their index: the first process has one to each,
            the others have one to the first.
    """

    def __init__(self, index: int, connections: Mapping[int, socket.socket]):
        self.index = index
        self._links = {other: _Link(connection) for other, connection in connections.items()}
        self._said: collections.deque[tuple[dict[str, Any], bool]] = collections.deque()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        for end in (self._ear, self._bell):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        for other, link in self._links.items():
            self._selector.register(link.connection, selectors.EVENT_READ, other)
        self._is_closed = False

    @property
    def connected(self) -> list[int]:
        """The processes to which there is a connection."""
        return [other for other, link in self._links.items() if link.is_open]

    def say(self, message: dict[str, Any], may_be_dropped: bool = False) -> None:
        """Tells all others, from whichever thread; another one, in `hear`, sends it.

        Args:
            message: What JSON can say.
            may_be_dropped: Whether a process that does not read needs not get it.
        """
        self._said.append((message | {"from": self.index}, may_be_dropped))
        self.wake()

    def wake(self) -> None:
        """Ends the waiting in `hear`."""
        with contextlib.suppress(OSError):  # full, so it wakes anyway
            self._bell.send(b"!")

    def hear(self, seconds: float) -> list[tuple[int, dict[str, Any] | None]]:
        """Sends what was said, and waits for what others say; one thread at a time.

        Args:
            seconds: How long to wait.

        Returns:
            Who said what; None instead of what, if the connection to that process has closed.
        """
        heard: list[tuple[int, dict[str, Any] | None]] = []
        with self._lock:
            if self._is_closed:
                return heard
            self._pass_on_said()
            for key, events in self._selector.select(seconds):
                if key.fileobj is self._ear:
                    with contextlib.suppress(OSError):
                        self._ear.recv(4096)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
                if events & selectors.EVENT_READ:
                    heard += self._receive(key.data)
            self._pass_on_said()
        return heard

    def close(self) -> None:
        """Closes the connections, once what was said is on its way (or nobody takes it)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._pass_on_said()
            for link in self._links.values():
                if link.is_open:
                    link.connection.settimeout(1.0)
                    with contextlib.suppress(OSError):
                        link.connection.sendall(link.waiting)
                self._end(link)
            self._close_own()

    def abandon(self) -> None:
        """Closes this process's copy of the connections; those of the one it comes of stay."""
        self._lock = threading.Lock()  # its thread may have had it
        self._is_closed = True
        for link in self._links.values():
            link.is_open = False
            link.connection.close()
        self._close_own()

    def _close_own(self) -> None:
        for own in (self._selector, self._ear, self._bell):
            own.close()

    def _pass_on_said(self) -> None:
        while self._said:
            self._tell(*self._said.popleft())

    def _tell(self, message: dict[str, Any], may_be_dropped: bool) -> None:
        line = json.dumps(message).encode() + b"\n"
        for other, link in self._links.items():
            is_behind = may_be_dropped and len(link.waiting) > _MOST_WAITING
            if link.is_open and other != message["from"] and not is_behind:
                link.waiting += line
                self._send(other)

    def _send(self, other: int) -> None:
        link = self._links[other]
        try:
            del link.waiting[: link.connection.send(link.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # What it said before it died is still to be read; that finds the end, too.
            link.waiting.clear()
        if link.is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
            self._selector.modify(link.connection, events, other)

    def _receive(self, other: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
        link = self._links[other]
        messages, has_ended = link.receive()
        for message in messages:
            if self.index == 0:
                message["from"] = other  # nobody speaks for another one
                if message.get("is") != REPORT:
                    self._said.append((message, message.get("is") == "beat"))
            yield message["from"], message
        if has_ended:
            self._end(link)
            if self.index == 0:
                self._said.append(({"is": "gone", "from": other}, False))
            yield other, None

    def _end(self, link: _Link) -> None:
        if link.is_open:
            link.is_open = False
            self._selector.unregister(link.connection)
            link.connection.close()


class _Link:
    """A connection, and what is on its way on it."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.is_open = True
        self.waiting = bytearray()
        self._received = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the messages that have come, and whether there will be no more."""
        has_ended = False
        try:
            received = self.connection.recv(1 << 16)
            has_ended = not received
            self._received += received
        except BlockingIOError:
            pass
        except OSError:
            has_ended = True
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
            is_strange = any(not isinstance(message.get("from"), int) for message in messages)
        except (ValueError, AttributeError):
            messages, is_strange = [], True
        if is_strange or len(self._received) > _MOST_BYTES:
            return [], True
        return messages, has_ended
