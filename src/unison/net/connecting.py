"""`connect`: the client's side of a connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable

from unison.errors import FailedPreconditionError, UnauthenticatedError
from unison.net import proof, tls
from unison.net.handshake import client_handshake, completed
from unison.net.proof import RefusedError
from unison.net.secret import KEY_VARIABLE
from unison.net.tls import Stream

#: The least timeout of one attempt to connect, in seconds.
_LEAST_SECONDS = 0.05


def connect(
    where: tuple[str, int] | str | bytes,
    secret: bytes,
    channel: bytes,
    *,
    about: bytes = b"",
    seconds: float,
    local_name: str | None = None,
    may_encrypt: bool = True,
    look: Callable[[], None] | None = None,
) -> Stream:
    """Connects to a server and authenticates both ends; does not retry.

    Args:
        where: Host and port, or the name of a local (Unix) socket.
        secret: The shared secret.
        channel: The channel: the protocol that the connection is for.
        about: A description of the connection for the server; up to 64 bytes.
        seconds: The timeout for all of it.
        local_name: The name of a local socket of the same server, which is faster. If no process of
            this user listens there, `where` is used.
        may_encrypt: Whether to use TLS if the server is on another machine.
        look: Called 20 times a second during the handshake; an exception that it raises ends it.

    Returns:
        The connection, which is non-blocking.

    Raises:
        OSError: Connection refused, closed or timed out: a retry may succeed.
        UnauthenticatedError: The server has another key.
        FailedPreconditionError: The two ends do not agree about TLS.
    """
    end = time.monotonic() + seconds
    if local_name is not None:
        # Nobody listens there, or another user who has taken the name: fall back to `where`.
        with contextlib.suppress(OSError):
            return _proved(_opened(local_name, end), secret, channel, about, False, end, look)
    connection = _opened(where, end)
    is_encrypted = may_encrypt and tls.is_encrypted(connection)
    try:
        return _proved(connection, secret, channel, about, is_encrypted, end, look)
    except RefusedError as error:
        if error.reason != proof.TLS_REQUIRED:
            raise
        if tls.encryption() is tls.Encryption.OFF or not may_encrypt:
            raise FailedPreconditionError(
                message="The server takes encrypted connections only, and this process does not "
                f"encrypt. Set {tls.TLS_VARIABLE} to the same value for all processes of the job."
            ) from error
    # There is a proxy in between: to the server, this process is on another machine.
    return _proved(_opened(where, end), secret, channel, about, True, end, look)


def _proved(
    connection: socket.socket,
    secret: bytes,
    channel: bytes,
    about: bytes,
    is_encrypted: bool,
    end: float,
    look: Callable[[], None] | None,
) -> Stream:
    steps = client_handshake(connection, secret, channel, about, is_encrypted)
    try:
        return completed(steps, connection.fileno(), end, look)
    except RefusedError as error:
        if error.reason == proof.WRONG_KEY:
            raise another_key() from error
        raise
    except UnauthenticatedError as error:
        raise another_key() from error
    except ssl.SSLError as error:
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
            raise  # the connection was closed
        raise FailedPreconditionError(
            message=f"The connection cannot be encrypted: {error}. Either {tls.AUTHORITY_VARIABLE} "
            "has not signed the certificates of both ends, or one end has none, or the other "
            "end is not a process of Unison."
        ) from error


def another_key() -> UnauthenticatedError:
    """Returns the error for a server with another key."""
    return UnauthenticatedError(
        message="The other end has another key, or a proxy between the two ends replaces the TLS "
        "certificate. Start all processes of the job as one user, by `unison run`, or with the "
        f"same {KEY_VARIABLE}."
    )


def _opened(where: tuple[str, int] | str | bytes, end: float) -> socket.socket:
    left = max(end - time.monotonic(), _LEAST_SECONDS)
    if isinstance(where, tuple):
        return socket.create_connection(where, timeout=left)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(left)
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection
