"""One dataset for several workers: what each of them reads, and that they go on together.

The workers are threads here; `tests/parallel` runs the same as processes.
"""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import unison
from unison.data import (
    SHARD_HINT,
    AutoShardPolicy,
    Dataset,
    InputOptions,
    InputReplicationMode,
    Options,
    TextLineDataset,
    distribute_dataset,
    distribute_from_function,
)
from unison.data.distribution.input_workers import connected, workers_in_threads
from unison.data.distribution.worker_examples import BatchSharding, Division, owned
from unison.data.sources.in_memory import ArrayRows
from unison.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from unison.runtime.agreement import MemoryStore
from unison.runtime.devices import default_devices
from unison.runtime.placement import Placement
from unison.train import Checkpoint

ON_HOST = InputOptions(experimental_fetch_to_device=False)


def with_policy(dataset, name):
    return dataset.with_options(Options(auto_shard_policy=AutoShardPolicy[name]))


def placement_of(replicas):
    return Placement(default_devices()[:replicas])


def together(num_workers, work, patience=8.0):
    """What `work` returns for every worker; each is a thread."""
    with ThreadPoolExecutor(num_workers) as threads:
        runs = [
            threads.submit(work, workers) for workers in workers_in_threads(num_workers, patience)
        ]
    for run in runs:
        if not isinstance(run.exception(), DeadlineExceededError | None):
            raise run.exception()
    return [run.result() for run in runs]


def parts_of(batch):
    values = getattr(batch, "values", None)
    return [
        np.asarray(part).tolist() for part in (values if isinstance(values, tuple) else [batch])
    ]


def read_by(num_workers, dataset_of, replicas=1, options=None):
    """For every worker, step and replica: the examples."""

    def work(workers):
        batches = distribute_dataset(dataset_of(), placement_of(replicas), options, workers)
        return [parts_of(batch) for batch in batches]

    return together(num_workers, work)


def all_examples(read):
    return sorted(
        example for steps in read for parts in steps for part in parts for example in part
    )


@pytest.fixture
def files(tmp_path):
    """Returns the names of files of text, of as many lines as asked for."""

    def write(*lines):
        names = []
        for number, count in enumerate(lines):
            path = tmp_path / f"{number}.txt"
            path.write_text("".join(f"{number}-{line}\n" for line in range(count)))
            names.append(str(path))
        return names

    return write


def lines_in(*lines):
    return sorted(
        f"{number}-{line}".encode() for number, n in enumerate(lines) for line in range(n)
    )


# -- DATA ------------------------------------------------------------------------------------


def test_functions_before_a_shuffle_may_give_elements_of_different_shapes():
    def dataset():
        ragged = Dataset.range(16).map(lambda n: np.arange(n + 1)).map(lambda row: row[1:])
        return ragged.shuffle(16, seed=1).map(lambda row: np.resize(row, 20)).batch(8)

    read = read_by(2, dataset)
    steps = [first + second for (first,), (second,) in zip(*read, strict=True)]
    assert steps == [batch.tolist() for batch in dataset()]

    def not_padded():
        return Dataset.range(16).map(lambda n: np.arange(n + 1)).shuffle(16, seed=1).batch(8)

    with pytest.raises(InvalidArgumentError, match="different shapes"):
        read_by(2, not_padded)


@pytest.mark.parametrize("parallel_calls", [None, 3])
def test_functions_before_a_shuffle_are_called_for_own_examples(parallel_calls):
    called = {}

    def dataset_of(reader):
        called[reader] = []

        def function(number):
            called[reader].append(int(number))
            return number, str(number).encode()

        mapped = Dataset.range(22).map(function, num_parallel_calls=parallel_calls)
        return mapped.shuffle(22, seed=2).repeat(2).map(lambda x, text: (x * 2, text)).batch(8)

    def work(workers):
        dataset = dataset_of(workers.index)
        batches = distribute_dataset(dataset, placement_of(1), ON_HOST, workers)
        return [[leaf.tolist() for leaf in batch] for batch in batches]

    whole = [[leaf.tolist() for leaf in batch] for batch in dataset_of("whole")]
    read = together(2, work)
    together_again = [
        [first + second for first, second in zip(*leaves, strict=True)]
        for leaves in zip(*read, strict=True)
    ]
    assert together_again == whole
    assert len(called[0]) == len(called[1]) == 22
    assert sorted(called[0] + called[1]) == sorted(called["whole"])


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("batch", [3, 8])
def test_workers_share_every_global_batch_as_replicas_of_one_worker_do(workers, replicas, batch):
    def dataset():
        return Dataset.range(21).shuffle(21, seed=1).batch(batch)

    alone = (
        distribute_dataset(dataset(), placement_of(4), ON_HOST) if workers * replicas == 4 else None
    )
    read = read_by(workers, dataset, replicas)
    steps = [list(itertools.chain(*of_step)) for of_step in zip(*read, strict=True)]
    if alone is not None:
        assert steps == [parts_of(batch) for batch in alone]
    batches = [list(itertools.chain(*parts)) for parts in steps]
    assert batches == [element.tolist() for element in dataset()]


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.shuffle(40).batch(7),
        lambda d: d.shuffle(5).batch(7).repeat(2).prefetch(2),
        lambda d: d.map(lambda x: x + 100, num_parallel_calls=2, deterministic=False).batch(4),
        lambda d: d.batch(6).map(lambda x: x - 1),
        lambda d: d.filter(lambda x: x % 3 > 0).cache().shuffle(9).batch(5),
        lambda d: d.repeat(2).shuffle(30).batch(8, drop_remainder=False),
        lambda d: d.take(30).skip(3).batch(1),
    ],
)
def test_each_element_is_read_once_by_some_worker_also_without_a_seed(transform):
    def dataset():
        return with_policy(transform(Dataset.range(40)), "DATA")

    expected = sorted(x for batch in dataset() for x in batch.tolist())
    for workers in (2, 3):
        read = read_by(workers, dataset)
        assert len({len(steps) for steps in read}) == 1
        assert all_examples(read) == expected


@pytest.mark.parametrize("calls", [None, 2])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_worker_maps_its_own_examples_only(calls, order):
    mapped = [[], []]

    def work(workers):
        def note(x):
            mapped[workers.index].append(int(x))
            return x * 10

        dataset = Dataset.from_tensor_slices(np.arange(24))
        if order == "before":
            dataset = dataset.shuffle(24, seed=1).map(note, num_parallel_calls=calls)
        else:
            dataset = dataset.map(note, num_parallel_calls=calls).repeat(1)
        batches = distribute_dataset(dataset.batch(4).prefetch(1), placement_of(2), None, workers)
        return [parts_of(batch) for batch in batches]

    read = together(2, work)
    if order == "before":
        assert sorted(map(len, mapped)) == [12, 12]
        assert sorted([*mapped[0], *mapped[1]]) == list(range(24))
    assert all_examples(read) == [10 * x for x in range(24)]


def test_an_error_in_a_function_tells_the_elements_number_in_the_whole():
    def fail_at_six(x):
        if x == 6:
            raise ZeroDivisionError("six")
        return x

    def work(workers):
        dataset = Dataset.from_tensor_slices(np.arange(8)).map(fail_at_six).batch(4)
        batches = distribute_dataset(dataset, placement_of(1), ON_HOST, workers)
        if workers.index == 0:
            return len(list(batches))
        with pytest.raises(ZeroDivisionError) as caught:
            list(batches)
        return caught.value.__notes__[0]

    assert together(2, work) == [2, "It is element 6 of those that all workers read together."]


def test_a_worker_reads_its_own_rows_only(monkeypatch):
    taken = []
    take = ArrayRows.take
    monkeypatch.setattr(
        ArrayRows, "take", lambda rows, where: (taken.append(len(where)), take(rows, where))[1]
    )
    rows = Dataset.from_tensor_slices(np.arange(40)).shuffle(40, seed=2).repeat(3).batch(8)
    shares = owned(rows.plan)(Division(2, range(1))).stream()
    parts = [shares.next() for _ in range(6)]
    assert [int(size) for _, size in parts] == [8] * 6
    assert taken[:6] == [4] * 6
    assert all(len(own) == 4 for own, _ in parts)
    assert len({*np.concatenate([own for own, _ in parts[:5]]).tolist()}) == 20


@pytest.mark.parametrize("vectorized", [False, True])
def test_random_maps_get_the_keys_of_the_elements_numbers(vectorized):
    def dataset():
        pairs = Dataset.range(20).shuffle(20, seed=3)
        keyed = pairs.map(lambda x, key: (x, key), seed=5, vectorized=vectorized)
        return keyed.map(lambda x, key: np.concatenate([np.reshape(x, (1,)), key])).batch(6)

    whole = sorted(row.tolist() for batch in dataset() for row in batch)
    read = read_by(3, dataset, options=ON_HOST)
    assert (
        sorted(row for steps in read for parts in steps for part in parts for row in part) == whole
    )


def test_a_worker_that_gets_none_of_a_batch_knows_what_there_is_none_of():
    # Nobody can tell what the function returns but by calling it.
    def dataset():
        rows = Dataset.range(5).map(lambda x: np.full((2, 3), x, np.float32))
        return rows.batch(4)

    def work(workers):
        batches = distribute_dataset(dataset(), placement_of(1), ON_HOST, workers)
        return [batch.shape for batch in batches]

    assert together(3, work) == [[(2, 2, 3), (1, 2, 3)], [(2, 2, 3), (0, 2, 3)], [(0, 2, 3)] * 2]


@pytest.mark.parametrize("batch", [4, 5, 7])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("skipped", [0, 2])
def test_the_numbers_of_a_workers_examples_are_those_in_the_whole(batch, workers, skipped):
    count = 22
    numbers = []
    for first in range(workers):
        sharding = BatchSharding(
            batch, -(-count // batch), count, Division(workers, range(first, first + 1))
        )
        own = sum(len(sharding.own(b)) for b in range(skipped, sharding.num_batches))
        numbers += sharding.numbers_of(np.arange(own), skipped).tolist() if own else []
        assert [sharding.numbers_of(place, skipped) for place in range(own)] == numbers[
            len(numbers) - own :
        ]
    assert sorted(numbers) == list(range(skipped * batch, count))


def test_every_pass_is_divided_also_if_a_worker_has_looked_into_the_dataset_before():
    def work(workers):
        dataset = with_policy(Dataset.range(30).shuffle(30).batch(6), "DATA")
        if workers.index:
            next(iter(dataset))
        batches = distribute_dataset(dataset, placement_of(1), ON_HOST, workers)
        return [[parts_of(batch) for batch in batches] for _ in range(3)]

    passes = list(zip(*together(2, work), strict=True))
    assert [all_examples(read) for read in passes] == [list(range(30))] * 3
    assert len({repr(read) for read in passes}) == 3


def test_a_strategy_divides_by_its_input_workers():
    def work(workers):
        strategy = unison.OneDeviceStrategy("CPU:0")
        strategy.input_workers = workers
        divided = strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))
        own = strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(context.input_pipeline_id + 1).batch(1)
        )
        return [parts_of(batch) for batch in divided], [parts_of(batch) for batch in own]

    first, second = together(2, work)
    assert first == ([[[0, 1]], [[4, 5]]], [[[0]], [[]]])
    assert second == ([[[2, 3]], [[6, 7]]], [[[0]], [[1]]])


def test_a_checkpoint_keeps_where_a_distributed_iterator_is(tmp_path):
    dataset = Dataset.range(40).shuffle(40, seed=1).batch(8)
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    first = [parts_of(next(iterator)) for _ in range(2)]
    path = Checkpoint(iterator=iterator).save(str(tmp_path / "at"))
    fewer = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    again = iter(fewer.experimental_distribute_dataset(dataset))
    Checkpoint(iterator=again).restore(path)
    rest = [parts_of(batch) for batch in again]
    assert all_examples([first, rest]) == list(range(40))
    assert len(rest) == 3


# -- FILE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
@pytest.mark.parametrize("lines", [(4, 4, 4), (1, 9, 2, 0, 5), (0, 0, 7)])
def test_files_are_divided_and_all_workers_take_as_many_steps(files, policy, lines):
    names = files(*lines)
    read = read_by(3, lambda: with_policy(TextLineDataset(names).batch(6), policy), replicas=2)
    assert len({len(steps) for steps in read}) == 1
    assert all_examples(read) == lines_in(*lines)
    for worker, steps in enumerate(read):
        numbers = {int(x.split(b"-")[0]) for parts in steps for part in parts for x in part}
        assert all(number % 3 == worker for number in numbers)


@pytest.mark.parametrize(
    "reading",
    [
        lambda names: Dataset.list_files(names).interleave(TextLineDataset, 2).batch(4),
        lambda names: Dataset.list_files(names).repeat(2).flat_map(TextLineDataset).batch(4),
        lambda names: TextLineDataset(names, num_parallel_reads=2).shuffle(5).batch(4).prefetch(1),
        lambda names: TextLineDataset(names).cache().batch(4),
    ],
)
def test_files_are_divided_however_they_are_read(files, reading):
    names = files(3, 5, 2, 7)
    repeats = 2 if "repeat" in reading.__code__.co_names else 1
    read = read_by(2, lambda: reading(names))
    assert all_examples(read) == sorted(lines_in(3, 5, 2, 7) * repeats)
    if repeats == 1:  # every pass has an order of its own, and the files are divided by it
        of_workers = [{x[:1] for parts in steps for part in parts for x in part} for steps in read]
        assert not of_workers[0] & of_workers[1]


def test_files_that_are_read_together_stay_together(files):
    names = files(2, 2, 2, 2)

    def dataset():
        pairs = Dataset.zip(Dataset.list_files(names, shuffle=False), Dataset.range(4))
        numbered = Dataset.zip(
            Dataset.from_tensor_slices(names).repeat(), Dataset.from_tensor_slices(names).repeat()
        )
        one = pairs.map(lambda name, _: name).flat_map(TextLineDataset)
        other = numbered.flat_map(lambda a, b: Dataset.zip(TextLineDataset(a), TextLineDataset(b)))
        return with_policy(Dataset.zip(one, other).map(lambda a, b: b[0]).batch(2), "FILE")

    assert all_examples(read_by(2, dataset)) == lines_in(2, 2, 2, 2)


def test_fewer_files_than_workers_are_an_error_under_file(files):
    names = files(3, 3)
    with pytest.raises(InvalidArgumentError, match=r"only has 2 file\(s\).*required 3 shards"):
        read_by(3, lambda: with_policy(TextLineDataset(names).batch(2), "FILE"))


def test_fewer_files_than_workers_are_divided_by_elements_under_auto(files):
    names = files(3, 4)
    read = read_by(3, lambda: TextLineDataset(names).batch(3))
    assert all_examples(read) == lines_in(3, 4)
    assert len(read[0]) == 3


def test_what_does_not_come_from_files_cannot_be_divided_by_file():
    with pytest.raises(NotFoundError, match="unshardable source dataset: Range"):
        read_by(2, lambda: with_policy(Dataset.range(8).batch(2), "FILE"))


def test_auto_divides_elements_where_their_positions_matter(files):
    names = files(3, 4)
    read = read_by(2, lambda: TextLineDataset(names).take(5).batch(2))
    assert all_examples(read) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1"]


@pytest.mark.parametrize("policy", ["FILE", "AUTO", "DATA"])
def test_parquet_files_are_divided(tmp_path, policy):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for number in range(3):
        table = pyarrow.table({"x": np.arange(4 + number) + 10 * number})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")

    def dataset():
        rows = Dataset.from_parquet(f"{tmp_path}/*.parquet").map(lambda row: row["x"])
        return with_policy(rows.shuffle(4).batch(4), policy)

    read = read_by(2, dataset)
    assert all_examples(read) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25]
    if policy == "FILE":
        files_of = [{x // 10 for parts in steps for part in parts for x in part} for steps in read]
        assert files_of == [{0, 2}, {1}]


def test_random_maps_of_files_draw_other_numbers_on_every_worker(files):
    def dataset():
        lines = TextLineDataset(names).map(lambda line, key: key, seed=1)
        return with_policy(lines.batch(4), "FILE")

    names = files(2, 2)
    first, second = read_by(2, dataset, options=ON_HOST)
    assert first != second
    assert (first, second) == tuple(read_by(2, dataset, options=ON_HOST))


# -- HINT and OFF ------------------------------------------------------------------------------


def test_a_hint_says_where_to_divide():
    def dataset():
        return with_policy(Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(4), "HINT")

    assert read_by(2, dataset) == [[[[0, 2]], [[4, 6]]], [[[1, 3]], [[5, 7]]]]


def test_a_hint_is_refused_elsewhere():
    dataset = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(4)
    with pytest.raises(FailedPreconditionError, match="can only be used"):
        list(dataset)


def test_every_worker_reads_everything_where_dividing_is_off():
    read = read_by(2, lambda: with_policy(Dataset.range(6).batch(4), "OFF"))
    assert read == [[[[0, 1]], [[2, 3]], [[4, 5]]]] * 2


def test_the_sizes_of_batches_rotate_so_that_every_worker_gets_as_many_examples():
    # As TensorFlow's `batch_sizes_for_worker` says of 7 examples, 2 workers and 2 replicas.
    read = read_by(2, lambda: with_policy(Dataset.range(7).batch(7), "OFF"), replicas=2)
    assert [[len(part) for part in parts] for parts in read[0]] == [[2, 2], [2, 1]]
    assert [[len(part) for part in parts] for parts in read[1]] == [[2, 1], [2, 2]]


# -- datasets of a function --------------------------------------------------------------------


def test_a_worker_without_data_gets_empty_batches_until_all_are_done():
    def work(workers):
        def dataset_fn(context):
            assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, 4)
            rows = np.zeros((3 * context.input_pipeline_id, 2), np.float32)
            return Dataset.from_tensor_slices(
                {"x": rows, "t": ["a"] * len(rows)}
                if len(rows)
                else {"x": rows, "t": np.empty(0, object)}
            ).batch(1)

        batches = distribute_from_function(dataset_fn, placement_of(2), ON_HOST, workers)
        return [[part.shape for part in batch["x"].values] for batch in batches]

    assert together(2, work) == [
        [[(0, 2), (0, 2)], [(0, 2), (0, 2)]],
        [[(1, 2), (1, 2)], [(1, 2), (0, 2)]],
    ]


def test_get_next_ends_for_all_at_once():
    def work(workers):
        dataset = Dataset.range(2 + workers.index).batch(1)
        iterator = iter(distribute_from_function(lambda c: dataset, placement_of(1), None, workers))
        values = []
        while (optional := iterator.get_next_as_optional()).has_value():
            values.append(optional.get_value().tolist())
        with pytest.raises(EOFError):
            iterator.get_next()
        return values

    assert together(2, work) == [[[0], [1], []], [[0], [1], [2]]]


def test_every_replica_of_every_worker_may_have_a_dataset_of_its_own():
    options = InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=InputReplicationMode.PER_REPLICA,
    )

    def work(workers):
        def dataset_fn(context):
            return (
                Dataset.range(8)
                .shard(context.num_input_pipelines, context.input_pipeline_id)
                .batch(1)
            )

        batches = distribute_from_function(dataset_fn, placement_of(2), options, workers)
        return [parts_of(batch) for batch in batches]

    assert together(2, work) == [[[[0], [1]], [[4], [5]]], [[[2], [3]], [[6], [7]]]]


# -- bad input -----------------------------------------------------------------------------------


def test_a_worker_whose_function_fails_is_named_to_the_others():
    def work(workers):
        def dataset_fn(context):
            if context.input_pipeline_id == 1:
                raise KeyError("mine")
            return Dataset.range(4).batch(2)

        with pytest.raises((KeyError, AbortedError)) as caught:
            distribute_from_function(dataset_fn, placement_of(1), None, workers)
        return str(caught.value)

    said = together(2, work)
    assert said[0] == "Worker 1 of 2 failed in its input: KeyError: 'mine'"
    assert said[1] == "'mine'"


def test_a_worker_whose_elements_fail_is_named_to_the_others():
    def fail_at_two(x):
        if x == 2:
            raise ValueError("not this one")
        return x

    def work(workers):
        dataset = Dataset.range(4).map(fail_at_two if workers.index else lambda x: x).batch(1)
        batches = iter(distribute_from_function(lambda c: dataset, placement_of(1), None, workers))
        seen = [next(batches).tolist(), next(batches).tolist()]
        with pytest.raises((ValueError, AbortedError)) as caught:
            next(batches)
        return seen, str(caught.value)

    first, second = together(2, work)
    assert first == ([[0], [1]], "Worker 1 of 2 failed in its input: ValueError: not this one")
    assert second == ([[0], [1]], "not this one")


def test_a_worker_that_does_not_come_is_named():
    first, _ = workers_in_threads(2, patience=0.2)
    with pytest.raises(DeadlineExceededError, match=r"worker 1 of 2 has not .* within 0\.2 s"):
        distribute_dataset(Dataset.range(4).batch(2), placement_of(1), None, first)


def test_workers_must_have_equal_datasets():
    def work(workers):
        dataset = Dataset.range(4).batch(2 + workers.index)
        return distribute_dataset(dataset, placement_of(1), None, workers)

    with pytest.raises(InvalidArgumentError, match=r"equal datasets.*worker 1 has .*size=3"):
        together(2, work)


def test_a_thread_that_waits_for_the_others_ends_when_the_iterator_is_dropped():
    first, second = workers_in_threads(2)

    def batches_of(workers):
        # Before the second step, worker 1 waits; worker 0 asks for it ahead of time.
        dataset = Dataset.range(4).batch(1)
        options = ON_HOST if workers.index else None
        return distribute_from_function(lambda c: dataset, placement_of(1), options, workers)

    with ThreadPoolExecutor(2) as threads:
        before = set(threading.enumerate())
        begun = [threads.submit(batches_of, workers) for workers in (first, second)]
        iterator, other = (iter(run.result(20)) for run in begun)
        for taken in [threads.submit(next, iterator), threads.submit(next, other)]:
            taken.result(20)
        reader = next(t for t in set(threading.enumerate()) - before if "prefetch" in t.name)
        assert reader.is_alive()
        del iterator, taken
        reader.join(10)
        assert not reader.is_alive()


def test_answers_that_all_have_read_are_forgotten():
    store = MemoryStore()

    def work(workers):
        place = connected(2, workers.index, store)
        talk = place.talk("steps")
        for question in range(1000):
            assert talk.ask(question + workers.index) == [question, question + 1]

    together(2, work)
    assert len(store) < 300


def test_a_long_answer_arrives_as_it_was():
    rows = {"rows": [(np.arange(3), b"ab"), (np.ones((2, 2), np.float16), b"")], "n": 2**70}
    said = together(2, lambda workers: workers.talk("x").ask(rows if workers.index else None))
    np.testing.assert_equal(said[0], [None, rows])


# -- going on elsewhere --------------------------------------------------------------------------


def begin(num_workers, dataset_of, steps, options=None, state=None):
    """The examples of each worker's next `steps` (None: all), and the state behind them."""

    def work(workers):
        batches = distribute_dataset(dataset_of(), placement_of(1), options, workers)
        iterator = iter(batches)
        if state is not None:
            iterator.set_state(state)
        taken = [parts_of(batch) for batch in itertools.islice(iterator, steps)]
        return taken, None if steps is None else iterator.get_state()

    runs = together(num_workers, work)
    return [taken for taken, _ in runs], runs[0][1]


def global_batches(read):
    return [
        [x for parts in of_step for part in parts for x in part]
        for of_step in zip(*read, strict=True)
    ]


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("steps", [0, 1, 3, 19])
@pytest.mark.parametrize("ahead", [None, ON_HOST], ids=["ahead", "on-host"])
def test_every_example_is_seen_once_when_the_number_of_workers_changes(counts, steps, ahead):
    def dataset():
        shuffled = Dataset.from_tensor_slices(np.arange(100)).shuffle(100)
        return with_policy(shuffled.batch(5), "DATA")

    first, state = begin(counts[0], dataset, steps, ahead)
    rest, _ = begin(counts[1], dataset, None, ahead, state)
    assert sorted(all_examples(first) + all_examples(rest)) == list(range(100))
    assert len(rest[0]) == 20 - steps


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.shuffle(50, seed=3).repeat(3).batch(7),
        lambda d: d.filter(lambda x: x % 5 > 0).shuffle(16, seed=2).batch(6).prefetch(2),
        lambda d: d.map(lambda x: x + 1, num_parallel_calls=2).batch(4).repeat(2),
        lambda d: d.batch(10).shuffle(3, seed=1).unbatch().batch(3),
    ],
)
def test_the_rest_is_what_it_would_have_been(transform):
    def dataset():
        return with_policy(transform(Dataset.range(50)), "DATA")

    whole = [batch.tolist() for batch in dataset()]
    for steps in (1, 5):
        first, state = begin(2, dataset, steps)
        rest, _ = begin(3, dataset, None, state=state)
        assert global_batches(first) + global_batches(rest) == whole


def test_examples_that_were_mapped_before_are_not_mapped_again():
    mapped = []

    def dataset():
        shuffled = Dataset.range(60).shuffle(60, seed=4)
        return with_policy(shuffled.map(lambda x: (mapped.append(int(x)), x)[1]).batch(6), "DATA")

    first, state = begin(2, dataset, 4, ON_HOST)
    mapped.clear()
    rest, _ = begin(3, dataset, None, ON_HOST, state)
    assert sorted(mapped) == all_examples(rest)
    assert sorted(all_examples(first) + all_examples(rest)) == list(range(60))


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize(
    "reading",
    [
        lambda names: TextLineDataset(names).batch(6),
        lambda names: TextLineDataset(names).shuffle(7).batch(5).prefetch(2),
        lambda names: Dataset.list_files(names).interleave(TextLineDataset, 2).batch(4),
    ],
)
def test_unread_files_are_dealt_out_again(files, counts, steps, reading):
    lines = (9, 1, 14, 6, 3, 11, 2)
    names = files(*lines)

    def dataset():
        return with_policy(reading(names), "FILE")

    first, state = begin(counts[0], dataset, steps)
    rest, _ = begin(counts[1], dataset, None, state=state)
    assert sorted(all_examples(first) + all_examples(rest)) == lines_in(*lines)
    assert len({len(taken) for taken in rest}) == 1


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (3, 2), (2, 4)])
def test_a_pass_goes_on_as_it_was_divided_where_auto_would_divide_otherwise(files, counts):
    names = files(3, 5, 4)
    first, state = begin(counts[0], lambda: TextLineDataset(names).batch(2), 2)
    rest, _ = begin(counts[1], lambda: TextLineDataset(names).batch(2), None, state=state)
    assert sorted(all_examples(first) + all_examples(rest)) == lines_in(3, 5, 4)


def test_workers_that_join_get_files_that_nobody_has_begun_to_read(files):
    names = files(*[10] * 6)

    def dataset():
        return with_policy(TextLineDataset(names).batch(2), "FILE")

    _, state = begin(1, dataset, 2)
    rest, _ = begin(2, dataset, None, state=state)
    assert [len({x[:1] for parts in steps for part in parts for x in part}) for steps in rest] == [
        4,
        2,
    ]


def test_the_number_of_workers_may_change_twice(files):
    lines = (9, 4, 14, 6, 3, 11, 2)
    names = files(*lines)

    def dataset():
        return with_policy(TextLineDataset(names).shuffle(4).batch(3), "FILE")

    first, state = begin(2, dataset, 2)
    second, state = begin(3, dataset, 2, state=state)
    rest, _ = begin(1, dataset, None, state=state)
    assert sorted(itertools.chain(*map(all_examples, (first, second, rest)))) == lines_in(*lines)


def test_datasets_of_a_function_go_on_with_as_many_workers():
    def work(workers, state=None):
        dataset = Dataset.range(6).shard(3, workers.index).batch(1)
        iterator = iter(distribute_from_function(lambda c: dataset, placement_of(1), None, workers))
        if state is not None:
            iterator.set_state(state)
        return parts_of(next(iterator)), iterator.get_state()

    begun = together(2, work)
    again = together(2, lambda workers: work(workers, begun[0][1]))
    assert [taken for taken, _ in again] == [[[3]], [[4]]]
    with pytest.raises(
        ValueError, match=r"as many workers as it began\. Expected: 2\. Received: 3"
    ):
        together(3, lambda workers: work(workers, begun[0][1]))


def test_the_state_of_another_dataset_is_refused():
    _, state = begin(1, lambda: Dataset.range(8).batch(2), 1)
    with pytest.raises(ValueError, match=r"Expected: .*size=4.*Received: .*size=2"):
        begin(1, lambda: Dataset.range(8).batch(4), 1, state=state)


def test_what_does_not_know_where_it_is_says_so():
    iterator = iter(distribute_dataset([np.zeros(4)], placement_of(2)))
    with pytest.raises(TypeError, match="has no position to save"):
        iterator.get_state()


# -- options -------------------------------------------------------------------------------------


def test_options_say_in_how_many_threads_the_functions_that_follow_are_called():
    threads = set()

    def note(x):
        threads.add(threading.current_thread())
        time.sleep(0.002)
        return x

    dataset = Dataset.range(40).with_options(Options(num_threads=2))
    assert list(dataset.map(note, num_parallel_calls=8)) == list(range(40))
    assert len(threads - {threading.current_thread()}) <= 2


def test_options_say_whether_the_functions_that_follow_keep_the_order():
    options = Options(deterministic=False)
    assert not options.keeps_order(None)
    assert options.keeps_order(True)
    assert Options().keeps_order(None)
    dataset = Dataset.range(50).with_options(options)
    mapped = dataset.map(lambda x: (time.sleep((x % 3) * 1e-3), x)[1], num_parallel_calls=4)
    assert sorted(mapped.as_numpy_iterator()) == list(range(50))


def test_a_number_of_threads_must_be_positive():
    with pytest.raises(InvalidArgumentError, match=r"positive number\. Received: 0"):
        Options(num_threads=0)


def test_a_worker_whose_file_is_empty_gets_empty_batches(tmp_path):
    (tmp_path / "0.txt").write_text("1\n2\n3\n")
    (tmp_path / "1.txt").write_text("")
    names = [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]

    def work(workers):
        dataset = TextLineDataset(names).map(lambda line: np.int64(line)).batch(2)
        batches = distribute_dataset(dataset, placement_of(1), ON_HOST, workers)
        return [batch.tolist() for batch in batches]

    first, second = together(2, work)
    assert sorted(number for batch in first for number in batch) == [1, 2, 3]
    assert second == [[]] * len(first)
