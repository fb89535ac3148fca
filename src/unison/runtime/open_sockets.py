"""The TCP sockets that this process has open, whichever library opened them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def tcp_sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process, and closes it afterwards.

    The socket's owner is not affected, unless the duplicate is shut down.

    Raises:
        OSError: The system does not list the open files.

    Examples:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     any(own.getsockname() == server.getsockname() for own in tcp_sockets())
        True
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), _copy(number) as copy:  # not a socket, or already closed
            if copy.proto == socket.IPPROTO_TCP:
                yield copy


def _copy(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        # If the program has called socket.setdefaulttimeout, Python makes a socket that it creates
        # non-blocking, and with it all duplicates; not one whose type says that it is non-blocking
        # already.
        return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    except OSError:
        os.close(copy)
        raise
