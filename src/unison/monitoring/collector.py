"""`Collector`: serves what is known of a job, on the loopback address.

Who may see the job knows its secret. Names other than those of this machine's loopback are refused,
so that no page of the web can ask under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import secrets
import socket
import threading
import time
import urllib.parse
from typing import Any, Final, Self

from unison.monitoring import page, prometheus
from unison.monitoring.job import WatchedJob
from unison.net.addresses import LOOPBACK

#: Seconds after which a connection is closed on which nothing is said.
_SILENCE: Final = 30.0

#: How many connections there may be.
_MOST_CONNECTIONS: Final = 1024

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
        self.asked_at = -_WATCHES
        self._has_told_end = threading.Event()
        self._is_over = False
        self._server = _Server(self)
        self.address = f"{LOOPBACK}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="unison-collector", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def end(self, how: str) -> None:
        """Lets those who watch see how the job has ended; waits for that, for a moment."""
        self.job.end(how)
        self._is_over = True
        if time.monotonic() - self.asked_at < _WATCHES:
            self._has_told_end.wait(_LAST_WORD)

    def state(self) -> dict[str, Any]:
        """Returns what is known of the job, to somebody who watches it."""
        self.asked_at = time.monotonic()
        return self.job.as_dict()

    def told(self, state: dict[str, Any]) -> None:
        """Takes note that somebody has got a state."""
        if self._is_over and state["ended"] is not None:
            self._has_told_end.set()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, collector: Collector):
        self.collector = collector
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__((LOOPBACK, 0), _Handler)
        port = self.server_address[1]
        self.hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"}

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed into the job's output of those who hang up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE
    #: An answer is one packet.
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        collector = self.server.collector
        place = urllib.parse.urlsplit(self.path)
        if not self._may_pass(collector.token, place.query):
            return
        if place.path == "/":
            self._answer(200, page.html().encode(), "text/html; charset=utf-8")
        elif place.path == "/state.json":
            state = collector.state()
            self._answer(200, json.dumps(state).encode(), "application/json")
            collector.told(state)
        elif place.path == "/metrics":
            text = prometheus.exposition(collector.job.as_dict())
            self._answer(200, text.encode(), prometheus.CONTENT_TYPE)
        else:
            self._answer(404, b"There are /, /state.json and /metrics.\n")

    def _may_pass(self, token: str, query: str) -> bool:
        """Whether who asks knows the secret, and means this machine; others are told so."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, b"Ask for this machine's loopback address.\n")
            return False
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not shown:
            shown = urllib.parse.parse_qs(query).get("token", [""])[0]
        if not hmac.compare_digest(shown.encode(), token.encode()):
            self._answer(403, b"The token is missing or wrong; `unison top --web` shows it.\n")
            return False
        return True

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in page.SECURITY_HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            self.wfile.flush()

    def version_string(self) -> str:
        return "unison"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed into the job's output."""
