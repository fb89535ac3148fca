"""What encryption costs the connections between machines.

    python -m benchmarks.encryption [--rounds 9]

A process answers the messages of this one, over TCP on the loopback interface: that is the cost of
TLS where the network costs nothing. Contestants, in turn: `plain` (UNISON_TLS=off), and `tls`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Iterator

import numpy as np

from unison.net.acceptor import Acceptor
from unison.net.array_messages import Connection
from unison.net.connecting import connect
from unison.net.handshake import server_handshake
from unison.net.listening import listen
from unison.net.tls import TLS_VARIABLE
from unison.parameter_server.messages import CHANNEL

SECRET = b"a secret for the benchmark, only"

#: What a contestant sets UNISON_TLS to.
CONTESTANTS = {"plain": "off", "tls": "always"}

_ANSWERS = 2000
_MEBIBYTES = 64
_SECONDS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    address, port = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(port,), daemon=True)
    server.start()
    where = ("127.0.0.1", address.recv())
    array = np.ones(_MEBIBYTES << 18, np.float32)
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, chosen in CONTESTANTS.items():
            os.environ[TLS_VARIABLE] = chosen
            measured[name].append(_round(where, array))
    server.terminate()
    print("| | connecting, ms | an answer, µs | arrays, MiB/s |\n| --- | --- | --- | --- |")
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for name, rounds in measured.items()
    }
    for name, (connecting, answer, rate) in medians.items():
        print(f"| {name} | {connecting * 1e3:.2f} | {answer * 1e6:.1f} | {rate:.0f} |")
    ratios = [tls / plain for tls, plain in zip(medians["tls"], medians["plain"], strict=True)]
    print("| tls / plain | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def _round(where: tuple[str, int], array: np.ndarray) -> tuple[float, float, float]:
    """Returns the seconds to connect and to get an answer, and the MiB/s of arrays both ways."""
    begin = time.perf_counter()
    with _connected(where) as connection:
        connecting = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(_ANSWERS):
            connection.ask("echo")
        answer = (time.perf_counter() - begin) / _ANSWERS
        begin = time.perf_counter()
        for _ in range(4):
            connection.ask("echo", [array])
        rate = 4 * 2 * _MEBIBYTES / (time.perf_counter() - begin)
    return connecting, answer, rate


@contextlib.contextmanager
def _connected(where: tuple[str, int]) -> Iterator[Connection]:
    connection = Connection(connect(where, SECRET, CHANNEL, seconds=_SECONDS))
    try:
        yield connection
    finally:
        connection.close()


def _serve(port: multiprocessing.connection.Connection) -> None:
    listener = listen("127.0.0.1", 0)
    acceptor = Acceptor([listener], lambda own: server_handshake(own, SECRET, [CHANNEL]))
    port.send(listener.getsockname()[1])
    while True:
        for accepted in acceptor.wait(_SECONDS):
            connection = Connection(accepted.stream)
            with contextlib.suppress(Exception):  # the client closes it
                while True:
                    message = connection.receive()
                    connection.send("echo", message.arrays)
            connection.close()


if __name__ == "__main__":
    main()
