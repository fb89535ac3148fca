"""The decisions of an input service, without sockets and threads."""

import contextlib
import dataclasses
import itertools
import json
import threading

import numpy as np
import pytest

from input_registry import ABOUT, DATA, DYNAMIC, OFF, registry
from unison.data import SHARD_HINT, AutoShardPolicy, Dataset, TextLineDataset
from unison.data.chunks import Chunk
from unison.data.service.buffers import FirstCome, Request, Rounds, Window
from unison.data.service.configuration import (
    ShardingPolicy,
    WorkerConfig,
    address_of_service,
    place_in_list,
    policy_of,
)
from unison.data.service.elements import (
    described_error,
    described_signature,
    error_of,
    packed,
    signature_of,
    unpacked,
)
from unison.data.service.iterations import worker_of_round
from unison.data.service.own_random_numbers import with_random_numbers_of
from unison.data.service.pickles import pickled, unpickled
from unison.data.service.registry import ANONYMOUS, RECONNECTION_SECONDS, Registry
from unison.data.service.shares import share_of
from unison.data.service.splits import split_sizes, with_splits
from unison.data.service.tasks import compacted
from unison.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    UnknownError,
)
from unison.storage.journal import Journal

KEY = b"k" * 32


def elements_of(plan):
    stream = plan.stream()
    found = []
    while (element := stream.next()) is not None:
        found.append(np.asarray(element[0]).tolist())
    return found


def chunk(*values):
    return Chunk(0, (np.array(values),))


def numbers(found):
    return None if found is None else [int(element[0]) for element in found]


# -- splits ------------------------------------------------------------------------------------


class HandsOut:
    """Hands out rows as a dispatcher does: to whoever asks."""

    def __init__(self, *sizes, most=3):
        self.made = registry()
        self.made.register_dataset(ABOUT | {"split_sizes": sizes}, b"", "sized")
        spec = dataclasses.replace(DYNAMIC, dataset="sized")
        self.number = self.made.join("c", "j", 0, spec, 0.0).number
        self.most = most
        self.requests = itertools.count()

    def __call__(self, source, repetition, is_nested):
        most = 1 if is_nested else self.most
        request = next(self.requests)
        return self.made.hand_out(self.number, source, repetition, most, "w", request)


def elements_of_workers(dataset, count, most=3):
    """Those that workers get which take turns, one element at a time."""
    hands_out = HandsOut(*split_sizes(dataset.plan), most=most)
    streams = [with_splits(dataset.plan, hands_out).stream() for _ in range(count)]
    found = [[] for _ in streams]
    while streams:
        for place, stream in enumerate(list(streams)):
            element = stream.next()
            if element is None:
                streams.remove(stream)
            else:
                found[place % count].append(np.asarray(element[0]).tolist())
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(20),
        Dataset.range(20).shuffle(20).map(lambda number: number + 1),
        Dataset.range(7).repeat(3),
        Dataset.range(100).skip(3).take(11),
        Dataset.zip(Dataset.range(9), Dataset.range(9)).map(lambda one, two: one + two),
        Dataset.range(6).concatenate(Dataset.range(10, 15)),
        Dataset.range(5).flat_map(lambda number: Dataset.from_tensors(number).repeat(3)),
        Dataset.range(12).shard(3, 1),
        Dataset.range(8).cache().repeat(2),
        Dataset.range(8).prefetch(2).filter(lambda number: number % 2 == 0),
    ],
    ids=lambda dataset: dataset.plan.name,
)
def test_dynamic_shards_are_all_elements_once(dataset, count):
    found = elements_of_workers(dataset, count)
    assert sorted(itertools.chain(*found)) == sorted(elements_of(dataset.plan))


def test_dynamic_shards_are_batched_by_each_worker():
    found = elements_of_workers(Dataset.range(10).batch(3), 2, most=2)
    batches = list(itertools.chain(*found))
    assert sorted(itertools.chain(*batches)) == list(range(10))
    assert all(len(batch) <= 3 for batch in batches)


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (Dataset.from_generator(lambda: iter([1]), output_signature=None), "ShardingPolicy.OFF"),
        (Dataset.counter(), "ShardingPolicy.OFF"),
        (Dataset.zip(Dataset.range(3).batch(2), Dataset.range(3)), "Zip the arrays"),
    ],
    ids=["generator", "counter", "zip of batches"],
)
def test_a_source_without_index_cannot_be_divided_dynamically(dataset, remedy):
    with pytest.raises(InvalidArgumentError, match=remedy):
        split_sizes(dataset.plan)


def test_elements_kept_in_files_cannot_be_divided_dynamically(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"cache\(\) without a filename"):
        split_sizes(Dataset.range(3).cache(str(tmp_path / "kept")).plan)


def test_splits_become_smaller_towards_the_end_so_that_workers_end_together():
    made = registry()
    for worker in "ab":
        made.hear_worker(worker, f"127.0.0.1:{ord(worker)}", None, 0.0)
    made.register_dataset(ABOUT | {"split_sizes": [1000]}, b"", "large")
    spec = dataclasses.replace(DYNAMIC, dataset="large")
    number = made.join("c", "j", 0, spec, 0.0).number
    sizes, end = [], 0
    while (found := made.hand_out(number, 0, 0, 500, "a", end)) is not None:
        assert found[0] == end
        end = found[1]
        sizes.append(found[1] - found[0])
    assert end == 1000
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (125, 1)


# -- static shares -----------------------------------------------------------------------------


def shares(dataset, policy, count):
    return [elements_of(share_of(dataset.plan, policy, count, index)) for index in range(count)]


def files(folder, count):
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"{number} a\n{number} b\n")
    return TextLineDataset([str(folder / f"{number}.txt") for number in range(count)])


def test_data_shards_are_every_nth_element():
    assert shares(Dataset.range(5), ShardingPolicy.DATA, 2) == [[0, 2, 4], [1, 3]]


def test_file_shards_are_every_nth_file(tmp_path):
    found = shares(files(tmp_path, 3), ShardingPolicy.FILE, 2)
    assert found == [[b"0 a", b"0 b", b"2 a", b"2 b"], [b"1 a", b"1 b"]]


def test_file_shards_need_a_file_for_each_worker(tmp_path):
    with pytest.raises(InvalidArgumentError, match="as many files as workers"):
        shares(files(tmp_path, 1), ShardingPolicy.FILE, 2)
    with pytest.raises(NotFoundError, match="unshardable"):
        shares(Dataset.range(3), ShardingPolicy.FILE, 2)


def test_file_or_data_divides_elements_if_there_are_too_few_files(tmp_path):
    assert shares(files(tmp_path, 1), ShardingPolicy.FILE_OR_DATA, 2) == [[b"0 a"], [b"0 b"]]
    assert shares(Dataset.range(3), ShardingPolicy.FILE_OR_DATA, 2) == [[0, 2], [1]]
    assert shares(files(tmp_path, 2), ShardingPolicy.FILE_OR_DATA, 2)[0] == [b"0 a", b"0 b"]


def test_hint_divides_where_the_dataset_says():
    dataset = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT).batch(2)
    assert shares(dataset, ShardingPolicy.HINT, 2) == [[[0, 2], [4]], [[1, 3], [5]]]


def test_iterations_and_workers_have_orders_of_their_own():
    dataset = Dataset.range(50).shuffle(50, seed=1).map(lambda number: number)
    orders = {
        tuple(elements_of(with_random_numbers_of(dataset.plan, iteration, worker)))
        for iteration in (0, 1)
        for worker in (0, 1)
    }
    assert len(orders) == 4
    assert tuple(elements_of(dataset.plan)) in orders  # the first worker's, in the first one


def test_an_order_that_is_to_be_the_same_in_each_pass_is_the_same_everywhere():
    dataset = Dataset.range(50).shuffle(50, seed=1, reshuffle_each_iteration=False)
    plans = [with_random_numbers_of(dataset.plan, iteration, 0) for iteration in (0, 1)]
    assert elements_of(plans[0]) == elements_of(plans[1])


# -- when an iteration is complete -------------------------------------------------------------


def two_workers(made):
    return [made.hear_worker(name, f"h:{name}", None, 0.0) for name in ("1", "2")]


@pytest.mark.parametrize("spec", [OFF, DYNAMIC], ids=["off", "dynamic"])
def test_an_iteration_is_complete_when_the_tasks_of_all_present_workers_have_ended(spec):
    made = registry()
    first, second = two_workers(made)
    number = made.join("c", "j", 0, spec, 0.0).number
    made.end_tasks(first, [number])
    assert not made.hear_consumer(number, "c", 0.0)["is_complete"]
    made.end_tasks(second, [number])
    assert made.hear_consumer(number, "c", 0.0)["is_complete"]


def test_what_a_lost_worker_has_not_ended_does_not_keep_others_from_completing():
    made = registry()
    first, second = two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.end_tasks(first, [number])
    made.leave_worker(second.id)
    assert made.hear_consumer(number, "c", 0.0)["is_complete"]


def test_an_iteration_whose_only_worker_is_lost_waits_for_another_one():
    made = registry()
    worker = made.hear_worker("1", "h:1", None, 0.0)
    number = made.join("c", "j", 0, OFF, 0.0).number
    made.leave_worker(worker.id)
    assert not made.hear_consumer(number, "c", 0.0)["is_complete"]
    again = made.hear_worker("2", "h:2", None, 0.0)
    assert list(made.tasks_of(again)) == [number]


def test_a_worker_that_joins_gets_the_iterations_that_are_not_complete():
    made = registry()
    first = made.hear_worker("1", "h:1", None, 0.0)
    ended = made.join("c", "ended", 0, OFF, 0.0).number
    made.end_tasks(first, [ended])
    going_on = made.join("c", "goes on", 0, OFF, 0.0).number
    assert list(made.tasks_of(made.hear_worker("2", "h:2", None, 0.0))) == [going_on]


def test_a_static_share_that_was_lost_is_computed_again_by_the_worker_at_its_address():
    made = registry("h:1", "h:2")
    first, second = two_workers(made)
    number = made.join("c", "j", 0, DATA, 0.0).number
    made.end_tasks(first, [number])
    made.leave_worker(second.id)
    assert not made.hear_consumer(number, "c", 0.0)["is_complete"]
    again = made.hear_worker("new", "h:2", None, 0.0)
    assert made.tasks_of(again)[number]["place"] == 1
    made.end_tasks(again, [number])
    assert made.hear_consumer(number, "c", 0.0)["is_complete"]


def test_static_sharding_needs_a_list_of_workers():
    with pytest.raises(FailedPreconditionError, match="worker_addresses"):
        registry().join("c", "j", 0, DATA, 0.0)


def test_workers_that_are_not_in_the_list_get_no_static_share():
    made = registry("h:1")
    number = made.join("c", "j", 0, DATA, 0.0).number
    assert number not in made.tasks_of(made.hear_worker("w", "elsewhere:1", None, 0.0))


@pytest.mark.parametrize(
    ("address", "listed", "taken", "place"),
    [
        ("h:1", ("h:1", "h:2"), set(), 0),
        ("h:2", ("h:1", "h:2"), set(), 1),
        ("h:3", ("h:1", "h:2"), set(), None),
        ("h:9", ("h", "h"), {0}, 1),
        ("h:9", ("h:%port%",), set(), 0),
        ("[::1]:9", ("[::1]:9",), set(), 0),
        ("127.0.0.1:9", ("localhost:%port%",), set(), 0),
        ("[::1]:9", ("localhost",), set(), 0),
        ("10.0.0.1:9", ("localhost",), set(), None),
    ],
)
def test_a_listed_address_may_leave_the_port_open(address, listed, taken, place):
    assert place_in_list(address, listed, taken) == place


# -- workers and jobs --------------------------------------------------------------------------


def test_a_worker_is_lost_soon_after_its_connection_is_closed():
    made = registry()
    made.hear_worker("1", "h:1", None, 0.0)
    made.close_worker("1", 1.0)
    made.expire(1.0 + RECONNECTION_SECONDS / 2)
    assert made.workers
    made.expire(1.1 + RECONNECTION_SECONDS)
    assert not made.workers


def test_a_worker_that_connects_again_is_the_same_one():
    made = registry()
    made.hear_worker("1", "h:1", None, 0.0)
    made.close_worker("1", 1.0)
    assert made.hear_worker("1", "h:1", 0, 1.5).number == 0
    made.expire(5.0)
    assert list(made.workers) == ["1"]


def test_a_silent_worker_is_lost_after_the_timeout():
    made = registry(worker_timeout=60.0)
    made.hear_worker("1", "h:1", None, 0.0)
    made.expire(59.0)
    assert made.workers
    made.expire(61.0)
    assert not made.workers


def test_a_new_process_at_an_address_takes_the_place_of_the_old_one():
    made = registry()
    made.hear_worker("old", "h:1", None, 0.0)
    made.hear_worker("new", "h:1", None, 0.0)
    assert list(made.workers) == ["new"]


def test_consumers_of_a_job_share_its_nth_iterations():
    made = registry()
    assert made.join("a", "j", 0, OFF, 0.0) is made.join("b", "j", 0, OFF, 0.0)
    assert made.join("a", "j", 1, OFF, 0.0) is not made.join("b", "j", 0, OFF, 0.0)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(OFF, policy=ShardingPolicy.DYNAMIC),
        dataclasses.replace(OFF, description="Slices"),
        dataclasses.replace(OFF, num_consumers=2),
    ],
    ids=["policy", "dataset", "consumers"],
)
def test_a_job_name_stands_for_one_job(other):
    made = registry()
    made.join("a", "j", 0, OFF, 0.0)
    with pytest.raises(InvalidArgumentError, match="exists with other parameters"):
        made.join("b", "j", 0, other, 0.0)


def test_a_job_of_ones_own_is_removed_with_its_consumer():
    made = registry()
    number = made.join("a", f"{ANONYMOUS}1", 0, OFF, 0.0).number
    made.release(number, "a", 1.0)
    with pytest.raises(NotFoundError):
        made.iteration(number)


def test_a_named_job_that_nobody_reads_is_removed_after_the_timeout():
    made = registry(job_timeout=300.0)
    number = made.join("a", "j", 0, OFF, 0.0).number
    made.release(number, "a", 1.0)
    made.expire(300.0)
    assert made.iteration(number)
    made.expire(302.0)
    with pytest.raises(NotFoundError, match="Begin a new iteration"):
        made.iteration(number)


def test_a_consumer_that_was_killed_keeps_no_job():
    made = registry(job_timeout=0.0)
    number = made.join("a", "j", 0, OFF, 0.0).number
    made.expire(29.0)
    assert made.iteration(number)
    made.expire(31.0)
    made.expire(32.0)
    with pytest.raises(NotFoundError):
        made.iteration(number)


def test_equal_datasets_are_registered_once_and_an_id_may_be_given():
    made = registry()
    one = made.register_dataset(ABOUT, b"1", None)
    assert made.register_dataset(ABOUT, b"1", None) == one
    assert made.register_dataset(ABOUT, b"2", None) != one
    assert made.register_dataset(ABOUT, b"3", "mine") == "mine"
    assert made.register_dataset(ABOUT, b"4", "mine") == "mine"
    assert made.dataset("mine").payload == b"3"


def test_a_dataset_that_was_not_registered_is_named():
    with pytest.raises(NotFoundError, match="'unknown' is not registered"):
        registry().dataset("unknown")
    with pytest.raises(NotFoundError) as caught:
        registry().dataset("x" * 100_000)  # as a corrupt journal may say
    assert len(str(caught.value)) < 1000


# -- a dispatcher that restarts ----------------------------------------------------------------


def test_recorded_events_are_the_same_datasets_jobs_and_splits(tmp_path):
    with contextlib.closing(Journal(str(tmp_path / "journal"))) as journal:
        made = Registry((), 0.0, journal.append)
        made.register_dataset(ABOUT, b"payload", "d")
        made.hear_worker("1", "h:1", None, 0.0)
        number = made.join("c", "j", 0, DYNAMIC, 0.0).number
        handed_out = [made.hand_out(number, 0, 0, 2, "1", request) for request in range(2)]
        rounds = made.workers_of_round(number, 3, 0.0)
    again = Registry((), 0.0)
    with contextlib.closing(Journal(str(tmp_path / "journal"))) as journal:
        for event, payload in journal.records:
            again.apply(event, payload)
    assert again.dataset("d").payload == b"payload"
    assert again.join("c", "j", 0, DYNAMIC, 0.0).number == number
    # The answer to the latest request may have been lost with the dispatcher.
    assert again.hand_out(number, 0, 0, 2, "1", 1) == handed_out[-1]
    begin, _ = again.hand_out(number, 0, 0, 2, "1", 2)
    assert begin == handed_out[-1][1]
    assert again.workers_of_round(number, 3, 0.0) == rounds == ["1"]
    assert again.hear_worker("2", "h:2", None, 0.0).number == 1


def test_a_journal_of_a_killed_process_ends_with_the_last_whole_record(tmp_path):
    path = tmp_path / "journal"
    with contextlib.closing(Journal(str(path))) as journal:
        journal.append({"number": 1}, b"abc")
        journal.append({"number": 2}, b"def")
    whole = path.read_bytes()
    for size in range(len(whole) // 2, len(whole)):
        path.write_bytes(whole[:size])
        with contextlib.closing(Journal(str(path))) as journal:
            assert [record["number"] for record, _ in journal.records] == [1]
            journal.append({"number": 3})
        with contextlib.closing(Journal(str(path))) as journal:
            assert [record["number"] for record, _ in journal.records] == [1, 3]


def test_a_journal_that_is_corrupt_is_an_error(tmp_path):
    path = tmp_path / "journal"
    with contextlib.closing(Journal(str(path))) as journal:
        journal.append({"number": 1}, b"abc")
        journal.append({"number": 2}, b"def")
    damaged = bytearray(path.read_bytes())
    damaged[20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataLossError, match="checksum mismatch"):
        Journal(str(path))


def test_a_journal_has_one_writer(tmp_path):
    with (
        contextlib.closing(Journal(str(tmp_path / "journal"))),
        pytest.raises(FailedPreconditionError, match="Another process"),
    ):
        Journal(str(tmp_path / "journal"))


# -- coordinated reads -------------------------------------------------------------------------


def test_workers_serve_rounds_by_turns_for_all_consumers():
    made = registry()
    two_workers(made)
    spec = dataclasses.replace(OFF, num_consumers=2)
    number = made.join("a", "j", 0, spec, 0.0).number
    workers = made.workers_of_round(number, 0, 0.0)
    assert [worker_of_round(workers, each) for each in range(4)] == ["1", "2", "1", "2"]


def test_a_worker_that_joins_serves_rounds_that_nobody_has_asked_for():
    made = registry()
    made.hear_worker("1", "h:1", None, 0.0)
    spec = dataclasses.replace(OFF, num_consumers=2)
    number = made.join("a", "j", 0, spec, 0.0).number
    assert made.workers_of_round(number, 0, 0.0) == ["1"]
    made.hear_worker("2", "h:2", None, 0.0)
    assert made.workers_of_round(number, 0, 0.0) == ["1"]
    assert made.workers_of_round(number, 16, 0.0) == ["1", "2"]


def test_rounds_of_a_lost_worker_are_served_by_another_one():
    made = registry()
    two_workers(made)
    spec = dataclasses.replace(OFF, num_consumers=2)
    number = made.join("a", "j", 0, spec, 0.0).number
    assert made.workers_of_round(number, 0, 0.0) == ["1", "2"]
    made.leave_worker("1")
    assert made.workers_of_round(number, 0, 10.0) == ["2", "2"]


def test_consumers_of_a_round_get_consecutive_elements():
    buffer = Rounds(2)
    for number in range(6):
        buffer.add(chunk(number))
    order = [(0, 0), (1, 0), (1, 2), (0, 2)]  # rounds 1 and 3 are another worker's
    found = [numbers(buffer.take(Request(1, consumer, number))) for consumer, number in order]
    assert found == [[0], [1], [3], [2]]


def test_a_round_can_be_asked_for_again_until_all_have_passed_it():
    buffer = Rounds(2)
    for number in range(4):
        buffer.add(chunk(number))
    assert numbers(buffer.take(Request(1, 0, 0))) == [0]
    assert numbers(buffer.take(Request(1, 0, 0))) == [0]
    assert numbers(buffer.take(Request(1, 1, 0))) == [1]


def test_a_round_waits_until_there_is_an_element_for_each_consumer():
    buffer = Rounds(2)
    buffer.add(chunk(1))
    assert buffer.take(Request(1, 0, 0)) is None
    with pytest.raises(InvalidArgumentError, match="num_consumers=2"):
        buffer.take(Request(1, 2, 0))


# -- other buffers -----------------------------------------------------------------------------


def test_elements_are_for_whoever_asks_first():
    buffer = FirstCome()
    buffer.add(chunk(1, 2, 3))
    buffer.add(chunk(4))
    assert numbers(buffer.take(Request(most=2))) == [1, 2]
    assert numbers(buffer.take(Request())) == [3]
    assert numbers(buffer.take(Request(most=5))) == [4]
    assert buffer.take(Request()) is None


def test_a_full_buffer_holds_few_chunks():
    buffer = FirstCome()
    while not buffer.is_full():
        buffer.add(chunk(1))
    assert len(buffer._chunks) == 4


def test_every_trainer_gets_the_elements_that_are_kept():
    window = Window()
    for number in range(3):
        window.add(chunk(number))
    of_first = [numbers(window.take(Request(trainer="a"))) for _ in range(4)]
    assert of_first == [[0], [1], [2], None]
    assert numbers(window.take(Request(trainer="b"))) == [0]


def test_a_trainer_that_is_late_misses_what_is_not_kept():
    window = Window(most_bytes=2 * chunk(0).stacked()[0].nbytes)
    for number in range(4):
        window.add(chunk(number))
    assert numbers(window.take(Request(trainer="late"))) == [2]


def test_the_window_is_filled_at_the_pace_of_the_fastest_trainer():
    window = Window()
    while not window.is_full():
        window.add(chunk(1))
    window.take(Request(trainer="slow"))
    assert not window.is_full()


# -- what is sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "elements",
    [
        [(np.float32(1.5), b"text")],
        [(np.arange(6).reshape(2, 3),), (np.arange(2).reshape(1, 2),)],
        [(np.array([b"a", b"", b"\0\xff"], object), np.int64(3))] * 2,
        [(np.array([], np.float64), b"")],
    ],
    ids=["scalar and text", "shapes", "texts", "empty"],
)
def test_elements_are_sent_as_they_are(elements):
    fields, arrays = packed(Chunk(0, elements=elements))
    found = list(unpacked(json.loads(json.dumps(fields)), arrays))
    for own, other in zip(found, elements, strict=True):
        for leaf, expected in zip(own, other, strict=True):
            assert type(leaf) is type(expected)
            np.testing.assert_array_equal(leaf, expected)


def test_stacked_elements_stay_stacked():
    fields, arrays = packed(Chunk(0, (np.arange(4), np.array([b"a"] * 4, object))))
    found = unpacked(fields, arrays)
    assert found.is_stacked
    assert [row[1] for row in found] == [b"a"] * 4


def test_small_elements_of_one_shape_are_stacked_and_others_are_not():
    assert compacted(Chunk(0, elements=[(np.ones(3),)] * 4)).is_stacked
    assert not compacted(Chunk(0, elements=[(np.ones(3),), (np.ones(2),)])).is_stacked
    assert not compacted(Chunk(0, elements=[(np.ones(1 << 16),)] * 2)).is_stacked


def test_elements_that_are_datasets_cannot_be_sent():
    windows = Dataset.range(4).window(2)
    with pytest.raises(InvalidArgumentError, match="flat_map"):
        described_signature(windows.plan.signature)
    with pytest.raises(InvalidArgumentError, match="flat_map"):
        packed(Chunk(0, elements=[windows.plan.stream().next()]))


def test_ragged_elements_cannot_be_sent():
    ragged = Dataset.from_generator(lambda: iter([[1], [2, 3]])).ragged_batch(2)
    with pytest.raises(InvalidArgumentError, match=r"x\.to_tensor\(\)"):
        described_signature(ragged.plan.signature)


@pytest.mark.parametrize(
    "change",
    [{"count": 3}, {"of": ["bytes", "array", "array"]}, {"leaves": 0}, {"of": [[2]]}, {"of": 7}],
    ids=str,
)
def test_an_invalid_message_is_corrupt(change):
    fields, arrays = packed(Chunk(0, elements=[(np.ones(2),)] * 2))
    with pytest.raises(DataLossError):
        unpacked(fields | change, arrays)


@pytest.mark.parametrize(
    "error", [ValueError("five"), InvalidArgumentError(message="six"), KeyError("seven")], ids=str
)
def test_errors_of_workers_keep_their_class_and_text(error):
    found = error_of(json.loads(json.dumps(described_error(error, "worker 1"))))
    assert type(found) is type(error)
    assert found.__notes__[-1].startswith("In worker 1")


def test_an_error_of_an_unknown_class_is_named():
    class OwnError(Exception):
        pass

    found = error_of(described_error(OwnError("text"), "worker 1"))
    assert isinstance(found, UnknownError)
    assert found.message == "OwnError: text"


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_tensor_slices({"a": np.zeros((3, 2), np.float32), "b": [b"x", b"y", b"z"]}),
        Dataset.zip(Dataset.range(3), Dataset.range(3).batch(2)),
    ],
    ids=["dictionary", "tuple"],
)
def test_signatures_are_sent_as_json(dataset):
    described = json.loads(json.dumps(described_signature(dataset.plan.signature)))
    assert signature_of(described) == dataset.plan.signature


def test_a_dataset_is_loaded_only_if_a_process_with_the_key_has_signed_it():
    signed = pickled(Dataset.range(3).map(lambda number: number * 2).plan, KEY)
    assert elements_of(unpickled(signed, KEY)) == [0, 2, 4]
    with pytest.raises(UnauthenticatedError):
        unpickled(signed[:-1] + b"!", KEY)
    with pytest.raises(UnauthenticatedError):
        unpickled(signed, b"other" * 8)


def test_what_cannot_be_sent_to_workers_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to input workers"):
        pickled(Dataset.range(3).map(lambda number: (lock, number)).plan, KEY)


# -- arguments ---------------------------------------------------------------------------------


def test_policies_have_tensorflows_older_names():
    assert policy_of("parallel_epochs") is ShardingPolicy.OFF
    assert policy_of("distributed_epoch") is ShardingPolicy.DYNAMIC
    with pytest.raises(ValueError, match="distributed_epoch"):
        policy_of("other")
    with pytest.raises(ValueError, match="ShardingPolicy"):
        policy_of(AutoShardPolicy.DATA)


@pytest.mark.parametrize("service", ["grpc://h:1", "h:1", ("grpc", "h:1")], ids=str)
def test_a_service_is_an_address_with_or_without_a_protocol(service):
    assert address_of_service(service) == "h:1"


@pytest.mark.parametrize("service", ["", "h", 5, "a://b://h:1", None, "h:port"], ids=str)
def test_another_service_is_an_error(service):
    with pytest.raises(ValueError, match=r"DispatchServer\.target"):
        address_of_service(service)


def test_a_worker_needs_the_address_of_a_dispatcher():
    with pytest.raises(ValueError, match="dispatcher_address"):
        WorkerConfig("")
