"""`Acceptor`: the one accept loop.

It accepts connections and runs their handshakes in the thread that calls it. Resources that an
unauthenticated client can use are bounded:

- A connection has no thread before its handshake is complete. At most `limit` handshakes are
  pending, and each has one deadline of `seconds`. When the limit is exceeded, the oldest pending
  connection of the address with the most pending connections is closed. So a stranger cannot lock
  out a worker.
- When the process is out of file descriptors or memory, the oldest pending connection is closed. If
  there is none, accepting pauses, and new connections wait in the kernel's backlog. A warning is
  logged once a minute at most.
- Errors of a single connection (closed before it was accepted, an invalid handshake) never end the
  loop.
"""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from unison.net.handshake import Steps
from unison.net.waker import Waker

logger = logging.getLogger("unison")

T = TypeVar("T")

#: The maximum number of pending handshakes, and the timeout of one in seconds.
_LIMIT = 256
HANDSHAKE_SECONDS = 10.0

#: The number of connections that are accepted before pending handshakes are served again.
_ACCEPTED_A_TURN = 16

#: Seconds for which accepting pauses when the process is out of resources: at first, and at most.
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5

#: Seconds between two warnings.
_BETWEEN_WARNINGS = 60.0

#: Seconds for which the thread waits at most, and for which its end is awaited.
_LONGEST_WAIT = 60.0
_SECONDS_TO_CLOSE = 5.0

#: The process or the system is out of file descriptors or memory.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

#: The listener itself is closed.
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})


class Acceptor(Generic[T]):
    """Accepts connections, and returns those that have completed their handshake.

    Either a thread calls `wait` in a loop, or a loop with a selector of its own registers the
    acceptor there and calls `accept` regularly, also when the selector does not report it:
    deadlines are checked then.

    Args:
        listeners: Listening sockets, which become non-blocking.
        handshake: Returns the steps of the handshake of a connection. It closes the connection if
            the handshake fails.
        limit: How many handshakes may be pending. Default: 256, or an eighth of the limit on file
            descriptors if that is less.
        seconds: The deadline of a handshake.

    Examples:
        >>> from unison.net.handshake import server_handshake
        >>> from unison.net.connecting import connect
        >>> from unison.net.listening import listen
        >>> listener = listen("127.0.0.1", 0)
        >>> acceptor = Acceptor([listener], lambda own: server_handshake(own, b"k" * 16, [b"a"]))
        >>> found = []
        >>> thread = threading.Thread(target=lambda: found.extend(acceptor.wait(10.0)))
        >>> thread.start()
        >>> client = connect(listener.getsockname(), b"k" * 16, b"a", about=b"me", seconds=10.0)
        >>> thread.join()
        >>> [accepted.about for accepted in found]
        [b'me']
        >>> for each in (client, found[0].stream, acceptor, listener):
        ...     each.close()
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handshake: Callable[[socket.socket], Steps[T]],
        *,
        limit: int | None = None,
        seconds: float = HANDSHAKE_SECONDS,
    ):
        self._handshake = handshake
        self._limit = _default_limit() if limit is None else limit
        self._seconds = seconds
        self._waker = Waker()
        self._is_woken = False
        #: Pending handshakes by file descriptor, the oldest first.
        self._pending: dict[int, _Pending[T]] = {}
        self._paused: dict[socket.socket, float] = {}
        self._seconds_to_pause = _FIRST_PAUSE
        #: The origin of the latest connection whose handshake failed, and the reason.
        self.last_refusal: str | None = None
        self._warned_at: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The file descriptor to register with another selector."""
        return self._selector.fileno()

    @property
    def pending(self) -> int:
        """The number of pending handshakes."""
        return len(self._pending)

    def accept(self) -> list[T]:
        """Returns connections that have completed their handshake; never blocks."""
        return self._turn(0.0)

    def wait(self, seconds: float) -> list[T]:
        """Like `accept`, but blocks until there is one, for `seconds`, or until `wake`."""
        last = time.monotonic() + seconds
        self._is_woken = False
        while True:
            found = self._turn(max(last - time.monotonic(), 0.0))
            if found or self._is_woken or time.monotonic() >= last:
                return found

    def wake(self) -> None:
        """Ends `wait` in another thread."""
        self._waker.wake()

    def close(self) -> None:
        """Closes the pending connections. The listeners stay open."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._waker.close()

    def _turn(self, seconds: float) -> list[T]:
        """Waits for events for `seconds` at most, and handles them."""
        found: list[T] = []
        for key, _ in self._selector.select(self._until_next(seconds)):
            if key.fileobj is self._waker:
                self._waker.clear()
                self._is_woken = True
            elif isinstance(key.data, _Pending):
                self._advance(key.data, found)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._accept_some(key.fileobj, found)
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if pending.closes_at > now:
                break  # so are all that came later
            self._drop(pending)
        for listener in [each for each, until in self._paused.items() if until <= now]:
            try:
                self._selector.register(listener, selectors.EVENT_READ)
            except OSError as error:
                self._pause(listener, error)
            else:
                del self._paused[listener]
        return found

    def _until_next(self, seconds: float) -> float:
        """Returns the seconds until the next deadline, at most `seconds`."""
        times = [*self._paused.values()]
        if self._pending:
            times.append(next(iter(self._pending.values())).closes_at)
        return max(min([seconds, *(each - time.monotonic() for each in times)]), 0.0)

    def _accept_some(self, listener: socket.socket, found: list[T]) -> None:
        for _ in range(_ACCEPTED_A_TURN):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except (OSError, MemoryError) as error:
                number = error.errno if isinstance(error, OSError) else errno.ENOMEM
                if number in _CLOSED:
                    self._selector.unregister(listener)
                    return
                if number in _EXHAUSTED and not self._drop_one():
                    self._selector.unregister(listener)
                    self._pause(listener, error)
                    return
                continue  # e.g. the client has closed it already
            self._seconds_to_pause = _FIRST_PAUSE
            self._begin(connection, str(address[0]) if isinstance(address, tuple) else "", found)

    def _begin(self, connection: socket.socket, source: str, found: list[T]) -> None:
        number = connection.fileno()
        closes_at = time.monotonic() + self._seconds
        pending = _Pending(number, source, closes_at, self._handshake(connection))
        self._pending[number] = pending
        self._advance(pending, found)
        while len(self._pending) > self._limit:
            self._drop_one()

    def _advance(self, pending: _Pending[T], found: list[T]) -> None:
        """Continues a handshake until it has to wait, or is complete."""
        if self._pending.get(pending.number) is not pending:
            return  # it was dropped in this turn
        try:
            self._wait_for(pending, next(pending.steps))
        except StopIteration as done:
            self._forget(pending)
            found.append(done.value)
        except (OSError, ValueError) as error:  # nothing that a client sends is an error here
            self._drop(pending)
            self.last_refusal = f"from {pending.source or 'this machine'}: {error}"
            logger.debug("A connection was refused, %s", self.last_refusal)
        except Exception:
            self._drop(pending)
            self._warn("The handshake of a connection failed.", exc_info=True)

    def _wait_for(self, pending: _Pending[T], events: int) -> None:
        if events == pending.events:
            return
        if pending.events:
            self._selector.modify(pending.number, events, pending)
        else:
            self._selector.register(pending.number, events, pending)
        pending.events = events

    def _drop_one(self) -> bool:
        """Closes the oldest connection of the address with the most; False if there is none."""
        counts: dict[str, int] = {}
        for each in self._pending.values():
            counts[each.source] = counts.get(each.source, 0) + 1
        if not counts:
            return False
        most = max(counts, key=lambda source: counts[source])
        self._drop(next(each for each in self._pending.values() if each.source == most))
        return True

    def _drop(self, pending: _Pending[T]) -> None:
        self._forget(pending)
        pending.steps.close()

    def _forget(self, pending: _Pending[T]) -> None:
        del self._pending[pending.number]
        if pending.events:
            self._selector.unregister(pending.number)

    def _pause(self, listener: socket.socket, error: BaseException) -> None:
        self._paused[listener] = time.monotonic() + self._seconds_to_pause
        self._seconds_to_pause = min(2 * self._seconds_to_pause, _LONGEST_PAUSE)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._warn(
            f"Accepting connections is paused: {error}. The limit on open files is {most} "
            "(`ulimit -n`)."
        )

    def _warn(self, text: str, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(text, -_BETWEEN_WARNINGS) >= _BETWEEN_WARNINGS:
            self._warned_at[text] = now
            logger.warning(text, exc_info=exc_info)


class AcceptingThread(Generic[T]):
    """A thread that accepts connections until it is closed.

    Args:
        acceptor: The acceptor; it is closed with the thread.
        listeners: Its listeners; they are closed, too.
        on_connection: Called in the thread with the result of each handshake; it must not block.
        name: The thread's name.
    """

    def __init__(
        self,
        acceptor: Acceptor[T],
        listeners: Sequence[socket.socket],
        on_connection: Callable[[T], None],
        name: str,
    ):
        self._acceptor = acceptor
        self._listeners = listeners
        self._on_connection = on_connection
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Accepted connections stay open."""
        self._is_closed = True
        self._acceptor.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                try:
                    accepted = self._acceptor.wait(_LONGEST_WAIT)
                except (OSError, MemoryError):  # of the selector: there is no resource left
                    logger.exception("Accepting connections failed; it is tried again.")
                    time.sleep(_LONGEST_PAUSE)
                    continue
                for connection in accepted:
                    try:
                        self._on_connection(connection)
                    except Exception:  # e.g. no thread can be started; others are still served
                        logger.exception("A connection could not be served.")
        finally:
            self._acceptor.close()
            for listener in self._listeners:
                listener.close()


class _Pending(Generic[T]):
    """A connection whose handshake is not complete."""

    def __init__(self, number: int, source: str, closes_at: float, steps: Steps[T]):
        self.number = number
        self.source = source
        self.closes_at = closes_at
        self.steps = steps
        #: The events that the selector waits for; 0: it is not registered.
        self.events = 0


def _default_limit() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LIMIT if most == resource.RLIM_INFINITY else max(4, min(_LIMIT, most // 8))
