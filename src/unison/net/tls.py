"""TLS: which connections are encrypted, with which certificates, and the encrypted stream.

Connections between machines are encrypted. A server generates its own certificate (`certificate`),
and the proof of the job's secret is bound to it (`proof`), so certificates need not be distributed.
With a certificate authority in the environment, both ends must also present a certificate that it
has signed.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from unison.errors import InvalidArgumentError
from unison.net.addresses import is_same_machine
from unison.net.certificate import new_key_pair

T = TypeVar("T")

#: The environment variable for `Encryption`.
TLS_VARIABLE = "UNISON_TLS"

#: The environment variables for the user's own certificates, files in PEM: the certificate of this
#: process with its chain, its private key, and the authority of all certificates.
CERTIFICATE_VARIABLE = "UNISON_TLS_CERTIFICATE"
PRIVATE_KEY_VARIABLE = "UNISON_TLS_PRIVATE_KEY"
AUTHORITY_VARIABLE = "UNISON_TLS_CA"
_FILE_VARIABLES = (CERTIFICATE_VARIABLE, PRIVATE_KEY_VARIABLE, AUTHORITY_VARIABLE)

#: The first byte of a TLS connection: the record type of a handshake.
FIRST_BYTE = b"\x16"

#: The largest TLS record; smaller buffers are joined.
_RECORD_BYTES = 1 << 14


class Encryption(enum.Enum):
    """The connections that are encrypted.

    - `ON`: those between machines. Unencrypted connections from other machines are refused.
    - `ALWAYS`: all TCP connections, also within a machine: for programs behind a proxy through
      which other machines appear as this one.
    - `OFF`: none that this process opens. Encrypted connections are accepted all the same.
    """

    ON = "on"
    ALWAYS = "always"
    OFF = "off"


def encryption() -> Encryption:
    """Returns the value of `UNISON_TLS`; the default is `ON`.

    Raises:
        InvalidArgumentError: It has another value.
    """
    given = os.environ.get(TLS_VARIABLE) or Encryption.ON.value
    try:
        return Encryption(given.lower())
    except ValueError as error:
        raise InvalidArgumentError(
            message=f"Expected {TLS_VARIABLE} to be on, always or off. Received: {given!r}."
        ) from error


def is_encrypted(connection: socket.socket) -> bool:
    """Whether a connection has to be encrypted, from the point of view of this end."""
    if connection.family == socket.AF_UNIX:
        return False
    chosen = encryption()
    return chosen is Encryption.ALWAYS or (
        chosen is Encryption.ON and not is_same_machine(connection)
    )


def check_settings() -> None:
    """Checks the settings in the environment.

    Raises:
        InvalidArgumentError: `UNISON_TLS` has an unknown value, or certificate files are missing or
            invalid.
    """
    encryption()
    if _files() is not None:
        server_identity()
        client_context()


class Identity(NamedTuple):
    """The TLS identity of a server.

    Attributes:
        context: The context with its private key.
        binding: The hash of its certificate (RFC 5929, `tls-server-end-point`).
    """

    context: ssl.SSLContext
    binding: bytes


def server_identity() -> Identity:
    """Returns the identity of this process: the user's certificate, or a generated one.

    Raises:
        InvalidArgumentError: Certificate files are missing or invalid.
    """
    return _server_identity(_files())


def client_context() -> ssl.SSLContext:
    """Returns the context for connections to servers.

    Raises:
        InvalidArgumentError: Certificate files are missing or invalid.
    """
    return _client_context(_files())


class TlsStream:
    """An encrypted connection with the methods of a socket that Unison uses.

    One thread may receive while another one sends. OpenSSL's objects are not thread-safe: a lock
    protects each operation, which never blocks, and the waiting happens outside of the lock.

    Args:
        connection: The connection, after its handshake.
    """

    def __init__(self, connection: ssl.SSLSocket):
        self._connection = connection
        self._connection.setblocking(False)
        self._lock = threading.Lock()
        self._timeout: float | None = 0.0
        self.family = connection.family

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def server_binding(self) -> bytes:
        """The hash of the server's certificate; for clients."""
        shown = self._connection.getpeercert(binary_form=True)
        return hashlib.sha256(shown or b"").digest()

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._connection.setsockopt(level, option, value)

    def getsockname(self) -> Any:
        return self._connection.getsockname()

    def getpeername(self) -> Any:
        return self._connection.getpeername()

    def recv(self, size: int) -> bytes:
        return self._completed(lambda: self._connection.recv(size))

    def recv_into(self, buffer: Any) -> int:
        return self._completed(lambda: self._connection.recv_into(buffer))

    @property
    def has_data(self) -> bool:
        """Whether data that have been decrypted wait to be received."""
        with self._lock:
            return self._connection.pending() > 0

    def send(self, data: Any) -> int:
        """Sends a part of `data`. After a BlockingIOError, the next call must start with it."""
        return self._completed(lambda: self._connection.send(data))

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Sends the first buffer, or several small ones joined to one record."""
        if len(buffers) == 1 or len(buffers[0]) >= _RECORD_BYTES:
            return self.send(buffers[0])
        joined = bytearray()
        for buffer in buffers:
            joined += memoryview(buffer)[: _RECORD_BYTES - len(joined)]
            if len(joined) == _RECORD_BYTES:
                break
        return self.send(joined)

    def shutdown(self, how: int) -> None:
        # `SSLSocket.shutdown` would let other threads continue unencrypted.
        socket.socket.shutdown(self._connection, how)

    def detach(self) -> int:
        """Returns the file descriptor, which the caller has to close."""
        return self._connection.detach()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _completed(self, operation: Callable[[], T]) -> T:
        """Runs an operation as soon as the connection is ready for it.

        Raises:
            BlockingIOError: It is not ready, and the stream is non-blocking.
            TimeoutError: The timeout has passed.
        """
        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            with self._lock:
                try:
                    return operation()
                except ssl.SSLWantReadError:
                    events = select.POLLIN
                except ssl.SSLWantWriteError:
                    events = select.POLLOUT
            self._wait(events, end)

    def _wait(self, events: int, end: float | None) -> None:
        if self._timeout == 0.0:
            raise BlockingIOError
        number = self.fileno()
        if number < 0:
            raise ConnectionError("the connection has been closed")
        waiting = select.poll()
        waiting.register(number, events)
        left = None if end is None else max(end - time.monotonic(), 0.0) * 1000
        if not waiting.poll(left):
            raise TimeoutError("timed out")


#: A connection, unencrypted or encrypted.
Stream = socket.socket | TlsStream


class _Files(NamedTuple):
    """The user's own certificates."""

    certificate: str
    private_key: str
    authority: str


def _files() -> _Files | None:
    given = [os.environ.get(name) for name in _FILE_VARIABLES]
    if not any(given):
        return None
    missing = [
        f"{name}={path or ''}"
        for name, path in zip(_FILE_VARIABLES, given, strict=True)
        if not path or not os.path.isfile(path)
    ]
    if missing:
        raise InvalidArgumentError(
            message=f"Expected all of {', '.join(_FILE_VARIABLES)} to be files, or none of them to "
            f"be set. Received: {', '.join(missing)}."
        )
    return _Files(*map(str, given))


@functools.cache
def _server_identity(files: _Files | None) -> Identity:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed
    if files is not None:
        _load(context, files)
        with open(files.certificate) as file:
            own = ssl.PEM_cert_to_DER_cert(_first_certificate(file.read()))
    else:
        pair = new_key_pair()
        own = pair.certificate
        # `load_cert_chain` reads files only; this one exists in memory only.
        file_in_memory = os.memfd_create("unison-certificate", os.MFD_CLOEXEC)
        try:
            os.write(file_in_memory, pair.pem)
            context.load_cert_chain(f"/proc/self/fd/{file_in_memory}")
        finally:
            os.close(file_in_memory)
    return Identity(context, hashlib.sha256(own).digest())


@functools.cache
def _client_context(files: _Files | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The proof authenticates the server, since it is bound to the certificate. Certificates do not
    # name the addresses of a job's machines.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if files is not None:
        _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: _Files) -> None:
    try:
        context.load_cert_chain(files.certificate, files.private_key)
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise InvalidArgumentError(
            message=f"Expected certificates in PEM, with the private key of the first. Received: "
            f"{files.certificate}, {files.private_key}, {files.authority} ({error})."
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _first_certificate(pem: str) -> str:
    start = pem.index(ssl.PEM_HEADER)
    return pem[start : pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)] + "\n"
