"""How the members of a view connect to each other.

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

#: Seconds between two looks whether the view is over.
_LOOK = 0.05

#: The timeout of one attempt to connect, in seconds.
_SECONDS_A_TRY = 5.0

_CALL = struct.Struct(">QIIB")


class Broken(Exception):  # noqa: N818 - what happens to a view, not a mistake
    """Members of a view cannot, or can no longer, talk: it was interrupted, or one is lost."""


class Call(NamedTuple):
    """What a connection is for.

    Attributes:
        view: The number of the view.
        caller: The place of the member that connects.
        called: The place of the one that listens.
        purpose: What they are going to say; a small number.
    """

    view: int
    caller: int
    called: int
    purpose: int


class Meeting:
    """Makes connections between members of a view.

    Args:
        token: What all members of the job know, and nobody else.
        seconds: How long all of it may take.
        is_over: Says why the view is not to be, and None as long as it is.
    """

    def __init__(self, token: str, seconds: float, is_over: Callable[[], str | None]):
        self._secret = token.encode()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._is_over = is_over

    def name(self, words: str) -> str:
        """Returns a name that only members know."""
        return derived_name(self._secret, words)

    def connect(self, call: Call, address: tuple[str, int] | bytes, who: str) -> socket.socket:
        """Returns a connection with a member that accepts `call`, as soon as it does.

        Args:
            call: What the connection is for.
            address: Where the member listens: host and port, or the name of a Unix socket.
            who: What it is called in messages.
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
            except OSError as error:  # it is in an earlier view still, or has left
                reason = str(error)
                time.sleep(_LOOK)
            else:
                assert isinstance(connection, socket.socket)
                return connection

    def accept(
        self, listener: socket.socket, expected: Iterable[Call], names: Callable[[Call], str]
    ) -> dict[Call, socket.socket]:
        """Returns the connections that members make for the expected calls, when all are there.

        Args:
            listener: Where they connect.
            expected: What they connect for. Others are turned away.
            names: What the caller is called in messages.
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
                    if call is None:  # it has come twice
                        found.stream.close()
                        continue
                    accepted[call] = for_caller.enter_context(found.stream)
            for_caller.pop_all()
        return accepted

    def receive_files(self, connection: socket.socket, count: int, who: str) -> list[int]:
        """Returns as many open files, that a member on this machine hands over."""
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
