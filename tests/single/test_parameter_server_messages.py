"""Messages between parameter servers, workers and the coordinator, and how their arrays travel."""

import contextlib
import json
import os
import socket
import struct
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from connections import open_files, served
from unison.errors import UnauthenticatedError, UnavailableError
from unison.net import array_messages
from unison.net.array_messages import Connection, NoRoomError
from unison.net.slots import Inbox, Outbox
from unison.net.tls import TLS_VARIABLE
from unison.storage.memory_left import memory_in_words, memory_left

KEY = b"k" * 32

needs_shared_memory = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="only Linux has memory as open files"
)


@pytest.fixture(params=["local", "network", "encrypted"])
def ends(request, monkeypatch):
    """The two ends of a connection."""
    if request.param == "local":
        sockets = socket.socketpair(socket.AF_UNIX)
    elif request.param == "network":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            other = socket.create_connection(listening.getsockname())
            sockets = (listening.accept()[0], other)
    else:
        monkeypatch.setenv(TLS_VARIABLE, "always")
        with served() as server:
            sockets = (server.connect(), server.next().stream)
    found = [Connection(each, KEY) for each in sockets]
    yield found
    for connection in found:
        connection.close()


def sent(ends, *arrays, **options):
    """Sends arrays from one end to the other; returns what has come."""
    one, other = ends
    thread = threading.Thread(target=one.send, args=("values", arrays), kwargs=options)
    thread.start()
    message = other.receive()
    thread.join(20)
    return message.arrays


@pytest.mark.parametrize("size", [3, 300_000])
def test_arrays_arrive_as_they_were_sent(ends, size):
    arrays = [
        np.arange(size, dtype=np.float32),
        np.arange(2 * size).reshape(2, size)[:, ::3],
        np.float64(0.5),
        np.zeros((0, 4), np.int8),
        np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
        np.array(True),
    ]
    for _ in range(3):
        for array, arrived in zip(arrays, sent(ends, *arrays), strict=True):
            assert arrived.dtype == np.asarray(array).dtype
            assert arrived.shape == np.shape(array)
            np.testing.assert_array_equal(arrived, array)
    one, other = ends
    assert one.sent_bytes == other.received_bytes
    assert one.sent_bytes >= 3 * sum(np.asarray(array).nbytes for array in arrays)


def test_arrays_that_are_held_do_not_change_when_others_come(ends):
    held = [sent(ends, np.full(50_000, n, np.float32))[0] for n in range(10)]
    for n, array in enumerate(held):
        assert np.all(array == n)


def test_an_operand_of_a_program_does_not_change_while_it_lives(ends):
    operands = [jnp.asarray(sent(ends, np.full(50_000, n, np.float32))[0]) for n in range(6)]
    sums = [float(jax.jit(jnp.sum)(operand)) for operand in operands]
    assert sums == [50_000.0 * n for n in range(6)]


def test_what_there_is_no_memory_for_is_named_and_the_next_message_comes(ends, monkeypatch):
    monkeypatch.setattr(array_messages, "memory_left", lambda: (1000, "a limit"))
    array = np.zeros((5_000, 1_000), np.float32)
    words = r"Out of memory: float32\[5000, 1000\], 20,000,000"
    with pytest.raises(NoRoomError, match=words) as no:
        sent(ends, array, are_kept=True)
    assert no.value.kind == "values"
    assert isinstance(no.value, MemoryError)
    assert sent(ends, np.arange(3))[0].tolist() == [0, 1, 2]


def test_how_much_memory_is_left_is_said_with_what_limits_it():
    left = memory_left()
    assert left is None or left[0] > 0
    if left is not None:
        assert left[1] in memory_in_words()


@needs_shared_memory
def test_a_slot_is_used_again_when_nobody_refers_to_its_arrays():
    outbox, inbox = Outbox(), Inbox()
    slot, file = outbox.slot(100_000)
    slot.taken()[:4] = 7
    inbox.add(slot.number, file)
    room = inbox.lent(slot.number)
    view = room[:4]
    del room
    assert not slot.is_free
    assert view.tolist() == [7, 7, 7, 7]
    assert outbox.slot(100_000)[0] is not slot
    del view
    assert slot.is_free
    again, file = outbox.slot(90_000)
    assert again is slot
    assert file is None


@needs_shared_memory
def test_there_are_few_slots_and_none_for_small_or_huge_messages():
    outbox = Outbox()
    slots = []
    while (found := outbox.slot(100_000)) is not None:
        slots.append(found[0])
        found[0].taken()
        os.close(found[1])
    assert 1 < len(slots) < 5
    slots[0].free()
    larger, file = outbox.slot(1_000_000)  # it takes the place of the free one
    os.close(file)
    assert larger.number == slots[0].number
    assert larger.capacity >= 1_000_000
    assert Outbox().slot(100) is None
    assert Outbox().slot(1 << 30) is None


def test_a_function_that_was_changed_on_its_way_is_not_taken(ends):
    one, other = ends
    signed = one.signed(b"a pickled function")
    assert other.verified(signed) == b"a pickled function"
    changed = signed.copy()
    changed[-1] ^= 1
    with pytest.raises(UnauthenticatedError):
        other.verified(changed)


def header(text, slot=-1, length=None):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Ii", len(data) if length is None else length, slot) + data


@pytest.mark.parametrize(
    "sent",
    [
        header(b"", length=2**32 - 1),
        header(b"[" * 100_000),
        header(b"\xff\xfe"),
        header(["ping", {}]),
        header([1, {}, []]),
        header(["ping", [], []]),
        header(["ping", {}, 7]),
        header(["ping", {}, [["float32", [-1]]]]),
        header(["ping", {}, [["float32", [2**70]]]]),
        header(["ping", {}, [["float32", [1e999]]]]),
        header(["ping", {}, [["float32", ["3"]]]]),
        header(["ping", {}, [["O", [3]]]]),
        header(["ping", {}, [["nothing", [3]]]]),
        header(["ping", {}, []], slot=2**31 - 1),
    ],
    ids=lambda sent: repr(sent[8:38]),
)
def test_what_is_not_a_message_ends_the_connection(sent):
    one, other = socket.socketpair()
    receiving = Connection(other, KEY)
    with one, contextlib.closing(receiving):
        one.sendall(sent)
        with pytest.raises(UnavailableError, match="Connection closed"):
            receiving.receive()
        assert not receiving.is_open


@needs_shared_memory
def test_a_file_that_comes_with_what_is_not_a_message_is_closed():
    before = open_files()
    one, other = socket.socketpair()
    receiving = Connection(other, KEY)
    file = os.memfd_create("test")
    with one, contextlib.closing(receiving):
        for sent in (header(["ping", {}, []], slot=0), header(b"{")):
            socket.send_fds(one, [sent], [file])  # it is empty, so nobody can map it
            with pytest.raises(UnavailableError):
                receiving.receive()
    os.close(file)
    assert not open_files() - before


@needs_shared_memory
def test_more_than_a_slot_holds_is_not_read_from_it():
    one, other = socket.socketpair()
    receiving = Connection(other, KEY)
    file = os.memfd_create("test")
    os.ftruncate(file, 4096)
    with one, contextlib.closing(receiving):
        sent = header(["values", {}, [["float32", [100_000]]]], slot=0)
        socket.send_fds(one, [sent], [file])
        with pytest.raises(UnavailableError, match="a slot of 4032"):
            receiving.receive()
    os.close(file)
