"""Locks on files, by which processes of one machine take turns. They end with their processes."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from typing import IO

#: Seconds between two attempts to get a lock.
_RETRY_SECONDS = 0.02


def lock(file: int | IO[bytes], seconds: float = 0.0, shared: bool = False) -> bool:
    """Locks an open file until all who have it open close it; returns whether that succeeded.

    Args:
        file: The file, or its descriptor. Processes that inherit it hold the lock, too.
        seconds: How long to wait for others that hold it.
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
    """Inside, this process holds the lock of a file, which is made if need be.

    Args:
        path: The file.
        seconds: How long to wait for others that hold it.

    Yields:
        Whether it holds the lock; not, if another process has held it for all that time.
    """
    with open(path, "ab") as file:
        yield lock(file, seconds)
