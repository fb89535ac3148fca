"""One request and its answer by HTTP/1.1, without a thread.

It is enough for a page, and for what asks for numbers once a second: requests without a body, one
for each connection, which the accept loop runs as it runs handshakes (`acceptor`). So connections
that ask for nothing, or do not read the answer, are bounded in number and time like all others.
"""

from __future__ import annotations

import http
import selectors
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from unison.net.handshake import Steps, sent
from unison.net.proof import RefusedError

#: A longer request is refused; of what comes after it, so much is read and dropped.
_MOST_BYTES = 1 << 14

#: How many lines a request may have.
_MOST_HEADERS = 100


class Request(NamedTuple):
    """What a client asks for.

    Attributes:
        method: "GET", ...
        path: The path, without the query.
        query: What the query says, by name; of a name that comes twice, the first.
        headers: The headers, by their names in small letters; of one that comes twice, the first.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Response(NamedTuple):
    """What it gets.

    Attributes:
        status: The status.
        body: The content.
        kind: Its type.
        when_sent: Called when all of it is on its way.
    """

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    when_sent: Callable[[], None] = lambda: None


def exchange(
    connection: socket.socket,
    respond: Callable[[Request], Response],
    headers: Mapping[str, str],
) -> Steps[None]:
    """Returns the steps of one request and its answer, after which the connection is closed.

    Args:
        connection: A connection that was just accepted.
        respond: Returns the answer. It is to return soon.
        headers: What every answer has as well.
    """
    try:
        connection.setblocking(False)
        head = yield from _head(connection)
        try:
            response = respond(parsed(head))
        except ValueError as error:
            response = Response(400, f"Expected a request of HTTP/1.1: {error}\n".encode())
        yield from sent(connection, _encoded(response, headers))
        response.when_sent()
        # To close it now would take from the client what it has not read yet, where something of
        # its request is still to be received.
        connection.shutdown(socket.SHUT_WR)
        yield from _dropped(connection)
    finally:
        connection.close()


def parsed(head: bytes) -> Request:
    r"""Returns what the head of a request says.

    Raises:
        ValueError: It is not one.

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


def _head(connection: socket.socket) -> Steps[bytes]:
    """Returns the lines of a request before its body."""
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


def _dropped(connection: socket.socket) -> Steps[None]:
    """Receives what is left, until the client closes the connection."""
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
