"""What is lost and what is not if parts of an input service fail, without sockets."""

import contextlib
import os
import resource
import socket
import threading
import time

import numpy as np
import pytest

from input_registry import ABOUT, DATA, DYNAMIC, OFF, registry
from unison.data import Dataset
from unison.data.chunks import Chunk
from unison.data.service.buffers import Request, Rounds
from unison.data.service.configuration import DispatcherConfig
from unison.data.service.dispatcher import DispatchServer
from unison.data.service.registry import Registry
from unison.data.service.splits import with_splits
from unison.data.service.tasks import Task
from unison.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from unison.net.array_messages import Connection
from unison.storage.journal import Journal


def restarted(kept, now=0.0):
    """The registry of a dispatcher that has started again, with the journal of another one."""
    made = Registry((), now)
    for event, payload in kept:
        made.apply(event, payload)
    return made


def two_workers(made):
    return [made.hear_worker(name, f"h:{name}", None, 0.0) for name in ("1", "2")]


# -- a dispatcher that restarts ----------------------------------------------------------------


@pytest.mark.parametrize("spec", [OFF, DYNAMIC], ids=["off", "dynamic"])
def test_workers_that_still_compute_are_awaited_after_a_restart(spec):
    kept = []
    made = registry(events=kept)
    first, _ = two_workers(made)
    number = made.join("c", "j", 0, spec, 0.0).number
    if spec is DYNAMIC:
        made.hand_out(number, 0, 0, 10, "2", 0)
    made.end_tasks(first, [number])
    again = restarted(kept, now=10.0)
    again.end_tasks(again.hear_worker("1", "h:1", 0, 10.1), [])
    again.expire(10.2)
    assert not again.iteration(number).is_complete
    second = again.hear_worker("2", "h:2", 1, 10.3)
    assert list(again.tasks_of(second)) == [number]
    again.end_tasks(second, [number])
    assert again.iteration(number).is_complete


def test_workers_that_were_lost_with_the_dispatcher_are_not_awaited_for_long():
    kept = []
    made = registry(events=kept)
    first, _ = two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.end_tasks(first, [number])
    again = restarted(kept, now=10.0)
    for now in (10.1, 69.0, 70.1):
        assert not again.iteration(number).is_complete
        again.hear_worker("1", "h:1", 0, now)
        again.expire(now)
    assert again.iteration(number).is_complete


def test_a_worker_that_was_lost_before_a_restart_is_not_awaited():
    kept = []
    made = registry(events=kept)
    two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.leave_worker("2")
    again = restarted(kept, now=10.0)
    again.end_tasks(again.hear_worker("1", "h:1", 0, 10.1), [number])
    assert again.iteration(number).is_complete


def test_a_worker_that_was_lost_and_came_back_before_a_restart_is_awaited():
    kept = []
    made = registry(events=kept)
    _, second = two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.leave_worker("2")
    made.hear_worker("2", "h:2", second.number, 1.0)
    again = restarted(kept, now=10.0)
    again.end_tasks(again.hear_worker("1", "h:1", 0, 10.1), [number])
    assert not again.iteration(number).is_complete


def test_a_dispatcher_without_a_journal_does_not_use_the_numbers_of_another_one():
    first, second = (registry().join("c", "j", 0, OFF, 0.0).number for _ in range(2))
    assert first != second
    with pytest.raises(NotFoundError, match="without fault_tolerant_mode"):
        registry().hear_consumer(first, "c", 0.0)


def test_with_a_journal_the_numbers_of_iterations_go_on():
    kept = []
    number = registry(events=kept).join("c", "j", 0, OFF, 0.0).number
    again = restarted(kept)
    assert again.join("c", "j", 0, OFF, 0.0).number == number
    assert again.join("c", "j", 1, OFF, 0.0).number == number + 1


# -- what has ended ----------------------------------------------------------------------------


def test_a_named_job_that_is_complete_is_so_for_a_program_that_comes_late():
    made = registry(job_timeout=300.0, worker_timeout=1e9)
    worker = made.hear_worker("1", "h:1", None, 0.0)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.end_tasks(worker, [number])
    made.release(number, "c", 1.0)
    made.expire(1000.0)
    late = made.join("late", "j", 0, DYNAMIC, 1000.0)
    assert (late.number, late.is_complete) == (number, True)
    assert not made.tasks_of(worker)


def test_a_static_share_that_has_ended_is_not_computed_again():
    made = registry("h:1", "h:2")
    first, _ = two_workers(made)
    number = made.join("c", "j", 0, DATA, 0.0).number
    made.end_tasks(first, [number])
    again = made.hear_worker("new", "h:1", None, 1.0)
    assert (made.tasks_of(again), made.ended_of(again)) == ({}, [number])


def test_a_worker_knows_what_it_has_no_elements_of_until_the_iteration_is_complete():
    made = registry()
    first, second = two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    assert made.ended_of(first) == []
    made.end_tasks(first, [number])
    assert (made.ended_of(first), made.ended_of(second)) == ([number], [])
    made.end_tasks(second, [number])
    assert made.ended_of(first) == []


# -- a journal ---------------------------------------------------------------------------------


def journal(path, *records):
    """Writes records, and returns all that are read again."""
    with contextlib.closing(Journal(str(path))) as made:
        for record in records:
            made.append(record, b"data")
    with contextlib.closing(Journal(str(path))) as made:
        return [record for record, _ in made.records]


@contextlib.contextmanager
def limited_size(size):
    """Inside, no file can become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_any_changed_bit_of_a_journal_is_an_error(tmp_path):
    path = tmp_path / "journal"
    journal(path, 1, 2, 3)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DataLossError, match=r"journal is corrupt: checksum mismatch"):
            Journal(str(path))
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("count", [1, 19, 20, 64, 5000])
def test_zeros_at_the_end_of_a_journal_are_a_record_that_was_not_written(tmp_path, count):
    path = tmp_path / "journal"
    journal(path, 1, 2)
    path.write_bytes(path.read_bytes() + bytes(count))
    assert journal(path, 3) == [1, 2, 3]


def test_what_could_not_be_appended_is_not_in_the_journal(tmp_path):
    path = tmp_path / "journal"
    with contextlib.closing(Journal(str(path))) as made:
        made.append(1)
        size = os.path.getsize(path)
        with limited_size(size + 5), pytest.raises(OSError, match="too large"):
            made.append("failed", bytes(100))
        assert os.path.getsize(path) == size
        made.append(2)
    assert journal(path) == [1, 2]


def test_a_dispatcher_that_cannot_write_its_journal_says_so_and_goes_on(tmp_path, caplog):
    config = DispatcherConfig(
        work_dir=str(tmp_path),
        fault_tolerant_mode=True,
        job_gc_timeout=0.0,
        job_gc_check_interval=0.05,
    )
    dispatcher = DispatchServer(config)
    serving = dispatcher._serving
    path = tmp_path / "dispatcher.journal"
    try:
        serving._registry.register_dataset(ABOUT, b"payload", "d")
        with (
            limited_size(os.path.getsize(path)),
            pytest.raises(ResourceExhaustedError, match=str(path)),
        ):
            serving._registry.join("c", "j", 0, OFF, 0.0)
        number = serving._registry.join("c", "j", 0, OFF, 0.0).number
        with limited_size(os.path.getsize(path)):
            serving._registry.release(number, "c", 0.0)
            wait_for(lambda: "What has expired is removed later" in caplog.text)
        wait_for(lambda: number not in serving._registry._iterations)
    finally:
        dispatcher.stop()


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- what is sent ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["shared memory", "tcp"])
def test_arrays_of_another_byte_order_arrive_with_their_values(family):
    with contextlib.ExitStack() as closing:
        ends = [closing.enter_context(contextlib.closing(end)) for end in pair(family)]
        sent = [np.array([1, 2], ">i4"), np.array(1.5, ">f8"), np.array(["2024-01-02"], ">M8[s]")]
        ends[0].send("kind", sent)
        for own, other in zip(ends[1].receive().arrays, sent, strict=True):
            assert own.dtype.isnative
            np.testing.assert_array_equal(own, other)


def pair(family):
    """Two connected ends."""
    if family == socket.AF_UNIX:
        streams = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            first = socket.create_connection(listening.getsockname())
            streams = first, listening.accept()[0]
    ends = [Connection(stream, b"k" * 32) for stream in streams]
    for end in ends:
        end.begin()
    return ends


# -- a task ------------------------------------------------------------------------------------


def task_of(function, ended):
    plan = Dataset.range(3).map(function).plan
    return Task(lambda: plan, Rounds(1), lambda: ended.append(True), "task")


def test_a_task_that_is_closed_has_not_ended():
    may_go_on, ended = threading.Event(), []
    task = task_of(lambda number: (may_go_on.wait(10), number)[1], ended)
    task.close()
    assert task.take(Request(1, 0, 0), 5.0) is None
    may_go_on.set()
    task.close(waits=True)
    task.take(Request(1, 0, 0), 5.0)
    assert task.take(Request(1, 0, 1), 5.0) is None
    assert not ended


def test_a_call_that_ends_with_a_closed_task_is_no_error_of_an_element():
    may_go_on, ended = threading.Event(), []

    def call(number):
        may_go_on.wait(10)
        raise UnavailableError(message="closed")

    task = task_of(call, ended)
    task.close()
    may_go_on.set()
    task.close(waits=True)
    assert task.take(Request(1, 0, 0), 5.0) is None
    assert not ended


def test_a_task_without_elements_left_says_so_once():
    ended = []
    task = task_of(lambda number: number, ended)
    for number in range(3):
        assert task.take(Request(1, 0, number), 5.0) is not None
    for _ in range(2):
        with pytest.raises(StopIteration):
            task.take(Request(1, 0, 3), 5.0)
    task.close(waits=True)
    assert ended == [True]


# -- coordinated reads -------------------------------------------------------------------------


def chunk(value):
    return Chunk(0, (np.array([value]),))


def filled(buffer):
    while not buffer.is_full():
        buffer.add(chunk(0))
    return buffer


def test_a_program_that_restarts_is_told_that_its_rounds_are_over():
    buffer = Rounds(2)
    for number in (0, 2, 4):
        for consumer in (0, 1):
            assert filled(buffer).take(Request(1, consumer, number)) is not None
    with pytest.raises(FailedPreconditionError, match=r"Round 0 .* round 4.*another job_name"):
        filled(buffer).take(Request(1, 1, 0))
    assert filled(buffer).take(Request(1, 1, 4)) is not None
    assert filled(buffer).take(Request(1, 1, 6)) is not None


def test_a_consumer_that_is_far_ahead_waits_for_the_others():
    buffer = Rounds(2)
    number = 0
    while number < 100 and filled(buffer).take(Request(1, 0, number)) is not None:
        number += 1
    assert number == len(buffer._rounds) == 32
    for late in range(number):
        assert filled(buffer).take(Request(1, 1, late)) is not None
    assert filled(buffer).take(Request(1, 0, number)) is not None


def test_rounds_that_a_consumer_has_read_from_a_lost_worker_do_not_keep_the_others_waiting():
    buffer = Rounds(2)
    for number in range(32):
        assert filled(buffer).take(Request(1, 1, number)) is not None
    assert buffer.take(Request(1, 1, 32)) is None
    assert buffer.take(Request(1, 0, 40)) is not None  # this one had read them elsewhere
    assert filled(buffer).take(Request(1, 1, 32)) is not None


# -- an empty source ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(0).repeat(),
        Dataset.range(0).map(lambda number: number).repeat(),
        Dataset.range(0).concatenate(Dataset.range(0)).repeat().repeat(),
    ],
    ids=["source", "map", "twice"],
)
@pytest.mark.timeout(10)
def test_passes_over_empty_sources_end(dataset):
    plan = with_splits(dataset.plan, lambda source, repetition, is_nested: None)
    assert plan.stream().next() is None
    assert plan.stream().next_block(5) is None


def test_passes_over_sources_of_which_some_are_empty_go_on():
    dataset = Dataset.range(0).concatenate(Dataset.range(3)).repeat(2)
    rows = iter([None, (0, 2), None, None, (2, 3), None])
    plan = with_splits(dataset.plan, lambda source, repetition, is_nested: next(rows))
    stream = plan.stream()
    assert [int(stream.next()[0]) for _ in range(3)] == [0, 1, 2]
