"""Locks on files, for the processes of one machine. They end with their processes."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from typing import IO

#: Seconds between two attempts to acquire a lock.
_RETRY_SECONDS = 0.02


def lock(file: int | IO[bytes], seconds: float = 0.0, shared: bool = False) -> bool:
    """Locks an open file until it is closed in all processes; returns whether this succeeded.

    Args:
        file: The file, or its descriptor. Processes that inherit it hold the lock, too.
        seconds: The timeout for other holders.
        shared: Whether others may hold a shared lock at the same time.

    Raises:
        OSError: The file system has no locks.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    last = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind)
        except BlockingIOError:
            if time.monotonic() >= last:
                return False
            time.sleep(_RETRY_SECONDS)
        else:
            return True


@contextlib.contextmanager
def locked(path: str, seconds: float) -> Iterator[bool]:
    """Inside, this process holds the lock of a file, which is created if it does not exist.

    Args:
        path: The file.
        seconds: The timeout for other holders.

    Yields:
        Whether it holds the lock; False after the timeout.
    """
    with open(path, "ab") as file:
        yield lock(file, seconds)
