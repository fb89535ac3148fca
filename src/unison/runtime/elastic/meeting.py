"""Connections between the members of a view.

Both ends prove that they know the job's token and mean the same view (`unison.net`). The
connections are then used by compiled code, which does not encrypt.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from unison.net.acceptor import Acceptor
from unison.net.connecting import connect
from unison.net.handshake import server_handshake
from unison.net.proof import derived_name
from unison.runtime.elastic.protocol import MEMBERS_CHANNEL

#: Seconds between two checks of whether the view is over.
_LOOK = 0.05

#: The timeout of one connection attempt, in seconds.
_SECONDS_A_TRY = 5.0

_CALL = struct.Struct(">QIIB")


class Broken(Exception):  # noqa: N818 - an event, not an error
    """A view's members cannot communicate (any more): it was interrupted, or a member is lost."""


class Call(NamedTuple):
    """The purpose of a connection.

    Attributes:
        view: The number of the view.
        caller: The index of the member that connects.
        called: The index of the member that listens.
        purpose: The purpose; a small number.
    """

    view: int
    caller: int
    called: int
    purpose: int


class Meeting:
    """Establishes connections between members of a view.

    Args:
        token: The job's secret, which only its members know.
        seconds: The timeout for all connections together.
        is_over: Returns the reason why the view is over, or None while it is not.
    """

    def __init__(self, token: str, seconds: float, is_over: Callable[[], str | None]):
        self._secret = token.encode()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._is_over = is_over

    def name(self, words: str) -> str:
        """Returns a name that only members can derive."""
        return derived_name(self._secret, words)

    def connect(self, call: Call, address: tuple[str, int] | bytes, who: str) -> socket.socket:
        """Connects to a member, and returns the connection once the member accepts `call`.

        Args:
            call: The purpose of the connection.
            address: The address at which the member listens: host and port, or the name of a Unix
                socket.
            who: The member's name in messages.
        """
        reason = "nobody listens there"
        about = _CALL.pack(*call)

        def look() -> None:
            self._look(f"{who} could not be reached at {_shown(address)}: {reason}")

        while True:
            look()
            left = max(self._deadline - time.monotonic(), _LOOK)
            try:
                connection = connect(
                    address,
                    self._secret,
                    MEMBERS_CHANNEL,
                    about=about,
                    seconds=min(_SECONDS_A_TRY, left),
                    may_encrypt=False,
                    look=look,
                )
            except OSError as error:  # it is still in an earlier view, or has left
                reason = str(error)
                time.sleep(_LOOK)
            else:
                assert isinstance(connection, socket.socket)
                return connection

    def accept(
        self, listener: socket.socket, expected: Iterable[Call], names: Callable[[Call], str]
    ) -> dict[Call, socket.socket]:
        """Returns members' connections for the expected calls, once all have been accepted.

        Args:
            listener: The listening socket.
            expected: The calls to accept. Others are rejected.
            names: Returns the caller's name in messages.
        """
        missing = {_CALL.pack(*call): call for call in expected}
        accepted: dict[Call, socket.socket] = {}
        acceptor = Acceptor(
            [listener],
            lambda own: server_handshake(
                own,
                self._secret,
                [MEMBERS_CHANNEL],
                expects=lambda about: about in missing,
                may_encrypt=False,
            ),
        )
        with contextlib.ExitStack() as undoing:
            for_caller = undoing.enter_context(contextlib.ExitStack())
            undoing.enter_context(contextlib.closing(acceptor))
            while missing:
                absent = sorted({names(call) for call in missing.values()})
                self._look(f"{', '.join(absent)} did not connect")
                for found in acceptor.wait(_LOOK):
                    assert isinstance(found.stream, socket.socket)
                    call = missing.pop(found.about, None)
                    if call is None:  # a duplicate
                        found.stream.close()
                        continue
                    accepted[call] = for_caller.enter_context(found.stream)
            for_caller.pop_all()
        return accepted

    def receive_files(self, connection: socket.socket, count: int, who: str) -> list[int]:
        """Returns `count` file descriptors that a member on this machine sends."""
        connection.settimeout(_LOOK)
        while True:
            self._look(f"{who} said nothing")
            try:
                said, files, _, _ = socket.recv_fds(connection, 1, count)
            except TimeoutError:
                continue
            except OSError as error:
                raise Broken(f"{who} has closed the connection: {error}") from error
            if not said:
                raise Broken(f"{who} has closed the connection.")
            return files

    def _look(self, complaint: str) -> None:
        why = self._is_over()
        if why is not None:
            raise Broken(why)
        if time.monotonic() > self._deadline:
            raise Broken(f"{complaint}, within {self._seconds:g} s.")


def _shown(address: tuple[str, int] | bytes) -> str:
    return "a Unix socket" if isinstance(address, bytes) else f"{address[0]}:{address[1]}"
