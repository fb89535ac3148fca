"""The processes of a job come together before JAX starts.

JAX's own start ends the process where somebody does not come. So the first process listens at its
address until all others have said who they are, and answers each: that all is well, or what is
not. Whoever is missing, comes twice or has other software is named on every process. The
connections stay open afterwards: see `unison.runtime.liveness.star`.

A message is one line of JSON. Nothing that is said is executed or kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unison.errors import UnavailableError

#: A message is no longer than this; what is, is no process of ours.
_MOST_BYTES = 1 << 16

#: Seconds between two tries to reach the first process, and for what a connection has to say.
_RETRY_AFTER = 0.1
_SECONDS_TO_SPEAK = 5.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place among those that meet.

    Attributes:
        index: Its number.
        names: What each process is called, in order.
    """

    index: int
    names: Sequence[str]


def meet(
    address: str, place: Place, about: Mapping[str, str], timeout: float
) -> dict[int, socket.socket]:
    """Waits until all processes have come.

    Args:
        address: Where the first process listens, as host:port.
        place: This process's place.
        about: What must be the same on all of them.
        timeout: Seconds to wait.

    Returns:
        The open connections to other processes by their index: the first has one to each, the
        others have one to the first.

    Raises:
        UnavailableError: Some did not come, two came as the same, or they differ in `about`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UnavailableError(
            message=f"The address of a worker must be host:port. Received: {address!r}"
        )
    where = (host.strip("[]"), int(port))
    last = time.monotonic() + timeout
    said = {"index": place.index, "about": dict(about)}
    come = _receive if place.index == 0 else _call
    outcome = come(where, place, said, last)
    if isinstance(outcome, str):
        raise UnavailableError(message=f"{outcome} (after {timeout:g} s at most, at {address})")
    return outcome


def _receive(
    where: tuple[str, int], place: Place, own: Any, last: float
) -> dict[int, socket.socket] | str:
    """What the first process does; returns its connections, or what is wrong."""
    family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server(where, family=family, backlog=len(place.names))
    except OSError as error:
        return (
            f"{place.names[0]} cannot listen at its address: {error}. Give it a free port of this "
            "machine"
        )
    guests = _Guests(place, own)
    with listener, contextlib.ExitStack() as connections:
        while not guests.are_complete() and (left := last - time.monotonic()) > 0:
            listener.settimeout(min(left, _RETRY_AFTER))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue  # somebody who is here may have spoken
            connections.enter_context(connection)
            # One that says nothing must not keep the others waiting.
            threading.Thread(target=guests.hear, args=(connection,), daemon=True).start()
        complaint = guests.complaint()
        guests.answer(complaint)
        if complaint is not None:
            return complaint
        connections.pop_all()
        return guests.connections


class _Guests:
    """Who has come to the first process."""

    def __init__(self, place: Place, own: Any):
        self._names = place.names
        self._said: dict[int, Any] = {0: own}
        self._connections: list[tuple[int, socket.socket]] = []
        self._twice: set[int] = set()
        self._lock = threading.Lock()

    def are_complete(self) -> bool:
        """Whether there is nothing to wait for."""
        if len(self._said) == len(self._names):
            self._forget_who_has_gone()
        return len(self._said) == len(self._names) or bool(self._twice)

    def hear(self, connection: socket.socket) -> None:
        """Notes what a connection says; closes one that is no process of ours."""
        try:
            said = json.loads(_read_line(connection, time.monotonic() + _SECONDS_TO_SPEAK))
            index = int(said["index"])
            if not 0 <= index < len(self._names):
                raise ValueError(index)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        if index in self._said:
            self._forget_who_has_gone()  # perhaps this one, which comes again
        with self._lock:
            if index in self._said:
                self._twice.add(index)
            self._said.setdefault(index, said)
            self._connections.append((index, connection))

    def _forget_who_has_gone(self) -> None:
        """Counts those as not come that have come and given up."""
        with self._lock:
            for guest in list(self._connections):
                index, connection = guest
                if index not in self._twice and _has_gone(connection):
                    connection.close()
                    self._connections.remove(guest)
                    del self._said[index]

    @property
    def connections(self) -> dict[int, socket.socket]:
        """The connections to those who have come, by their index."""
        return dict(self._connections)

    def complaint(self) -> str | None:
        """Returns what is wrong; None if all have come and agree."""
        if self._twice:
            names = [self._names[index] for index in sorted(self._twice)]
            return f"Two processes came as {names}. Give each task one process"
        if len(self._said) < len(self._names):
            self._forget_who_has_gone()
        missing = [name for index, name in enumerate(self._names) if index not in self._said]
        if missing:
            return (
                f"These did not come: {missing}. Check that they run, have the same cluster, and "
                "can reach this address"
            )
        own = self._said[0]["about"]
        for index in range(1, len(self._names)):
            other = self._said[index].get("about")
            if other != own:
                return f"{self._names[0]} and {self._names[index]} differ: {own} and {other}"
        return None

    def answer(self, complaint: str | None) -> None:
        """Tells everybody."""
        line = json.dumps({"complaint": complaint}).encode() + b"\n"
        for _, connection in self._connections:
            with contextlib.suppress(OSError):
                connection.settimeout(_SECONDS_TO_SPEAK)
                connection.sendall(line)


def _call(
    where: tuple[str, int], place: Place, own: Any, last: float
) -> dict[int, socket.socket] | str:
    """What the other processes do; returns their connection, or what is wrong."""
    failure: Exception | None = None
    while (left := last - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as connections:
                connection = socket.create_connection(where, timeout=left)
                connections.enter_context(connection)
                connection.sendall(json.dumps(own).encode() + b"\n")
                # The first process may take as long as it waits for the others.
                answer = json.loads(_read_line(connection, last + _SECONDS_TO_SPEAK))
                if answer["complaint"] is not None:
                    return str(answer["complaint"])
                connections.pop_all()
                return {0: connection}
        except (OSError, ValueError, KeyError, TypeError) as error:
            failure = error
            time.sleep(_RETRY_AFTER)
    return (
        f"{place.names[place.index]} could not reach {place.names[0]}: {failure}. Check that it "
        "runs, and the address"
    )


def _has_gone(connection: socket.socket) -> bool:
    """Whether the other end of a connection has closed it."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _read_line(connection: socket.socket, last: float) -> bytes:
    """Reads a line, and nothing of what follows it."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(last - time.monotonic(), 0.001))
        waiting = connection.recv(4096, socket.MSG_PEEK)
        received = connection.recv(waiting.find(b"\n") + 1 or len(waiting) or 1)
        line += received
        if not received or len(line) > _MOST_BYTES:
            raise ValueError("no message")
    return line
