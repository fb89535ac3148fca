"""Both ends of connections, for the tests of `unison.net` and of who uses it."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from unison.net.acceptor import Acceptor
from unison.net.connecting import connect
from unison.net.handshake import Accepted, server_handshake
from unison.net.listening import listen

SECRET = b"s" * 32
CHANNEL = b"test"
#: Seconds after which a test has failed.
LIMIT = 20.0


def open_files() -> collections.Counter[tuple[str, int]]:
    """The files that this process has open, sockets among them, by the kernel's numbers.

    What has been left open is `open_files() - before`: tests before may still close theirs.
    """
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder that is listed is closed
            found[os.readlink(descriptor), descriptor.stat().st_ino] += 1
    return found


class Served:
    """A server that keeps the connections that it has accepted, in a thread."""

    def __init__(self, secret=SECRET, listeners=(), channels=(CHANNEL,), handshake=None, **options):
        self._own = contextlib.ExitStack()
        self.listeners = listeners or [listen("127.0.0.1", 0)]
        self.address = self.listeners[0].getsockname()
        self.accepted: list[Accepted] = []
        self.acceptor = Acceptor(
            self.listeners,
            handshake or (lambda own: server_handshake(own, secret, channels)),
            **options,
        )
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._is_closed:
            self.accepted += self.acceptor.wait(0.05)

    def next(self) -> Accepted:
        """The next connection, once it is there."""
        until(lambda: self.accepted)
        return self.accepted.pop(0)

    def connect(self, secret=SECRET, channel=CHANNEL, seconds=LIMIT, **options):
        return connect(self.address, secret, channel, seconds=seconds, **options)

    def close(self):
        self._is_closed = True
        self._thread.join(LIMIT)
        self.acceptor.close()
        for each in (*self.listeners, *(accepted.stream for accepted in self.accepted)):
            each.close()


@contextlib.contextmanager
def served(**options) -> Iterator[Served]:
    server = Served(**options)
    with contextlib.closing(server):
        yield server


def until(condition, seconds=LIMIT):
    """What `condition` returns, once it is true."""
    last = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < last
        time.sleep(0.005)
    return found


def ended(connection: socket.socket) -> bool:
    """Whether the other end closes a connection, within the limit."""
    connection.settimeout(LIMIT)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def is_closed(connection):
    """Whether the other end has closed a connection by now, which becomes non-blocking."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class Squatter:
    """A process of another user that has taken the name of a local socket."""

    def __init__(self, name):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SQUATTER, name[1:]],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline() == b"listens\n"

    def received(self):
        """What the first client has sent until it closed the connection."""
        return self._process.stdout.read()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


SQUATTER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
connection = listener.accept()[0]
connection.settimeout(20)
try:
    sys.stdout.buffer.write(connection.recv(1000))
except OSError:
    pass
"""
