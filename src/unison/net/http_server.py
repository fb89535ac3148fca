"""A server of small HTTP responses, in one thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Final, Self

from unison.net.acceptor import AcceptingThread, Acceptor
from unison.net.addresses import joined_address
from unison.net.handshake import Steps
from unison.net.http_exchange import Request, Response, exchange
from unison.net.listening import listen

#: The most simultaneous connections; each has one request.
_MOST_CONNECTIONS: Final = 32


class HttpServer:
    """Answers the requests to an address, as a context manager.

    Idle connections and requests that are refused use no threads, and few file descriptors.

    Args:
        host: The address of this machine at which it listens.
        port: The port; 0: a free one.
        respond: Returns the response. It must not block.
        headers: Headers of every response.
        name: The name of its thread.
        may_encrypt: Whether it speaks HTTPS, too, and requires it of clients on other machines.

    Attributes:
        address: The address at which it listens, as host:port.

    Raises:
        OSError: It cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        respond: Callable[[Request], Response],
        headers: Mapping[str, str],
        name: str,
        may_encrypt: bool = False,
    ):
        self._respond = respond
        self._headers = headers
        self._name = name
        self._may_encrypt = may_encrypt
        self._listener = listen(host, port)
        self.address = joined_address(host, self._listener.getsockname()[1])
        self._accepting: AcceptingThread[None] | None = None

    def __enter__(self) -> Self:
        acceptor = Acceptor([self._listener], self._exchange, limit=_MOST_CONNECTIONS)
        self._accepting = AcceptingThread(acceptor, [self._listener], lambda done: None, self._name)
        return self

    def __exit__(self, *error: object) -> None:
        if self._accepting is not None:
            self._accepting.close()

    def _exchange(self, connection: socket.socket) -> Steps[None]:
        return exchange(connection, self._respond, self._headers, self._may_encrypt)


def bearer_token(request: Request) -> str:
    """Returns the token of a request's header `Authorization: Bearer`; empty if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
