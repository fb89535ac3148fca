"""`Collector`: serves what is known of a job, on the loopback address.

Who may see the job knows its secret. Names other than those of this machine's loopback are refused,
so that no page of the web can ask under a name of its own (DNS rebinding). Idle
connections and requests without the secret take no threads, and few file descriptors.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from typing import Final, Self

from unison.monitoring import page, prometheus
from unison.monitoring.job import WatchedJob
from unison.net.acceptor import AcceptingThread, Acceptor
from unison.net.addresses import LOOPBACK, joined_address
from unison.net.handshake import Steps
from unison.net.http_exchange import Request, Response, exchange
from unison.net.listening import listen
from unison.net.proof import is_equal

#: The most simultaneous connections; each has one request.
_MOST_CONNECTIONS: Final = 32

#: Seconds for which somebody counts as watching after having asked, and that they have to hear how
#: the job has ended.
_WATCHES: Final = 3.0
_LAST_WORD: Final = 3.0


class Collector:
    """Serves a job from the start of a `with` block to its end.

    Args:
        job: What is known of the job.

    Attributes:
        address: Where it listens, as host:port.
        token: What lets one see the job.

    Raises:
        OSError: It cannot listen.
    """

    def __init__(self, job: WatchedJob):
        self.job = job
        self.token = secrets.token_urlsafe(24)
        self._asked_at = -_WATCHES
        self._has_told_end = threading.Event()
        self._is_over = False
        self._listener = listen(LOOPBACK, 0)
        port = self._listener.getsockname()[1]
        self.address = joined_address(LOOPBACK, port)
        self._hosts = {self.address, f"localhost:{port}"}
        self._accepting: AcceptingThread[None] | None = None

    def __enter__(self) -> Self:
        acceptor = Acceptor([self._listener], self._exchange, limit=_MOST_CONNECTIONS)
        self._accepting = AcceptingThread(
            acceptor, [self._listener], lambda done: None, "unison-collector"
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self._accepting is not None:
            self._accepting.close()

    def end(self, how: str) -> None:
        """Lets those who watch see how the job has ended; waits for that, for a moment."""
        self.job.end(how)
        self._is_over = True
        if time.monotonic() - self._asked_at < _WATCHES:
            self._has_told_end.wait(_LAST_WORD)

    def _exchange(self, connection: socket.socket) -> Steps[None]:
        return exchange(connection, self._respond, page.SECURITY_HEADERS)

    def _respond(self, request: Request) -> Response:
        """Answers who knows the secret, and means this machine; others are told so."""
        if request.method != "GET":
            return Response(501, b"There is GET only.\n")
        if request.headers.get("host", "") not in self._hosts:
            return Response(403, b"Ask for this machine's loopback address.\n")
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not is_equal(shown or request.query.get("token", ""), self.token):
            return Response(403, b"The token is missing or wrong; `unison top --web` shows it.\n")
        if request.path == "/":
            return Response(200, page.html().encode(), "text/html; charset=utf-8")
        if request.path == "/state.json":
            return self._state()
        if request.path == "/metrics":
            text = prometheus.exposition(self.job.as_dict())
            return Response(200, text.encode(), prometheus.CONTENT_TYPE)
        return Response(404, b"There are /, /state.json and /metrics.\n")

    def _state(self) -> Response:
        """Returns what is known of the job, to somebody who watches it."""
        self._asked_at = time.monotonic()
        state = self.job.as_dict()

        def when_sent() -> None:
            if self._is_over and state["ended"] is not None:
                self._has_told_end.set()

        return Response(200, json.dumps(state).encode(), "application/json", when_sent)
