"""Listening sockets."""

from __future__ import annotations

import socket

from unison.net import tls

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
