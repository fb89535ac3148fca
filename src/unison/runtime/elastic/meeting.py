"""How the members of a view come to be connected.

Both sides show that they know the job's token, and that they mean the same view, before anything
else is said: each answers a number, which the other has drawn, by a keyed hash (HMAC, RFC 2104).
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

#: Seconds between two looks whether the view is over.
_LOOK = 0.05

_NONCE = 16
_PROOF = 32
_CALL = struct.Struct(">QIIB")
_CALL_BYTES = _CALL.size + _NONCE + _PROOF


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
        self._token = token.encode()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._is_over = is_over

    def name(self, words: str) -> str:
        """Returns a name that only members know."""
        return hmac.digest(self._token, f"name {words}".encode(), "sha256").hex()[:32]

    def connect(self, call: Call, address: tuple[str, int] | bytes, who: str) -> socket.socket:
        """Returns a connection with a member that accepts `call`, as soon as it does.

        Args:
            call: What the connection is for.
            address: Where the member listens: host and port, or the name of a Unix socket.
            who: What it is called in messages.
        """
        reason = "nobody listens there"
        while True:
            self._look(f"{who} could not be reached at {_shown(address)}: {reason}")
            try:
                connection = self._open(address)
            except OSError as error:
                reason = str(error)
                time.sleep(_LOOK)
                continue
            try:
                self._introduce(connection, call, who)
                return connection
            except OSError as error:  # it is in an earlier view still, or has left
                connection.close()
                reason = str(error)
                time.sleep(_LOOK)
            except BaseException:
                connection.close()
                raise

    def accept(
        self, listener: socket.socket, expected: Iterable[Call], names: Callable[[Call], str]
    ) -> dict[Call, socket.socket]:
        """Returns the connections that members make for the expected calls, when all are there.

        Args:
            listener: Where they connect.
            expected: What they connect for. Others are turned away.
            names: What the caller is called in messages.
        """
        missing = set(expected)
        accepted: dict[Call, socket.socket] = {}
        timeout = listener.gettimeout()
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while missing:
                    absent = sorted({names(call) for call in missing})
                    self._look(f"{', '.join(absent)} did not connect")
                    for key, _ in selector.select(_LOOK):
                        if key.fileobj is listener:
                            self._greet(selector, listener)
                            continue
                        assert isinstance(key.fileobj, socket.socket)
                        call = self._hear(selector, key.fileobj, key.data, missing)
                        if call is not None:
                            accepted[call] = key.fileobj
                            missing.discard(call)
            except BaseException:
                for connection in accepted.values():
                    connection.close()
                raise
            finally:
                listener.settimeout(timeout)
                for key in list(selector.get_map().values()):
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                        key.fileobj.close()
        return accepted

    def receive(self, connection: socket.socket, count: int, who: str) -> bytes:
        """Returns as many bytes from a member."""
        connection.settimeout(_LOOK)
        received = b""
        while len(received) < count:
            self._look(f"{who} said nothing")
            try:
                piece = connection.recv(count - len(received))
            except TimeoutError:
                continue
            if not piece:
                raise ConnectionError(f"{who} has closed the connection")
            received += piece
        return received

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

    # -- the two sides of a connection -------------------------------------------------------

    def _open(self, address: tuple[str, int] | bytes) -> socket.socket:
        if not isinstance(address, bytes):
            left = max(self._deadline - time.monotonic(), _LOOK)
            return socket.create_connection(address, timeout=min(1.0, left))
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _introduce(self, connection: socket.socket, call: Call, who: str) -> None:
        theirs = self.receive(connection, _NONCE, who)
        own = secrets.token_bytes(_NONCE)
        packed = _CALL.pack(*call)
        connection.sendall(packed + own + self._proof(b"caller", packed, theirs, own))
        answer = self.receive(connection, _PROOF, who)
        if not hmac.compare_digest(answer, self._proof(b"called", packed, theirs, own)):
            raise ConnectionError(f"{who} does not know the job's token")

    def _greet(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        nonce = secrets.token_bytes(_NONCE)
        try:
            connection.send(nonce)
        except OSError:
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ, (nonce, bytearray()))

    def _hear(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        state: tuple[bytes, bytearray],
        missing: set[Call],
    ) -> Call | None:
        """Takes what a caller says; returns its call when that is complete and was missing."""
        own, heard = state
        try:
            piece = connection.recv(_CALL_BYTES - len(heard))
            heard += piece
            if piece and len(heard) < _CALL_BYTES:
                return None
            selector.unregister(connection)
            packed, theirs = bytes(heard[: _CALL.size]), bytes(heard[_CALL.size : -_PROOF])
            proof = bytes(heard[-_PROOF:])
            if len(heard) == _CALL_BYTES and hmac.compare_digest(
                proof, self._proof(b"caller", packed, own, theirs)
            ):
                call = Call(*_CALL.unpack(packed))
                if call in missing:
                    connection.send(self._proof(b"called", packed, own, theirs))
                    return call
        except BlockingIOError:
            return None
        except OSError:
            selector.unregister(connection)
        connection.close()
        return None

    def _proof(self, side: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self._token, side + b"".join(parts), "sha256")

    def _look(self, complaint: str) -> None:
        why = self._is_over()
        if why is not None:
            raise Broken(why)
        if time.monotonic() > self._deadline:
            raise Broken(f"{complaint}, within {self._seconds:g} s.")


def _shown(address: tuple[str, int] | bytes) -> str:
    return "a Unix socket" if isinstance(address, bytes) else f"{address[0]}:{address[1]}"
