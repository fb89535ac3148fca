"""The wire: small typed messages with arrays, between processes that know one key.

A message is a JSON object and arrays behind it, whose bytes go from and to where they lie; between
processes of one machine they go through memory that both share. Nothing on the wire is unpickled;
what must be (a function that makes a dataset) comes as bytes with a signature by the key, which is
checked first. Both ends prove that they know the key before either listens to the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import importlib.metadata
import json
import math
import os
import pathlib
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from unison.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from unison.net.addresses import own_address, split_address
from unison.parameter_server.memory import memory_in_words, memory_left
from unison.parameter_server.slots import Inbox, Outbox
from unison.runtime.precision import device_array, keeps_explicit_64_bits
from unison.storage import atomic

#: The environment variable with the key of a job, in hexadecimal digits.
KEY_VARIABLE = "UNISON_KEY"

_MAGIC = b"unison-ps-3\n"
#: How a message begins: with the length of its header, and the slot where its arrays lie (-1: they
#: follow). So its length does not depend on which slot is free.
_BEGINNING = struct.Struct("<Ii")
_NONCE_BYTES = 32
_KEY_BYTES = 32
#: Arrays begin at multiples of it, so that JAX can take them as they lie.
_ALIGNMENT = 64
#: How many buffers the system takes in one call.
_MOST_BUFFERS = 512
_LONGEST_HEADER = 1 << 26
#: For more than this, it is asked first whether there is memory: where the system promises more
#: than it has, processes are killed later.
_LARGE_BYTES = 1 << 24
#: How much is received at once of what there is no memory for.
_SKIPPED_BYTES = 1 << 20
#: Seconds for the first words of a connection.
_HANDSHAKE_SECONDS = 20.0


def key() -> bytes:
    """Returns the key of this user's jobs.

    It is what `UNISON_KEY` says (`unison run` makes one for each job), else what a file of the
    user's holds, which nobody else can read; it is written when it is first asked for.
    """
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return bytes.fromhex(given)
    folder = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "unison"
    path = folder / "key"
    if not path.exists():
        with atomic.aside(str(path)) as new:
            with new.opened(0o600) as file:
                file.write(secrets.token_hex(_KEY_BYTES).encode())
            new.publish_if_absent()  # another process may be faster
    if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
        raise PermissionError(
            f"Expected {path} to be readable by its owner only: who knows this key can run code "
            f"in this user's jobs. Run `chmod 600 {path}`, or set {KEY_VARIABLE}."
        )
    content = path.read_bytes().strip()
    try:
        found = bytes.fromhex(content.decode())
    except ValueError:
        found = b""
    if len(found) != _KEY_BYTES:
        raise ValueError(
            f"Expected {2 * _KEY_BYTES} hexadecimal digits in {path}. Received: {len(content)} "
            "bytes that are none. Remove it: a new key is made."
        )
    return found


def new_key() -> str:
    """Returns a key for one job, as `UNISON_KEY` takes it."""
    return secrets.token_hex(_KEY_BYTES)


@dataclasses.dataclass(frozen=True)
class Message:
    """What comes over a connection.

    Attributes:
        kind: What it is about.
        fields: Numbers, text, and lists and dictionaries of them.
        arrays: The arrays, in order.
    """

    kind: str
    fields: dict[str, Any]
    arrays: list[np.ndarray]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class NoRoomError(ResourceExhaustedError):
    """There is no memory for the arrays of a message.

    Attributes:
        kind: What the message is about.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(message=text)
        self.kind = kind

    def __reduce__(self) -> Any:
        return NoRoomError, (self.kind, str(self))


class Connection:
    """A connection to a process that knows the same key.

    Args:
        sock: A connected socket.
        is_server: Whether the other end has connected to this one.
        secret: The key. Default: this user's.

    Raises:
        UnauthenticatedError: The other end does not know the key.
        UnavailableError: It has gone.
    """

    def __init__(self, sock: socket.socket, is_server: bool, secret: bytes | None = None):
        self._socket = sock
        self._secret = key() if secret is None else secret
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        #: How many bytes have been sent and received.
        self.sent_bytes = self.received_bytes = 0
        #: Whether nothing has been heard of the other end's end.
        self.is_open = True
        self._is_local = sock.family == socket.AF_UNIX
        self._outbox = Outbox() if self._is_local else None
        self._inbox = Inbox()
        if not self._is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_HANDSHAKE_SECONDS)
        self._authenticate(is_server)

    def begin(self) -> None:
        """Ends the introductions: from now on the other end may be silent for long."""
        self._socket.settimeout(None)

    # -- the first words ------------------------------------------------------------------------

    def _authenticate(self, is_server: bool) -> None:
        own = secrets.token_bytes(_NONCE_BYTES)
        self._send_bytes(_MAGIC + own)
        first = bytes(self._receive_bytes(len(_MAGIC) + _NONCE_BYTES))
        if not first.startswith(_MAGIC):
            raise UnauthenticatedError(message="The other end does not speak Unison's protocol.")
        other = first[len(_MAGIC) :]
        # Who asked and who answers is part of what is signed: nobody can send it back.
        self._send_bytes(self._proof(is_server, own, other))
        expected = self._proof(not is_server, other, own)
        try:
            proof = bytes(self._receive_bytes(len(expected)))
        except UnavailableError:
            proof = b""  # it has hung up on our proof
        if not hmac.compare_digest(proof, expected):
            raise UnauthenticatedError(
                message="The other end has another key. Start all processes of the job as one "
                f"user, by `unison run`, or with the same {KEY_VARIABLE}."
            )

    def _proof(self, is_server: bool, own: bytes, other: bytes) -> bytes:
        who = b"server" if is_server else b"client"
        return hmac.digest(self._secret, who + own + other, "sha256")

    def signed(self, payload: bytes) -> np.ndarray:
        """Returns bytes with a signature, for an array of a message."""
        return np.frombuffer(hmac.digest(self._secret, payload, "sha256") + payload, np.uint8)

    def verified(self, signed: np.ndarray) -> bytes:
        """Returns the bytes that `signed` was given at the other end.

        Raises:
            UnauthenticatedError: They were changed, or signed by another key.
        """
        data = signed.tobytes()
        size = hashlib.sha256().digest_size
        if not hmac.compare_digest(data[:size], hmac.digest(self._secret, data[size:], "sha256")):
            raise UnauthenticatedError(message="A function has come with a wrong signature.")
        return data[size:]

    # -- messages -------------------------------------------------------------------------------

    def send(
        self, kind: str, arrays: Iterable[Any] = (), are_kept: bool = False, **fields: Any
    ) -> None:
        """Sends a message.

        Args:
            kind: What it is about.
            arrays: Its arrays.
            are_kept: Whether the other end keeps the arrays: they are not to lie in memory that
                is meant for the next message.
            fields: Numbers, text, and lists and dictionaries of them.

        Raises:
            UnavailableError: The other end has gone.
        """
        parts = [np.asarray(array) for array in arrays]
        described = [[part.dtype.name, part.shape] for part in parts]
        size = sum(_aligned(part.nbytes) for part in parts)
        with self._sending:
            found = None if are_kept or self._outbox is None else self._outbox.slot(size)
            slot, file = found or (None, None)
            number = -1 if slot is None else slot.number
            header = json.dumps([kind, fields, described], separators=(",", ":")).encode()
            buffers: list[Any] = [_BEGINNING.pack(len(header), number) + header]
            if slot is None:
                buffers += _buffers(parts)
            else:
                _fill(slot.taken(), parts)
                self.sent_bytes += size
            with contextlib.ExitStack() as closing:
                if file is not None:
                    closing.callback(os.close, file)
                    self._send_file(buffers, file)
                for start in range(0, len(buffers), _MOST_BUFFERS):
                    self._send_buffers(buffers[start : start + _MOST_BUFFERS])

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            UnavailableError: The other end has gone.
            NoRoomError: There is no memory for its arrays. The next message can be received.
        """
        length, slot, files = self._receive_beginning()
        if length > _LONGEST_HEADER:
            raise UnavailableError(message=f"A message begins with {length} bytes of description.")
        kind, fields, described = json.loads(bytes(self._receive_bytes(length)))
        for file in files:
            self._inbox.add(slot, file)
        kinds = [(np.dtype(_dtype(dtype)), tuple(shape)) for dtype, shape in described]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
        size = sum(map(_aligned, sizes))
        if slot < 0:
            data = self._receive_arrays(kind, size, kinds)
        else:
            data = self._inbox.lent(slot)
            self.received_bytes += size
        arrays = []
        start = 0
        for (dtype, shape), own in zip(kinds, sizes, strict=True):
            arrays.append(data[start : start + own].view(dtype).reshape(shape))
            start += _aligned(own)
        return Message(kind, fields, arrays)

    def ask(self, kind: str, arrays: Iterable[Any] = (), **fields: Any) -> Message:
        """Sends a message and returns the answer to it.

        Raises:
            UnavailableError: The other end has gone.
            RuntimeError: It answers with an error.
        """
        with self._asking:
            self.send(kind, arrays, **fields)
            answer = self.receive()
        if answer.kind == "error":
            raise RuntimeError(answer["text"])
        return answer

    def close(self) -> None:
        """Ends the connection; who waits at either end gets an UnavailableError."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _gone(self, why: object) -> UnavailableError:
        self.is_open = False
        return UnavailableError(message=f"The other end has gone: {why}")

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
            self.sent_bytes += len(data)
        except OSError as error:
            raise self._gone(error) from error

    def _send_file(self, buffers: list[Any], file: int) -> None:
        """Sends the first of `buffers`, and an open file with it."""
        first = buffers.pop(0)
        try:
            sent = socket.send_fds(self._socket, [first], [file])
        except OSError as error:
            raise self._gone(error) from error
        self.sent_bytes += sent
        if sent < len(first):
            buffers.insert(0, first[sent:])

    def _send_buffers(self, buffers: list[Any]) -> None:
        left = sum(len(buffer) for buffer in buffers)
        self.sent_bytes += left
        try:
            while left:
                sent = self._socket.sendmsg(buffers)
                left -= sent
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if buffers and sent:
                    buffers[0] = memoryview(buffers[0])[sent:]
        except OSError as error:
            raise self._gone(error) from error

    def _receive_beginning(self) -> tuple[int, int, list[int]]:
        """Returns the length of the next message's header, the slot of its arrays, and the open
        files that come with it.
        """
        data = b""
        files: list[int] = []
        if self._is_local:
            try:
                data, files, _, _ = socket.recv_fds(
                    self._socket, _BEGINNING.size, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._gone("it has hung up")
            self.received_bytes += len(data)
        data += bytes(self._receive_bytes(_BEGINNING.size - len(data)))
        length, slot = _BEGINNING.unpack(data)
        return length, slot, files

    def _receive_arrays(
        self, kind: str, size: int, arrays: list[tuple[np.dtype, tuple]]
    ) -> np.ndarray:
        """Returns the bytes of a message's arrays."""
        if size < _LARGE_BYTES or (left := memory_left()) is None or size <= left[0]:
            with contextlib.suppress(MemoryError):
                return self._receive_bytes(size)
        rest = size
        while rest:  # it would be taken for the next message
            rest -= len(self._receive_bytes(min(rest, _SKIPPED_BYTES)))
        shapes = ", ".join(f"{dtype.name}{list(shape)}" for dtype, shape in arrays)
        raise NoRoomError(
            kind, f"There is no memory for {shapes}, {size:,} bytes. {memory_in_words()}"
        )

    def _receive_bytes(self, count: int) -> np.ndarray:
        """Returns the next bytes, from an address that is a multiple of the alignment."""
        memory = np.empty(count + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        data = memory[start : start + count]
        view = memoryview(data.data)
        received = 0
        try:
            while received < count:
                size = self._socket.recv_into(view[received:])
                if not size:
                    raise self._gone("it has hung up")
                received += size
        except OSError as error:
            if isinstance(error, UnavailableError):
                raise
            raise self._gone(error) from error
        self.received_bytes += count
        return data


def _aligned(size: int) -> int:
    """Returns how many bytes an array of `size` bytes takes in a message."""
    return size + -size % _ALIGNMENT


def _buffers(parts: Iterable[np.ndarray]) -> list[Any]:
    """Returns the bytes of arrays, and what is between them."""
    buffers: list[Any] = []
    for part in parts:
        if part.nbytes:
            buffers += [
                np.ascontiguousarray(part).reshape(-1).view(np.uint8),
                bytes(-part.nbytes % _ALIGNMENT),
            ]
    return buffers


def _fill(room: np.ndarray, parts: Iterable[np.ndarray]) -> None:
    """Copies arrays to where the other end looks for them."""
    start = 0
    for part in parts:
        room[start : start + part.nbytes].view(part.dtype).reshape(part.shape)[...] = part
        start += _aligned(part.nbytes)


def _dtype(name: str) -> Any:
    """Returns the dtype of a name, those that JAX adds to NumPy's (bfloat16) included."""
    return jax.numpy.dtype(name)


def connect(address: str, within: float, what: str, **introduction: Any) -> Connection:
    """Returns a connection to the process that listens at `address`, which may be still to come.

    Args:
        address: Host and port.
        within: Seconds.
        what: What it is called in messages.
        introduction: What it is told; see `accept`.

    Raises:
        DeadlineExceededError: Nobody listens there in time.
        UnauthenticatedError: It has another key.
        FailedPreconditionError: It runs another version.
    """
    end = time.monotonic() + within
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            sock = _connected(address, left)
            connection = Connection(sock, is_server=False)
            break
        except (OSError, UnavailableError) as error:
            if isinstance(error, UnauthenticatedError):
                raise
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    message=f"{what} does not answer at {address} within {within:g} s: {error}. "
                    "Is it started, and is the address right?"
                ) from error
            time.sleep(0.05)
    connection.ask("hello", **introduction, has_64_bits=keeps_explicit_64_bits(), **versions())
    connection.begin()
    return connection


def _connected(address: str, within: float) -> socket.socket:
    local = _local_name(address)
    if local is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(within)
        try:
            sock.connect(local)
        except OSError:
            sock.close()
        else:
            return sock
    host, port = split_address(address)
    sock = socket.create_connection((host, port), within)
    sock.settimeout(None)
    return sock


def _local_name(address: str) -> str | None:
    """Returns the name of the socket by which processes of this machine reach an address of it.

    It takes half the time of a socket of the network. Names like this (Linux has them) belong to
    the network that a process sees, as addresses do.
    """
    host, port = split_address(address)
    own = own_address(host) if sys.platform == "linux" else None
    return None if own is None else f"\0unison-{own}:{port}"


def versions() -> dict[str, str]:
    """Returns the versions that all processes of a job must share."""
    return {name: importlib.metadata.version(name) for name in ("unison", "jax")}


def listen(address: str) -> list[socket.socket]:
    """Returns sockets that listen at a host and port, and at none other of the machine's.

    Raises:
        OSError: Another process listens there, or the host is not this machine.
    """
    host, port = split_address(address)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = [socket.create_server((host, port), family=family, backlog=64)]
    local = _local_name(address)
    if local is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # then there is the other one
            sock.bind(local)
            sock.listen(64)
            listening.append(sock)
    for each in listening:
        each.settimeout(None)  # whatever the program's default is
    return listening


def accept(connection: Connection) -> Message:
    """Returns how the other end introduces itself.

    Raises:
        RuntimeError: It runs another version of Unison or JAX, which it is told as well.
    """
    hello = connection.receive()
    theirs = {name: hello.fields.get(name) for name in versions()}
    if hello.kind != "hello" or theirs != versions():
        text = f"Expected {versions()} on all machines of the job. Received: {theirs}"
        connection.send("error", text=text)
        raise RuntimeError(text)
    if hello["has_64_bits"]:
        # What the other end traces has the dtypes that it says.
        jax.config.update("jax_explicit_x64_dtypes", "allow")
    connection.send("welcome")
    connection.begin()
    return hello


def operand(array: np.ndarray) -> Any:
    """Returns an array as a program takes it: of 64 bits, JAX would make 32."""
    return device_array(array) if array.dtype.itemsize == 8 else array
