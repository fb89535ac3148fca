"""`Collector`: serves the state of a job on the loopback address.

Clients must know the job's secret. Host names other than those of this machine's loopback address
are rejected, to prevent DNS rebinding by web pages.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Final, Self

from unison.monitoring import page, prometheus
from unison.monitoring.job import WatchedJob
from unison.net.addresses import LOOPBACK
from unison.net.http_exchange import Request, Response
from unison.net.http_server import HttpServer, bearer_token
from unison.net.proof import is_equal

#: Seconds for which a client counts as watching after a request, and that it has to learn how the
#: job has ended.
_WATCHES: Final = 3.0
_LAST_WORD: Final = 3.0


class Collector:
    """Serves the state of a job, as a context manager.

    Args:
        job: The state of the job.

    Attributes:
        address: The address at which it listens, as host:port.
        token: The secret for access to the job.

    Raises:
        OSError: It cannot listen.
    """

    def __init__(self, job: WatchedJob):
        self.job = job
        self.token = secrets.token_urlsafe(24)
        self._asked_at = -_WATCHES
        self._has_told_end = threading.Event()
        self._is_over = False
        headers = page.SECURITY_HEADERS
        self._server = HttpServer(LOOPBACK, 0, self._respond, headers, "unison-collector")
        self.address = self._server.address
        self._hosts = {self.address, f"localhost:{self.address.rpartition(':')[2]}"}

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def end(self, how: str) -> None:
        """Publishes how the job has ended; waits briefly for watching clients to receive it."""
        self.job.end(how)
        self._is_over = True
        if time.monotonic() - self._asked_at < _WATCHES:
            self._has_told_end.wait(_LAST_WORD)

    def _respond(self, request: Request) -> Response:
        """Answers requests that have the secret and this machine's host name; rejects others."""
        if request.method != "GET":
            return Response(501, b"There is GET only.\n")
        if request.headers.get("host", "") not in self._hosts:
            return Response(403, b"Ask for this machine's loopback address.\n")
        if not is_equal(bearer_token(request) or request.query.get("token", ""), self.token):
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
        """Returns the state of the job, to a watching client."""
        self._asked_at = time.monotonic()
        state = self.job.as_dict()

        def when_sent() -> None:
            if self._is_over and state["ended"] is not None:
                self._has_told_end.set()

        return Response(200, json.dumps(state).encode(), "application/json", when_sent)
