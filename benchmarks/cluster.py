"""Where the processes of a contestant find each other: in TF_CONFIG, whoever they are."""

from __future__ import annotations

import json
import os
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
