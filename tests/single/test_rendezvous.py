"""Processes come together, or hear what is wrong. Here they are threads."""

import contextlib
import socket
import threading
import time

import pytest

from unison.errors import UnavailableError
from unison.runtime.launching import cluster_on_this_machine
from unison.runtime.rendezvous import Place, meet


@pytest.fixture
def address() -> str:
    return cluster_on_this_machine(1).task_address("worker", 0)


def come_together(address, guests, timeout=30.0, count=None):
    """What each of the guests, given by index and what they are about, hears."""
    count = len(guests) if count is None else count
    names = [f"worker {index}" for index in range(count)]
    heard = [None] * len(guests)

    def come(number, index, about):
        try:
            meet(address, Place(index, names), about, timeout)
            heard[number] = "all is well"
        except UnavailableError as error:
            heard[number] = error.message

    threads = [
        threading.Thread(target=come, args=(number, *guest), daemon=True)
        for number, guest in enumerate(guests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 20)
        assert not thread.is_alive()
    return heard


def test_all_come(address):
    guests = [(index, {"jax": "1"}) for index in range(5)]
    assert come_together(address, guests) == ["all is well"] * 5


def test_who_is_missing_is_named_to_all_that_came(address):
    heard = come_together(address, [(0, {}), (2, {})], timeout=1.0, count=4)
    for message in heard:
        assert "These did not come: ['worker 1', 'worker 3']" in message


def test_two_that_come_as_one_are_named_to_all(address):
    heard = come_together(address, [(0, {}), (1, {}), (1, {})], count=3)
    for message in heard:
        assert "Two processes came as ['worker 1']" in message


def test_other_software_is_named(address):
    heard = come_together(address, [(0, {"jax": "1"}), (1, {"jax": "2"})])
    for message in heard:
        assert "worker 0 and worker 1 differ: {'jax': '1'} and {'jax': '2'}" in message


def test_a_first_process_that_does_not_listen_is_named(address):
    (message,) = come_together(address, [(1, {})], timeout=0.5, count=2)
    assert "worker 1 could not reach worker 0" in message
    assert address in message


def test_a_port_in_use_is_named(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        (message,) = come_together(address, [(0, {})], timeout=1.0, count=2)
    assert "worker 0 cannot listen at its address" in message


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"index": 99}\n'])
def test_strangers_are_passed_over(address, noise):
    host, port = address.split(":")
    connections = contextlib.ExitStack()

    def disturb():
        last = time.monotonic() + 30
        while time.monotonic() < last:
            with contextlib.suppress(OSError):
                connection = connections.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(noise)
                return

    stranger = threading.Thread(target=disturb, daemon=True)
    stranger.start()
    with connections:
        names = ["worker 0", "worker 1"]
        host_process = threading.Thread(
            target=meet, args=(address, Place(0, names), {}, 30.0), daemon=True
        )
        host_process.start()
        stranger.join(30)
        meet(address, Place(1, names), {}, 30.0)
        host_process.join(30)
        assert not host_process.is_alive()


@pytest.mark.parametrize("address", ["host", "host:", ":", "host:port"])
def test_an_address_needs_host_and_port(address):
    with pytest.raises(UnavailableError, match="must be host:port"):
        meet(address, Place(0, ["worker 0", "worker 1"]), {}, 1.0)


def test_one_that_speaks_late_is_heard_at_once(address):
    host, port = address.split(":")
    names = ["worker 0", "worker 1"]
    meeting = threading.Thread(target=meet, args=(address, Place(0, names), {}, 60.0), daemon=True)
    meeting.start()
    last = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, int(port)))
            break
        assert time.monotonic() < last
    with connection:
        time.sleep(0.3)
        connection.sendall(b'{"index": 1, "about": {}}\n')
        meeting.join(30)
        assert not meeting.is_alive()


def speak(address, said):
    """A connection to the first process, as soon as it listens, that has said something."""
    host, port = address.split(":")
    last = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(said)
            return connection
        assert time.monotonic() < last


@pytest.mark.parametrize("missing", [["worker 1"], ["worker 1", "worker 3"]])
def test_one_that_gave_up_has_not_come(address, missing):
    heard = {}
    names = sorted({"worker 0", "worker 1", "worker 2", *missing})

    def come(index):
        try:
            heard[index] = sorted(meet(address, Place(index, names), {}, 1.5))
        except UnavailableError as error:
            heard[index] = error.message

    meetings = [threading.Thread(target=come, args=(index,), daemon=True) for index in (0, 2)]
    meetings[0].start()
    speak(address, b'{"index": 1, "about": {}}\n').close()
    time.sleep(0.3)
    meetings[1].start()
    for meeting in meetings:
        meeting.join(30)
        assert not meeting.is_alive()
    for message in heard.values():
        assert f"These did not come: {missing}." in message


def test_one_that_gave_up_may_come_again(address):
    heard = []
    place = Place(0, ["worker 0", "worker 1", "worker 2"])
    meeting = threading.Thread(
        target=lambda: heard.append(sorted(meet(address, place, {}, 60.0))), daemon=True
    )
    meeting.start()
    said = b'{"index": 1, "about": {}}\n'
    speak(address, said).close()
    time.sleep(0.3)
    with speak(address, said) as again, speak(address, said.replace(b"1", b"2")) as third:
        for guest in (again, third):
            guest.settimeout(30)
            assert guest.recv(100) == b'{"complaint": null}\n'
    meeting.join(30)
    assert heard == [[1, 2]]
