"""Sockets of a program that has set a default timeout, or made its own non-blocking."""

import os
import socket
import time

import pytest

from unison.data import Dataset
from unison.monitoring.process import SentBytes
from unison.net.listening import listen_with_local
from unison.runtime.launching.workers import ProcessWorker, Program
from unison.runtime.liveness.sockets import listening, shut_down
from unison.runtime.open_sockets import tcp_sockets

DEFAULT = 0.2


@pytest.fixture
def with_default_timeout():
    socket.setdefaulttimeout(DEFAULT)
    yield
    socket.setdefaulttimeout(None)


@pytest.fixture
def connection():
    """Both ends of one, which were made without a default timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with client, accepted:
        yield client, accepted


@pytest.mark.parametrize(
    "look",
    [
        lambda: list(tcp_sockets()),
        lambda: SentBytes().count(),
        listening,
        lambda: shut_down([("127.0.0.1", 1)]),
    ],
    ids=["tcp_sockets", "SentBytes", "listening", "shut_down"],
)
@pytest.mark.parametrize("default", [None, DEFAULT])
def test_who_looks_at_sockets_leaves_them_blocking_or_not_as_they_are(connection, look, default):
    blocking, non_blocking = connection
    non_blocking.setblocking(False)
    socket.setdefaulttimeout(default)
    try:
        look()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(blocking.fileno())
    assert not os.get_blocking(non_blocking.fileno())


def test_tcp_sockets_are_found_and_nothing_else(connection):
    open_before = len(os.listdir("/proc/self/fd"))
    pair = socket.socketpair()
    with pair[0], pair[1], socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        inodes = [os.fstat(own.fileno()).st_ino for own in tcp_sockets()]
        assert len(inodes) == len(set(inodes))
        assert {os.fstat(end.fileno()).st_ino for end in connection} <= set(inodes)
        others = {os.fstat(each.fileno()).st_ino for each in (*pair, datagrams)}
        assert not others & set(inodes)
    assert len(os.listdir("/proc/self/fd")) == open_before  # the copies are closed


@pytest.mark.usefixtures("with_default_timeout")
def test_a_worker_may_take_longer_to_answer_than_the_programs_sockets():
    program = f"""
import os, socket, time
connection = socket.socket(fileno=os.dup(0))
call = connection.recv(100)
time.sleep({2 * DEFAULT})
connection.sendall(call + b" and an answer")
"""
    worker = ProcessWorker(0, Program(["-c", program], {}, call=b"a call"), lambda *line: None)
    worker.close()
    assert worker.exit_code == 0, worker.last_lines()
    assert worker.result() == b"a call and an answer"


@pytest.mark.usefixtures("with_default_timeout")
def test_the_processes_of_a_map_wait_for_elements_for_longer_than_the_programs_sockets():
    values = []
    for x in Dataset.range(100).map(lambda x: x + 1, 1, executor="process"):
        values.append(int(x))
        if len(values) in (1, 10):
            time.sleep(2 * DEFAULT)  # they have nothing to do meanwhile
    assert values == list(range(1, 101))


@pytest.mark.usefixtures("with_default_timeout")
def test_a_server_waits_for_clients_for_longer_than_the_programs_sockets():
    listeners = listen_with_local("127.0.0.1:0")
    assert {each.gettimeout() for each in listeners} == {None}
    for each in listeners:
        each.close()
