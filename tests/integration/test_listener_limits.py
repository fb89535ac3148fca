"""Every listener serves its clients when the system cannot accept, and beside idle connections."""

import contextlib
import os
import resource
import socket
import threading
import time

import pytest

from connections import is_closed, until
from listener_conversations import LISTENERS, running_listeners, where
from unison.net.acceptor import HANDSHAKE_SECONDS

pytestmark = pytest.mark.slow

#: The limit on open files of the process with the listeners, of which each may use an eighth for
#: connections without a proof.
FILES = 400
MOST = FILES // 8
IDLE = MOST + 20


@pytest.fixture(scope="module")
def listeners():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    started = running_listeners()
    try:
        running = started.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        stack.push(started)
        for name in LISTENERS:  # what is made once is made by now
            assert running.failure(name) is None
        yield running


def idle_connections(address, count):
    """Connections that never prove anything."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    made = [socket.socket(family) for _ in range(count)]
    for each in made:
        with contextlib.suppress(ConnectionRefusedError):  # a meeting that is over, in between
            each.connect(address)
    return made


def taken_files(process):
    """The file descriptors of a process, once what it is still closing is closed."""
    before = None
    while (taken := {int(number) for number in os.listdir(f"/proc/{process.pid}/fd")}) != before:
        before = taken
        time.sleep(0.05)
    return taken


@contextlib.contextmanager
def few_files(process, spare):
    """Leaves a process so many free file descriptors."""
    taken = taken_files(process)
    free = [number for number in range(FILES) if number not in taken]
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free[spare], hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, hard))


@pytest.mark.parametrize("number", ["ECONNABORTED", "ENOMEM"])
@pytest.mark.parametrize("name", LISTENERS)
def test_a_client_is_served_after_accepting_has_failed(listeners, name, number):
    listeners.ask(f"fail {number} 3")
    assert listeners.failure(name) is None
    assert listeners.ask("left") == "0"


@pytest.mark.parametrize("name", LISTENERS)
def test_a_client_is_served_when_the_process_has_files_again(listeners, name):
    failures = []
    client = threading.Thread(target=lambda: failures.append(listeners.failure(name)))
    with few_files(listeners.process, 0):
        client.start()
        time.sleep(0.3)
        assert client.is_alive(), "it was served without a file"
    client.join(20)
    assert failures == [None]


@pytest.mark.parametrize("spare", [1, 2, 3])
@pytest.mark.parametrize("name", LISTENERS)
def test_a_listener_outlives_that_a_connection_takes_the_last_file(listeners, name, spare):
    address = where(listeners.listeners[name])
    with few_files(listeners.process, spare):
        client = threading.Thread(target=listeners.failure, args=(name,))
        with contextlib.ExitStack() as idle:
            if name != "relay":
                client.start()
            for each in idle_connections(address, 2 * spare):
                idle.enter_context(each)
            time.sleep(0.2)
    if name != "relay":
        client.join(20)
    assert listeners.failure(name) is None


@pytest.mark.parametrize("name", LISTENERS)
def test_the_number_of_connections_without_a_proof_is_bounded(listeners, name):
    with contextlib.ExitStack() as stack:
        idle = idle_connections(where(listeners.listeners[name]), IDLE)
        for each in idle:
            stack.callback(each.close)
        # Before the timeout would close them.
        until(lambda: sum(map(is_closed, idle)) >= IDLE - MOST, HANDSHAKE_SECONDS / 2)
        assert listeners.failure(name) is None


@pytest.fixture(scope="module")
def seconds_open(listeners):
    """How long each listener leaves a connection open that never proves anything."""
    began, closed = time.monotonic(), {}
    with contextlib.ExitStack() as stack:
        opened = {}
        for name in LISTENERS:
            (connection,) = idle_connections(where(listeners.listeners[name]), 1)
            opened[name] = stack.enter_context(connection)
        while len(closed) < len(opened) and time.monotonic() < began + 2 * HANDSHAKE_SECONDS:
            for name, connection in opened.items():
                if name not in closed and is_closed(connection):
                    closed[name] = time.monotonic() - began
            time.sleep(0.05)
    return closed


@pytest.mark.parametrize("name", LISTENERS)
def test_a_connection_without_a_proof_is_closed_after_the_timeout(seconds_open, name):
    assert seconds_open[name] < HANDSHAKE_SECONDS + 3
