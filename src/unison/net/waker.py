"""`Waker`: wakes a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Becomes readable for selectors when another thread or a signal handler calls `wake`.

    Examples:
        >>> import select
        >>> waker = Waker()
        >>> waker.wake()
        >>> select.select([waker], [], [], 1.0)[0] == [waker]
        True
        >>> waker.clear()
        >>> select.select([waker], [], [], 0.0)[0]
        []
        >>> waker.close()
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Makes it readable."""
        with contextlib.suppress(OSError):  # full, so it is readable; or closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """Makes it unreadable until the next `wake`."""
        with contextlib.suppress(OSError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Closes both ends; `wake` does nothing from now on."""
        self._reader.close()
        self._writer.close()
