"""What no all-reduce can beat: the way of its bytes, by TCP and in memory."""

from __future__ import annotations

import select
import socket
import time

import numpy as np

from benchmarks import cluster
from benchmarks.contestants.all_reduce import AllReduce, array_of
from benchmarks.protocol import Contestant
from benchmarks.workloads import AllReduceWork

_SECONDS_TO_CONNECT = 30


def copy(work: AllReduceWork) -> Contestant:
    """One process copies the array."""
    array = array_of(work, 0)
    copied = np.empty_like(array)
    return AllReduce(work, lambda: np.copyto(copied, array), {"numpy": np.__version__})


def stream(work: AllReduceWork) -> Contestant:
    """Each process sends what a ring would to the next one, and receives as much."""
    own = cluster.from_environment()
    to_next, from_previous = _ring(own)
    array = array_of(work, own.rank)
    count = array.nbytes * 2 * (own.size - 1) // own.size
    outgoing = memoryview(np.resize(array, count // 4)).cast("B")
    incoming = memoryview(bytearray(count))

    def call() -> None:
        sent = received = 0
        while sent < count or received < count:
            wants = [to_next] if sent < count else []
            readable, writable, _ = select.select([from_previous], wants, [])
            if writable:
                sent += to_next.send(outgoing[sent:])
            if readable:
                received += from_previous.recv_into(incoming[received:])

    return AllReduce(work, call, {})


def _ring(own: cluster.Cluster) -> tuple[socket.socket, socket.socket]:
    """Returns the connections to the next process, and from the previous one."""
    with socket.create_server(own.host_and_port(own.rank)) as server:
        server.settimeout(_SECONDS_TO_CONNECT)
        to_next = _connected(own.host_and_port((own.rank + 1) % own.size))
        from_previous, _ = server.accept()
    for connection in (to_next, from_previous):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return to_next, from_previous


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _SECONDS_TO_CONNECT
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
