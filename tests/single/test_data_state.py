"""Iterators over datasets are saved and restored in the middle of a pass, to the last bit."""

import functools
import importlib
import itertools
import pkgutil
import random

import ml_dtypes
import numpy as np
import pytest

import unison.data
import unison.tf as tf
from subprocess_program import run_program
from unison.data import Dataset, TextLineDataset
from unison.data.passes import Passes
from unison.data.plan import Plan, Rows, Stream, position_of
from unison.data.specs import ArraySpec, Signature
from unison.data.state import decode, encode
from unison.data.structure import LEAF

#: Of pipelines without end, so many elements are looked at.
MANY = 40

NUMBERS = np.arange(10.0, dtype=np.float32)
WORDS = np.array([b"one", b"", b"three\0", b"\xff", b"five"], object)


def ragged():
    """Elements of different lengths, which have no access by index."""
    return Dataset.from_generator(lambda: [np.arange(n) for n in (3, 1, 4, 1, 5, 2)])


def generated(count=10):
    return Dataset.from_generator(lambda: iter(range(count)))


def doubled(x):
    return np.multiply(x, 2)


def noisy(x):
    return tf.cast(x, tf.float32) + tf.random.uniform([])


def with_noise(x, key):
    return x + int(np.asarray(key).ravel()[-1]) % 1000


def noisy_rows(rows, keys):
    return rows + keys.reshape(len(rows), -1)[:, -1].astype(np.int64)


def six_by(x):
    return 6 // int(x % 3)


def is_long(word):
    return np.bool_(len(word) > 0)


PIPELINES = {
    # sources
    "from_tensor_slices": lambda: Dataset.from_tensor_slices({"x": NUMBERS, "y": -NUMBERS}),
    "text": lambda: Dataset.from_tensor_slices(WORDS),
    "from_tensors": lambda: Dataset.from_tensors((1, NUMBERS)).repeat(3),
    "range": lambda: Dataset.range(3, 20, 4),
    "counter": lambda: Dataset.counter(5, -2),
    "counter.batch": lambda: Dataset.counter().batch(3),
    "generator": generated,
    "ragged generator": ragged,
    "nothing": lambda: Dataset.range(0),
    # one transformation
    "shuffle": lambda: Dataset.range(10).shuffle(10, seed=1),
    "shuffle, small buffer": lambda: Dataset.range(10).shuffle(3, seed=1),
    "shuffle, same order": lambda: Dataset.range(10).shuffle(
        5, seed=1, reshuffle_each_iteration=False
    ),
    "shuffle of a generator": lambda: generated().shuffle(4, seed=2),
    "shuffle of a short generator": lambda: generated(3).shuffle(100, seed=2),
    "shuffle of text": lambda: Dataset.from_tensor_slices(WORDS).filter(is_long).shuffle(3, seed=1),
    "shuffle of ragged rows": lambda: ragged().shuffle(3, seed=1),
    "repeat": lambda: Dataset.range(3).repeat(3),
    "repeat for ever": lambda: Dataset.range(5).repeat(),
    "repeat of nothing": lambda: Dataset.range(0).repeat(),
    "batch": lambda: Dataset.range(10).batch(3),
    "batch of ragged rows, padded": lambda: ragged().padded_batch(2),
    "unbatch": lambda: generated().batch(4).unbatch(),
    "rebatch": lambda: Dataset.range(10).batch(4).rebatch([1, 3]),
    "rebatch with empty ones": lambda: Dataset.range(10).batch(4).rebatch([2, 0]),
    "take": lambda: generated().take(4),
    "skip": lambda: generated().skip(4),
    "shard": lambda: generated().shard(3, 1),
    "zip": lambda: Dataset.zip((generated(), Dataset.range(4))),
    "concatenate": lambda: generated(3).concatenate(Dataset.range(3)),
    "enumerate": lambda: generated().enumerate(5),
    "filter": lambda: generated().filter(lambda x: x % 3 != 1),
    "take_while": lambda: generated().take_while(lambda x: x % 5 < 4),
    "unique": lambda: Dataset.from_tensor_slices([1, 2, 1, 3, 2, 4]).unique(),
    "scan": lambda: generated().scan(np.int64(0), lambda total, x: (total + x, total + x)),
    "assert_cardinality": lambda: generated().assert_cardinality(10),
    "ignore_errors": lambda: generated().map(six_by).ignore_errors(),
    "window": lambda: Dataset.range(7).window(3, shift=2),
    "window of a generator": lambda: generated(7).window(3, shift=4, stride=1),
    "group_by_window": lambda: generated().group_by_window(
        lambda x: x % 2, lambda key, window: window.batch(2), window_size=3
    ),
    "bucket_by_sequence_length": lambda: ragged().bucket_by_sequence_length(len, [3], [2, 2]),
    "sample_from_datasets": lambda: Dataset.sample_from_datasets(
        [generated(6), Dataset.range(100, 102), Dataset.range(200, 209)], [0.3, 0.4, 0.3], seed=3
    ),
    "sample_from_datasets, to the first end": lambda: Dataset.sample_from_datasets(
        [generated(6), Dataset.range(100, 103)], seed=3, stop_on_empty_dataset=True
    ),
    "choose_from_datasets": lambda: Dataset.choose_from_datasets(
        [generated(3), Dataset.range(100, 109)],
        Dataset.from_tensor_slices([0, 1, 1, 0, 1, 0, 0, 0, 1, 1]),
        stop_on_empty_dataset=False,
    ),
    "choose_from_datasets, to the first end": lambda: Dataset.choose_from_datasets(
        [generated(3), Dataset.range(100, 109)], Dataset.range(2).repeat(5)
    ),
    "map": lambda: generated().map(doubled),
    "map in threads": lambda: generated().map(doubled, num_parallel_calls=2),
    "map with keys": lambda: Dataset.range(6).map(with_noise, seed=7).repeat(3),
    "map with keys, one by one": lambda: generated(6).map(with_noise, seed=7).repeat(3),
    "map of blocks with keys": lambda: (
        Dataset.range(8).map(noisy_rows, seed=7, vectorized=True).repeat(3).batch(2)
    ),
    "shuffle.map of blocks with keys": lambda: (
        Dataset.range(8).shuffle(8, seed=2).map(noisy_rows, seed=7, vectorized=True).repeat(3)
    ),
    "map of blocks with keys.shuffle": lambda: (
        Dataset.range(8).map(noisy_rows, seed=7, vectorized=True).shuffle(8, seed=2).repeat(3)
    ),
    "map of blocks with keys.batch.repeat": lambda: (
        Dataset.range(8).map(noisy_rows, seed=7, vectorized=True).batch(3).repeat(3)
    ),
    "random": lambda: Dataset.random(seed=3, rerandomize_each_iteration=True).take(5).repeat(3),
    "flat_map": lambda: Dataset.range(5).flat_map(Dataset.range),
    "interleave": lambda: Dataset.range(5).interleave(
        lambda n: Dataset.range(10 * n, 10 * n + n), cycle_length=2, block_length=2
    ),
    "interleave in threads": lambda: Dataset.range(5).interleave(
        lambda n: Dataset.range(10 * n, 10 * n + n), cycle_length=2, num_parallel_calls=2
    ),
    "prefetch": lambda: generated().prefetch(3),
    "cache": lambda: generated().cache(),
    # one behind the other
    "shuffle.repeat.batch": lambda: Dataset.range(5).shuffle(5, seed=1).repeat(2).batch(3),
    "shuffle.repeat": lambda: generated(5).shuffle(3, seed=1).repeat(),
    "repeat.shuffle": lambda: Dataset.range(4).repeat(2).shuffle(3, seed=1),
    "shuffle.shuffle": lambda: Dataset.range(9).shuffle(9, seed=1).shuffle(3, seed=2),
    "shuffle.take.repeat": lambda: Dataset.range(9).shuffle(9, seed=1).take(3).repeat(3),
    "shuffle beside itself": lambda: Dataset.zip((shuffled := _shuffled(), shuffled)).repeat(3),
    "sample.repeat": lambda: PIPELINES["sample_from_datasets"]().repeat(2),
    "window.flat_map": lambda: (
        Dataset.range(9).window(3, 1, drop_remainder=True).flat_map(lambda w: w.batch(3))
    ),
    "window.flat_map, row by row": lambda: generated(7).window(3, 2).flat_map(lambda w: w),
    "window.shuffle.flat_map": lambda: (
        generated(8).window(2, 1).shuffle(3, seed=1).flat_map(lambda w: w.batch(2))
    ),
    "windows of text": lambda: (
        Dataset.from_tensor_slices(WORDS).window(2).shuffle(2, seed=1).flat_map(lambda w: w)
    ),
    "flat_map of shuffled ones": lambda: Dataset.range(3).flat_map(
        lambda n: Dataset.range(4).shuffle(4, seed=7)
    ),
    "cache.shuffle.repeat": lambda: generated(4).cache().shuffle(4, seed=1).repeat(3),
    "filter.shuffle.batch.prefetch": lambda: (
        Dataset.range(12).filter(lambda x: x % 2 == 0).shuffle(4, seed=1).batch(2).prefetch(1)
    ),
    "map.unbatch.shuffle": lambda: (
        Dataset.range(6).batch(3).map(doubled).unbatch().shuffle(2, seed=1)
    ),
    # the drop-in face
    "tf: map": lambda: tf.data.Dataset.range(8).map(lambda x: x * x).shuffle(4, seed=1).batch(3),
    "tf: filter": lambda: tf.data.Dataset.range(9).filter(lambda x: x % 3 > 0).batch(2),
    "tf: scan": lambda: tf.data.Dataset.range(6).scan(
        tf.constant(0, tf.int64), lambda total, x: (total + x, total)
    ),
    "tf: window.flat_map": lambda: (
        tf.data.Dataset.range(6).window(3, 1).flat_map(lambda w: w.batch(3))
    ),
    "tf: text": lambda: tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).shuffle(2, seed=1),
    "tf: numpy iterator": lambda: _AsNumpy(tf.data.Dataset.range(5).shuffle(3, seed=1)),
}

ENDLESS = {"counter", "counter.batch", "repeat for ever", "shuffle.repeat"}


def _shuffled():
    return Dataset.range(4).shuffle(4, seed=1)


class _AsNumpy:
    """A dataset whose iterators are those of `as_numpy_iterator`."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __iter__(self):
        return self._dataset.as_numpy_iterator()


def plain(value):
    """What an element is, for comparing: the values with their dtypes and shapes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, Dataset):
        return list(map(plain, value))
    if isinstance(value, Plan):
        return plain(Dataset(value))
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tolist()


def first(iterator):
    return [plain(element) for element in itertools.islice(iterator, MANY)]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_restored_iterator_goes_on_with_the_rest_and_the_next_epoch(name):
    make = PIPELINES[name]
    dataset = make()
    uninterrupted, next_epoch = first(iter(dataset)), first(iter(dataset))
    saved = iter(make())
    for count in range(len(uninterrupted) + 1):
        fresh = make()
        iterator = iter(fresh)
        iterator.set_state(saved.get_state())
        left = len(uninterrupted) - count
        assert [plain(element) for element in itertools.islice(iterator, left)] == (
            uninterrupted[count:]
        )
        if len(uninterrupted) < MANY:
            assert next(iterator, "the end") == "the end"
        assert first(iter(fresh)) == next_epoch
        if count < len(uninterrupted):
            assert plain(next(saved)) == uninterrupted[count]


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in ENDLESS])
def test_an_iterator_that_has_ended_stays_at_the_end(name):
    make = PIPELINES[name]
    saved, fresh = iter(make()), make()
    iterator = iter(fresh)
    assert len(first(saved)) < MANY
    iterator.set_state(saved.get_state())
    assert next(iterator, "the end") == "the end"
    uninterrupted = make()
    assert [first(iter(uninterrupted)), first(iter(uninterrupted))][1] == first(iter(fresh))


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "tf: numpy iterator"])
@pytest.mark.parametrize("before", [0, 2])
def test_skipping_leaves_what_reading_would_leave(name, before):
    def stream():
        opened = PIPELINES[name]().plan.stream()
        for _ in range(before):
            opened.next()
        return opened

    def elements(stream):
        return [plain(leaves) for leaves in itertools.islice(iter(stream.next, None), MANY)]

    all_of_them = elements(stream())
    for count in (0, 1, 3, 7, MANY - 1):
        skipping = stream()
        if name in ENDLESS:
            assert skipping.skip(count) == count
            assert elements(skipping)[: MANY - count] == all_of_them[count:]
        else:
            assert skipping.skip(count) == min(count, len(all_of_them))
            assert elements(skipping) == all_of_them[count:]


def test_the_lines_of_files_go_on_where_they_were(tmp_path):
    for name in "abc":
        tmp_path.joinpath(name).write_text("".join(f"{name}{n}\n" for n in range(4)))

    def make(reads):
        names = sorted(map(str, tmp_path.iterdir()))
        return TextLineDataset(names, num_parallel_reads=reads)

    for reads in (None, 2):
        lines = list(make(reads))
        saved = iter(make(reads))
        for count in range(len(lines) + 1):
            iterator = iter(make(reads))
            iterator.set_state(saved.get_state())
            assert list(iterator) == lines[count:]
            next(saved, None)


def summed(*leaves):
    return np.int64(sum(map(np.sum, leaves)))


#: Transformations of numbers into numbers.
LINKS = [
    lambda d: d.shuffle(4, seed=3),
    lambda d: d.shuffle(100, seed=5),
    lambda d: d.shuffle(5, seed=1, reshuffle_each_iteration=False),
    lambda d: d.repeat(2),
    lambda d: d.take(7),
    lambda d: d.skip(2),
    lambda d: d.shard(2, 1),
    lambda d: d.batch(3).unbatch(),
    lambda d: d.batch(2).rebatch([3, 1]).unbatch(),
    lambda d: d.filter(lambda x: x % 2 == 0),
    lambda d: d.take_while(lambda x: x < 500),
    lambda d: d.unique(),
    lambda d: d.map(summed),
    lambda d: d.map(summed, num_parallel_calls=2),
    lambda d: d.map(lambda x, key: np.int64(x + key[0] % 7), seed=4),
    lambda d: d.cache(),
    lambda d: d.prefetch(2),
    lambda d: d.enumerate().map(summed),
    lambda d: Dataset.zip((d, d)).map(summed),
    lambda d: d.concatenate(d),
    lambda d: d.window(3, 2).flat_map(lambda window: window),
    lambda d: d.window(2, 1).shuffle(3, seed=2).flat_map(lambda w: w.batch(2)).map(summed),
    lambda d: d.group_by_window(
        lambda x: np.int64(x % 2), lambda key, window: window.shuffle(3, seed=9), window_size=3
    ),
    lambda d: d.interleave(lambda x: Dataset.range(int(x) % 4), cycle_length=2),
    lambda d: d.interleave(
        lambda x: Dataset.range(int(x) % 4), cycle_length=2, num_parallel_calls=2
    ),
    lambda d: Dataset.sample_from_datasets([d, Dataset.range(3)], seed=2),
    lambda d: Dataset.choose_from_datasets(
        [d, Dataset.range(5)], Dataset.range(2).repeat(6).shuffle(12, seed=1)
    ),
    lambda d: d.scan(np.int64(0), lambda total, x: (np.int64(total + x), total)),
]


@pytest.mark.parametrize("seed", range(60))
def test_any_chain_of_transformations_goes_on_in_any_epoch(seed):
    draw = random.Random(seed)
    source = draw.choice([generated, lambda: Dataset.range(11)])
    links = draw.choices(LINKS, k=draw.randint(2, 5))

    def make():
        return functools.reduce(lambda dataset, link: link(dataset), links, source())

    dataset = make()
    epochs = [first(iter(dataset)) for _ in range(3)]
    interrupted = make()
    epoch = draw.randint(0, 1)
    for _ in range(epoch):
        first(iter(interrupted))
    saved, fresh = iter(interrupted), make()
    count = draw.randint(0, len(epochs[epoch]))
    elements = [plain(next(saved)) for _ in range(count)]
    restored = iter(fresh)
    restored.set_state(saved.get_state())
    elements += [plain(x) for x in itertools.islice(restored, MANY - count)]
    assert elements == epochs[epoch]
    if len(elements) < MANY:
        assert first(iter(fresh)) == epochs[epoch + 1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.map(noisy),
        lambda d: d.map(noisy).shuffle(3).repeat(3).batch(2),
        lambda d: d.map(noisy).repeat(3).map(noisy),
        lambda d: d.filter(lambda x: noisy(x) % 1 < 0.5).repeat(4),
        lambda d: d.shuffle(3).filter(lambda x: noisy(x) % 1 < 0.5).repeat(4),
        lambda d: d.take_while(lambda x: noisy(x) % 1 < 0.8).repeat(4),
        lambda d: d.scan(0.0, lambda total, x: (total + noisy(x), total)).repeat(2),
    ],
)
def test_what_functions_draw_is_drawn_again(transform):
    dataset, fresh = (transform(tf.data.Dataset.range(6)) for _ in range(2))
    first(iter(dataset))
    for count in (0, 1, 3):
        saved, restored = iter(dataset), iter(fresh)
        for _ in range(count):
            next(saved, None)
        restored.set_state(saved.get_state())
        assert first(restored) == first(saved)
        assert first(iter(fresh)) == first(iter(dataset))


class _Passing(Plan):
    """Its stream begins another pass right behind its state, as a thread may that reads ahead."""

    lasting = ("passes",)

    def __init__(self):
        self.passes = Passes()

    def _stream(self):
        return _PassingStream(self.passes)


class _PassingStream(Stream):
    def __init__(self, passes):
        self._passes = passes
        self._left = 3

    def next(self):
        return None

    def state(self):
        begun = self._passes.state()
        if self._left:
            self._left -= 1
            self._passes.begin()
        return begun


def test_a_state_is_of_one_moment_where_threads_read_ahead():
    plan = _Passing()
    position = position_of(plan, plan.stream())
    assert position == {"plans": [{"passes": 3}], "stream": 3}


def test_passes_that_begin_while_a_state_is_taken_are_made_once():
    def make():
        return Dataset.range(2).shuffle(2, seed=1).repeat().prefetch(3)

    expected = list(map(int, itertools.islice(make(), 300)))
    saved = iter(make())
    for count in range(100):
        restored = iter(make())
        restored.set_state(saved.get_state())
        rest = list(map(int, itertools.islice(restored, 40)))
        assert rest == expected[count : count + 40]
        next(saved)


def test_an_iterator_can_be_restored_twice_and_saved_again():
    make = PIPELINES["shuffle.repeat.batch"]
    one, two, three = iter(make()), iter(make()), iter(make())
    next(one)
    state = one.get_state()
    two.set_state(state)
    next(two)
    two.set_state(state)
    three.set_state(two.get_state())
    assert first(three) == first(one)


def test_a_state_is_not_changed_by_later_reading():
    iterator = iter(generated().shuffle(4, seed=1))
    next(iterator)
    state = iterator.get_state()
    rest = first(iterator)
    iterator.set_state(state)
    assert first(iterator) == rest


def test_going_back_in_the_same_program_gives_the_same_passes_again():
    dataset = Dataset.range(8).shuffle(8, seed=1)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    rest, second, third = first(iterator), first(iter(dataset)), first(iter(dataset))
    iterator.set_state(state)
    assert [first(iterator), first(iter(dataset)), first(iter(dataset))] == [rest, second, third]


@pytest.mark.parametrize("count", [0, 7, 60, 100])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(50).shuffle(50).repeat(2),
        lambda: generated(50).shuffle(20).repeat(2),
        lambda: Dataset.sample_from_datasets([Dataset.range(25), Dataset.range(50, 75)]).repeat(2),
    ],
    ids=["rows", "a buffer", "sample_from_datasets"],
)
def test_what_is_drawn_without_a_seed_is_drawn_again(make, count):
    saved, restored = iter(make()), iter(make())
    for _ in range(count):
        next(saved)
    restored.set_state(saved.get_state())
    assert list(restored) == list(saved)


def test_a_shuffle_of_rows_keeps_no_order_and_no_rows():
    iterator = iter(Dataset.from_tensor_slices(np.zeros((100_000, 3))).shuffle(100_000).batch(10))
    next(iterator)
    state = iterator.get_state()
    assert state["data"].size == 0
    assert len(state["position"]) < 300


def test_only_the_rest_of_a_batch_is_kept_by_unbatch():
    iterator = iter(Dataset.from_tensors(np.zeros((1000, 4))).unbatch())
    for _ in range(998):
        next(iterator)
    assert iterator.get_state()["data"].size == 2 * 4 * 8


class _CountedRows(Rows):
    def __init__(self):
        self.read = []

    def __len__(self):
        return 1000

    def take(self, indices):
        self.read.extend(np.asarray(indices).tolist())
        return (np.asarray(indices),)


class _Counted(Plan):
    def __init__(self):
        self.counted = _CountedRows()

    def signature_from(self, inputs):
        return Signature(LEAF, (ArraySpec((), np.dtype(np.int64)),))

    def rows(self):
        return self.counted


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.batch(10),
        lambda d: d.take(995).skip(2).batch(10),
        lambda d: d.shuffle(1000, seed=1).batch(10),
        lambda d: d.repeat(2).batch(10),
    ],
)
def test_rows_that_were_read_are_not_read_again(transform):
    iterator = iter(transform(Dataset(_Counted())))
    for _ in range(90):
        next(iterator)
    plan = _Counted()
    restored = iter(transform(Dataset(plan)))
    restored.set_state(iterator.get_state())
    assert plan.counted.read == []
    next(restored)
    assert len(plan.counted.read) == 10


def test_a_row_of_each_pass_before_is_read():
    plan = _Counted()
    stream = Dataset(plan).shuffle(1000, seed=1).repeat().batch(10).plan.stream()
    assert stream.skip(50_050) == 50_050
    assert len(plan.counted.read) == 501
    stream.next()
    assert len(plan.counted.read) == 501 + 10


def test_a_generator_is_read_anew_up_to_where_it_was():
    def make(read):
        return Dataset.from_generator(lambda: (read.append(n) or n for n in range(9)))

    iterator = iter(make([]))
    for _ in range(4):
        next(iterator)
    read = []
    restored = iter(make(read))
    restored.set_state(iterator.get_state())
    assert read == [0, 1, 2, 3]
    assert next(restored) == 4


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (lambda: generated().take(5).skip(2), [2, 3, 4]),
        (lambda: generated().skip(5).skip(2), [7, 8, 9]),
        (lambda: Dataset.counter().filter(lambda x: x % 2 == 0).take(3).skip(1), [2, 4]),
        (lambda: Dataset.counter(3).skip(4).take(2), [7, 8]),
        (lambda: generated().skip(20), []),
        (lambda: Dataset.range(9).window(4).flat_map(lambda w: w.skip(3)), [3, 7]),
    ],
)
def test_skipping_passes_over_as_many_as_are_left(dataset, expected):
    assert list(map(int, dataset())) == expected


@pytest.mark.parametrize(
    "transform",
    [
        lambda d, fail: d.filter(fail),
        lambda d, fail: d.take_while(fail),
        lambda d, fail: d.map(fail),
        lambda d, fail: d.flat_map(lambda x: Dataset.from_tensors(fail(x))),
        lambda d, fail: d.scan(0, lambda total, x: (total, fail(x))),
        lambda d, fail: d.group_by_window(
            lambda x: np.int64(fail(x)), lambda key, window: window, window_size=1
        ),
    ],
)
def test_an_error_after_restoring_names_the_element_by_its_number_in_the_dataset(transform):
    def fail(x):
        if x == 5:
            raise RuntimeError("five")
        return np.bool_(True)

    saved, restored = (iter(transform(generated(), fail)) for _ in range(2))
    for _ in range(4):
        next(saved)
    restored.set_state(saved.get_state())
    next(restored)
    with pytest.raises(RuntimeError, match="five") as raised:
        next(restored)
    assert "element 5" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    "name",
    [
        "shuffle of a generator",
        "window of a generator",
        "unique",
        "group_by_window",
        "sample_from_datasets",
        "unbatch",
    ],
)
def test_a_state_of_a_stream_is_not_used_up(name):
    plan = PIPELINES[name]().plan
    for count in (1, 3):
        stream = plan.stream()
        for _ in range(count):
            stream.next()
        state = stream.state()
        rest = [plain(leaves) for leaves in iter(stream.next, None)]
        for _ in range(2):
            restored = plan.stream()
            restored.restore(state)
            assert [plain(leaves) for leaves in iter(restored.next, None)] == rest


# -- what cannot be restored ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        lambda: Dataset.range(10).batch(2),
        lambda: Dataset.range(10).shuffle(4).batch(3),
        lambda: Dataset.range(10).shuffle(5).batch(2),
        lambda: Dataset.range(11).shuffle(5).batch(3),
        lambda: Dataset.from_tensor_slices(NUMBERS).shuffle(5).batch(3),
        lambda: Dataset.range(10).shuffle(5).batch(3, drop_remainder=True),
    ],
)
def test_the_state_of_another_pipeline_is_refused_and_nothing_is_changed(other):
    iterator = iter(Dataset.range(10).shuffle(5, seed=1).batch(3))
    next(iterator)
    before = iterator.get_state()
    with pytest.raises(ValueError, match="another pipeline") as raised:
        iterator.set_state(iter(other()).get_state())
    message = str(raised.value)
    assert "Expected: Range(numbers=range(0, 10)).Shuffle(buffer_size=5" in message
    assert f"Received: {other().plan.description}" in message
    assert "Make the dataset as it was" in message
    after = iterator.get_state()
    assert (after["position"], after["data"].tolist()) == (
        before["position"],
        before["data"].tolist(),
    )


def test_the_plan_of_several_inputs_is_described_with_all_of_them():
    chosen = Dataset.choose_from_datasets(
        [Dataset.range(3), Dataset.counter().take(2)], Dataset.range(2)
    )
    assert chosen.plan.description == (
        "(Range(numbers=range(0, 3)), Counter(start=0, step=1).Take(count=2), "
        "Range(numbers=range(0, 2))).Choose(stop_on_empty=True)"
    )


@pytest.mark.parametrize("state", [None, 3, {}, {"next_index": 4}, {"version": 1}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="Expected what get_state"):
        iter(Dataset.range(3)).set_state(state)


def test_a_dataset_that_fails_while_it_is_restored_leaves_the_iterator_as_it_was():
    fails = []

    def numbers():
        for n in range(9):
            if fails and n == 2:
                raise OSError("gone")
            yield n

    def make():
        return Dataset.from_generator(numbers).shuffle(3, seed=1)

    dataset, reference = make(), make()
    passes = [first(iter(reference)) for _ in range(4)]
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    assert [first(iter(dataset)), first(iter(dataset))] == passes[1:3]
    fails.append(True)
    with pytest.raises(OSError, match="gone"):
        iterator.set_state(state)
    fails.clear()
    assert [first(iterator), first(iter(dataset))] == [passes[0][1:], passes[3]]


def test_elements_that_are_datasets_but_no_windows_are_refused_when_they_wait():
    dataset = Dataset.range(5).map(Dataset.range).shuffle(3, seed=1)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(TypeError, match="a dataset, and no window"):
        iterator.get_state()


def test_an_iterator_over_what_is_no_dataset_says_what_to_do():
    from unison.data.iterators import ElementIterator

    iterator = ElementIterator(iter([1, 2]), lambda: None)
    with pytest.raises(TypeError, match="Make a Dataset of what it iterates over"):
        iterator.get_state()


# -- as JSON and bytes ---------------------------------------------------------------------------

STATES = [
    None,
    True,
    -3,
    2**127 + 1,
    0.1,
    float("inf"),
    "text",
    "",
    b"",
    b"\x00\xff",
    (),
    [],
    {},
    (1, (2, [3])),
    {"tuple": 1},
    {"array": [0], "b": ()},
    {"one": {"one": {}}},
    [b"a", b"", b"\xff\0"],
    [(1, 2), (3, 4)],
    [(b"a", np.float32(1)), (b"", np.float32(2))],
    [(np.ones(2), 1), (np.zeros(3), 2)],
    [(), ()],
    [np.int8(1), np.int8(2)],
    [np.int8(1), np.int16(2)],
    [np.ones((2, 3)), np.zeros((2, 3))],
    [np.array(1), np.array(2)],
    [WORDS, WORDS[:2]],
    np.float16(0.1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.uint64(2**64 - 1),
    np.array(3),
    np.zeros((0, 4), np.int32),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.arange(12).reshape(3, 4).T,
    np.array(["2020-01-01"], "datetime64[D]"),
    np.array([0.1, 2], ml_dtypes.bfloat16),
    ml_dtypes.bfloat16(0.1),
    WORDS,
    WORDS[:4].reshape(2, 2),
    np.empty((0, 2), object),
    np.random.Generator(np.random.PCG64(3)).bit_generator.state,
]


def same(one, two):
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (two.dtype, two.shape) and one.tolist() == two.tolist()
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return one == two


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_state_is_the_same_after_it_was_text_and_bytes(state):
    text, data = encode(state)
    assert isinstance(text, str)
    assert data.dtype == np.uint8
    assert same(decode(text, data.copy()), state)
    assert same(decode(*encode([state, {"a": state}])), [state, {"a": state}])


def test_elements_of_one_kind_are_kept_leaf_by_leaf():
    text, data = encode([(np.float32(n), np.zeros(5, np.int8)) for n in range(1000)])
    assert len(text) < 100
    assert data.size == 1000 * (4 + 5)


@pytest.mark.parametrize(
    "state", [{1}, {1: 2}, object(), np.array([None]), np.zeros(2, "i4,f4"), np.str_("a")]
)
def test_what_cannot_be_kept_is_named(state):
    with pytest.raises(TypeError, match=r"Received: .*of type"):
        encode({"state": [state]})


# -- in another process --------------------------------------------------------------------------

_PROGRAM = """
import sys
import numpy as np
from unison.data import Dataset
from unison.train import Checkpoint

def make():
    words = Dataset.from_tensor_slices(np.array([b"a", b"bb", b"ccc", b"\\xff"], object))
    numbers = Dataset.from_generator(lambda: iter(range(4)))
    return Dataset.zip((words, numbers)).shuffle(3).repeat(3).batch(2)

iterator = iter(make())
checkpoint = Checkpoint(iterator=iterator)
path = sys.argv[1]
if len(sys.argv) > 2:
    for _ in range(3):
        next(iterator)
    checkpoint.write(path)
else:
    checkpoint.read(path).assert_consumed()
for words, numbers in iterator:
    print(words.tolist(), numbers.tolist())
"""


def test_another_process_goes_on_from_a_checkpoint(tmp_path):
    path = str(tmp_path.joinpath("checkpoint"))
    interrupted, restored = (
        run_program(_PROGRAM, path, *arguments, imported=("jax", "unison")).stdout
        for arguments in (["write"], [])
    )
    assert len(interrupted.splitlines()) == 3
    assert restored == interrupted


# -- the streams ---------------------------------------------------------------------------------


def _all_streams(base=Stream):
    for stream in base.__subclasses__():
        yield stream
        yield from _all_streams(stream)


def test_every_stream_says_what_reading_changes():
    for module in pkgutil.walk_packages(unison.data.__path__, "unison.data."):
        importlib.import_module(module.name)
    forgetful = [
        stream.__qualname__
        for stream in _all_streams()
        if stream.__module__.startswith("unison.")
        and not stream.moving
        and stream.state is Stream.state
    ]
    assert forgetful == []
