"""Records in memory that outlives the processes that write them."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
import zlib

import numpy as np
import pytest

from subprocess_program import environment_of_program
from unison.errors import ResourceExhaustedError
from unison.storage.memory_slots import MemorySlots


@pytest.fixture
def slots():
    made = MemorySlots.create("test")
    yield made
    made.close()


def write(slots, step, data):
    slots.begin(len(data))[:] = data
    slots.commit(step, {"step": step})


def contents(slots):
    with slots.records() as records:
        return [(record.step, record.header, bytes(record.data)) for record in records]


def test_new_slots_have_no_record(slots):
    assert contents(slots) == []
    assert slots.steps() == []


def test_the_two_newest_records_are_kept(slots):
    for step in (3, 5, 9):
        write(slots, step, b"data of %d" % step)
    assert contents(slots) == [
        (9, {"step": 9}, b"data of 9"),
        (5, {"step": 5}, b"data of 5"),
    ]


def test_a_record_that_was_begun_replaces_the_older_one_only(slots):
    write(slots, 1, b"one")
    write(slots, 2, b"two")
    slots.begin(5)[:2] = b"th"
    assert contents(slots) == [(2, {"step": 2}, b"two")]


def test_records_grow_and_shrink(slots):
    for step, size in enumerate([0, 10_000, 3, 1 << 20, 0, 5]):
        data = bytes([step]) * size
        write(slots, step, data)
        assert contents(slots)[0] == (step, {"step": step}, data)


def test_a_record_gets_further_data(slots):
    write(slots, 1, b"x" * 8192)
    first = slots.begin(4)
    first[:] = b"abcd"
    whole = slots.extend(100_000)
    whole[99_999] = 7
    slots.commit(2, None)
    with slots.records() as (newest, _):
        assert bytes(newest.data[:4]) == b"abcd"
        assert len(newest.data) == 100_000
        assert newest.data[99_999] == 7


def test_allocation_comes_before_writing(slots):
    slots.allocate(1 << 20)
    sizes = [os.fstat(descriptor).st_size for descriptor in slots.descriptors]
    assert all(size >= 1 << 20 for size in sizes)
    assert slots.steps() == []


def test_memory_that_is_not_there_is_an_error(slots):
    with pytest.raises(ResourceExhaustedError, match="of the host's memory"):
        slots.begin(1 << 60)


@pytest.mark.parametrize("place", [0, 8, 16, 24, 32])
def test_a_wrong_description_is_no_record(slots, place):
    write(slots, 1, b"data")
    descriptor = slots.descriptors[0]
    byte = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), place)
    assert contents(slots) == []


@pytest.mark.parametrize("sizes", [(-1, 3), (1 << 62, 3), (3, 1 << 62), (3, -1)])
def test_implausible_sizes_are_no_record(slots, sizes):
    write(slots, 1, b"data")
    os.pwrite(slots.descriptors[0], struct.pack("<qq", *sizes), 16)
    assert contents(slots) == []


KILLED = """
import os, signal, sys
from unison.storage.memory_slots import MemorySlots
slots = MemorySlots(tuple(map(int, sys.argv[1:3])))
slots.begin(4)[:] = b"mine"
slots.commit(1, {"by": "a process"})
slots.begin(1 << 20)[: 1 << 19] = b"x" * (1 << 19)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(60)
def test_records_outlive_the_process_that_was_killed_while_writing(slots):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), *map(str, slots.descriptors)],
        pass_fds=slots.descriptors,
        env=environment_of_program({}),
        timeout=50,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert contents(slots) == [(1, {"by": "a process"}, b"mine")]


def test_arrays_can_be_written_in_place(slots):
    memory = slots.begin(40)
    np.frombuffer(memory, np.float32, 10)[:] = np.arange(10)
    slots.commit(0, None)
    with slots.records() as (record,):
        assert np.frombuffer(record.data, np.float32).sum() == 45.0


@pytest.mark.parametrize("size", [2**62, 5000])
def test_a_record_that_claims_more_than_its_slot_has_is_incomplete(slots, size):
    write(slots, 1, b"data")
    page = bytearray(os.pread(slots.descriptors[0], 64, 0))
    page[16:24] = size.to_bytes(8, "little")
    page[24:32] = bytes(8)
    page[32:36] = zlib.crc32(page[:32]).to_bytes(4, "little")
    os.pwrite(slots.descriptors[0], page, 0)
    assert slots.steps() == []
    with slots.records() as records:
        assert records == []
