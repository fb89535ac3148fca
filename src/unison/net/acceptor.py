"""`Acceptor`: the one accept loop.

It accepts connections and runs their handshakes, all in the thread that calls it. What others may
do to it is bounded:

- A connection that has not completed its handshake has no thread. There are at most `limit` of
  them, and each has `seconds` for all of the handshake. When there is one more, the oldest one is
  closed, of the address that has most of them: so a stranger cannot lock out a worker.
- Where the process has no file descriptor or memory left, the oldest such connection is closed.
  Where there is none to close, the listener rests for a moment: the connections wait in the
  kernel's queue. A warning says so once a minute at most.
- A connection that was closed before it was accepted is not an error, nor is anything that a
  stranger sends.
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

#: How many connections may be without a handshake, and how long one may take.
_LIMIT = 256
HANDSHAKE_SECONDS = 10.0

#: How many connections are accepted in one turn: then those that there are get theirs.
_ACCEPTED_A_TURN = 16

#: Seconds for which a listener rests at first, and at most, where nothing can be accepted.
_FIRST_REST = 0.02
_LONGEST_REST = 0.5

#: Seconds between two warnings.
_BETWEEN_WARNINGS = 60.0

#: Seconds for which a thread waits at most, and for its end.
_LONGEST_WAIT = 60.0
_SECONDS_TO_CLOSE = 5.0

#: The process, or the system, has no descriptor or memory left.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

#: The listener itself is gone.
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})


class Acceptor(Generic[T]):
    """Accepts connections, and returns those whose handshake is complete.

    Either one thread calls `wait` in a loop, or a loop that has a selector registers the acceptor
    there and calls `accept` each time it looks: at least as often as handshakes are to time out.

    Args:
        listeners: Listening sockets, which become non-blocking.
        handshake: Returns the steps of a connection's handshake. It closes the connection where it
            fails.
        limit: How many connections may be without a handshake. Default: 256, or an eighth of the
            descriptors that the process may have, if that is less.
        seconds: How long a handshake may take.

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
        #: The oldest first.
        self._pending: dict[int, _Pending[T]] = {}
        self._resting: dict[socket.socket, float] = {}
        self._rest = _FIRST_REST
        #: Where the latest connection whose handshake failed came from, and why it failed.
        self.last_refusal: str | None = None
        self._warned_at: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The descriptor of what it waits for, for another selector."""
        return self._selector.fileno()

    @property
    def pending(self) -> int:
        """How many connections have not completed their handshake."""
        return len(self._pending)

    def accept(self) -> list[T]:
        """Returns the connections whose handshake is complete by now, without waiting."""
        return self._turn(0.0)

    def wait(self, seconds: float) -> list[T]:
        """Waits for such connections: until there are some, for `seconds`, or until `wake`."""
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
        """Closes the connections whose handshake is not complete. The listeners stay open."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._waker.close()

    def _turn(self, seconds: float) -> list[T]:
        """Waits until something happens, and does what follows from it."""
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
        for listener in [each for each, until in self._resting.items() if until <= now]:
            del self._resting[listener]
            self._selector.register(listener, selectors.EVENT_READ)
        return found

    def _until_next(self, seconds: float) -> float:
        """Returns for how long nothing has to be done of which no socket tells."""
        times = [*self._resting.values()]
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
                if number in _EXHAUSTED and not self._free_one():
                    self._let_rest(listener, error)
                    return
                continue  # it was closed before it was accepted
            self._rest = _FIRST_REST
            self._begin(connection, str(address[0]) if isinstance(address, tuple) else "", found)

    def _begin(self, connection: socket.socket, source: str, found: list[T]) -> None:
        number = connection.fileno()
        closes_at = time.monotonic() + self._seconds
        pending = _Pending(number, source, closes_at, self._handshake(connection))
        self._pending[number] = pending
        self._advance(pending, found)
        while len(self._pending) > self._limit:
            self._free_one()

    def _advance(self, pending: _Pending[T], found: list[T]) -> None:
        """Takes a handshake as far as it goes now."""
        if self._pending.get(pending.number) is not pending:
            return  # it was dropped in this turn
        try:
            events = next(pending.steps)
        except StopIteration as done:
            self._forget(pending)
            found.append(done.value)
        except (OSError, ValueError) as error:  # what a stranger does is not an error
            self._forget(pending)
            self.last_refusal = f"from {pending.source or 'this machine'}: {error}"
            logger.debug("A connection was refused, %s", self.last_refusal)
        except Exception:
            self._forget(pending)
            self._warn("A new connection has failed.", exc_info=True)
        else:
            if events != pending.events:
                if pending.events:
                    self._selector.modify(pending.number, events, pending)
                else:
                    self._selector.register(pending.number, events, pending)
                pending.events = events

    def _free_one(self) -> bool:
        """Closes the oldest connection of the address that has most; whether there was one."""
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

    def _let_rest(self, listener: socket.socket, error: BaseException) -> None:
        self._selector.unregister(listener)
        self._resting[listener] = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._warn(
            f"New connections have to wait: {error}. This process may have {most} files open "
            "(`ulimit -n`)."
        )

    def _warn(self, text: str, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(text, -_BETWEEN_WARNINGS) >= _BETWEEN_WARNINGS:
            self._warned_at[text] = now
            logger.warning(text, exc_info=exc_info)


class AcceptingThread(Generic[T]):
    """A thread that accepts connections until it is closed, and hands on those that may come in.

    Args:
        acceptor: What accepts.
        listeners: Its listeners, which are closed with it.
        on_connection: Called in the thread with what a handshake has returned; it is to return
            soon.
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
        """Stops to listen. Connections that were handed on stay."""
        self._is_closed = True
        self._acceptor.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for connection in self._acceptor.wait(_LONGEST_WAIT):
                    try:
                        self._on_connection(connection)
                    except Exception:  # no memory for a thread: the others are still served
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
        #: What the selector waits for; 0: it does not know of it yet.
        self.events = 0


def _default_limit() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LIMIT if most == resource.RLIM_INFINITY else max(4, min(_LIMIT, most // 8))
