"""Parsing of network addresses, and which of them belong to this machine."""

from __future__ import annotations

import contextlib
import socket

#: The address of processes that share this machine; nobody else can reach it.
LOOPBACK = "127.0.0.1"


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of an address.

    Examples:
        >>> split_address("[::1]:2222")
        ('::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def host_and_port(address: str) -> tuple[str, int] | None:
    """Returns the host and the port of an address of the user's; None if it is not host:port.

    Examples:
        >>> host_and_port("[::1]:2222"), host_and_port("2222"), host_and_port("host:0")
        (('::1', 2222), None, None)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    return split_address(address)


def joined_address(host: str, port: int | str) -> str:
    """Returns a host and a port, or what stands for one, as one address.

    Examples:
        >>> joined_address("::1", 2222), joined_address("10.0.0.1", 2222)
        ('[::1]:2222', '10.0.0.1:2222')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str | None:
    """Returns the address that `host` is or resolves to; None if it is not this machine's."""
    with contextlib.suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((where[0], 0))
                return str(where[0])
    return None


def address_towards(host: str, port: int) -> str | None:
    """Returns the source address of connections from this machine to a host; sends nothing."""
    with contextlib.suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect(where)
                return str(trial.getsockname()[0])
    return None


def is_same_machine(connection: socket.socket) -> bool:
    """Whether the peer of a connection is on this machine, judging by the addresses.

    It is if both ends have the same address, or the connection is a local (Unix) socket.
    """
    if connection.family == socket.AF_UNIX:
        return True
    try:
        own, other = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:  # it has been closed
        return False
    # Loopback has many addresses; the two ends may use different ones.
    return own == other or (is_loopback(own) and is_loopback(other))


def is_loopback(host: str) -> bool:
    """Whether an address is one of loopback, which only this machine reaches.

    Examples:
        >>> is_loopback("127.0.0.2"), is_loopback("10.0.0.1")
        (True, False)
    """
    plain = host.removeprefix("::ffff:")
    return plain.startswith("127.") or plain == "::1"
