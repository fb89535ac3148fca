"""Work ahead of time and side by side: bounded, in order, and gone when it is not wanted."""

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from unison.data import AUTOTUNE, Dataset
from unison.data.transformations.prefetching import ReadAhead

PREFIX = "unison-data"

# Threads of what other files' tests have left behind.
_others = set()


def threads():
    own = set(threading.enumerate()) - _others
    return [thread for thread in own if thread.name.startswith(PREFIX)]


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    _others.update(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: not threads())


def counted(drawn, count=100):
    def numbers():
        for number in range(count):
            drawn.append(number)
            yield number

    return Dataset.from_generator(numbers)


def test_no_more_is_read_ahead_than_the_buffer_holds():
    drawn = []
    iterator = iter(counted(drawn).prefetch(3))
    assert drawn == []
    next(iterator)
    # One is taken, three wait, and one is being made.
    wait_until(lambda: len(drawn) >= 4)
    time.sleep(0.05)
    assert len(drawn) <= 5


def test_a_thread_ends_with_the_dataset():
    assert len(list(counted([], 10).prefetch(2))) == 10
    wait_until(lambda: not threads())


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.prefetch(1),
        lambda d: d.prefetch(1).prefetch(1).batch(2).prefetch(AUTOTUNE),
        lambda d: d.map(lambda x: x, num_parallel_calls=3),
        lambda d: d.interleave(lambda x: counted([], 10**6), 2, num_parallel_calls=2),
    ],
)
def test_threads_end_when_an_iterator_is_dropped(transform):
    iterator = iter(transform(counted([])))
    next(iterator), next(iterator)
    assert threads()
    del iterator
    gc.collect()
    wait_until(lambda: not threads())


def test_a_thread_ends_with_an_iterator_whose_error_was_caught():
    def fail(x):
        raise KeyError("mine")

    def read():
        # In one block, so that errors that were not asked for wait beside the one that was.
        iterator = iter(Dataset.range(4).map(fail).batch(4).prefetch(1))
        with pytest.raises(KeyError, match="mine"):
            next(iterator)

    read()
    gc.collect()
    wait_until(lambda: not threads())


def test_a_loop_that_is_left_leaves_no_thread():
    for number in counted([]).prefetch(2):
        if number == 3:
            break
    gc.collect()
    wait_until(lambda: not threads())


def test_an_error_in_the_thread_is_raised_where_its_element_would_be():
    def numbers():
        yield from range(3)
        raise KeyError("mine")

    iterator = iter(Dataset.from_generator(numbers).prefetch(5))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    assert next(iterator, "end") == "end"


def test_an_end_is_an_end_ever_after():
    results = iter([1, 2])
    ahead = ReadAhead(lambda: next(results, None), size=4)
    assert [ahead.get() for _ in range(5)] == [1, 2, None, None, None]


def test_elements_that_wait_for_something_are_computed_side_by_side():
    together = threading.Barrier(3, timeout=30)

    def meet(x):
        together.wait()
        return x

    # The first call is made alone, to see what the function is.
    calls = iter(range(100))
    dataset = Dataset.range(7).map(
        lambda x: x if next(calls) == 0 else meet(x), num_parallel_calls=3
    )
    assert [int(x) for x in dataset] == list(range(7))


def test_results_keep_their_order_unless_it_is_given_up():
    def slow_first(x):
        time.sleep(0.1 if x == 1 else 0.0)
        return x

    dataset = Dataset.range(8)
    ordered = dataset.map(slow_first, num_parallel_calls=4)
    assert [int(x) for x in ordered] == list(range(8))
    unordered = dataset.map(slow_first, num_parallel_calls=4, deterministic=False)
    seen = [int(x) for x in unordered]
    assert sorted(seen) == list(range(8))
    assert seen[1] != 1


def test_autotune_makes_threads_only_for_calls_that_take_time():
    used = set()

    def remember(x, seconds):
        used.add(threading.current_thread().name)
        if seconds:  # a sleep of 0 leaves the core to others, for as long as they want it
            time.sleep(seconds)
        return x

    list(Dataset.range(40).map(lambda x: remember(x, 0), num_parallel_calls=AUTOTUNE))
    assert used == {threading.current_thread().name}
    list(Dataset.range(40).map(lambda x: remember(x, 0.003), num_parallel_calls=AUTOTUNE))
    assert any(name.startswith("unison-data-map") for name in used)


def test_no_more_calls_wait_than_there_are_threads():
    started = []
    dataset = Dataset.range(100).map(lambda x: started.append(1) or x, num_parallel_calls=2)
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    time.sleep(0.05)
    assert len(started) <= 13


def test_a_prefetched_dataset_can_be_shuffled_and_repeated():
    dataset = Dataset.range(20).map(lambda x: x).prefetch(4).shuffle(5).repeat(3).batch(6)
    assert np.bincount(np.concatenate(list(dataset.prefetch(2)))).tolist() == [3] * 20


def test_a_program_that_ends_in_the_middle_ends():
    program = (
        "from unison.data import Dataset; import time;"
        "d = Dataset.range(10**9).map(lambda x: x, num_parallel_calls=2).batch(10).prefetch(2);"
        "iterator = iter(d); next(iterator); print('done')"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stdout.strip(), finished.stderr) == (0, "done", "")


def test_blocks_are_read_ahead_where_blocks_are_taken():
    sizes = []

    def identity(block):
        sizes.append(len(block))
        return block

    numbers = Dataset.from_generator(lambda: iter(range(20)), output_signature=np.int64(0))
    batches = list(numbers.map(identity, vectorized=True).prefetch(4).batch(5))
    assert np.concatenate(batches).tolist() == list(range(20))
    assert sizes == [5] * 4


def test_datasets_that_are_interleaved_are_waited_for_side_by_side():
    together = threading.Barrier(3, timeout=30)

    def meeting(n):
        together.wait()
        yield from range(int(n), int(n) + 2)

    dataset = Dataset.range(0, 30, 10).interleave(
        lambda n: Dataset.from_generator(meeting, output_signature=np.int64(0), args=(n,)),
        cycle_length=3,
        num_parallel_calls=AUTOTUNE,
    )
    assert [int(n) for n in dataset] == [0, 10, 20, 1, 11, 21]


def test_a_dataset_that_is_not_ready_is_passed_over_where_order_does_not_count():
    may_go_on = threading.Event()

    def waiting(n):
        if n == 0:
            assert may_go_on.wait(5)
        yield from [n] * 3

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.from_generator(waiting, output_signature=np.int64(0), args=(n,)),
        cycle_length=3,
        num_parallel_calls=3,
        deterministic=False,
    )
    iterator = iter(dataset)
    assert sorted(int(next(iterator)) for _ in range(6)) == [1, 1, 1, 2, 2, 2]
    may_go_on.set()
    assert [int(n) for n in iterator] == [0, 0, 0]


def test_no_dataset_starves_where_order_does_not_count():
    def endless(n):
        while True:
            yield n

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.from_generator(endless, output_signature=np.int64(0), args=(n,)),
        cycle_length=3,
        num_parallel_calls=3,
        deterministic=False,
    )
    taken = np.bincount([int(n) for n in dataset.take(60_000)], minlength=3)
    assert taken.min() > 0


@pytest.mark.parametrize("cycle_length", [1, 3, 5])
@pytest.mark.parametrize("block_length", [1, 2, 7])
@pytest.mark.parametrize("threads", [None, 2, AUTOTUNE])
def test_batches_of_interleaved_datasets_are_their_elements(cycle_length, block_length, threads):
    def numbers(n):
        return Dataset.from_generator(
            lambda: iter(range(int(n) * 100, int(n) * 100 + int(n) * 3 % 7)),
            output_signature=np.int64(0),
        )

    def interleaved(threads):
        return Dataset.range(9).interleave(numbers, cycle_length, block_length, threads)

    elements = [int(n) for n in interleaved(None)]
    assert sorted(elements) == [n * 100 + k for n in range(9) for k in range(n * 3 % 7)]
    assert [int(n) for n in interleaved(threads)] == elements
    for size in (1, 4, 50):
        assert np.concatenate(list(interleaved(threads).batch(size))).tolist() == elements


def test_an_error_of_an_interleaved_dataset_comes_in_its_turn():
    def failing(n):
        yield int(n)
        if n == 1:
            raise KeyError("mine")
        yield int(n) + 10

    dataset = Dataset.range(2).interleave(
        lambda n: Dataset.from_generator(failing, output_signature=np.int64(0), args=(n,)),
        cycle_length=2,
        num_parallel_calls=2,
    )
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 10]
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    assert next(iterator, "end") == "end"
