"""The accept loop: what strangers can do to it, and what the system's limits can."""

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time

import pytest

from connections import CHANNEL, SECRET, ended, is_closed, open_files, served, until
from left_over import Since
from unison.net.acceptor import AcceptingThread, Acceptor
from unison.net.connecting import connect
from unison.net.handshake import server_handshake
from unison.net.listening import listen


def silent(server, count=1, source="127.0.0.1"):
    """Connections that say nothing, in the order in which they are accepted."""
    return [
        socket.create_connection(server.address, source_address=(source, 0)) for _ in range(count)
    ]


@contextlib.contextmanager
def closed_later(connections):
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def test_a_connection_that_says_nothing_has_no_thread():
    with served() as server:
        since = Since()
        with closed_later(silent(server, 20)):
            until(lambda: server.acceptor.pending == 20)
            assert since.threads() == []


def test_one_deadline_holds_for_the_whole_handshake():
    with served(seconds=0.5) as server, closed_later(silent(server)) as (slow,):
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not is_closed(slow):  # it says something all the time
                slow.send(b"u")
                time.sleep(0.05)
                assert time.monotonic() - began < 20
        until(lambda: server.acceptor.pending == 0)


def test_the_oldest_is_closed_when_there_are_too_many():
    with served(limit=3) as server, closed_later(silent(server, 4)) as connections:
        until(lambda: is_closed(connections[0]))
        assert [is_closed(each) for each in connections] == [True, False, False, False]


def test_a_stranger_with_many_connections_does_not_displace_those_of_other_machines():
    with served(limit=4) as server, closed_later(silent(server, 1, "127.0.0.2")) as (other,):
        until(lambda: server.acceptor.pending == 1)
        with closed_later(silent(server, 10)) as many:
            until(lambda: is_closed(many[0]))
            until(lambda: sum(map(is_closed, many)) == 7)
            assert not is_closed(other)


def test_a_worker_comes_in_while_a_stranger_holds_all_that_may_be_held():
    with served(limit=8) as server, closed_later(silent(server, 30)):
        server.connect().close()
        assert server.next().channel == CHANNEL


class Failing(socket.socket):
    """A listener that fails to accept, at first."""

    def __init__(self, *errors):
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self.errors = list(errors)

    def accept(self):
        if self.errors:
            number = self.errors.pop(0)
            raise MemoryError if number is None else OSError(number, os.strerror(number))
        return super().accept()


@pytest.mark.parametrize(
    "number",
    [
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ECONNABORTED,
        errno.EPROTO,
        None,
    ],
    ids=lambda number: errno.errorcode.get(number, "MemoryError"),
)
def test_it_goes_on_after_an_error(number):
    with served(listeners=[Failing(number, number, number)]) as server:
        server.connect().close()
        assert server.next().channel == CHANNEL


def test_where_there_are_no_descriptors_the_oldest_that_has_proved_nothing_gives_way():
    listener = Failing()
    with served(listeners=[listener]) as server, closed_later(silent(server, 2)) as (first, second):
        until(lambda: server.acceptor.pending == 2)
        listener.errors = [errno.EMFILE]
        server.connect().close()
        until(lambda: is_closed(first))
        assert not is_closed(second)


def test_a_full_process_is_warned_of_once(caplog):
    with served(listeners=[Failing(*[errno.EMFILE] * 5)]) as server:
        server.connect().close()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "Accepting connections is paused" in record.message
    assert "ulimit -n" in record.message


def test_a_listener_rests_without_using_the_processor():
    listener = Failing(*[errno.EMFILE] * 1000)
    acceptor = Acceptor([listener], lambda own: server_handshake(own, SECRET, [CHANNEL]))
    with contextlib.closing(acceptor), listener, socket.create_connection(listener.getsockname()):
        acceptor.wait(0.5)
        assert 990 < len(listener.errors) < 1000


STRAINED = """
import resource, socket, sys, threading
from connections import served
resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with served() as server:
    print(server.address[1], flush=True)
    sys.stdin.readline()
"""


def test_more_connections_than_the_process_may_have_files_do_not_make_it_deaf():
    process = subprocess.Popen(
        [sys.executable, "-c", STRAINED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    with process:
        try:
            address = ("127.0.0.1", int(process.stdout.readline()))
            with contextlib.ExitStack() as flood:
                for _ in range(200):
                    with contextlib.suppress(OSError):
                        flood.enter_context(socket.create_connection(address, timeout=1.0))
                retried_connect(address)
            retried_connect(address)
            _, errors = process.communicate("", timeout=60)
            assert "Traceback" not in errors
        finally:
            process.kill()


def retried_connect(address):
    def connected():
        with contextlib.suppress(OSError):
            connect(address, SECRET, CHANNEL, seconds=5.0).close()
            return True
        return False

    until(connected)


def test_a_mistake_in_a_handshake_ends_one_connection_only(caplog):
    mistakes = [ZeroDivisionError()]

    def handshake(own):
        if mistakes:
            own.close()
            raise mistakes.pop()
        return server_handshake(own, SECRET, [CHANNEL])

    def steps(own):
        return (yield from handshake(own))

    with served(handshake=steps) as server:
        with closed_later(silent(server)) as (first,):
            assert ended(first)
        server.connect().close()
        assert server.next().channel == CHANNEL
    assert "ZeroDivisionError" in caplog.text


def test_an_outer_loop_can_look_at_it_with_its_own_selector():
    listener = listen("127.0.0.1", 0)
    acceptor = Acceptor([listener], lambda own: server_handshake(own, SECRET, [CHANNEL]))
    with (
        listener,
        contextlib.closing(acceptor),
        selectors.DefaultSelector() as selector,
        socket.create_connection(listener.getsockname()),
    ):
        selector.register(acceptor, selectors.EVENT_READ)
        assert selector.select(20)
        assert acceptor.accept() == []
        assert acceptor.pending == 1


def test_a_thread_that_accepts_ends_when_it_is_closed_and_leaves_nothing():
    before = open_files()
    listener = listen("127.0.0.1", 0)
    acceptor = Acceptor([listener], lambda own: server_handshake(own, SECRET, [CHANNEL]))
    accepting = AcceptingThread(acceptor, [listener], lambda accepted: None, "unison-test")
    assert "unison-test" in [thread.name for thread in threading.enumerate()]
    accepting.close()
    assert "unison-test" not in [thread.name for thread in threading.enumerate()]
    assert not open_files() - before


def test_a_process_that_may_have_few_files_keeps_few_strangers():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
    try:
        with served() as server, closed_later(silent(server, 30)) as connections:
            until(lambda: sum(map(is_closed, connections)) == 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
