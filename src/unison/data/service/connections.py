"""Connections to dispatchers and workers of an input service: who connects, and the calls.

The messages are those of `unison.net.array_messages`; both ends have proved that they know the key.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from unison.data.service.elements import described_error, error_of
from unison.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    OpError,
    UnauthenticatedError,
    UnavailableError,
)
from unison.net.acceptor import HANDSHAKE_SECONDS, AcceptingThread, Acceptor
from unison.net.addresses import joined_address, split_address
from unison.net.array_messages import Connection, Message
from unison.net.connecting import connect as connect_once
from unison.net.handshake import Accepted, server_handshake
from unison.net.listening import listen_with_local, local_name_of
from unison.net.secret import key

logger = logging.getLogger("unison")

#: The channel of these connections (`unison.net.proof`); the number changes with the protocol.
CHANNEL = b"input-service-1"

#: The maximum number of messages whose arrays wait in shared memory for one consumer.
_MOST_SLOTS = 8

#: Seconds between two attempts to connect.
_BETWEEN_ATTEMPTS = 0.1

#: Seconds for which an answer is awaited; questions that wait for a change are answered earlier.
_MOST_SECONDS_OF_AN_ANSWER = 30.0

#: Seconds for which the threads of a server are awaited.
_SECONDS_TO_CLOSE = 5.0


def connect(
    address: str, seconds: float, what: str, tries_again: Callable[[], bool] = lambda: True
) -> Connection:
    """Connects to a dispatcher or a worker, which may not have started yet.

    Args:
        address: Host and port.
        seconds: The timeout.
        what: Its name in messages.
        tries_again: Whether to try again after an attempt that has failed.

    Raises:
        DeadlineExceededError: No process listens there in time.
        UnauthenticatedError: The process has another key.
    """
    end = time.monotonic() + seconds
    secret = key()
    while True:
        try:
            stream = connect_once(
                split_address(address),
                secret,
                CHANNEL,
                seconds=max(0.1, min(end - time.monotonic(), HANDSHAKE_SECONDS)),
                local_name=local_name_of(address),
            )
        except OSError as error:
            if isinstance(error, UnauthenticatedError | FailedPreconditionError):
                raise
            if time.monotonic() > end or not tries_again():
                raise DeadlineExceededError(
                    message=f"{what} does not answer at {address}: timed out after {seconds:g} s "
                    f"({error}). Is it started, and is the address right?"
                ) from error
            time.sleep(min(_BETWEEN_ATTEMPTS, max(end - time.monotonic(), 0.0)))
            continue
        connection = Connection(stream, secret, _MOST_SLOTS)
        connection.begin()
        return connection


class Calls:
    """Calls to a dispatcher, over a connection that is opened again if it is lost.

    Several threads may call; one call at a time is in flight.

    Args:
        address: Host and port.
        seconds: The timeout for connecting.
        is_wanted: Whether to keep trying.
    """

    def __init__(self, address: str, seconds: float, is_wanted: Callable[[], bool] = lambda: True):
        self._address = address
        self._seconds = seconds
        self._is_wanted = is_wanted
        self._connection: Connection | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def call(self, kind: str, arrays: Any = (), **fields: Any) -> Message:
        """Returns the answer to a message, which is sent again if the connection is lost.

        Raises:
            DeadlineExceededError: The dispatcher cannot be reached.
            OpError: What the dispatcher says.
        """
        end = time.monotonic() + self._seconds
        with self._lock:
            while True:
                try:
                    if self._is_closed:
                        raise UnavailableError(message="The connection has been closed.")
                    if self._connection is None:
                        left = max(end - time.monotonic(), 0.1)
                        self._connection = self._connected(left)
                    self._connection.send(kind, arrays, **fields)
                    if not self._connection.wait(_MOST_SECONDS_OF_AN_ANSWER):
                        raise UnavailableError(
                            message="Timed out: the dispatcher has not answered within "
                            f"{_MOST_SECONDS_OF_AN_ANSWER:g} s."
                        )
                    answer = self._connection.receive()
                    break
                except UnavailableError:
                    if self._connection is not None:
                        self._connection.close()
                    self._connection = None
                    if self._is_closed or not self._is_wanted() or time.monotonic() > end:
                        raise
                    time.sleep(_BETWEEN_ATTEMPTS)
        if answer.kind == "error":
            raise error_of(answer.fields)
        return answer

    def _connected(self, seconds: float) -> Connection:
        def tries_again() -> bool:
            return not self._is_closed and self._is_wanted()

        try:
            return connect(self._address, seconds, "The dispatcher", tries_again)
        except DeadlineExceededError as error:
            if not tries_again():
                raise UnavailableError(message="The connection has been closed.") from error
            raise DeadlineExceededError(
                message=f"The dispatcher of the input service does not answer at {self._address}: "
                f"timed out after {self._seconds:g} s ({error.message}). Start it, or start "
                "one with fault_tolerant_mode again at the same port."
            ) from error

    def close(self) -> None:
        """Closes the connection; a call in flight, and later ones, raise an UnavailableError."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.shut_down()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


#: Answers a message of a connection: returns the type, the arrays and the fields of the answer.
Answer = tuple[str, Any, dict[str, Any]]


class Listening:
    """A server: a thread for each authenticated connection, which answers its messages in turn.

    Args:
        host: The address of this machine to listen at.
        port: The port; 0: a free one.
        name: The server's name in messages, and of its threads.
        answer: Answers a message of a connection.
        ended: Called when a connection has ended.

    Raises:
        OSError: Another process listens there, or the address is not this machine's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        answer: Callable[[Connection, Message], Answer],
        ended: Callable[[Connection], None] = lambda connection: None,
    ):
        self._name = name
        self._answer = answer
        self._ended = ended
        self._is_closed = False
        self._open: dict[Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        secret = self._secret = key()
        try:
            listeners = listen_with_local(joined_address(host, port))
        except OSError as error:
            raise OSError(
                f"The {name} cannot listen at {host}:{port}: {error}. The port is in use, or the "
                "address does not belong to this machine."
            ) from error
        #: The port.
        self.port: int = listeners[0].getsockname()[1]
        acceptor = Acceptor(listeners, lambda own: server_handshake(own, secret, [CHANNEL]))
        self._accepting = AcceptingThread(acceptor, listeners, self._begin, f"unison-{name}")

    def _begin(self, accepted: Accepted) -> None:
        connection = Connection(accepted.stream, self._secret, _MOST_SLOTS)
        connection.begin()
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"unison-{self._name}", daemon=True
        )
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._open[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            del self._open[connection]
            connection.close()
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                message = connection.receive()
                try:
                    kind, arrays, fields = self._answer(connection, message)
                except UnavailableError:
                    raise
                except OpError as error:
                    connection.send("error", **described_error(error, f"the {self._name}"))
                else:
                    connection.send(kind, arrays, **fields)
                del message
        except UnavailableError:
            pass  # the peer has disconnected
        except Exception as error:  # a peer's message must not end anything but its connection
            logger.warning(
                "The %s has closed a connection because of an invalid message (%s: %s)",
                self._name,
                type(error).__name__,
                str(error)[:500],
            )
        finally:
            connection.close()
            with self._lock:
                self._open.pop(connection, None)
            self._ended(connection)

    def close(self) -> None:
        """Closes the listeners and all connections, and waits for their threads."""
        self._accepting.close()
        with self._lock:
            self._is_closed = True
            threads = dict(self._open)
        for connection in threads:
            connection.shut_down()
        end = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in threads.values():
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))


def name_of_this_machine() -> str:
    """Returns the name of this machine, for messages."""
    with contextlib.suppress(OSError):
        return socket.gethostname()
    return "this machine"
