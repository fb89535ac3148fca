"""Where the processes of a contestant find each other: in TF_CONFIG, whoever they are."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

_VARIABLE = "TF_CONFIG"


class Cluster(NamedTuple):
    """The processes of a contestant, as one of them sees it.

    Attributes:
        addresses: HOST:PORT of each.
        rank: The index of this one.
    """

    addresses: Sequence[str]
    rank: int

    @property
    def size(self) -> int:
        return len(self.addresses)

    def host_and_port(self, rank: int) -> tuple[str, int]:
        host, port = self.addresses[rank].rsplit(":", 1)
        return host, int(port)

    def environment(self) -> dict[str, str]:
        """Returns what a process finds in its environment; one that is alone, nothing."""
        if self.size == 1:
            return {}
        task = {"type": "worker", "index": self.rank}
        return {_VARIABLE: json.dumps({"cluster": {"worker": self.addresses}, "task": task})}


def from_environment() -> Cluster:
    if _VARIABLE not in os.environ:
        return Cluster(["127.0.0.1:0"], 0)
    config = json.loads(os.environ[_VARIABLE])
    return Cluster(config["cluster"]["worker"], config["task"]["index"])


def free_addresses(count: int) -> list[str]:
    """Returns addresses of this machine that nobody uses now."""
    with contextlib.ExitStack() as open_sockets:
        # All are open at once, so that all ports differ.
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for server in servers:
            open_sockets.enter_context(server)
        return ["{}:{}".format(*server.getsockname()) for server in servers]
