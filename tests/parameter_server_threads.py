"""Clusters of workers and parameter servers that are threads of this process, and waiting."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from unison.parameter_server import ClusterCoordinator, ParameterServerStrategy, Server
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as sockets:
        made = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in made]


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Waits for something that other threads or processes do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@contextlib.contextmanager
def clusters() -> Iterator[Any]:
    """Yields a function that starts a cluster; all are ended after the block."""
    with contextlib.ExitStack() as ending:

        def start(
            workers: int = 1, servers: int = 1, partitioner: Any = None, **options: Any
        ) -> tuple[ParameterServerStrategy, ClusterCoordinator]:
            addresses = free_addresses(workers + servers)
            cluster = ClusterSpec({"worker": addresses[:workers], "ps": addresses[workers:]})
            for job, count in (("worker", workers), ("ps", servers)):
                for index in range(count):
                    ending.callback(Server(cluster, job, index).stop)
            strategy = ParameterServerStrategy(
                SimpleClusterResolver(cluster), partitioner, timeout_seconds=30, **options
            )
            coordinator = ClusterCoordinator(strategy)
            ending.callback(coordinator.end)
            return strategy, coordinator

        yield start
