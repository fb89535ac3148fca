"""Ends the waiting of XLA's collectives between CPUs, which know no other way out.

Their operations (gloo) wait for data on sockets without a limit. When such a socket is shut down,
the operation that waits for it fails, and JAX raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

#: An address as (host, port).
Address = tuple[str, int]

_FOLDER = "/dev/fd"

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listening() -> set[Address]:
    """Returns the addresses at which this process listens."""
    found = set()
    for number in _open_files():
        with contextlib.suppress(OSError), _copy(number) as copy:
            is_ours = copy.family in _FAMILIES
            if is_ours and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_plain(copy.getsockname()))
    return found


def shut_down(listeners: Iterable[Address]) -> int:
    """Shuts down this process's connections that somebody at `listeners` has accepted.

    Args:
        listeners: The addresses at which the processes' collectives listen.

    Returns:
        How many there were.
    """
    wanted = set(listeners)
    count = 0
    for number in _open_files():
        with contextlib.suppress(OSError), _copy(number) as copy:
            is_ours = copy.family in _FAMILIES
            if is_ours and wanted & {_plain(copy.getsockname()), _plain(copy.getpeername())}:
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open_files() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from map(int, os.listdir(_FOLDER))


def _copy(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _plain(address: tuple[Any, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
