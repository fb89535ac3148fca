"""Listening sockets."""

from __future__ import annotations

import contextlib
import socket
import sys

from unison.net import tls
from unison.net.addresses import joined_address, own_address, split_address

#: The length of the kernel's queue of connections that are not accepted yet.
_BACKLOG = 128


def listen(host: str, port: int, backlog: int = _BACKLOG) -> socket.socket:
    """Returns a socket that listens at a host and port, and at no other address of the machine.

    Args:
        host: A name or an address of this machine.
        port: The port; 0: a free one.
        backlog: The length of the kernel's queue of connections that are not accepted yet.

    Raises:
        OSError: Another process listens there, or the host is not this machine.
        InvalidArgumentError: The TLS settings in the environment are invalid.

    Examples:
        >>> with listen("127.0.0.1", 0) as listener:
        ...     listener.getsockname()[0]
        '127.0.0.1'
    """
    tls.check_settings()
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    # Regardless of `socket.setdefaulttimeout`.
    listener.settimeout(None)
    return listener


def listen_locally(name: str | bytes, backlog: int = _BACKLOG) -> socket.socket:
    """Returns a local (Unix) socket that listens under a name.

    Args:
        name: A path, or an abstract name (Linux), which starts with a zero byte.
        backlog: The length of the kernel's queue of connections that are not accepted yet.

    Raises:
        OSError: The name is in use.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    listener.settimeout(None)
    return listener


def listen_with_local(address: str) -> list[socket.socket]:
    """Returns sockets that listen at a host and port only, and at no other address of the machine.

    Raises:
        OSError: Another process listens there, or the host is not an address of this machine.
    """
    host, port = split_address(address)
    listening = [listen(host, port)]
    local = local_name_of(joined_address(host, listening[0].getsockname()[1]))
    if local is not None:
        with contextlib.suppress(OSError):  # the name is taken: the network socket remains
            listening.append(listen_locally(local))
    return listening


def local_name_of(address: str) -> str | None:
    """Returns the name of the local socket that stands for an address of this machine.

    It takes half the time of a network socket. Abstract names like this (on Linux) belong to a
    network namespace, as addresses do. Any user can claim one: so both ends check which user the
    peer's process belongs to, and use the network if it is another user's.
    """
    host, port = split_address(address)
    own = own_address(host) if sys.platform == "linux" else None
    return None if own is None else f"\0unison-{own}:{port}"
