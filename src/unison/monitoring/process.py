"""The system's statistics of this process: its memory, and the bytes that it has sent."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from unison.planning.hardware import device_of_kind
from unison.runtime.open_sockets import tcp_sockets

#: The offset of the number of acknowledged bytes in Linux' `tcp_info`.
_ACKNOWLEDGED = 120


def resident_bytes() -> int | None:
    """Returns this process's resident memory in bytes; None if the system does not provide it.

    Examples:
        >>> resident_bytes() > 1_000_000
        True
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def device_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the bytes in use on these devices; None if they do not provide it."""
    told = [device.memory_stats() for device in devices]
    used = [stats["bytes_in_use"] for stats in told if stats and "bytes_in_use" in stats]
    return sum(used) if used else None


def peak_operations(devices: Sequence[Any]) -> float | None:
    """Returns the 16-bit floating-point operations that these devices compute in a second at most.

    None if that is not known of each of them.
    """
    known = [device_of_kind(device.device_kind) for device in devices]
    rates = [each.flops for each in known if each is not None]
    return sum(rates) if rates and len(rates) == len(devices) else None


class SentBytes:
    """Counts the bytes that this process's TCP connections have sent."""

    def __init__(self) -> None:
        self._of_closed = 0
        self._of_open: dict[int, int] = {}

    def count(self) -> int | None:
        """Returns the number so far; None if the system does not provide it.

        Bytes that a connection sends between the last call and its end are missing.
        """
        now: dict[int, int] = {}
        try:
            for own in tcp_sockets():
                told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                inode = os.fstat(own.fileno()).st_ino
                now[inode] = struct.unpack_from("=Q", told, _ACKNOWLEDGED)[0]
        except (OSError, struct.error):
            return None
        self._of_closed += sum(
            sent for inode, sent in self._of_open.items() if now.get(inode, -1) < sent
        )
        self._of_open = now
        return self._of_closed + sum(now.values())
