"""One HTTP/1.1 request and its response, without a thread.

It serves a page and its polling: GET requests, one for each connection. The accept loop runs the
exchange as it runs handshakes (`acceptor`), so idle connections and clients that do not read the
response are bounded in number and time.
"""

from __future__ import annotations

import http
import selectors
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from unison.net import tls
from unison.net.handshake import Steps, first_byte, sent, tls_handshake
from unison.net.proof import RefusedError
from unison.net.tls import Stream

#: The longest head of a request, and how much is discarded after it.
_MOST_BYTES = 1 << 14

#: The most headers and query parameters of a request.
_MOST_HEADERS = 100


class Request(NamedTuple):
    """A request.

    Attributes:
        method: "GET", ...
        path: The path, without the query.
        query: The parameters of the query; the first value of each.
        headers: The headers by their names in lower case; the first value of each.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Response(NamedTuple):
    """A response.

    Attributes:
        status: The status code.
        body: The content.
        kind: The content type.
        when_sent: Called when all of the response has been sent.
    """

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    when_sent: Callable[[], None] = lambda: None


def exchange(
    connection: socket.socket,
    respond: Callable[[Request], Response],
    headers: Mapping[str, str],
    may_encrypt: bool = False,
) -> Steps[None]:
    """Returns the steps of one request and its response; then the connection is closed.

    Args:
        connection: A connection that was just accepted.
        respond: Returns the response. It must not block.
        headers: Headers of every response.
        may_encrypt: Whether HTTPS is spoken, too, and required of clients on other machines.
    """
    stream: Stream = connection
    try:
        connection.setblocking(False)
        if may_encrypt and (yield from first_byte(connection)) == tls.FIRST_BYTE:
            context = tls.server_identity().context
            stream = yield from tls_handshake(connection, context, is_server=True)
        head = yield from _head(stream)
        if may_encrypt and stream is connection and tls.is_encrypted(connection):
            response = Response(403, b"Ask by HTTPS: UNISON_TLS is on.\n")
        else:
            response = _response(head, respond)
        yield from sent(stream, _encoded(response, headers))
        response.when_sent()
        # Closing with unread data resets the connection, and the client would lose the response.
        stream.shutdown(socket.SHUT_WR)
        yield from _dropped(stream)
    finally:
        stream.close()


def _response(head: bytes, respond: Callable[[Request], Response]) -> Response:
    try:
        return respond(parsed(head))
    except ValueError as error:
        return Response(400, f"Expected a request of HTTP/1.1: {error}\n".encode())


def parsed(head: bytes) -> Request:
    r"""Parses the head of a request.

    Raises:
        ValueError: It is not a request of HTTP/1.

    Examples:
        >>> parsed(b"GET /state.json?token=a%20b HTTP/1.1\r\nHost: localhost\r\n\r\n")
        Request(method='GET', path='/state.json', query={'token': 'a b'},
                headers={'host': 'localhost'})
    """
    first, *lines = head.decode("latin-1").splitlines()
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version[:20])
    place = urllib.parse.urlsplit(target)
    query = urllib.parse.parse_qs(place.query, max_num_fields=_MOST_HEADERS)
    headers: dict[str, str] = {}
    if len(lines) > _MOST_HEADERS:
        raise ValueError("too many headers")
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return Request(method, place.path, {name: each[0] for name, each in query.items()}, headers)


def _head(connection: Stream) -> Steps[bytes]:
    """Receives the head of a request."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            piece = connection.recv(4096)
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not piece or len(data) > _MOST_BYTES:
            raise RefusedError("expected a request of HTTP")
        data += piece
    return data.partition(b"\r\n\r\n")[0]


def _dropped(connection: Stream) -> Steps[None]:
    """Discards what else the client sends, until it closes the connection."""
    count = 0
    while count < _MOST_BYTES:
        try:
            piece = connection.recv(4096)
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not piece:
            return
        count += len(piece)


def _encoded(response: Response, headers: Mapping[str, str]) -> bytes:
    shown = {
        "Content-Type": response.kind,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **headers,
    }
    lines = [f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in shown.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + response.body
