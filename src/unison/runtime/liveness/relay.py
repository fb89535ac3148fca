"""How the processes of a job reach JAX's coordination service, which the first of them hosts.

The service proves nothing, and up to JAX 0.11 it cannot encrypt. So it listens only at a local
socket in a folder of the user (`ServiceRelay`), and every other process of the job connects to the
address where the first process listens: both prove that they know the job's key, and between
machines the connection is encrypted (`unison.net`).

JAX's client ends its process (from C++, with no way to object) when its connection to the service
breaks. So it connects to a relay in its own process (`ClientRelay`), which passes all on; when the
service is gone, the relay's other end stays open, and the client waits on. That the first process
has died is noticed elsewhere (`unison.runtime.liveness.watcher`).
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

#: Seconds between two tries to reach the service.
_RETRY_AFTER = 0.05

#: The folder of a service's socket: what its name begins with, and seconds for which it stays when
#: nobody listens there.
_PREFIX = "unison-coordination-"
_YOUNG = 60.0

#: The longest path that a local socket can have, and what is added to that of a folder.
_LONGEST_PATH = 107
_LONGEST_NAME = 40


class ServiceRelay:
    """The first process's side: passes on to the service what the others send.

    Args:
        entrance: Where they connect; it is the relay's from now on.
        seconds: How long it may take until the service listens.

    Attributes:
        address: Where the service is to listen, as JAX writes it.
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
        """Takes no more connections, and closes those that there are."""
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
        if service is None:  # it comes too late to the meeting, or the service does not start
            accepted.stream.close()
        else:
            self._pump.join(accepted.stream, service)

    def _connected(self) -> socket.socket | None:
        """Returns a connection to the service, as soon as it listens."""
        while not self._is_closed.is_set():
            service = socket.socket(socket.AF_UNIX)
            try:
                service.connect(str(self._path))
            except OSError:
                service.close()
                if time.monotonic() > self._last:
                    return None
                self._is_closed.wait(_RETRY_AFTER)
            else:
                return service
        return None


class ClientRelay:
    """Another process's side: passes on what this process's JAX sends.

    Args:
        where: The address where the first process listens.
        seconds: How long it may take until it can be reached.

    Attributes:
        address: Where JAX's client connects to, as JAX writes it.
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
        """Takes no more connections. Those that there are stay, until JAX's client ends them."""
        self._is_closed.set()
        self._accepting.close()
        self._pump.finish()

    def _join(self, client: socket.socket) -> None:
        # This process has few connections to the service, and each may take until it is there.
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
    """Returns the steps of a handshake that only connections of this process complete."""
    try:
        process, _, _ = peer_of(connection)
        if process != os.getpid():
            raise RefusedError(f"process {process} is another one")
        return connection
        yield  # a generator, though there is nothing to wait for
    except BaseException:
        connection.close()
        raise


def _new_folder() -> pathlib.Path:
    """Returns a new folder for a socket, which only this user can enter."""
    try:
        around = runtime_folder()
    except OSError:  # another user has made it
        around = pathlib.Path(tempfile.gettempdir())
    if len(str(around)) + _LONGEST_NAME > _LONGEST_PATH:
        around = pathlib.Path("/tmp")
    _remove_left_behind(around)
    return pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around))


def _remove_left_behind(around: pathlib.Path) -> None:
    """Removes the folders of processes that were killed."""
    for folder in around.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
            if time.time() - folder.stat().st_mtime < _YOUNG:
                continue  # its process may be about to listen
            try:
                trial.connect(str(folder / "service"))
            except (ConnectionRefusedError, FileNotFoundError):
                (folder / "service").unlink(missing_ok=True)
                folder.rmdir()
