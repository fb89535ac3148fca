"""An input service whose dispatcher and workers are threads of this process."""

import collections
import contextlib
import itertools
import socket
import threading
import time

import numpy as np
import pytest

from unison.cli import main
from unison.data import Dataset, TextLineDataset, service
from unison.data.service import ShardingPolicy, reading
from unison.data.service.configuration import DispatcherConfig, WorkerConfig
from unison.data.service.connections import Calls, Listening, connect
from unison.data.service.worker import InputWorker
from unison.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)

pytestmark = pytest.mark.timeout(60)


class Cluster(contextlib.ExitStack):
    """A dispatcher, and workers that are added to it."""

    def __init__(self, **options):
        super().__init__()
        self.dispatcher = service.DispatchServer(DispatcherConfig(**options))
        self.callback(lambda: self.dispatcher.stop())

    @property
    def target(self):
        return self.dispatcher.target

    def add_worker(self, **options):
        worker = InputWorker(WorkerConfig(self.target[7:], heartbeat_interval=0.2, **options))
        self.callback(worker.stop)
        assert worker.wait_until_registered(10.0)
        return worker

    def read(self, dataset, mode, **options):
        return dataset.apply(service.distribute(mode, self.target, **options))


def cluster(workers, **options):
    made = Cluster(**options)
    for _ in range(workers):
        made.add_worker()
    return made


@pytest.fixture(scope="module")
def two_workers():
    with cluster(2) as made:
        yield made


def numbers(dataset):
    return [np.asarray(element).tolist() for element in dataset]


# -- what is visited ---------------------------------------------------------------------------


def test_under_off_each_worker_computes_the_whole_dataset(two_workers):
    found = numbers(two_workers.read(Dataset.range(10), ShardingPolicy.OFF))
    assert collections.Counter(found) == dict.fromkeys(range(10), 2)


def test_under_dynamic_sharding_each_element_is_visited_once(two_workers):
    dataset = Dataset.range(500).map(lambda number: number * 2)
    found = numbers(two_workers.read(dataset, ShardingPolicy.DYNAMIC))
    assert sorted(found) == list(range(0, 1000, 2))


def test_both_workers_take_part_in_dynamic_sharding(two_workers):
    dataset = Dataset.range(64).map(lambda number: (number, time.sleep(0.005), number)[2])
    names = {
        threading.current_thread().name for _ in two_workers.read(dataset, ShardingPolicy.DYNAMIC)
    }
    assert names == {"MainThread"}
    batches = dataset.batch(4)
    sizes = [len(b) for b in two_workers.read(batches, ShardingPolicy.DYNAMIC)]
    assert sum(sizes) == 64


def test_each_pass_is_a_new_iteration_with_an_order_of_its_own(two_workers):
    with cluster(1) as one:
        dataset = one.read(Dataset.range(50).shuffle(50), ShardingPolicy.OFF)
        first, second = numbers(dataset), numbers(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


def test_one_worker_keeps_the_order_of_the_dataset():
    with cluster(1) as one:
        dataset = Dataset.range(100).shuffle(10, seed=3).batch(7)
        assert numbers(one.read(dataset, ShardingPolicy.OFF)) == numbers(dataset)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_tensor_slices(
            {"a": np.arange(4.0, dtype=np.float32), "b": [b"w", b"", b"y", b"z"]}
        ),
        Dataset.range(3).map(lambda number: (number, np.ones(int(number) + 1))),
        Dataset.range(4).batch(2).map(lambda batch: {"x": batch, "none": batch.astype(np.float16)}),
    ],
    ids=["text", "shapes", "batches"],
)
def test_elements_are_those_of_the_dataset(dataset):
    with cluster(1) as one:
        read = one.read(dataset, ShardingPolicy.OFF)
        assert read.element_spec == dataset.element_spec
        found, expected = list(read), list(dataset)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_equal(own, other)


def test_transformations_after_it_run_here(two_workers):
    here = threading.current_thread().name
    names = []
    read = two_workers.read(Dataset.range(8), ShardingPolicy.DYNAMIC)
    found = numbers(read.map(lambda number: (names.append(here), number + 1)[1]).batch(4))
    assert sorted(itertools.chain(*found)) == list(range(1, 9))
    assert len(names) == 8


# -- jobs --------------------------------------------------------------------------------------


def test_consumers_of_a_named_job_share_its_elements(two_workers):
    parts = [[], []]
    dataset = Dataset.range(300).batch(3)

    def consume(part):
        for batch in two_workers.read(dataset, ShardingPolicy.DYNAMIC, job_name="shared"):
            part.extend(batch.tolist())

    threads = [threading.Thread(target=consume, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(parts[0] + parts[1]) == list(range(300))


def test_jobs_without_a_name_are_read_alone(two_workers):
    reads = [two_workers.read(Dataset.range(20), ShardingPolicy.DYNAMIC) for _ in range(2)]
    assert [sorted(numbers(read)) for read in reads] == [list(range(20))] * 2


def test_an_iteration_of_a_named_job_that_has_ended_gives_nothing_and_the_next_all(two_workers):
    first, late = (
        two_workers.read(Dataset.range(20), ShardingPolicy.DYNAMIC, job_name="ended")
        for _ in range(2)
    )
    assert sorted(numbers(first)) == list(range(20))
    assert numbers(late) == []
    assert sorted(numbers(late)) == list(range(20))


def test_one_job_name_stands_for_one_pipeline(two_workers):
    numbers(two_workers.read(Dataset.range(3), ShardingPolicy.OFF, job_name="same"))
    with pytest.raises(InvalidArgumentError, match="exists with other parameters"):
        numbers(two_workers.read(Dataset.range(4), ShardingPolicy.OFF, job_name="same"))


def test_datasets_are_registered_by_one_process_and_read_by_others(two_workers):
    dataset = Dataset.from_tensor_slices({"a": np.arange(6)}).batch(2)
    dataset_id = service.register_dataset(two_workers.target, dataset)
    assert service.register_dataset(two_workers.target, dataset) == dataset_id
    for given in (dataset_id, dataset_id.encode()):
        read = service.from_dataset_id("distributed_epoch", two_workers.target, given)
        assert read.element_spec == dataset.element_spec
        assert sorted(itertools.chain(*(batch["a"] for batch in read))) == list(range(6))


def test_a_dataset_may_be_registered_under_an_id_of_ones_own(two_workers):
    for _ in range(2):
        found = service.register_dataset(two_workers.target, Dataset.range(3), dataset_id="own")
        assert found == "own"
    read = service.from_dataset_id("distributed_epoch", two_workers.target, "own", job_name="j")
    assert sorted(numbers(read)) == [0, 1, 2]
    with pytest.raises(NotFoundError, match="'other' is not registered"):
        service.from_dataset_id("distributed_epoch", two_workers.target, "other")


# -- static sharding ---------------------------------------------------------------------------


def static(count):
    made = Cluster(worker_addresses=("127.0.0.1:%port%",) * count)
    for _ in range(count):
        made.add_worker()
    return made


def test_static_shards_together_are_the_dataset(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} a\n{number} b\n")
    lines = TextLineDataset([str(tmp_path / f"{number}.txt") for number in range(4)])
    expected = sorted(numbers(lines))
    with static(2) as made:
        for policy in (ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.FILE_OR_DATA):
            assert sorted(numbers(made.read(lines, policy))) == expected
        with pytest.raises(NotFoundError, match="unshardable"):
            numbers(made.read(Dataset.range(10), ShardingPolicy.FILE))


def test_shards_of_shuffled_elements_together_are_all_elements():
    with static(3) as made:
        found = numbers(made.read(Dataset.range(30).shuffle(30), ShardingPolicy.DATA))
    assert sorted(found) == list(range(30))


def test_static_sharding_without_a_list_of_workers_is_an_error(two_workers):
    with pytest.raises(FailedPreconditionError, match="worker_addresses"):
        numbers(two_workers.read(Dataset.range(3), ShardingPolicy.DATA))


# -- coordinated reads -------------------------------------------------------------------------


def test_coordinated_consumers_get_consecutive_elements_of_one_worker_in_each_round(two_workers):
    found = [[], []]
    dataset = Dataset.counter()

    def consume(index):
        read = two_workers.read(
            dataset, "parallel_epochs", job_name="rounds", consumer_index=index, num_consumers=2
        )
        found[index] = numbers(read.take(40))

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Both workers count from 0, and each serves every other round.
    expected = [number // 2 * 2 for number in range(40)]
    assert found == [expected, [number + 1 for number in expected]]


def test_coordinated_reads_need_a_dataset_that_does_not_end(two_workers):
    options = {"job_name": "finite", "consumer_index": 0, "num_consumers": 1}
    with pytest.raises(InvalidArgumentError, match=r"\.repeat\(\)"):
        two_workers.read(Dataset.range(4), "parallel_epochs", **options)
    unknown = Dataset.range(4).filter(lambda number: number < 3)
    with pytest.raises(FailedPreconditionError, match=r"\.repeat\(\)"):
        numbers(two_workers.read(unknown, "parallel_epochs", **options))


# -- several trainers --------------------------------------------------------------------------


def test_trainers_with_a_cache_get_the_same_elements():
    with cluster(1) as one:
        dataset = Dataset.random(seed=1).batch(2)
        first, second = (
            one.read(
                dataset,
                ShardingPolicy.OFF,
                job_name="cached",
                cross_trainer_cache=service.CrossTrainerCache(name),
            )
            for name in ("a", "b")
        )
        assert numbers(first.take(20)) == numbers(second.take(20))


def test_a_cache_for_trainers_needs_a_name_and_a_dataset_that_does_not_end(two_workers):
    cache = service.CrossTrainerCache("a")
    with pytest.raises(ValueError, match="job_name"):
        two_workers.read(Dataset.counter(), "parallel_epochs", cross_trainer_cache=cache)
    with pytest.raises(InvalidArgumentError, match=r"\.repeat\(\)"):
        two_workers.read(
            Dataset.range(3), "parallel_epochs", cross_trainer_cache=cache, job_name="j"
        )
    with pytest.raises(ValueError, match="trainer_id"):
        service.CrossTrainerCache("")


# -- workers that come and go, and dispatchers that restart ------------------------------------


def test_a_worker_that_is_added_begins_with_the_first_element():
    with cluster(1) as one:
        iterator = iter(one.read(Dataset.counter(), ShardingPolicy.OFF, max_outstanding_requests=2))
        assert [int(next(iterator)) for _ in range(5)] == list(range(5))
        one.add_worker()
        assert any(int(next(iterator)) == 0 for _ in range(10_000))
        del iterator


def test_an_iteration_goes_on_with_a_worker_that_comes_later():
    with Cluster() as made:
        read = made.read(Dataset.range(5), ShardingPolicy.DYNAMIC)
        timer = threading.Timer(0.3, made.add_worker)
        timer.start()
        assert sorted(numbers(read)) == list(range(5))
        timer.join()


def test_a_worker_does_not_send_what_a_lost_one_at_its_address_was_asked_for():
    with cluster(1) as made:
        read = made.read(Dataset.range(5), ShardingPolicy.OFF, job_name="two")
        worker = made.add_worker()
        iterator = iter(read)
        next(iterator)  # so that there is a task
        with contextlib.closing(connect(worker.address, 5.0, "The worker")) as connection:
            about = {"iteration": 0, "most": 1, "consumer": -1, "round": -1, "trainer": ""}
            connection.send("take", worker="lost", **about)
            assert connection.wait(10.0)
            assert connection.receive().kind == "other"
        found = [1] + [int(number) for number in iterator]
    assert len(found) == 10


def test_a_worker_that_stops_leaves_the_rest_to_the_others():
    with cluster(1) as made:
        leaving = made.add_worker()
        read = made.read(Dataset.range(400), ShardingPolicy.DYNAMIC, max_outstanding_requests=2)
        iterator = iter(read)
        found = [int(next(iterator)) for _ in range(20)]
        leaving.stop()
        found += [int(number) for number in iterator]
    assert len(found) == len(set(found))  # at most once
    assert set(found) <= set(range(400))


def test_a_dispatcher_that_restarts_goes_on_where_it_was(tmp_path):
    options = {"work_dir": str(tmp_path), "fault_tolerant_mode": True}
    with cluster(1, **options) as made:
        port = int(made.target.rpartition(":")[2])
        read = made.read(Dataset.range(400), ShardingPolicy.DYNAMIC, max_outstanding_requests=2)
        iterator = iter(read)
        found = [int(next(iterator)) for _ in range(10)]
        made.dispatcher.stop()
        made.dispatcher = service.DispatchServer(DispatcherConfig(port=port, **options))
        made.add_worker()
        found += [int(number) for number in iterator]
        assert sorted(found) == list(range(400))
        assert sorted(numbers(read)) == list(range(400))


def test_a_dispatcher_without_a_journal_forgets_and_says_so():
    with cluster(1) as made:
        port = int(made.target.rpartition(":")[2])
        iterator = iter(made.read(Dataset.counter(), ShardingPolicy.OFF))
        next(iterator)
        made.dispatcher.stop()
        made.dispatcher = service.DispatchServer(DispatcherConfig(port=port))
        with pytest.raises(NotFoundError, match="restarted without fault_tolerant_mode"):
            for _ in iterator:
                pass


def test_fault_tolerance_needs_a_folder():
    with pytest.raises(ValueError, match="work_dir"):
        DispatcherConfig(fault_tolerant_mode=True)


def test_two_dispatchers_cannot_have_one_journal(tmp_path):
    options = {"work_dir": str(tmp_path), "fault_tolerant_mode": True}
    with Cluster(**options), pytest.raises(FailedPreconditionError, match="Another process"):
        service.DispatchServer(DispatcherConfig(**options))


# -- errors ------------------------------------------------------------------------------------


def test_a_job_without_workers_ends_after_the_timeout():
    with Cluster() as made:
        read = made.read(Dataset.range(3), ShardingPolicy.OFF, timeout=0.1)
        with pytest.raises(UnavailableError, match="none is registered"):
            numbers(read)


def test_local_workers_are_those_that_this_process_has_started(two_workers):
    read = two_workers.read(
        Dataset.range(3), ShardingPolicy.OFF, target_workers="LOCAL", timeout=0.1
    )
    with pytest.raises(UnavailableError, match="none that this process has started"):
        numbers(read)


def test_local_readers_of_one_job_end_while_workers_of_others_compute(monkeypatch):
    with cluster(0) as made:
        own, _ = made.add_worker(), made.add_worker()
        monkeypatch.setattr(reading, "ids_of_local_workers", lambda: frozenset({own.id}))
        dataset = made.read(
            Dataset.range(4), ShardingPolicy.OFF, job_name="local", target_workers="LOCAL"
        )
        assert sorted(numbers(dataset)) == [0, 1, 2, 3]
        late = made.read(
            Dataset.range(4), ShardingPolicy.OFF, job_name="local", target_workers="LOCAL"
        )
        assert numbers(late) == []


@pytest.mark.parametrize("options", [{}, {"consumer_index": 0, "num_consumers": 1}], ids=str)
def test_a_worker_that_cannot_be_reached_is_named_after_the_timeout(options):
    with cluster(0) as made:
        port = free_port()
        calls = Calls(made.target[7:], 5.0)
        made.callback(calls.close)
        heartbeat = {"number": None, "ended": [], "version": -1, "seconds": 0.0}
        calls.call("work", worker="w", address=f"127.0.0.1:{port}", **heartbeat)
        dataset = made.read(
            Dataset.counter(), ShardingPolicy.OFF, job_name="j", timeout=0.5, **options
        )
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}.*refused"):
            next(iter(dataset))


def test_a_lost_worker_that_does_not_answer_does_not_keep_others_from_the_end():
    may_answer = threading.Event()
    with cluster(1) as made:
        mute = Listening(
            "127.0.0.1", 0, "mute", lambda *of: (may_answer.wait(30), ("later", (), {}))[1]
        )
        made.callback(mute.close)
        made.callback(may_answer.set)
        calls = Calls(made.target[7:], 5.0)
        made.callback(calls.close)
        heartbeat = {"number": None, "ended": [], "version": -1, "seconds": 0.0}
        calls.call("work", worker="w", address=f"127.0.0.1:{mute.port}", **heartbeat)
        iterator = iter(made.read(Dataset.range(3), ShardingPolicy.OFF, timeout=20.0))
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        begin = time.monotonic()
        calls.call("leave", worker="w")
        assert next(iterator, None) is None
        assert time.monotonic() - begin < 8.0


def test_a_worker_listens_at_the_port_of_its_address():
    with cluster(0) as made:
        port = free_port()
        worker = made.add_worker(worker_address=f"127.0.0.1:{port}")
        assert worker.address == f"127.0.0.1:{port}"
        dataset = made.read(Dataset.range(3), ShardingPolicy.OFF, timeout=5.0)
        assert numbers(dataset) == [0, 1, 2]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def test_an_error_of_a_function_names_the_worker_and_the_element(two_workers):
    def fail(number):
        if number == 3:
            raise InvalidArgumentError(message="three")
        return number

    with pytest.raises(InvalidArgumentError, match="three") as raised:
        numbers(two_workers.read(Dataset.range(5).map(fail), ShardingPolicy.DYNAMIC))
    notes = "\n".join(raised.value.__notes__)
    assert "In the function of map, called for element" in notes
    assert "In the input worker at 127.0.0.1:" in notes


def test_after_an_error_the_other_elements_follow():
    with cluster(1) as one:
        dataset = Dataset.from_tensor_slices([1.0, 0.0, 2.0]).map(lambda x: 1 // int(x) or int(x))
        iterator = iter(one.read(dataset, ShardingPolicy.OFF))
        found = []
        for _ in range(4):
            try:
                found.append(int(next(iterator)))
            except ZeroDivisionError:
                found.append("error")
            except StopIteration:
                found.append("end")
        assert found == [1, "error", 2, "end"]


def test_a_position_among_elements_of_workers_cannot_be_saved(two_workers):
    iterator = iter(two_workers.read(Dataset.range(5), ShardingPolicy.OFF))
    next(iterator)
    with pytest.raises(TypeError, match="Save between epochs"):
        iterator.get_state()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"consumer_index": 0}, "num_consumers"),
        ({"num_consumers": 2, "consumer_index": 0}, "job_name"),
        ({"num_consumers": 2, "consumer_index": 2, "job_name": "j"}, "from 0 up to"),
        ({"job_name": ""}, "not empty"),
        ({"compression": "LZ"}, "compression"),
        ({"target_workers": "NEAR"}, "target_workers"),
        ({"max_outstanding_requests": 0}, "positive"),
    ],
    ids=str,
)
def test_invalid_arguments_are_errors_at_once(two_workers, options, text):
    with pytest.raises(ValueError, match=text):
        two_workers.read(Dataset.range(3), ShardingPolicy.OFF, **options)


def test_a_source_that_cannot_be_divided_is_an_error_at_once(two_workers):
    dataset = Dataset.from_generator(lambda: iter([1]), output_signature=None)
    with pytest.raises(InvalidArgumentError, match=r"ShardingPolicy\.OFF"):
        two_workers.read(dataset, ShardingPolicy.DYNAMIC)


def test_a_dispatcher_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("unison.data.service.datasets._SECONDS_FOR_DISPATCHER", 0.1)
    with Cluster() as made:
        target = made.target
    with pytest.raises(DeadlineExceededError, match=r"does not answer at .*: timed out after"):
        service.register_dataset(target, Dataset.range(3))


def test_a_command_whose_port_is_in_use_says_so_in_one_line(two_workers, capsys):
    port = two_workers.target.rpartition(":")[2]
    assert main(["data-service", "dispatcher", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unison data-service: ")
    assert "cannot listen" in said
    assert said.count("\n") == 1
    assert main(["data-service", "worker", "nowhere"]) == 2
    assert "address of a dispatcher" in capsys.readouterr().err


def test_a_program_with_another_key_is_refused(two_workers, monkeypatch):
    monkeypatch.setenv("UNISON_KEY", "cd" * 32)
    with pytest.raises(UnauthenticatedError, match="another key"):
        service.register_dataset(two_workers.target, Dataset.range(3))


# -- what is held ------------------------------------------------------------------------------


def test_few_elements_are_computed_before_they_are_needed():
    with cluster(1) as one:
        read = one.read(Dataset.counter(), ShardingPolicy.OFF, max_outstanding_requests=3)
        iterator = iter(read)
        next(iterator)
        state = iterator._elements._reading.stream._reader._state
        for _ in range(200):
            assert state._outstanding <= 3
            next(iterator)


def test_an_iterator_that_is_dropped_ends_its_threads_and_its_job():
    with Cluster() as one:
        worker = one.add_worker()
        before = set(threading.enumerate())
        iterator = iter(one.read(Dataset.counter(), ShardingPolicy.OFF))
        next(iterator)
        added = {
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith(
                ("unison-input-fetch", "unison-input-job", "unison-input-task")
            )
        }
        assert len(added) == 3
        del iterator
        end = time.monotonic() + 20
        while worker._tasks or any(thread.is_alive() for thread in added):
            assert time.monotonic() < end, added
            time.sleep(0.02)


def test_nothing_is_left_of_a_service_that_was_stopped():
    before = set(threading.enumerate())
    with cluster(2) as made:
        numbers(made.read(Dataset.range(10), ShardingPolicy.DYNAMIC))
        assert set(threading.enumerate()) - before
    end = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before
