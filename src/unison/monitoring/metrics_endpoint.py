"""A job's metrics at an address of the user's choice, for Prometheus on another machine."""

from __future__ import annotations

import os
from typing import Final, NamedTuple, Self

from unison.monitoring import prometheus
from unison.monitoring.job import WatchedJob
from unison.net.addresses import host_and_port
from unison.net.http_exchange import Request, Response
from unison.net.http_server import HttpServer, bearer_token
from unison.net.proof import is_equal

#: The variables with the address, as host:port, and with the token that clients must send.
VARIABLE: Final = "UNISON_METRICS_ADDRESS"
TOKEN_VARIABLE: Final = "UNISON_METRICS_TOKEN"

#: Characters; a shorter token could be guessed.
_LEAST_TOKEN: Final = 16

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class MetricsPlace(NamedTuple):
    """The place of a job's metrics.

    Attributes:
        host: The address of this machine at which they are served.
        port: The port.
        token: The token that clients must send.
    """

    host: str
    port: int
    token: str


def place_of(address: str | None) -> MetricsPlace | None:
    """Returns the place that an address, or else the environment, names; None if neither does.

    Raises:
        ValueError: The address is not host:port, or there is no token.
    """
    address = address or os.environ.get(VARIABLE)
    if not address:
        return None
    where = host_and_port(address)
    if where is None:
        raise ValueError(
            "Expected HOST:PORT as the address of metrics, an address of this machine and a free "
            f"port. Received: {address!r}"
        )
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < _LEAST_TOKEN:
        raise ValueError(
            f"The metrics at {address} need a token of at least {_LEAST_TOKEN} characters in "
            f"{TOKEN_VARIABLE}, which Prometheus sends as `authorization: credentials`. "
            f"Received: {len(token)} characters"
        )
    return MetricsPlace(*where, token)


class MetricsEndpoint:
    """Serves `/metrics` of a job by HTTPS, and on this machine also by HTTP; a context manager.

    Args:
        job: The job.
        place: Where.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, job: WatchedJob, place: MetricsPlace):
        self._job = job
        self._token = place.token
        host, port, _ = place
        self._server = HttpServer(
            host, port, self._respond, _HEADERS, "unison-metrics", may_encrypt=True
        )

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def _respond(self, request: Request) -> Response:
        if not is_equal(bearer_token(request), self._token):
            return Response(403, f"Expected the bearer token of {TOKEN_VARIABLE}.\n".encode())
        if request.method != "GET":
            return Response(501, b"There is GET only.\n")
        if request.path != "/metrics":
            return Response(404, b"There is /metrics.\n")
        text = prometheus.exposition(self._job.as_dict())
        return Response(200, text.encode(), prometheus.CONTENT_TYPE)
