"""A process with every listener of Unison, for `listener_fuzzing`.

It prints where they listen as one line of JSON, then serves until its input ends. Each line of the
input is a question, which it answers with a line:

- "relay" names a listener that only this process may connect to: it connects, and the answer is
  "served" or "not served".
- "fail ENOMEM 3" makes the next three attempts to accept a connection fail, and "left" asks for how
  many of these there have not been: the answer is their number.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import urllib.parse

from unison.data.service import DispatchServer, WorkerConfig
from unison.data.service.worker import InputWorker
from unison.errors import OpError
from unison.monitoring.collector import Collector
from unison.monitoring.job import WatchedJob
from unison.monitoring.metrics_endpoint import MetricsEndpoint, MetricsPlace
from unison.net.acceptor import Acceptor
from unison.net.addresses import joined_address
from unison.net.handshake import server_handshake
from unison.net.listening import listen, listen_locally
from unison.net.secret import key
from unison.parameter_server import Server
from unison.runtime.cluster import ClusterSpec
from unison.runtime.elastic.meeting import Call, Meeting
from unison.runtime.elastic.register import Register
from unison.runtime.host_memory import HostMemory
from unison.runtime.launching import cluster_on_this_machine, holdings, record_transfer
from unison.runtime.launching.nodes import meet_nodes
from unison.runtime.launching.partners import Partners
from unison.runtime.liveness.failure_detector import Watch
from unison.runtime.liveness.relay import ClientRelay, ServiceRelay
from unison.runtime.liveness.star import Star
from unison.runtime.rendezvous import CHANNEL, COORDINATION_CHANNEL, Entrance, Place, meet

#: Seconds that nothing here takes.
FOREVER = 1e6

NAMES = ["worker 0", "worker 1"]
CALL = Call(7, 1, 0, 0)


def in_thread(target, *args):
    threading.Thread(target=target, args=args, name="fuzzed", daemon=True).start()


def servers():
    """A worker and a parameter server."""
    first, second = cluster_on_this_machine(2).job_tasks("worker")
    cluster = ClusterSpec({"worker": [first], "ps": [second]})
    kept = [Server(cluster, "worker", 0), Server(cluster, "ps", 0)]
    return {"worker": first, "parameter server": second}, kept


def input_service():
    """A dispatcher of an input service, and a worker of another one, which has nothing to do."""
    dispatcher, other = DispatchServer(), DispatchServer()
    worker = InputWorker(WorkerConfig(other.target.split("://")[1]), "w")
    worker.wait_until_registered(20)
    found = {"input dispatcher": dispatcher.target.split("://")[1], "input worker": worker.address}
    return found, [worker, other, dispatcher]


def register(token):
    """A register, which is replaced by a new one when its job has ended."""

    def made(port=0):
        return Register(
            1,
            3,
            port=port,
            token=token,
            slots=1,
            heartbeat_timeout=2.0,
            wait=FOREVER,
            start_timeout=FOREVER,
            on_event=lambda event: None,
            on_report=lambda name, told: None,
        )

    first = made()
    port = int(first.address.rpartition(":")[2])

    def replace(own):
        while True:
            own.wait(FOREVER)
            own.close()
            while True:
                with contextlib.suppress(OSError):
                    own = made(port)
                    break
                time.sleep(0.01)

    in_thread(replace, first)
    return first.address


def meeting():
    """The first of two processes that come together; then it hears what the other one says."""
    address = cluster_on_this_machine(1).task_address("worker", 0)

    def hear(star):
        watch = Watch(NAMES, 0, FOREVER, time.monotonic())
        while star.connected:
            for worker, message in star.hear(1.0):
                watch.hear(worker, message, time.monotonic())
                watch.look(0, "nothing", time.monotonic())
        star.close()

    def come_together():
        while True:
            with contextlib.suppress(OSError):
                met = meet(address, Place(0, NAMES), {}, FOREVER)
                met.entrance.close()
                in_thread(hear, Star(0, met.lines))

    in_thread(come_together)
    return address


def machines():
    """The first of two machines of a job; when both have met, it waits for another one."""
    address = cluster_on_this_machine(1).task_address("worker", 0)

    def come_together():
        while True:
            with contextlib.suppress(OSError, OpError):
                meet_nodes(2, address, 1, {}, FOREVER)

    in_thread(come_together)
    return address


def records(memory):
    """The second of two machines, which keeps copies of the first one's records."""
    # Sizes at random are refused from here on.
    record_transfer.memory_left = lambda: (1 << 24, "the test")
    own = Partners(memory)
    at = own.announce("127.0.0.1").at
    nobody = holdings.Holding("127.0.0.1:1", None, 0, {})
    found = [nobody, holdings.Holding(at, None, 0, {})]
    own.begin(holdings.Meeting("fuzzed", 1, [1, 1], found))
    [copies] = own._held.of([0], spare=[])
    for step in (0, 1):  # what is made once is made by now
        copies.begin(1 << 12)
        copies.commit(step, None)
    return at, own


def relays():
    """The way to JAX's coordination service, in whose place something sends back what it gets."""
    listener = listen("127.0.0.1", 0)
    channels = [CHANNEL, COORDINATION_CHANNEL]
    entrance = Entrance(
        listener, Acceptor([listener], lambda own: server_handshake(own, key(), channels))
    )
    of_service = ServiceRelay(entrance, FOREVER)
    where = listener.getsockname()
    of_client = ClientRelay(where, FOREVER)
    path = urllib.parse.unquote(of_service.address.removeprefix("unix:"))
    service = listen_locally(path)

    def send_back(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve():
        while True:
            with contextlib.suppress(OSError):  # it has no file for one
                in_thread(send_back, service.accept()[0])

    in_thread(serve)
    name = "\0" + of_client.address.removeprefix("unix-abstract:")
    return joined_address(*where), name, (of_service, of_client)


def members(token):
    """A member of a view, to whom another one connects again and again."""
    listener = listen("127.0.0.1", 0)
    name = f"\0unison-fuzzed-{secrets.token_hex(8)}"
    local = listen_locally(name)

    def accept(own):
        while True:
            with contextlib.suppress(OSError):  # the process has no file to begin with
                found = Meeting(token, FOREVER, lambda: None).accept(own, [CALL], str)
                for connection in found.values():
                    connection.close()

    in_thread(accept, listener)
    in_thread(accept, local)
    return joined_address(*listener.getsockname()), name


class Client:
    """This process's client, which has its next socket already: there may be no file for it."""

    def __init__(self):
        self._next = socket.socket(socket.AF_UNIX)

    def reaches_service(self, name):
        """Whether it reaches the service through its relay."""
        try:
            with self._next as client:
                client.settimeout(5)
                client.connect(name)
                client.sendall(b"question")
                return client.recv(100) == b"question"
        except OSError:
            return False
        finally:
            self._next = socket.socket(socket.AF_UNIX)


class FailingAccept:
    """`socket.accept`, some calls of which fail.

    Attributes:
        left: How many of the next calls fail.
        number: The error that they raise.
    """

    def __init__(self):
        self.left, self.number = 0, 0
        accept = socket.socket.accept

        def failing(listener):
            if self.left:
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number))
            return accept(listener)

        socket.socket.accept = failing


def answer(question, found, accepting, client):
    """Answers a line of the input."""
    match question.split():
        case ["fail", name, count]:
            accepting.number, accepting.left = getattr(errno, name), int(count)
            return count
        case ["left"]:
            return accepting.left
        case [name]:
            return "served" if client.reaches_service(found[name]) else "not served"


def main():
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    token = secrets.token_hex(16)
    found, kept = servers()
    of_input, input_kept = input_service()
    found |= of_input
    kept += input_kept
    found["register"] = register(token)
    found["meeting"] = meeting()
    found["machines"] = machines()
    found["coordination"], found["relay"], relays_kept = relays()
    found["members"], found["members on this machine"] = members(token)
    found["records"], of_records = records(HostMemory(1))
    job = WatchedJob("train.py", "workers", NAMES)
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    place = MetricsPlace("127.0.0.1", port, token)
    with Collector(job) as collector, MetricsEndpoint(job, place), of_records:
        found["monitor"] = collector.address
        found["metrics"] = f"127.0.0.1:{port}"
        about = {"listeners": found, "token": token, "page": collector.token}
        print(json.dumps(about), flush=True)
        accepting, client = FailingAccept(), Client()
        for line in sys.stdin:
            print(answer(line, found, accepting, client), flush=True)
    for each in relays_kept:
        each.close()
    for each in kept:
        each.stop()


if __name__ == "__main__":
    main()
