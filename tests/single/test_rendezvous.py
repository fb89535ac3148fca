"""Processes come together, or hear what is wrong. Here they are threads."""

import contextlib
import gc
import json
import os
import socket
import threading
import time

import pytest

from connections import LIMIT, ended, open_files
from unison.errors import UnauthenticatedError, UnavailableError
from unison.net.connecting import connect
from unison.net.lines import MOST_BYTES
from unison.net.secret import key
from unison.runtime import rendezvous
from unison.runtime.launching import cluster_on_this_machine
from unison.runtime.rendezvous import CHANNEL, COORDINATION_CHANNEL, Place, meet


@pytest.fixture
def address() -> str:
    return cluster_on_this_machine(1).task_address("worker", 0)


def where(address):
    host, port = address.split(":")
    return host, int(port)


@contextlib.contextmanager
def meeting(address, place, about=None, timeout=30.0):
    """A process that meets the others in a thread; yields what it gets in the end."""
    outcome = []

    def come():
        try:
            outcome.append(meet(address, place, about or {}, timeout))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    yield outcome
    thread.join(timeout + 20)
    assert not thread.is_alive()
    for met in outcome:
        if not isinstance(met, OSError):
            close(met)


def close(met):
    for line in met.lines.values():
        line.close()
    if met.entrance is not None:
        met.entrance.close()


def come_together(address, guests, timeout=30.0, count=None):
    """What each of the guests, given by index and what they are about, hears."""
    count = len(guests) if count is None else count
    names = [f"worker {index}" for index in range(count)]
    with contextlib.ExitStack() as stack:
        outcomes = [
            stack.enter_context(meeting(address, Place(index, names), about, timeout))
            for index, about in guests
        ]
    return [
        each.message if isinstance(each, UnavailableError) else "all is well"
        for (each,) in outcomes
    ]


def test_all_come(address):
    guests = [(index, {"jax": "1"}) for index in range(5)]
    assert come_together(address, guests) == ["all is well"] * 5


def test_who_is_missing_is_named_to_all_that_came(address):
    heard = come_together(address, [(0, {}), (2, {})], timeout=1.0, count=4)
    for message in heard:
        assert "Timed out waiting for workers: ['worker 1', 'worker 3']" in message


def test_two_that_come_as_one_are_named_to_all(address):
    heard = come_together(address, [(0, {}), (1, {}), (1, {})], count=3)
    for message in heard:
        assert "Duplicate registration for ['worker 1']" in message


def test_other_software_is_named(address):
    heard = come_together(address, [(0, {"jax": "1"}), (1, {"jax": "2"})])
    for message in heard:
        assert "worker 0 and worker 1 differ: {'jax': '1'} and {'jax': '2'}" in message


def test_a_first_process_that_does_not_listen_is_named(address):
    (message,) = come_together(address, [(1, {})], timeout=0.5, count=2)
    assert "worker 1 could not reach worker 0" in message
    assert address in message


def test_a_meeting_leaves_open_what_it_returns_and_nothing_else(address):
    gc.disable()  # what is forgotten would be closed some time
    try:
        before = open_files()
        for _ in range(3):
            assert come_together(address, [(0, {}), (1, {})]) == ["all is well"] * 2
            come_together(address, [(0, {}), (1, {}), (1, {})], count=3)
        assert not open_files() - before
    finally:
        gc.enable()


def test_a_port_in_use_is_named(address):
    with socket.create_server(where(address)):
        (message,) = come_together(address, [(0, {})], timeout=1.0, count=2)
    assert "worker 0 cannot listen at its address" in message


@pytest.mark.parametrize("address", ["host", "host:", ":", "host:port"])
def test_an_address_needs_host_and_port(address):
    with pytest.raises(UnavailableError, match="must be host:port"):
        meet(address, Place(0, ["worker 0", "worker 1"]), {}, 1.0)


def test_one_with_another_key_is_refused_at_once_and_named_to_the_first(address, monkeypatch):
    keys = threading.local()
    own = key()
    monkeypatch.setattr(rendezvous, "key", lambda: getattr(keys, "other", own))
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names), timeout=2.0) as outcome:
        keys.other = os.urandom(32)
        with pytest.raises(UnauthenticatedError, match=r"another key.*UNISON_KEY"):
            meet(address, Place(1, names), {}, 30.0)
    (error,) = outcome
    assert "The latest connection that failed: from 127.0.0.1: refused: wrong key" in error.message


# -- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"index": 1, "about": {}}\n', b"\x16\x03\x01"]
)
def test_strangers_are_passed_over(address, noise):
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)) as first, stranger(address) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(noise)
        with meeting(address, Place(1, names)) as second:
            pass
    assert [list(met.lines) for met in (*first, *second)] == [[1], [0]]


def test_strangers_that_say_nothing_keep_no_process_out(address):
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)) as first, contextlib.ExitStack() as flood:
        for _ in range(400):
            flood.enter_context(stranger(address))
        with meeting(address, Place(1, names)):
            pass
    assert list(first[0].lines) == [1]


@contextlib.contextmanager
def stranger(address):
    """A connection of somebody who proves nothing."""
    connection = listened_to(lambda: socket.create_connection(where(address), timeout=LIMIT))
    with connection:
        yield connection


def listened_to(connected):
    """What `connected` returns, as soon as somebody listens."""
    last = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return connected()
        assert time.monotonic() < last
        time.sleep(0.01)


# -- what processes of the job say -------------------------------------------------------------


def speak(address, said, channel=CHANNEL):
    """A connection that has proved to know the key, and said something."""
    stream = listened_to(lambda: connect(where(address), key(), channel, seconds=LIMIT))
    stream.settimeout(LIMIT)
    with contextlib.suppress(OSError):  # closed before all was said
        stream.sendall(said if isinstance(said, bytes) else json.dumps(said).encode() + b"\n")
    return stream


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 60_000 + b"\n",
        b'{"index":1e999, "about": {}}\n',
        b'{"index":9' + b"9" * 5000 + b"}\n",
        b'{"index":"1"}\n',
        b'{"index":true, "about": {}}\n',
        b'{"index":1.0, "about": {}}\n',
        b'{"index":1}\n',
        b'{"index":1, "about": 7}\n',
        b'{"index":-1, "about": {}}\n',
        b'{"index":99, "about": {}}\n',
        b'"index"\n',
        b"x" * (MOST_BYTES + 100_000),
    ],
    ids=lambda said: repr(said[:24]),
)
def test_what_is_no_registration_ends_the_connection(address, said):
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)) as first:
        with speak(address, said) as strange:
            assert ended(strange)
        with meeting(address, Place(1, names)):
            pass
    assert list(first[0].lines) == [1]


def test_the_coordination_service_is_not_reached_before_all_have_come(address):
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)):
        with speak(address, b"", COORDINATION_CHANNEL) as early:
            assert ended(early)
        with meeting(address, Place(1, names)):
            pass


def test_one_that_says_nothing_is_closed(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_SPEAK", 0.2)
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)):
        with speak(address, b"") as silent:
            assert ended(silent)
        with meeting(address, Place(1, names)):
            pass


def test_one_that_speaks_late_is_heard_at_once(address):
    place = Place(0, ["worker 0", "worker 1"])
    with meeting(address, place) as first, speak(address, b"") as late:
        time.sleep(0.3)
        late.sendall(b'{"index": 1, "about": {}}\n')
        assert late.recv(100) == b'{"complaint": null}\n'
    assert list(first[0].lines) == [1]


@pytest.mark.parametrize("missing", [["worker 1"], ["worker 1", "worker 3"]])
def test_one_that_gave_up_has_not_come(address, missing):
    names = sorted({"worker 0", "worker 1", "worker 2", *missing})
    with meeting(address, Place(0, names), timeout=1.5) as first:
        speak(address, {"index": 1, "about": {}}).close()
        time.sleep(0.3)
        with meeting(address, Place(2, names), timeout=1.5) as third:
            pass
    for error in (*first, *third):
        assert f"Timed out waiting for workers: {missing}." in error.message


def test_one_that_gave_up_may_come_again(address):
    names = ["worker 0", "worker 1", "worker 2"]
    with meeting(address, Place(0, names)) as first:
        said = {"index": 1, "about": {}}
        speak(address, said).close()
        time.sleep(0.3)
        with speak(address, said) as again, speak(address, said | {"index": 2}) as third:
            for guest in (again, third):
                assert guest.recv(100) == b'{"complaint": null}\n'
    assert sorted(first[0].lines) == [1, 2]


def test_what_comes_with_the_answer_is_not_lost(address):
    names = ["worker 0", "worker 1"]
    with meeting(address, Place(0, names)) as first, meeting(address, Place(1, names)) as second:
        while not first:
            time.sleep(0.001)
        first[0].lines[1].send({"is": "beat", "from": 0})
        while not second:
            time.sleep(0.001)
        messages = []
        last = time.monotonic() + LIMIT
        while not messages:
            messages += second[0].lines[0].receive()
            assert time.monotonic() < last
    assert messages == [{"is": "beat", "from": 0}]
