"""The TCP sockets that this process has open, whoever in it has opened them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def tcp_sockets() -> Iterator[socket.socket]:
    """Yields a copy of each TCP connection and listener of this process; it is closed afterwards.

    Whoever uses the socket itself notices nothing, unless the copy is shut down.

    Raises:
        OSError: The system does not say which files are open.

    Examples:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     any(own.getsockname() == server.getsockname() for own in tcp_sockets())
        True
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), _copy(number) as copy:  # a file, or closed by now
            if copy.proto == socket.IPPROTO_TCP:
                yield copy


def _copy(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        # Where the program has called socket.setdefaulttimeout, Python makes what it opens
        # non-blocking, and with it all copies; not what it is told to be so already.
        return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    except OSError:
        os.close(copy)
        raise
