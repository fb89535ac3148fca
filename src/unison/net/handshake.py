"""The handshake of a connection: TLS where it is encrypted, then the proof of the job's secret.

Each side is a generator that yields what it waits for (`selectors.EVENT_READ` or `EVENT_WRITE`) and
returns the connection. So a server can run many at once without a thread for any (`acceptor`), and
a client waits for its own (`completed`). A connection whose handshake fails, or is given up by
closing the generator, is closed.
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

#: What the kernel says of the process at the other end of a local socket: its number, user, group.
_CREDENTIALS = struct.Struct("3i")


class Accepted(NamedTuple):
    """A connection whose other end knows the job's secret.

    Attributes:
        stream: The connection; it does not block.
        channel: What the client wants it for.
        about: What it says of that.
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
        secret: What both ends know.
        channels: What connections may be for.
        expects: Whether a connection is expected now, by what its client says of it. One that is
            not is closed before this end has proved anything, and the client tries again.
        may_encrypt: Whether TLS is spoken, and clients on other machines have to.
    """
    stream: Stream = connection
    binding = proof.NOT_ENCRYPTED
    try:
        _prepare(connection)
        check_user(connection)
        is_plain = (yield from _first_byte(connection)) != tls.FIRST_BYTE or not may_encrypt
        if not is_plain:
            identity = tls.server_identity()
            stream = yield from _encrypted(connection, identity.context, is_server=True)
            binding = identity.binding
        checked = ServerProof(secret, binding)
        challenge = checked.challenge((yield from received(stream, proof.HELLO_BYTES)))
        if is_plain and may_encrypt and tls.is_encrypted(connection):
            yield from _refuse(stream, proof.TLS_REQUIRED, proof.CHALLENGE_BYTES)
        if checked.channel not in channels:
            yield from _refuse(stream, proof.WRONG_CHANNEL, proof.CHALLENGE_BYTES)
        yield from sent(stream, challenge)
        answer = yield from received(stream, proof.ANSWER_HEAD_BYTES)
        if answer[0] > proof.MOST_ABOUT_BYTES:
            raise RefusedError("the other end does not speak Unison's protocol")
        answer += yield from received(stream, answer[0] + proof.PROOF_BYTES)
        own = checked.verify(answer)
        if own is None:
            yield from _refuse(stream, proof.WRONG_KEY, proof.PROOF_BYTES)
        elif not expects(checked.about):
            raise RefusedError("the connection is not expected")
        else:
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
    """Returns the steps of a client's handshake, which return the connection.

    Args:
        connection: A connection to a server.
        secret: What both ends know.
        channel: What the connection is for.
        about: What the server is told of it.
        is_encrypted: Whether it begins with TLS.
    """
    stream: Stream = connection
    binding = proof.NOT_ENCRYPTED
    try:
        _prepare(connection)
        check_user(connection)
        if is_encrypted:
            encrypted = yield from _encrypted(connection, tls.client_context(), is_server=False)
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
    """Checks that a local socket's other end belongs to this process's user.

    Others of the network are not asked: they prove that they know the secret.

    Raises:
        RefusedError: It is another user's.
    """
    if connection.family != socket.AF_UNIX:
        return
    _, user, _ = peer_of(connection)
    if user != os.geteuid():
        raise RefusedError(f"the socket belongs to another user ({user})")


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the process, user and group at the other end of a local socket."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(told)
    return process, user, group


def completed(
    steps: Steps[T], number: int, end: float, look: Callable[[], None] | None = None
) -> T:
    """Returns what a handshake returns, and waits for it.

    Args:
        steps: The handshake.
        number: The file descriptor of its connection.
        end: The time (`time.monotonic`) at which it must be complete: one deadline for all steps.
        look: Called 20 times a second; by raising, it ends the waiting.

    Raises:
        TimeoutError: It was not complete in time.
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
    """Returns exactly as many bytes as are asked for, and leaves what follows them."""
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
    """Sends all of some bytes."""
    while data:
        try:
            data = data[stream.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    if connection.family != socket.AF_UNIX:
        # Answers are not to wait until what was sent before has been acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _first_byte(connection: socket.socket) -> Steps[bytes]:
    """Returns the first byte that has come, which stays to be received."""
    while True:
        try:
            return connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            yield selectors.EVENT_READ


def _refuse(stream: Stream, reason: bytes, size: int) -> Steps[None]:
    yield from sent(stream, proof.refusal(reason, size))
    raise RefusedError(f"refused: {reason.decode()}", reason)


def _encrypted(
    connection: socket.socket, context: ssl.SSLContext, is_server: bool
) -> Steps[TlsStream]:
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
