"""Worker processes of `map`: exact results, errors with their place, and no trace afterwards."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import unison.tf as tf  # before any test: it sets an option of JAX
from unison.data import AUTOTUNE, Dataset
from unison.errors import InternalError

SECONDS = 30


def workers_of(process):
    """The worker processes that `process` has, or that it has left behind."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if b"workers/start.py" in command and status[0] != "Z" and int(status[1]) == process:
            found.append(int(folder.name))
    return found


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_process_is_left():
    files = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    wait_until(lambda: not workers_of(os.getpid()))
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert not any(thread.name.startswith("unison-data") for thread in threading.enumerate())


def in_processes(dataset, function, count=2, **kwargs):
    return dataset.map(function, count, executor="process", **kwargs)


def numbers(dataset):
    return [int(x) for x in dataset]


# -- results -------------------------------------------------------------------------------


def images(count):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count)


def decoded(image, label):
    return {"image": image.astype(np.float32) / 255, "label": label}


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_batches_are_those_of_a_map_in_this_process(batch_size):
    dataset = Dataset.from_tensor_slices(images(300))
    expected = list(dataset.map(decoded).batch(batch_size))
    received = list(in_processes(dataset, decoded).batch(batch_size))
    assert len(received) == len(expected)
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])


@pytest.mark.parametrize(
    "function",
    [
        lambda n: n * 2,
        lambda n: (n, str(n)),
        lambda n: np.arange(n),
        lambda n: {"a": (n, [n, n]), "b": b"x" * int(n)},
        lambda n: np.zeros((2, 0)),
        lambda n: np.full(int(n) * 1000, n),
    ],
)
def test_elements_of_every_kind_cross(function):
    expected = list(Dataset.range(6).map(function))
    received = list(in_processes(Dataset.range(6), function))
    assert repr(received) == repr(expected)


def test_results_can_be_kept_and_written_to():
    batches = list(in_processes(Dataset.range(4000), lambda n: n).batch(10))
    for batch in batches:
        batch += 1
    assert np.concatenate(batches).tolist() == list(range(1, 4001))


def test_what_a_device_was_given_stays_as_it_is():
    # JAX may take an array as it is, without a copy.
    dataset = in_processes(Dataset.range(300), lambda n: np.full(4096, n, np.float32)).batch(2)
    batches = list(dataset.prefetch_to_device(2))
    for number, batch in enumerate(batches):
        assert np.unique(batch).tolist() == [2 * number, 2 * number + 1]


def test_memory_is_used_again():
    # Each batch takes 2 MB, all of them 400.
    dataset = in_processes(Dataset.range(200), lambda n: np.full(262144, n)).batch(1)
    before = resident_memory()
    for number, batch in enumerate(dataset):
        assert batch[0, -1] == number
    assert resident_memory() - before < 150e6


def resident_memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_function_may_keep_what_it_is_given():
    def with_previous(x, kept=[]):  # noqa: B006
        kept.append(x)
        return np.stack(kept[-2:]).sum(0) if len(kept) > 1 else x

    rows = Dataset.range(400).map(lambda n: np.full(2000, n))
    sums = [int(x[0]) for x in in_processes(rows, with_previous, 1)]
    assert sums == [0] + [2 * n - 1 for n in range(1, 400)]


def test_results_come_as_they_are_ready_where_order_does_not_count():
    def slow_first(n):
        time.sleep(0.3 if n == 0 else 0)
        return n

    seen = numbers(in_processes(Dataset.range(40), slow_first, deterministic=False))
    assert sorted(seen) == list(range(40))
    assert seen[0] != 0


def test_as_many_processes_as_are_asked_for_compute_and_stay_for_the_next_pass():
    def where(n):
        time.sleep(0.02)
        return os.getpid()

    dataset = in_processes(Dataset.range(20), where, 2)
    first, second = set(numbers(dataset)), set(numbers(dataset))
    assert first == second
    assert len(first) == 2
    assert os.getpid() not in first


def test_a_worker_starts_no_backend_and_does_not_run_the_main_module():
    def loaded(n):
        return "jax" in sys.modules, "pytest" in sys.modules

    jax, pytest_is_loaded = next(iter(in_processes(Dataset.range(1), loaded, AUTOTUNE)))
    assert not jax
    assert not pytest_is_loaded


def test_under_the_face_functions_in_workers_see_numpy_and_give_tensors():
    def halved(n):
        assert isinstance(n, np.integer)
        return np.float32(n / 2)

    dataset = in_processes(tf.data.Dataset.range(4), halved).batch(4)
    assert dataset.element_spec == tf.TensorSpec([None], tf.float32)
    (batch,) = dataset
    assert batch.numpy().tolist() == [0, 0.5, 1, 1.5]


def test_a_worker_has_the_whole_package_where_its_function_wants_it():
    def sum_below(n):
        import unison
        from unison.data import Dataset

        return sum(Dataset.range(n)) if unison.__version__ else 0

    assert numbers(in_processes(Dataset.range(5), sum_below)) == [0, 0, 1, 3, 6]


# -- errors --------------------------------------------------------------------------------


class MineError(Exception):
    def __init__(self, number, reason):
        super().__init__(number, reason)
        self.number = number


def test_an_error_comes_back_as_it_is_in_its_place():
    def failing(n):
        if n % 10 == 3:
            raise MineError(int(n), "by intention")
        return n

    iterator = iter(in_processes(Dataset.range(20), failing))
    seen = []
    while (element := next(iterator, "end") if len(seen) not in (3, 13) else None) != "end":
        if element is not None:
            seen.append(int(element))
            continue
        with pytest.raises(MineError, match="by intention") as raised:
            next(iterator)
        assert raised.value.number == len(seen)
        notes = "\n".join(raised.value.__notes__)
        assert f"function of map, called for element {len(seen)}" in notes
        assert "in failing" in notes
        seen.append(None)
    assert seen == [None if n % 10 == 3 else n for n in range(20)]


def test_an_error_that_cannot_be_pickled_says_what_it_was():
    def failing(n):
        error = RuntimeError("with a lock")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(Exception, match="RuntimeError: with a lock"):
        next(iter(in_processes(Dataset.range(1), failing)))


def test_a_generator_that_raises_does_so_in_its_place():
    def numbers_and_error():
        yield from range(5)
        raise KeyError("mine")

    iterator = iter(in_processes(Dataset.from_generator(numbers_and_error), lambda n: n))
    assert [int(next(iterator)) for _ in range(5)] == list(range(5))
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    assert next(iterator, "end") == "end"


def test_a_function_that_cannot_be_pickled_is_named_with_the_mend():
    lock = threading.Lock()

    def locked(n):
        with lock:
            return n

    with pytest.raises(TypeError, match=r"(?s)`lock` of type lock.*executor=\"thread\""):
        next(iter(in_processes(Dataset.range(3), locked)))


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed by signal 9 \(SIGKILL\)"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_a_worker_that_dies_is_an_error_and_is_replaced(end, how):
    def ending(n):
        if n == 2:
            end()
        return n

    dataset = in_processes(Dataset.range(400), ending, 1).batch(2)
    iterator = iter(dataset)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(InternalError, match=how):
        next(iterator)
    # Those that it had at the time are lost, and no others.
    rest = np.concatenate(list(iterator)).tolist()
    assert rest == list(range(4, 400))


def test_a_worker_that_another_process_kills_is_an_error():
    dataset = in_processes(Dataset.range(10**6), lambda n: (time.sleep(0.05), n)[1], 1)
    iterator = iter(dataset)
    next(iterator)
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(InternalError, match="SIGKILL"):
        numbers(iterator)


def test_elements_that_are_datasets_do_not_cross():
    dataset = in_processes(Dataset.range(4).window(2), lambda window: 0)
    with pytest.raises(TypeError, match="datasets cannot be sent to worker processes"):
        next(iter(dataset))


def test_after_an_interrupt_a_new_iterator_has_new_workers():
    dataset = in_processes(Dataset.range(10**6), lambda n: (time.sleep(0.05), n)[1])
    iterator = iter(dataset)
    next(iterator)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        numbers(iterator)
    with pytest.raises(InternalError, match="Take a new iterator"):
        next(iterator)
    assert not workers_of(os.getpid())
    assert next(iter(dataset)) == 0


def test_an_unknown_executor_is_refused():
    with pytest.raises(ValueError, match='Expected executor to be "thread" or "process"'):
        Dataset.range(3).map(lambda n: n, executor="fibers")


# -- where a pass was ----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_restored_iterator_goes_on_exactly(batch_size):
    def make():
        dataset = Dataset.range(50).shuffle(50, seed=3)
        dataset = in_processes(dataset, lambda n, key: (n, key), seed=5).repeat(2)
        return dataset if batch_size is None else dataset.batch(batch_size)

    def values(iterator):
        return [np.hstack([np.ravel(leaf) for leaf in element]).tolist() for element in iterator]

    whole = values(make())
    for taken in (1, len(whole) // 2 + 1):
        iterator = iter(make())
        for _ in range(taken):
            next(iterator)
        other = iter(make())
        other.set_state(iterator.get_state())
        assert values(other) == whole[taken:]
        assert values(iterator) == whole[taken:]


# -- the end -------------------------------------------------------------------------------


def test_workers_end_with_the_dataset():
    dataset = in_processes(Dataset.range(10**6), lambda n: n)
    iterator = iter(dataset)
    next(iterator)
    assert len(workers_of(os.getpid())) == 2
    gc.disable()
    try:
        del dataset, iterator
        assert not workers_of(os.getpid())
    finally:
        gc.enable()


@pytest.mark.parametrize("ahead", [0, 2])
def test_workers_in_a_long_call_end_with_the_dataset(ahead):
    dataset = in_processes(Dataset.range(9), lambda n: time.sleep(n and 1000) or n, 1)
    next(iter(dataset.prefetch(ahead)))
    del dataset
    gc.collect()
    wait_until(lambda: not workers_of(os.getpid()))


PROGRAM = """
import os, sys, time
import numpy as np
from unison.data import Dataset

print("started", flush=True)  # only once: workers do not run this again

def slow(n):
    time.sleep(0.01)
    return np.full(100_000, n)

dataset = Dataset.range(10**9).map(slow, 2, executor="process").batch(3).prefetch(2)
iterator = iter(dataset)
next(iterator)
print(os.getpid(), flush=True)
sys.stdin.readline()
{rest}
"""


def start(rest):
    """Starts a program that uses workers; it has them when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(rest=rest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    assert process.stdout.readline() == f"{process.pid}\n"
    workers = workers_of(process.pid)
    assert len(workers) == 2
    # What they share has no name that could be left behind.
    maps = "".join(Path(f"/proc/{worker}/maps").read_text() for worker in workers)
    assert "/memfd:unison-data (deleted)" in maps
    assert "/dev/shm" not in maps
    process.stdin.write("\n")
    process.stdin.flush()
    return process, workers


def are_gone(processes):
    return not any(Path(f"/proc/{process}").exists() for process in processes)


def end_of(process, workers):
    try:
        output, errors = process.communicate(timeout=SECONDS)
        wait_until(lambda: are_gone(workers))
    finally:
        process.kill()
    return output, errors


def test_a_program_that_ends_in_the_middle_ends_its_workers():
    process, workers = start("")
    assert end_of(process, workers) == ("", "")
    assert process.returncode == 0


def test_an_interrupt_ends_all_with_one_line():
    process, workers = start("print('going on', flush=True)\nfor batch in iterator: pass")
    assert process.stdout.readline() == "going on\n"
    # As the terminal does: all processes of the session get it.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = end_of(process, workers)
    assert process.returncode == -signal.SIGINT
    (line,) = errors.splitlines()
    assert line.startswith("KeyboardInterrupt: ")


def test_workers_notice_that_their_parent_was_killed():
    process, workers = start("time.sleep(1000)")
    process.kill()
    _, errors = end_of(process, workers)
    assert errors == ""


def test_a_fork_of_the_program_leaves_the_workers_to_it():
    rest = """
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print(next(iterator)[0, 0], flush=True)
"""
    process, workers = start(rest)
    output, _ = end_of(process, workers)
    assert output == "3\n"
