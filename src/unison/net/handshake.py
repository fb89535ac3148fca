"""The handshake of a connection: TLS if it is encrypted, then the proof of the job's secret.

Each side is a generator that yields the event it waits for (`selectors.EVENT_READ` or
`EVENT_WRITE`), and returns the connection. So a server runs many handshakes in one thread
(`acceptor`), and a client blocks on its own (`completed`). If the handshake fails, or its generator
is closed, the connection is closed.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, TypeVar

from unison.net import proof, tls
from unison.net.proof import ClientProof, RefusedError, ServerProof
from unison.net.tls import Stream, TlsStream

T = TypeVar("T")

#: Steps of a handshake.
Steps = Generator[int, None, T]

#: The peer credentials of a local socket (`ucred`): process, user and group.
_CREDENTIALS = struct.Struct("3i")


class Accepted(NamedTuple):
    """An authenticated connection of a server.

    Attributes:
        stream: The connection, which is non-blocking.
        channel: The channel that the client has chosen.
        about: The client's description of the connection.
    """

    stream: Stream
    channel: bytes
    about: bytes


def server_handshake(
    connection: socket.socket,
    secret: bytes,
    channels: Collection[bytes],
    *,
    expects: Callable[[bytes], bool] = lambda about: True,
    may_encrypt: bool = True,
) -> Steps[Accepted]:
    """Returns the steps of a server's handshake.

    Args:
        connection: A connection that was just accepted.
        secret: The shared secret.
        channels: The channels that are accepted.
        expects: Whether a connection with this description is expected now. If it is not, the
            connection is closed without a proof, and the client retries.
        may_encrypt: Whether TLS is accepted, and required of clients on other machines.
    """
    stream: Stream = connection
    binding = proof.NOT_ENCRYPTED
    try:
        _prepare(connection)
        check_user(connection)
        is_plain = (yield from first_byte(connection)) != tls.FIRST_BYTE or not may_encrypt
        if not is_plain:
            identity = tls.server_identity()
            stream = yield from tls_handshake(connection, identity.context, is_server=True)
            binding = identity.binding
        checked = ServerProof(secret, binding)
        challenge = checked.challenge((yield from received(stream, proof.HELLO_BYTES)))
        if is_plain and may_encrypt and tls.is_encrypted(connection):
            raise (yield from _refused(stream, proof.TLS_REQUIRED, proof.CHALLENGE_BYTES))
        if checked.channel not in channels:
            raise (yield from _refused(stream, proof.WRONG_CHANNEL, proof.CHALLENGE_BYTES))
        yield from sent(stream, challenge)
        answer = yield from received(stream, proof.ANSWER_HEAD_BYTES)
        if answer[0] > proof.MOST_ABOUT_BYTES:
            raise RefusedError("the peer does not speak Unison's protocol")
        answer += yield from received(stream, answer[0] + proof.PROOF_BYTES)
        own = checked.verify(answer)
        if own is None:
            raise (yield from _refused(stream, proof.WRONG_KEY, proof.PROOF_BYTES))
        if not expects(checked.about):
            raise RefusedError("unexpected connection")
        yield from sent(stream, own)
        return Accepted(stream, checked.channel, checked.about)
    except BaseException:
        stream.close()
        raise


def client_handshake(
    connection: socket.socket,
    secret: bytes,
    channel: bytes,
    about: bytes,
    is_encrypted: bool,
) -> Steps[Stream]:
    """Returns the steps of a client's handshake.

    Args:
        connection: A connection to a server.
        secret: The shared secret.
        channel: The channel: the protocol that the connection is for.
        about: A description of the connection for the server.
        is_encrypted: Whether to use TLS.
    """
    stream: Stream = connection
    binding = proof.NOT_ENCRYPTED
    try:
        _prepare(connection)
        check_user(connection)
        if is_encrypted:
            encrypted = yield from tls_handshake(connection, tls.client_context(), is_server=False)
            stream, binding = encrypted, encrypted.server_binding
        proving = ClientProof(secret, channel, about, binding)
        yield from sent(stream, proving.hello)
        challenge = yield from received(stream, proof.CHALLENGE_BYTES)
        yield from sent(stream, proving.answer(challenge))
        proving.check((yield from received(stream, proof.PROOF_BYTES)))
        return stream
    except BaseException:
        stream.close()
        raise


def check_user(connection: socket.socket) -> None:
    """Checks that the peer of a local socket runs as the same user as this process.

    Other kinds of sockets pass: their peers are authenticated by the proof alone.

    Raises:
        RefusedError: The peer is another user's process.
    """
    if connection.family != socket.AF_UNIX:
        return
    _, user, _ = peer_of(connection)
    if user != os.geteuid():
        raise RefusedError(f"the peer is a process of another user ({user})")


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the process, user and group of the peer of a local socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(credentials)
    return process, user, group


def completed(
    steps: Steps[T], number: int, end: float, look: Callable[[], None] | None = None
) -> T:
    """Runs a handshake to its end, blocking, and returns its result.

    Args:
        steps: The handshake.
        number: The file descriptor of its connection.
        end: The deadline for all of it, as `time.monotonic` counts.
        look: Called 20 times a second; an exception that it raises ends the handshake.

    Raises:
        TimeoutError: The deadline has passed.
    """
    try:
        while True:
            events = next(steps)
            waiting = select.poll()
            waiting.register(
                number, select.POLLIN if events == selectors.EVENT_READ else select.POLLOUT
            )
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out during the handshake")
                if waiting.poll(1000 * (left if look is None else min(left, 0.05))):
                    break
                if look is not None:
                    look()
    except StopIteration as done:
        value: T = done.value
        return value
    finally:
        steps.close()


def received(stream: Stream, size: int) -> Steps[bytes]:
    """Receives exactly `size` bytes."""
    data = b""
    while len(data) < size:
        try:
            piece = stream.recv(size - len(data))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not piece:
            raise ConnectionResetError("connection closed during the handshake")
        data += piece
    return data


def sent(stream: Stream, data: bytes) -> Steps[None]:
    """Sends all of `data`."""
    while data:
        try:
            data = data[stream.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    if connection.family != socket.AF_UNIX:
        # Otherwise a small message waits for the acknowledgement of the one before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def first_byte(connection: socket.socket) -> Steps[bytes]:
    """Returns the first byte without consuming it."""
    while True:
        try:
            return connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            yield selectors.EVENT_READ


def _refused(stream: Stream, reason: bytes, size: int) -> Steps[RefusedError]:
    """Sends the client the reason for a refusal, and returns the error to raise."""
    yield from sent(stream, proof.refusal(reason, size))
    return RefusedError(f"refused: {reason.decode()}", reason)


def tls_handshake(
    connection: socket.socket, context: ssl.SSLContext, is_server: bool
) -> Steps[TlsStream]:
    """Returns the connection after TLS' handshake."""
    wrapped = context.wrap_socket(connection, server_side=is_server, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                yield selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                yield selectors.EVENT_WRITE
            else:
                return TlsStream(wrapped)
    except BaseException:
        wrapped.close()
        raise
