"""Keeps JAX from ending this process when the one that hosts JAX's coordination service dies.

JAX's client ends its process (from C++, with no way to object) when its connection to the service
breaks. So it connects to a relay in its own process instead, which passes all on; when the service
is gone, the relay's other end stays open, and the client waits on. That the first process has died
is noticed elsewhere (`unison.runtime.liveness.watcher`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

#: Seconds between two tries to reach the service.
_RETRY_AFTER = 0.05


class Relay:
    """Passes on to the service what comes to an address of this process.

    Args:
        where: Where the service listens, or will.
        seconds: How long it may take until it does.

    Attributes:
        address: Where it listens, as host:port.
    """

    def __init__(self, where: tuple[str, int], seconds: float):
        self._where = where
        self._last = time.monotonic() + seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(None)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = _in_thread(self._accept)

    def close(self) -> None:
        """Takes no more connections. Those that there are stay, until their clients end them."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would wait on
        self._listener.close()
        self._thread.join(1.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            while True:
                _in_thread(self._join, self._listener.accept()[0])

    def _join(self, client: socket.socket) -> None:
        client.settimeout(None)
        with client, contextlib.ExitStack() as ends:
            service = self._connect()
            if service is None:
                return
            ends.enter_context(service)
            for end in (client, service):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = _in_thread(_pass_on, service, client)
            _pass_on(client, service)
            with contextlib.suppress(OSError):
                service.shutdown(socket.SHUT_WR)
            back.join()

    def _connect(self) -> socket.socket | None:
        while True:
            try:
                service = socket.create_connection(self._where, timeout=1.0)
            except OSError:
                if time.monotonic() > self._last:
                    return None
                time.sleep(_RETRY_AFTER)
            else:
                service.settimeout(None)
                return service


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Passes on what comes until the source ends; what the target does not take is dropped."""
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            with contextlib.suppress(OSError):
                target.sendall(received)


def _in_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="unison-relay", daemon=True)
    thread.start()
    return thread
