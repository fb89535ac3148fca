"""What clients say to each listener of Unison, and how it is seen that one serves them."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from mutations import mutated_bytes, mutated_structure
from unison.data.service import connections as input_connections
from unison.net.array_messages import Connection
from unison.net.connecting import connect
from unison.net.lines import Line, encoded
from unison.net.secret import key
from unison.parameter_server import messages
from unison.runtime.elastic.meeting import Call, Meeting
from unison.runtime.elastic.protocol import MEMBERS_CHANNEL, REGISTER_CHANNEL
from unison.runtime.launching import node_registrations, record_transfer
from unison.runtime.process_group import software
from unison.runtime.rendezvous import CHANNEL, COORDINATION_CHANNEL, Place, meet, registered

PROGRAM = Path(__file__).with_name("listeners_program.py")

#: Seconds in which a listener has to serve a rightful client.
PATIENCE = 2.0


class Running(NamedTuple):
    """A process with all listeners.

    Attributes:
        process: The process.
        errors: The file with its standard error.
        listeners: Where each listens.
        token: The secret of its elastic job.
        page: The token of its page.
    """

    process: subprocess.Popen[str]
    errors: IO[str]
    listeners: dict[str, str]
    token: str
    page: str

    def ask(self, question: str) -> str:
        """Returns the process's answer to a line of its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def printed(self) -> str:
        """Returns its standard error."""
        self.errors.seek(0)
        return self.errors.read()

    def failure(self, name: str) -> BaseException | None:
        """Returns why a listener serves no rightful client, which may retry, as clients do."""
        failure: BaseException | None = None
        for _ in range(3):
            try:
                LISTENERS[name].is_served(self, self.listeners[name])
                return None
            except Exception as error:
                failure = error
                assert self.process.poll() is None, self.printed()
        return failure


@contextlib.contextmanager
def running_listeners() -> Iterator[Running]:
    """Starts a process with all listeners, and ends it."""
    folders = [str(PROGRAM.parent), str(PROGRAM.parents[1] / "src")]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdin is not None
        stack.callback(process.stdout.close)
        stack.callback(process.stdin.close)
        yield Running(process, errors, **json.loads(process.stdout.readline()))


class Listener(NamedTuple):
    """How a listener is spoken to.

    Attributes:
        is_served: Looks whether a rightful client is served; it raises where it is not.
        channel: What connections are for; empty where nothing is proved.
        messages: Returns right messages, as they are sent one after the other.
        mutated: Returns one of these with something in its structure changed.
        encode: Returns the bytes of one.
        about: What is said of a connection with the proof.
        uses_token: Whether the secret is that of the elastic job.
        is_encrypted: Whether TLS is spoken.
    """

    is_served: Callable[[Running, str], Any]
    channel: bytes = b""
    messages: Callable[[random.Random], list[Any]] = lambda rng: []
    mutated: Callable[[random.Random, Any], Any] | None = None
    encode: Callable[[Any], bytes] = bytes
    about: bytes = b""
    uses_token: bool = False
    is_encrypted: bool = True


def where(address: str) -> Any:
    """An address as sockets take it."""
    if address.startswith("\0"):
        return address
    host, _, port = address.rpartition(":")
    return host, int(port)


def _line(message: Any) -> bytes:
    try:
        return encoded(message)
    except (ValueError, RecursionError):  # more nesting than can be written
        return b"[" * 1000 + b"\n"


class _Frame(NamedTuple):
    """A message of parameter servers: what describes it, and the bytes of its arrays."""

    header: Any
    arrays: bytes = b""

    def mutated(self, rng: random.Random) -> _Frame:
        return self._replace(header=mutated_structure(rng, self.header))

    def encoded(self) -> bytes:
        try:
            text = json.dumps(self.header).encode()
        except (ValueError, RecursionError):
            text = b"[" * 1000
        return struct.pack("<Ii", len(text), -1) + text + self.arrays


def _served_server(running: Running, address: str) -> None:
    connection = messages.connect(address, PATIENCE, "the server", role="pulse")
    with contextlib.closing(connection):
        assert connection.ask("ping").kind == "alive"


def _hello(**about: Any) -> _Frame:
    versions = {name: importlib.metadata.version(name) for name in ("unison", "jax")}
    return _Frame(["hello", {"has_64_bits": False, **versions, **about}, []])


def _frames(rng: random.Random, hello: _Frame, requests: dict[str, Any]) -> list[_Frame]:
    """An introduction and some requests, each by its kind with its fields."""
    chosen = rng.sample(list(requests), rng.randrange(1, len(requests)))
    return [hello, *(_Frame([kind, requests[kind], []]) for kind in chosen)]


def _of_parameter_server(rng: random.Random) -> list[_Frame]:
    job = f"job {rng.randrange(3)}"
    requests = {
        "assign": {"keys": ["a"]},
        "read": {"keys": ["a"]},
        "pull": {"keys": ["a"], "rows": []},
        "push": {"closure": 1, "settled": 0, "updates": []},
        "hold": {"closure": 1, "settled": 0, "worker": 0, "updates": []},
        "commit": {"closure": 1, "settled": 0, "workers": [0]},
        "attach": {"store": "s", "servers": 1, "index": 0, "rights": "update"},
        "enter": {"store": "s", "variable": "a", "bounds": [0, 3]},
        "created": {"store": "s", "variable": "a"},
        "drop": {"store": "s"},
        "status": {},
        "forget": {"keys": ["a"]},
    }
    hello = _hello(role=rng.choice(["worker", "coordinator"]), job=job)
    _, *others = _frames(rng, hello, requests)
    begin = _Frame(["begin", {"job": job, "is_new": rng.random() < 0.5}, []])
    values = struct.pack("<3f", 1, 2, 3).ljust(64, b"\0")
    create = _Frame(["create", {"keys": ["a"]}, [["float32", [3]]]], values)
    return [hello, begin, create, *others]


def _of_worker(rng: random.Random) -> list[_Frame]:
    if rng.random() < 0.5:
        return [_hello(role="pulse"), *[_Frame(["ping", {"wants_report": True}, []])] * 3]
    about = {"role": "coordinator", "job": "j", "worker": 0, "servers": [], "patience": 0.1}
    requests = {
        "run": {"function": 0, "iterators": [], "is_step": False},
        "dataset": {"iterator": 0},
        "streamed dataset": {"iterator": 0},
        "program": {"function": 0},
        "next": {"iterator": 0},
        "goodbye": {},
    }
    return _frames(rng, _hello(**about), requests)


_SPEC = {
    "dataset": "d",
    "description": "Range",
    "policy": 1,
    "num_consumers": None,
    "is_shared": False,
}


def _of_input_dispatcher(rng: random.Random) -> list[_Frame]:
    about = {
        "description": "Range",
        "signature": {},
        "cardinality": 3,
        "split_sizes": [3],
        "split_error": "",
    }
    payload = rng.randbytes(64)
    register = _Frame(["register", {"about": about, "id": "d"}, [["uint8", [64]]]], payload)
    rows = {"source": 0, "repetition": 0, "most": 1, "worker": "w", "request": 1}
    requests = {
        "describe": {"id": "d"},
        "payload": {"id": "d"},
        "join": {"consumer": "c", "job": "j", "index": 0, "spec": _SPEC},
        "read": {"iteration": 0, "consumer": "c", "version": -1, "seconds": 0},
        "split": {"iteration": 0, **rows},
        "round": {"iteration": 0, "round": 3},
        "work": {
            "worker": "w",
            "address": "127.0.0.1:1",
            "number": None,
            "ended": [0],
            "version": -1,
            "seconds": 0,
        },
        "leave": {"worker": "w"},
        "release": {"iteration": 0, "consumer": "c"},
    }
    chosen = rng.sample(list(requests), rng.randrange(1, len(requests)))
    return [register, *(_Frame([kind, requests[kind], []]) for kind in chosen)]


def _of_input_worker(rng: random.Random) -> list[_Frame]:
    request = {"worker": "w", "iteration": 0, "most": 0, "consumer": -1, "round": -1, "trainer": ""}
    return [_Frame(["take", request, []])] * rng.randrange(1, 4)


def _served_input(kind: str, fields: dict[str, Any], answer: str) -> Callable[[Running, str], None]:
    def is_served(running: Running, address: str) -> None:
        channel = input_connections.CHANNEL
        connection = Connection(connect(where(address), key(), channel, seconds=PATIENCE), key())
        with contextlib.closing(connection):
            connection.send(kind, **fields)
            assert connection.wait(PATIENCE)
            assert connection.receive().kind == answer

    return is_served


def _of_register(rng: random.Random) -> list[Any]:
    name = f"worker {rng.randrange(3)}"
    hello = {
        "is": "hello",
        "id": f"id {rng.randrange(5)}",
        "name": name,
        "host": "here",
        "address": "127.0.0.1:1",
        "replicas": 1,
        "slot": rng.choice([None, 0, 1]),
        "software": {"unison": "1"},
    }
    others = [
        {"is": "ready", "view": 0, "step": None, "formed": 0, "is_open": True},
        {"is": "formed", "view": 1},
        {"is": "suspect", "view": 1, "accused": ["id 1"], "about": "it is gone"},
        {"is": "open", "is_open": True},
        {"is": "beat", "step": 1, "doing": "trains", "view": 1, "begun": 3},
        {"is": "stack", "stack": "here"},
        {"is": "report", "told": {"steps": 3, "marks": [[1, 2.0, False]]}},
        {"is": "leaving"},
        {"is": "failed", "about": "ValueError"},
        {"is": "done"},
    ]
    return [hello, *rng.sample(others, rng.randrange(len(others)))]


def _served_register(running: Running, address: str) -> None:
    hello = {
        "is": "hello",
        "id": os.urandom(8).hex(),
        "name": "rightful",
        "host": "here",
        "address": "127.0.0.1:1",
        "replicas": 1,
        "slot": None,
        "software": {"unison": "1"},
    }
    stream = connect(where(address), running.token.encode(), REGISTER_CHANNEL, seconds=PATIENCE)
    line = Line(stream)
    with contextlib.closing(line):
        line.send(hello)
        line.send({"is": "beat", "step": 0, "doing": "waits", "view": 0, "begun": 0})
        last = time.monotonic() + PATIENCE
        while not line.receive():
            assert line.is_open
            assert time.monotonic() < last
            time.sleep(0.002)
        line.send({"is": "leaving"})


def _of_meeting(rng: random.Random) -> list[Any]:
    said = {"from": 1}
    others = [
        {"is": "beat", "count": 1, "mark": "", "doing": "", "seconds": 0.1, **said},
        {"is": "left", "count": 1, "mark": "", **said},
        {"is": "failed", "error": "ValueError", **said},
        {"is": "operation", "number": 1, "text": "run", **said},
        {"is": "finding", "kind": "died", "worker": 1, "by": 0, "about": "", **said},
        {"is": "where", "worker": 1, **said},
        {"is": "stack", "stack": "here", **said},
        {"is": "report", "told": "{}", **said},
    ]
    return [{"index": 1, "about": {}}, *rng.sample(others, rng.randrange(len(others)))]


def _served_meeting(running: Running, address: str) -> None:
    met = meet(address, Place(1, ["worker 0", "worker 1"]), {}, PATIENCE)
    for line in met.lines.values():
        line.close()


def _of_machines(rng: random.Random) -> list[Any]:
    about = {"nnodes": "2"} | software()
    return [{"workers": ["127.0.0.1:1"] * rng.randrange(1, 4), "about": about}]


def _served_machines(running: Running, address: str) -> None:
    (said,) = _of_machines(random.Random(0))
    found = registered(
        where(address), key(), node_registrations.CHANNEL, said, time.monotonic() + PATIENCE
    )
    assert isinstance(found, tuple), found
    line, answer = found
    line.close()
    assert len(answer["workers"]) == 2


def _of_records(rng: random.Random) -> list[Any]:
    """A copy of a record, with the bytes of its header and data; or a question for one."""
    if rng.random() < 0.2:
        return [{"is": "fetch", "worker": 0, "step": 5, "total": 2}]
    data = rng.randbytes(rng.randrange(1, 1000))
    return [
        {"is": "copy", "run": "fuzzed", "workers": [0, 1]},
        {"is": "record", "worker": 0, "step": 5, "size": len(data), "header": 2},
        b"{}" + struct.pack("<I", len(data)) + data + struct.pack("<I", 0),
        {"is": "end", "checksum": zlib.crc32(data, zlib.crc32(b"{}"))},
    ]


def _mutated_part(rng: random.Random, part: Any) -> Any:
    return mutated_bytes(rng, part) if isinstance(part, bytes) else mutated_structure(rng, part)


def _part(part: Any) -> bytes:
    if isinstance(part, bytes):
        return part
    line = _line(part)
    return struct.pack("<I", len(line)) + line


def _served_records(running: Running, address: str) -> None:
    stream = connect(where(address), key(), record_transfer.CHANNEL, seconds=PATIENCE)
    with contextlib.closing(record_transfer.RecordConnection(stream)) as connection:
        connection.send({"is": "fetch", "worker": 1, "step": 5, "total": 2})
        assert connection.receive(PATIENCE) == {"is": "missing"}


def _served_coordination(running: Running, address: str) -> None:
    with connect(where(address), key(), COORDINATION_CHANNEL, seconds=PATIENCE) as client:
        client.settimeout(PATIENCE)
        client.sendall(b"question")
        assert client.recv(100) == b"question"


def _served_relay(running: Running, address: str) -> None:
    assert running.ask("relay") == "served"


def _served_members(running: Running, address: str) -> None:
    found = where(address)
    meeting = Meeting(running.token, PATIENCE, lambda: None)
    meeting.connect(
        Call(7, 1, 0, 0), found.encode() if isinstance(found, str) else found, "the member"
    ).close()


def _served_monitor(running: Running, address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", f"/state.json?token={running.page}")
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["workers"]


def _served_metrics(running: Running, address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    with contextlib.closing(connection):
        bearer = {"Authorization": f"Bearer {running.token}"}
        connection.request("GET", "/metrics", headers=bearer)
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"unison_worker_up" in answer.read()


def _of_monitor(rng: random.Random) -> list[Any]:
    path = rng.choice(["/", "/state.json", "/metrics", "/../x", "http://[", "/?token=%ff"])
    method = rng.choice(["GET", "POST", "PRI", ""])
    length = rng.choice(["", "Content-Length: 99999999999\r\n", "A: b\r\n" * 200])
    return [f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n".encode()]


def _serving_input(
    said: Callable[[random.Random], list[_Frame]], kind: str, fields: dict[str, Any], answer: str
) -> Listener:
    return Listener(
        _served_input(kind, fields, answer),
        input_connections.CHANNEL,
        said,
        lambda rng, frame: frame.mutated(rng),
        lambda frame: frame.encoded(),
    )


def _serving(said: Callable[[random.Random], list[_Frame]]) -> Listener:
    return Listener(
        _served_server,
        messages.CHANNEL,
        said,
        lambda rng, frame: frame.mutated(rng),
        lambda frame: frame.encoded(),
    )


_CALL = struct.pack(">QIIB", 7, 1, 0, 0)
_MEMBERS = Listener(
    _served_members,
    MEMBERS_CHANNEL,
    lambda rng: [rng.randbytes(rng.randrange(1, 200))],
    about=_CALL,
    uses_token=True,
    is_encrypted=False,
)
_BYTES: Callable[[random.Random], list[Any]] = lambda rng: [rng.randbytes(300)]  # noqa: E731

LISTENERS = {
    "parameter server": _serving(_of_parameter_server),
    "worker": _serving(_of_worker),
    "input dispatcher": _serving_input(
        _of_input_dispatcher, "describe", {"id": "unknown"}, "error"
    ),
    "input worker": _serving_input(
        _of_input_worker,
        "take",
        {"worker": "w", "iteration": -1, "most": 0, "consumer": -1, "round": -1, "trainer": ""},
        "later",
    ),
    "register": Listener(
        _served_register, REGISTER_CHANNEL, _of_register, mutated_structure, _line, uses_token=True
    ),
    "meeting": Listener(_served_meeting, CHANNEL, _of_meeting, mutated_structure, _line),
    "machines": Listener(
        _served_machines, node_registrations.CHANNEL, _of_machines, mutated_structure, _line
    ),
    "records": Listener(
        _served_records, record_transfer.CHANNEL, _of_records, _mutated_part, _part
    ),
    "coordination": Listener(_served_coordination, COORDINATION_CHANNEL, _BYTES),
    "relay": Listener(_served_relay, messages=_BYTES, is_encrypted=False),
    "members": _MEMBERS,
    "members on this machine": _MEMBERS,
    "monitor": Listener(_served_monitor, messages=_of_monitor, is_encrypted=False),
    "metrics": Listener(_served_metrics, messages=_of_monitor, is_encrypted=False),
}
