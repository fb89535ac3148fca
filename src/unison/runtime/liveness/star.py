"""Short messages between all processes of a job, relayed by the first one.

Each process keeps its connection from the rendezvous (`unison.runtime.rendezvous`). The kernel
closes the connections of a process that dies, for any reason: so the others know within
milliseconds, without waiting for a missing heartbeat.

A message is one line of JSON (`unison.net.lines`). Received data is never executed.
"""

from __future__ import annotations

import collections
import selectors
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from unison.net.lines import Line, Message, encoded
from unison.net.waker import Waker

#: The type of messages for the first process only: it does not relay them.
REPORT = "report"

#: The number of pending bytes above which a process only gets messages that must not be dropped.
_MOST_WAITING = 1 << 20


class Star:
    """A process's node in the star.

    Args:
        index: The index of this process.
        lines: The connections to the others by their index: the first process has one to each, the
            others have one to the first.
    """

    def __init__(self, index: int, lines: Mapping[int, Line]):
        self.index = index
        self._lines = dict(lines)
        self._said: collections.deque[tuple[Message, bool]] = collections.deque()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        for other, line in self._lines.items():
            self._selector.register(line.stream, selectors.EVENT_READ, other)
        #: The processes whose connections have been closed.
        self._ended: set[int] = set()
        #: Whether data that the rendezvous has read ahead was searched for messages.
        self._has_looked = False
        self._is_closed = False

    @property
    def connected(self) -> list[int]:
        """The processes with an open connection."""
        return [other for other in self._lines if other not in self._ended]

    def say(self, message: dict[str, Any], may_be_dropped: bool = False) -> None:
        """Queues a message for all others; any thread may call this, and `hear` sends it.

        Args:
            message: The message, of values that JSON can represent.
            may_be_dropped: Whether the message may be dropped for a process that does not read.
        """
        self._said.append((message | {"from": self.index}, may_be_dropped))
        self.wake()

    def wake(self) -> None:
        """Wakes up `hear`."""
        self._waker.wake()

    def hear(self, seconds: float) -> list[tuple[int, dict[str, Any] | None]]:
        """Sends queued messages, and waits for received ones; for one thread at a time.

        Args:
            seconds: How long to wait.

        Returns:
            Pairs of a process and its message; None instead of a message if the connection to that
            process was closed.
        """
        heard: list[tuple[int, dict[str, Any] | None]] = []
        with self._lock:
            if self._is_closed:
                return heard
            self._pass_on_said()
            if not self._has_looked:
                self._has_looked = True
                for other in self._lines:
                    heard += self._receive(other)
                seconds = 0.0 if heard else seconds
            for key, events in self._selector.select(seconds):
                if key.fileobj is self._waker:
                    self._waker.clear()
                    continue
                if events & selectors.EVENT_WRITE:
                    self._lines[key.data].flush()
                    self._attend(key.data)
                if events & selectors.EVENT_READ:
                    heard += self._receive(key.data)
            self._pass_on_said()
        return heard

    def close(self) -> None:
        """Closes the connections, once queued messages are sent (or a timeout is over)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._pass_on_said()
            for other, line in self._lines.items():
                if line.is_open:
                    line.flush_within(1.0)
                self._end(other)
            self._close_own()

    def abandon(self) -> None:
        """Closes a forked process's copies of the connections; its parent's stay open."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._is_closed = True
        for other, line in self._lines.items():
            if other not in self._ended:
                line.abandon()
        self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        self._waker.close()

    def _pass_on_said(self) -> None:
        while self._said:
            self._tell(*self._said.popleft())

    def _tell(self, message: Message, may_be_dropped: bool) -> None:
        encoded_once = encoded(message)
        for other, line in self._lines.items():
            is_behind = may_be_dropped and line.num_waiting > _MOST_WAITING
            if line.is_open and other != message["from"] and not is_behind:
                line.send_encoded(encoded_once)
                self._attend(other)

    def _attend(self, other: int) -> None:
        """Sets the events to wait for: writing, if there is data to send."""
        line = self._lines[other]
        if line.is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.num_waiting else 0)
            self._selector.modify(line.stream, events, other)

    def _receive(self, other: int) -> Iterator[tuple[int, Message | None]]:
        line = self._lines[other]
        if other in self._ended:
            return
        for message in line.receive():
            if not isinstance(message.get("from"), int):
                line.is_open = False
                break
            if self.index == 0:
                message["from"] = other  # a process cannot impersonate another one
                if message.get("is") != REPORT:
                    self._said.append((message, message.get("is") == "beat"))
            yield message["from"], message
        if not line.is_open:
            self._end(other)
            if self.index == 0:
                self._said.append(({"is": "gone", "from": other}, False))
            yield other, None

    def _end(self, other: int) -> None:
        if other not in self._ended:
            self._ended.add(other)
            self._selector.unregister(self._lines[other].stream)
            self._lines[other].close()
