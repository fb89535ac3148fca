"""The rendezvous of a job's processes before JAX starts.

`jax.distributed.initialize` ends the process if one of the others is missing. So the first process
listens at its address until all others have registered, and then sends each a confirmation or an
error. If a process is missing, has registered twice, or has different software, the error on all
processes names it. Both ends of a connection prove that they know the job's key first
(`unison.net`).

The connections stay open (`unison.runtime.liveness.star`), and the first process keeps listening
for connections to JAX's coordination service (`unison.runtime.liveness.relay`).

A message is a JSON line. Received data is never executed or stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from unison.errors import UnavailableError
from unison.net.acceptor import HANDSHAKE_SECONDS, Acceptor
from unison.net.addresses import joined_address, split_address
from unison.net.connecting import connect
from unison.net.handshake import Accepted, server_handshake
from unison.net.lines import Line, Message
from unison.net.listening import listen
from unison.net.secret import KEY_VARIABLE, key

#: The channels of connections to the first process: the rendezvous, and JAX's coordination service.
CHANNEL = b"rendezvous-1"
COORDINATION_CHANNEL = b"coordination-1"

#: Seconds between two connection attempts; timeout for a registration or an answer.
_RETRY_AFTER = 0.1
_SECONDS_TO_SPEAK = 5.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's position among those of the rendezvous.

    Attributes:
        index: Its index.
        names: The names of all processes, in order.
    """

    index: int
    names: Sequence[str]


class Entrance(NamedTuple):
    """The listening socket of the first process, and its acceptor.

    Attributes:
        listener: The listening socket.
        acceptor: Its acceptor, for both channels.
    """

    listener: socket.socket
    acceptor: Acceptor[Accepted]

    def close(self) -> None:
        """Stops listening."""
        self.acceptor.close()
        self.listener.close()


class Met(NamedTuple):
    """The result of a rendezvous.

    Attributes:
        lines: The open connections to other processes by their index: the first has one to each,
            the others have one to the first.
        entrance: The socket at which the first process keeps listening; None on the others.
    """

    lines: dict[int, Line]
    entrance: Entrance | None


def meet(address: str, place: Place, about: Mapping[str, str], timeout: float) -> Met:
    """Waits until all processes have registered at the address of the first one.

    Args:
        address: The address at which the first process listens, as host:port.
        place: The position of this process.
        about: The values that must be the same on all processes.
        timeout: The timeout in seconds.

    Raises:
        UnavailableError: Processes are missing, two have registered with the same index, they
            differ in `about`, or the first one cannot listen at the address.
        UnauthenticatedError: The first process has another key.
        FailedPreconditionError: Some processes use TLS and others do not.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UnavailableError(
            message=f"The address of a worker must be host:port. Received: {address!r}"
        )
    where, secret = split_address(address), key()
    if place.index > 0:
        return call(where, secret, place, about, timeout)
    try:
        entrance = opened_entrance(*where, secret, len(place.names))
    except OSError as error:
        raise UnavailableError(
            message=f"{place.names[0]} cannot listen at its address: {error}. Give it a free port "
            f"of this machine (after {timeout:g} s at most, at {address})"
        ) from error
    return receive(entrance, place, about, timeout)


def opened_entrance(
    host: str,
    port: int,
    secret: bytes,
    count: int,
    channels: Sequence[bytes] = (CHANNEL, COORDINATION_CHANNEL),
) -> Entrance:
    """Returns the entrance of the first process, at which it listens from now on.

    Args:
        host: A name or an address of this machine.
        port: The port; 0: a free one.
        secret: The job's key.
        count: The number of processes.
        channels: The channels that it accepts.

    Raises:
        OSError: Another process listens there, or the host is not this machine.
    """
    listener = listen(host, port, backlog=max(count, 128))
    acceptor = Acceptor([listener], lambda each: server_handshake(each, secret, channels))
    return Entrance(listener, acceptor)


def receive(entrance: Entrance, place: Place, about: Mapping[str, str], timeout: float) -> Met:
    """Runs the rendezvous on the first process; takes ownership of the entrance.

    Raises:
        UnavailableError: See `meet`.
    """
    last = time.monotonic() + timeout
    own = {"index": place.index, "about": dict(about)}
    with contextlib.ExitStack() as undoing:
        undoing.callback(entrance.close)
        with _Guests(place, own, entrance.acceptor) as guests:
            while not guests.are_complete() and (left := last - time.monotonic()) > 0:
                guests.hear(min(left, _RETRY_AFTER))
            complaint = guests.complaint()
            guests.answer(complaint)
            if complaint is not None:
                raise _failed(complaint, timeout, entrance.listener.getsockname())
            lines = guests.keep_lines()
        undoing.pop_all()
    return Met(lines, entrance)


def call(
    where: tuple[str, int], secret: bytes, place: Place, about: Mapping[str, str], timeout: float
) -> Met:
    """Runs the rendezvous on the other processes.

    Raises:
        UnavailableError: See `meet`.
        UnauthenticatedError: The first process has another key.
        FailedPreconditionError: Some processes use TLS and others do not.
    """
    own = {"index": place.index, "about": dict(about)}
    outcome = _call(where, secret, place, own, time.monotonic() + timeout)
    if isinstance(outcome, str):
        raise _failed(outcome, timeout, where)
    return outcome


def _failed(complaint: str, timeout: float, where: tuple[Any, ...]) -> UnavailableError:
    address = joined_address(where[0], where[1])
    return UnavailableError(message=f"{complaint} (after {timeout:g} s at most, at {address})")


class _Guests:
    """The processes that have connected to the first process."""

    def __init__(self, place: Place, own: Message, acceptor: Acceptor[Accepted]):
        self._names = place.names
        self._acceptor = acceptor
        self._said: dict[int, Message] = {0: own}
        #: Connections that have registered, in order; and those that have not, with their
        #: deadlines.
        self._lines: list[tuple[int, Line]] = []
        self._silent: dict[Line, float] = {}
        self._twice: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(acceptor, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for line in (*self._silent, *(line for _, line in self._lines)):
            line.close()

    def are_complete(self) -> bool:
        """Returns whether there is nothing left to wait for."""
        if len(self._said) == len(self._names):
            self._forget_who_has_gone()
        return len(self._said) == len(self._names) or bool(self._twice)

    def hear(self, seconds: float) -> None:
        """Receives registrations and accepts connections; waits for at most `seconds`."""
        for key_, _ in self._selector.select(seconds):
            if key_.data is not None:
                self._hear(key_.data)
        for accepted in self._acceptor.accept():
            if accepted.channel == CHANNEL:
                line = Line(accepted.stream, most_waiting=None)
                self._silent[line] = time.monotonic() + _SECONDS_TO_SPEAK
                self._selector.register(line.stream, selectors.EVENT_READ, line)
            else:  # of another job
                accepted.stream.close()
        for line in [each for each, until in self._silent.items() if until < time.monotonic()]:
            self._turn_away(line)

    def _hear(self, line: Line) -> None:
        if line not in self._silent:
            self._forget_who_has_gone()
            return
        for said in line.receive(most=1):
            index, about = said.get("index"), said.get("about")
            if (
                type(index) is not int
                or not 0 <= index < len(self._names)
                or not isinstance(about, dict)
            ):
                self._turn_away(line)
                return
            del self._silent[line]
            if index in self._said:
                self._forget_who_has_gone()  # possibly this process, which reconnects
            if index in self._said:
                self._twice.add(index)
            self._said.setdefault(index, said)
            self._lines.append((index, line))
            return
        if not line.is_open:
            self._turn_away(line)

    def _turn_away(self, line: Line) -> None:
        del self._silent[line]
        self._selector.unregister(line.stream)
        line.close()

    def _forget_who_has_gone(self) -> None:
        """Drops the registrations of processes that have closed their connections."""
        for guest in list(self._lines):
            index, line = guest
            line.receive(most=0)
            if not line.is_open:
                self._selector.unregister(line.stream)
                line.close()
                self._lines.remove(guest)
                if index not in self._twice:
                    del self._said[index]

    def keep_lines(self) -> dict[int, Line]:
        """Returns the connections to the registered processes, by their index; they stay open."""
        kept, self._lines = dict(self._lines), []
        return kept

    def complaint(self) -> str | None:
        """Returns an error message; None if all have registered and agree."""
        if self._twice:
            names = [self._names[index] for index in sorted(self._twice)]
            return f"Duplicate registration for {names}. Give each task one process"
        if len(self._said) < len(self._names):
            self._forget_who_has_gone()
        missing = [name for index, name in enumerate(self._names) if index not in self._said]
        if missing:
            refused = self._acceptor.last_refusal
            because = "" if refused is None else f". The latest connection that failed: {refused}"
            return (
                f"Timed out waiting for workers: {missing}. Check that they run, have the same "
                f"cluster and {KEY_VARIABLE}, and can reach this address{because}"
            )
        own = self._said[0]["about"]
        for index in range(1, len(self._names)):
            other = self._said[index]["about"]
            if other != own:
                return f"{self._names[0]} and {self._names[index]} differ: {own} and {other}"
        return None

    def answer(self, complaint: str | None) -> None:
        """Sends the result to all registered processes."""
        for _, line in self._lines:
            line.send({"complaint": complaint})
            if line.num_waiting:
                line.flush_within(_SECONDS_TO_SPEAK)


def _call(
    where: tuple[str, int], secret: bytes, place: Place, own: Message, last: float
) -> Met | str:
    """Runs the rendezvous on the other processes; returns the connection, or an error message."""
    outcome = registered(where, secret, CHANNEL, own, last)
    if isinstance(outcome, Exception):
        return (
            f"{place.names[place.index]} could not reach {place.names[0]}: {outcome}. Check that "
            "it runs, and the address"
        )
    line, answer = outcome
    complaint = answer.get("complaint")
    if complaint is not None:
        line.close()
        return str(complaint)
    return Met({0: line}, None)


def registered(
    where: tuple[str, int], secret: bytes, channel: bytes, own: Message, last: float
) -> tuple[Line, Message] | Exception:
    """Registers with a process that may not listen yet, and waits for its answer.

    Args:
        where: Where it listens.
        secret: The job's key.
        channel: The channel.
        own: The registration.
        last: When to give up, by `time.monotonic`.

    Returns:
        The connection, which stays open, and the answer; or the latest error.

    Raises:
        UnauthenticatedError: The process has another key.
        FailedPreconditionError: Only one of the two processes uses TLS.
    """
    failure: Exception = TimeoutError("no time is left")
    while (left := last - time.monotonic()) > 0:
        try:
            stream = connect(where, secret, channel, seconds=min(left, HANDSHAKE_SECONDS))
        except PermissionError:  # another key: a retry would fail again
            raise
        except OSError as error:
            failure = error
        else:
            with contextlib.ExitStack() as undoing:
                line = Line(stream, most_waiting=None)
                undoing.callback(line.close)
                line.send(own)
                # The first process answers once it no longer waits for the others.
                answer = _answer(line, last + _SECONDS_TO_SPEAK)
                if answer is not None:
                    undoing.pop_all()
                    return line, answer
                failure = ConnectionResetError("connection closed by peer")
        time.sleep(_RETRY_AFTER)
    return failure


def _answer(line: Line, last: float) -> dict[str, Any] | None:
    """Returns the first message; None if the connection is closed or the time is over before."""
    with selectors.DefaultSelector() as selector:
        selector.register(line.stream, selectors.EVENT_READ)
        while line.is_open and (left := last - time.monotonic()) > 0:
            selector.select(left)
            for answer in line.receive(most=1):
                return answer
    return None
