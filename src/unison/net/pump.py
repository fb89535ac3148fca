"""`Pump`: forwards bytes between pairs of connections, all in one thread."""

from __future__ import annotations

import collections
import contextlib
import logging
import selectors
import socket
import threading

from unison.net.tls import Stream
from unison.net.waker import Waker

logger = logging.getLogger("unison")

#: The size of a send buffer; while it is full, nothing is received from the other connection.
_MOST_WAITING = 1 << 18

#: The number of bytes received at a time: at least one TLS record, since selectors do not report
#: data in TLS' own buffer.
_RECEIVED_BYTES = 1 << 16

_SECONDS_TO_CLOSE = 5.0


class Pump:
    """Forwards what each connection of a pair receives to the other one.

    Args:
        name: The name of its thread.

    Examples:
        >>> client, here = socket.socketpair()
        >>> there, server = socket.socketpair()
        >>> pump = Pump("unison-pump")
        >>> pump.join(here, there)
        >>> client.sendall(b"question")
        >>> server.recv(100)
        b'question'
        >>> for each in (client, server, pump):
        ...     each.close()
    """

    def __init__(self, name: str):
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._new: collections.deque[_Pair] = collections.deque()
        self._pairs: set[_Pair] = set()
        self._is_finishing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, client: Stream, server: Stream, outlives_server: bool = False) -> None:
        """Forwards between two connections until one of them is closed; thread-safe.

        Args:
            client: The connection of a client; the pump takes ownership.
            server: The connection to its server; likewise.
            outlives_server: Whether the client's connection stays open after the server has closed
                its own. What the client sends then is discarded.
        """
        pair = _Pair(client, server, outlives_server)
        self._new.append(pair)
        self._waker.wake()
        if not self._thread.is_alive():
            pair.close()

    def finish(self) -> None:
        """Ends the thread as soon as all present connections are closed."""
        self._is_finishing = True
        self._waker.wake()

    def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        self._waker.wake()
        self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        try:
            while not self._is_closed and not (self._is_finishing and not self._pairs):
                for key, events in self._selector.select():
                    if isinstance(key.data, _End):
                        self._serve(key.data, events)
                    else:
                        self._waker.clear()
                while self._new:
                    pair = self._new.popleft()
                    self._pairs.add(pair)
                    for end in (pair.client, pair.server):
                        end.stream.setblocking(False)
                    self._attend(pair)
        except Exception:
            logger.exception("Forwarding between connections failed.")
        finally:
            self._pairs.update(self._new)
            for pair in self._pairs:
                pair.close()
            self._selector.close()
            self._waker.close()

    def _serve(self, end: _End, events: int) -> None:
        pair = end.pair
        if pair not in self._pairs:  # it was closed in this iteration
            return
        if events & selectors.EVENT_WRITE:
            end.flush()
        if events & selectors.EVENT_READ:
            end.receive()
        for each in (pair.client, pair.server):
            each.flush()
        self._attend(pair)

    def _attend(self, pair: _Pair) -> None:
        """Updates what the selector waits for, and closes a pair that has ended."""
        if pair.is_over:
            self._pairs.remove(pair)
            for end in (pair.client, pair.server):
                self._wait_for(end, 0)
            pair.close()
            return
        for end in (pair.client, pair.server):
            events = 0
            if not end.has_ended and len(end.other.waiting) < _MOST_WAITING:
                events |= selectors.EVENT_READ
            if end.waiting and not end.is_broken:
                events |= selectors.EVENT_WRITE
            self._wait_for(end, events)

    def _wait_for(self, end: _End, events: int) -> None:
        if events == end.events:
            return
        if not events:
            self._selector.unregister(end.stream)
        elif not end.events:
            self._selector.register(end.stream, events, end)
        else:
            self._selector.modify(end.stream, events, end)
        end.events = events


class _End:
    """One connection of a pair.

    Attributes:
        stream: The connection.
        pair: The pair.
        waiting: The send buffer.
        has_ended: Whether the peer has closed it, or shut down sending.
        is_broken: Whether sending has failed.
        events: The events that the selector waits for.
    """

    def __init__(self, stream: Stream, pair: _Pair):
        self.stream = stream
        self.pair = pair
        self.waiting = bytearray()
        self.has_ended = self.is_broken = False
        self.events = 0
        self._has_said_end = False

    @property
    def other(self) -> _End:
        """The other connection of the pair."""
        return self.pair.server if self is self.pair.client else self.pair.client

    def receive(self) -> None:
        try:
            received = self.stream.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.has_ended = True
        elif not self.other.is_broken:
            self.other.waiting += received

    def flush(self) -> None:
        if self.waiting and not self.is_broken:
            try:
                del self.waiting[: self.stream.send(self.waiting)]
            except BlockingIOError:
                return
            except OSError:
                self.is_broken = True
                self.waiting.clear()
        if self.other.has_ended and not self.waiting and not self._has_said_end:
            self._has_said_end = True
            if not self.pair.keeps_open(self):
                with contextlib.suppress(OSError):
                    self.stream.shutdown(socket.SHUT_WR)


class _Pair:
    """The connection of a client, and the one to its server."""

    def __init__(self, client: Stream, server: Stream, outlives_server: bool):
        self._outlives_server = outlives_server
        self.client = _End(client, self)
        self.server = _End(server, self)

    def close(self) -> None:
        self.client.stream.close()
        self.server.stream.close()

    def keeps_open(self, end: _End) -> bool:
        """Whether a connection stays open when the other one has ended."""
        return self._outlives_server and end is self.client

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to forward."""
        client, server = self.client, self.server
        if self._outlives_server and not client.has_ended:
            return client.is_broken
        if client.is_broken or server.is_broken:
            return True
        return client.has_ended and server.has_ended and not client.waiting and not server.waiting
