"""How processes reach JAX's coordination service: who may, and what stays when it is gone."""

import contextlib
import errno
import os
import pathlib
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.parse

import pytest

from connections import LIMIT, ended, until
from left_over import Since
from unison.net.acceptor import Acceptor
from unison.net.connecting import connect
from unison.net.handshake import server_handshake
from unison.net.listening import listen, listen_locally
from unison.net.runtime_folder import runtime_folder
from unison.net.secret import key
from unison.net.tls import TLS_VARIABLE
from unison.runtime.liveness import relay
from unison.runtime.liveness.relay import ClientRelay, ServiceRelay
from unison.runtime.rendezvous import CHANNEL, COORDINATION_CHANNEL, Entrance


@pytest.fixture(autouse=True)
def own_folder(monkeypatch):
    # Names of sockets are short, and pytest's folders have long ones.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield pathlib.Path(folder)


def entrance():
    listener = listen("127.0.0.1", 0)
    channels = [CHANNEL, COORDINATION_CHANNEL]
    return Entrance(listener, Acceptor([listener], lambda o: server_handshake(o, key(), channels)))


class Relays:
    """Both relays, in one process, and what stands for JAX's service and client."""

    def __init__(self, seconds=10.0):
        first = entrance()
        self.where = first.listener.getsockname()
        self.of_service = ServiceRelay(first, seconds)
        self.of_client = ClientRelay(self.where, seconds)
        self.path = urllib.parse.unquote(self.of_service.address.removeprefix("unix:"))
        self.name = self.of_client.address.removeprefix("unix-abstract:")
        self._ends = contextlib.ExitStack()

    def service(self):
        listener = self._ends.enter_context(listen_locally(self.path))
        listener.settimeout(LIMIT)
        return listener

    def client(self):
        client = self._ends.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(LIMIT)
        client.connect(f"\0{self.name}")
        return client

    def connected(self):
        """A client, and the service's end of its connection."""
        service = self.service()
        client = self.client()
        accepted = self._ends.enter_context(service.accept()[0])
        accepted.settimeout(LIMIT)
        return client, accepted

    def close(self):
        self.of_client.close()
        self.of_service.close()
        self._ends.close()


@pytest.fixture
def relays():
    made = Relays()
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize("encryption", ["off", "always"])
def test_what_jax_sends_reaches_the_service_and_back(relays, monkeypatch, encryption):
    monkeypatch.setenv(TLS_VARIABLE, encryption)
    client, service = relays.connected()
    client.sendall(b"question")
    assert service.recv(100) == b"question"
    service.sendall(b"answer")
    assert client.recv(100) == b"answer"


@pytest.mark.parametrize("encryption", ["off", "always"])
def test_much_is_passed_on_to_one_that_reads_slowly(relays, monkeypatch, encryption):
    monkeypatch.setenv(TLS_VARIABLE, encryption)
    client, service = relays.connected()
    data = os.urandom(5_000_000)
    for source, target in ((client, service), (service, client)):
        sending = threading.Thread(target=source.sendall, args=(data,))
        sending.start()
        received = bytearray()
        while len(received) < len(data):
            time.sleep(0.001)
            received += target.recv(1 << 17)
        sending.join(LIMIT)
        assert received == data


def test_the_client_stays_when_the_service_is_gone(relays):
    client, service = relays.connected()
    client.sendall(b"question")
    assert service.recv(100) == b"question"
    relays.of_service.close()
    assert service.recv(1) == b""
    service.close()
    client.settimeout(0.1)
    for _ in range(5):
        client.sendall(b"are you there?")
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_connection_to_the_service_ends_with_its_client(relays):
    client, service = relays.connected()
    client.sendall(b"!")
    client.close()
    assert service.recv(1) == b"!"
    assert service.recv(1) == b""


def test_a_service_that_comes_later_is_waited_for(relays):
    client = relays.client()
    client.sendall(b"early")
    time.sleep(0.3)
    accepted, _ = relays.service().accept()
    with accepted:
        accepted.settimeout(LIMIT)
        assert accepted.recv(100) == b"early"


def test_a_service_that_does_not_come_ends_the_client():
    relays = Relays(seconds=0.2)
    with contextlib.closing(relays):
        relays.of_service.close()
        assert ended(relays.client())


def test_a_connection_waits_where_the_process_has_no_file_for_the_service(relays, monkeypatch):
    errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(3)]

    def made(family):
        if errors:
            raise errors.pop()
        return socket.socket(family)

    service = relays.service()
    namespace = types.SimpleNamespace(socket=made, AF_UNIX=socket.AF_UNIX)
    monkeypatch.setattr(relay, "socket", namespace)
    client = relays.client()
    accepted, _ = service.accept()
    with accepted:
        accepted.settimeout(LIMIT)
        client.sendall(b"question")
        assert accepted.recv(100) == b"question"


def test_who_does_not_know_the_key_does_not_reach_the_service(relays):
    service = relays.service()
    with socket.create_connection(relays.where) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".ljust(200))
        assert ended(stranger)
    service.settimeout(0.2)
    with pytest.raises(TimeoutError):
        service.accept()


def test_who_comes_too_late_to_the_meeting_is_closed(relays):
    relays.service()
    with connect(relays.where, key(), CHANNEL, seconds=LIMIT) as late:
        assert ended(late)


def test_other_processes_of_the_user_do_not_reach_the_service_by_a_workers_relay(relays):
    service = relays.service()
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, relays.name], capture_output=True, check=True, timeout=60
    )
    assert done.stdout.strip() == b"closed"
    service.settimeout(0.2)
    with pytest.raises(TimeoutError):
        service.accept()


INTRUDER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
connection.settimeout(20)
print("closed" if not connection.recv(100) else "open")
"""


def test_a_relay_waits_for_its_client_for_longer_than_the_programs_sockets(relays):
    socket.setdefaulttimeout(0.2)
    try:
        client, service = relays.connected()
        for each in (client, service):
            each.settimeout(LIMIT)
        time.sleep(0.4)
        client.sendall(b"question")
        assert service.recv(100) == b"question"
        time.sleep(0.4)
        service.sendall(b"answer")
        assert client.recv(100) == b"answer"
    finally:
        socket.setdefaulttimeout(None)


def test_only_the_user_can_enter_the_folder_of_the_service(relays):
    folder = pathlib.Path(relays.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == runtime_folder()


def test_relays_leave_nothing_when_they_are_closed():
    since = Since()
    with contextlib.closing(Relays()) as relays:
        client, service = relays.connected()
        client.sendall(b"!")
        service.recv(1)
        client.close()
    until(lambda: not since.threads() and not since.descriptors())
    assert list(runtime_folder().iterdir()) == []


def test_what_killed_processes_have_left_is_removed_and_nothing_else():
    folder = runtime_folder()
    names = [f"unison-coordination-{name}" for name in ("left", "used", "young")]
    left, in_use, young = (folder / name for name in names)
    for each in (left, in_use, young):
        each.mkdir()
        listen_locally(str(each / "service")).close()
    (in_use / "service").unlink()
    with contextlib.closing(listen_locally(str(in_use / "service"))):
        long_ago = time.time() - 100
        for each in (left, in_use):
            os.utime(each, (long_ago, long_ago))
        with contextlib.closing(Relays()) as relays:
            own = pathlib.Path(relays.path).parent
            assert sorted(folder.iterdir()) == sorted([in_use, young, own])


def test_a_folder_with_a_long_name_is_not_used_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with contextlib.closing(Relays()) as relays:
        assert relays.path.startswith("/tmp/")
        relays.connected()
        folder = pathlib.Path(relays.path).parent
    assert not folder.exists()


def test_a_runtime_folder_that_another_user_has_made_does_not_end_the_job(own_folder):
    (own_folder / "unison").mkdir()
    (own_folder / "unison").chmod(0o755)
    with contextlib.closing(Relays()) as relays:
        folder = pathlib.Path(relays.path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == pathlib.Path(tempfile.gettempdir())
        relays.connected()
