"""The protocol of parameter servers: who connects, and in which versions.

The messages are those of `unison.net.array_messages`. Received data is not unpickled, except for
the functions that create datasets: these are sent as bytes with a signature by the key, which is
checked first. `unison.net` connects the processes: both ends have proved that they know the key
before either accepts messages.
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import jax
import numpy as np

from unison.errors import DeadlineExceededError, UnauthenticatedError
from unison.net.acceptor import HANDSHAKE_SECONDS
from unison.net.addresses import split_address
from unison.net.array_messages import Connection, Message
from unison.net.connecting import connect as connect_once
from unison.net.listening import local_name_of
from unison.net.secret import key
from unison.runtime.precision import device_array, keeps_explicit_64_bits

#: The channel of these connections (`unison.net.proof`); the number changes with the protocol.
CHANNEL = b"servers-4"

#: The roles of clients: one that checks whether the server is alive, a worker that uses variables,
#: and a coordinator.
ROLES = ("pulse", "worker", "coordinator")

#: The maximum length of an error about another process's message, in characters.
_MOST_SAID = 500


def connect(address: str, within: float, what: str, **introduction: Any) -> Connection:
    """Connects to the process that listens at `address`, which may not have started yet.

    Args:
        address: Host and port.
        within: The timeout in seconds.
        what: Its name in messages.
        introduction: The fields of the introduction; see `accept`.

    Raises:
        DeadlineExceededError: No process listens there in time.
        UnauthenticatedError: The process has another key.
        FailedPreconditionError: The process runs another version.
    """
    end = time.monotonic() + within
    secret = key()
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            stream = connect_once(
                split_address(address),
                secret,
                CHANNEL,
                seconds=min(left, HANDSHAKE_SECONDS),
                local_name=local_name_of(address),
            )
            break
        except OSError as error:
            if isinstance(error, UnauthenticatedError):
                raise
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    message=f"{what} does not answer at {address}: timed out after {within:g} s "
                    f"({error}). Is it started, and is the address right?"
                ) from error
            time.sleep(0.05)
    connection = Connection(stream, secret)
    connection.ask("hello", **introduction, has_64_bits=keeps_explicit_64_bits(), **versions())
    connection.begin()
    return connection


def versions() -> dict[str, str]:
    """Returns the versions that all processes of a job must share."""
    return {name: importlib.metadata.version(name) for name in ("unison", "jax")}


def accept(connection: Connection) -> Message:
    """Returns the peer's introduction.

    Raises:
        RuntimeError: It runs another version of Unison or JAX, or does not state its role; it is
            sent the error, too.
    """
    hello = connection.receive()
    theirs = {name: hello.fields.get(name) for name in versions()}
    role, job = hello.fields.get("role"), hello.fields.get("job")
    text = None
    if hello.kind != "hello" or theirs != versions():
        text = f"Expected {versions()} on all machines of the job. Received: {theirs}"
    elif role not in ROLES or (role != "pulse" and not isinstance(job, str)):
        text = f"Expected one of {ROLES}, and a job's name. Received: {role!r}, {job!r}"
    if text is not None:
        text = text[:_MOST_SAID]
        connection.send("error", text=text)
        raise RuntimeError(text)
    if hello.fields.get("has_64_bits"):
        # Programs that the peer traces may have 64-bit dtypes.
        jax.config.update("jax_explicit_x64_dtypes", "allow")
    connection.send("welcome")
    connection.begin()
    return hello


def operand(array: np.ndarray) -> Any:
    """Returns an array as a program's operand: JAX would convert 64 bits to 32."""
    return device_array(array) if array.dtype.itemsize == 8 else array
