"""Unblocks XLA's collectives between CPUs, which cannot be cancelled otherwise.

Their operations (Gloo) wait for data on sockets without a timeout. When such a socket is shut down,
the operation that waits for it fails, and JAX raises an error.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

from unison.runtime.open_sockets import tcp_sockets

#: An address as (host, port).
Address = tuple[str, int]


def listening() -> set[Address]:
    """Returns the addresses at which this process listens."""
    found = set()
    with contextlib.suppress(OSError):  # not available on this system
        for own in tcp_sockets():
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_plain(own.getsockname()))
    return found


def shut_down(listeners: Iterable[Address]) -> int:
    """Shuts down this process's connections that were accepted at `listeners`.

    Args:
        listeners: The addresses at which the processes' collectives listen.

    Returns:
        The number of connections.
    """
    wanted = set(listeners)
    count = 0
    with contextlib.suppress(OSError):  # not available on this system
        for own in tcp_sockets():
            with contextlib.suppress(OSError):  # it is not connected
                if wanted & {_plain(own.getsockname()), _plain(own.getpeername())}:
                    own.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _plain(address: tuple[Any, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
