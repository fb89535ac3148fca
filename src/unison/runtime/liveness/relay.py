"""Relays between JAX's clients and its coordination service, which the first process hosts.

The service does not authenticate its clients, and before JAX 0.12 it has no TLS. So it only listens
at a local socket in a private folder of the user. The other processes connect to the first one over
an authenticated and, between machines, encrypted connection (`unison.net`), and `ServiceRelay`
forwards to the service.

JAX's client aborts its process (in C++, which cannot be prevented) when its connection to the
service breaks. So it connects to a `ClientRelay` in its own process, which keeps the connection
open when the service has ended. The death of the first process is detected elsewhere
(`unison.runtime.liveness.watcher`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import socket
import tempfile
import threading
import time
import urllib.parse

from unison.errors import OpError
from unison.net.acceptor import HANDSHAKE_SECONDS, AcceptingThread, Acceptor
from unison.net.connecting import connect
from unison.net.handshake import Accepted, Steps, peer_of
from unison.net.listening import listen_locally
from unison.net.proof import RefusedError
from unison.net.pump import Pump
from unison.net.runtime_folder import runtime_folder
from unison.net.secret import key
from unison.runtime.rendezvous import COORDINATION_CHANNEL, Entrance

#: Seconds between two attempts to connect.
_RETRY_AFTER = 0.05

#: Folders of sockets: the prefix of their names, and the seconds before an unused one is removed.
_PREFIX = "unison-coordination-"
_YOUNG = 60.0

#: The longest path of a local socket, and the length that is added to that of the parent folder.
_LONGEST_PATH = 107
_LONGEST_NAME = 40


class ServiceRelay:
    """Forwards connections of the other processes to the service, in the first process.

    Args:
        entrance: The socket to which the other processes connect; the relay takes ownership.
        seconds: The timeout until the service listens.

    Attributes:
        address: The address at which the service has to listen, for gRPC.
    """

    def __init__(self, entrance: Entrance, seconds: float):
        self._path = _new_folder() / "service"
        self.address = f"unix:{urllib.parse.quote(str(self._path))}"
        self._last = time.monotonic() + seconds
        self._is_closed = threading.Event()
        self._pump = Pump("unison-relay")
        self._accepting = AcceptingThread(
            entrance.acceptor, [entrance.listener], self._join, "unison-relay"
        )

    def close(self) -> None:
        """Stops listening, and closes all connections."""
        self._is_closed.set()
        self._accepting.close()
        self._pump.close()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()

    def _join(self, accepted: Accepted) -> None:
        service = None
        if accepted.channel == COORDINATION_CHANNEL:
            service = self._connected()
        if service is None:  # too late for the rendezvous, or the service does not start
            accepted.stream.close()
        else:
            self._pump.join(accepted.stream, service)

    def _connected(self) -> socket.socket | None:
        """Connects to the service as soon as it listens; None after the timeout."""
        while not self._is_closed.is_set():
            service = None
            try:
                service = socket.socket(socket.AF_UNIX)
                service.connect(str(self._path))
            except OSError:  # it does not listen yet, or this process has no file for it
                if service is not None:
                    service.close()
                if time.monotonic() > self._last:
                    return None
                self._is_closed.wait(_RETRY_AFTER)
            else:
                return service
        return None


class ClientRelay:
    """Forwards the connections of this process's JAX client to the first process.

    Args:
        where: The address of the first process.
        seconds: The timeout until it can be reached.

    Attributes:
        address: The address for JAX's client, for gRPC.
    """

    def __init__(self, where: tuple[str, int], seconds: float):
        self._where = where
        self._secret = key()
        self._last = time.monotonic() + seconds
        self._is_closed = threading.Event()
        name = f"unison-relay-{secrets.token_hex(8)}"
        listener = listen_locally(f"\0{name}")
        self.address = f"unix-abstract:{name}"
        self._pump = Pump("unison-relay")
        self._accepting = AcceptingThread(
            Acceptor([listener], _of_this_process), [listener], self._join, "unison-relay"
        )

    def close(self) -> None:
        """Stops listening. Connections stay open until JAX's client closes them."""
        self._is_closed.set()
        self._accepting.close()
        self._pump.finish()

    def _join(self, client: socket.socket) -> None:
        # JAX opens very few connections, and each waits until the service can be reached.
        threading.Thread(
            target=self._reach, args=(client,), name="unison-relay", daemon=True
        ).start()

    def _reach(self, client: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                service = connect(
                    self._where, self._secret, COORDINATION_CHANNEL, seconds=HANDSHAKE_SECONDS
                )
            except (OSError, OpError):
                if time.monotonic() > self._last:
                    break
                self._is_closed.wait(_RETRY_AFTER)
            else:
                self._pump.join(client, service, outlives_server=True)
                return
        client.close()


def _of_this_process(connection: socket.socket) -> Steps[socket.socket]:
    """Returns the steps of a handshake that accepts connections of this process only."""
    try:
        process, _, _ = peer_of(connection)
        if process != os.getpid():
            raise RefusedError(f"the peer is another process ({process})")
        return connection
        yield  # makes this a generator
    except BaseException:
        connection.close()
        raise


def _new_folder() -> pathlib.Path:
    """Creates a folder for a socket that only this user can enter."""
    try:
        around = runtime_folder()
    except OSError:  # e.g. another user has created it
        around = pathlib.Path(tempfile.gettempdir())
    if len(str(around)) + _LONGEST_NAME > _LONGEST_PATH:
        around = pathlib.Path("/tmp")
    _remove_left_behind(around)
    return pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around))


def _remove_left_behind(around: pathlib.Path) -> None:
    """Removes folders that killed processes have left behind."""
    for folder in around.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
            if time.time() - folder.stat().st_mtime < _YOUNG:
                continue  # its process may not listen yet
            try:
                trial.connect(str(folder / "service"))
            except (ConnectionRefusedError, FileNotFoundError):
                (folder / "service").unlink(missing_ok=True)
                folder.rmdir()
