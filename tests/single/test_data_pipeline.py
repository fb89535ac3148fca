"""`unison.data.Dataset`: NumPy in, NumPy out; what TensorFlow's names mean is in the facts."""

import contextlib
import gzip
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from unison.data import Dataset, TextLineDataset
from unison.data.caching.cache import Cache
from unison.data.sources.in_memory import ArrayRows
from unison.data.transformations.shuffling import shuffled_indices
from unison.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)

IMAGES = np.arange(60, dtype="float32").reshape(20, 3)
LABELS = np.arange(20)


def pairs():
    return Dataset.from_tensor_slices((IMAGES, LABELS))


def one_by_one(dataset):
    """The same elements without access by index: what follows goes element by element."""
    iterated = Dataset.from_generator(lambda: iter(dataset), output_signature=dataset.element_spec)
    assert iterated.plan.rows() is None
    return iterated


def rows_of(batches):
    return [row.tolist() for batch in batches for row in batch]


@pytest.fixture
def taken(monkeypatch):
    """The numbers of rows that were taken out of arrays, call by call."""
    counts = []
    take = ArrayRows.take

    def counting(self, indices):
        counts.append(len(indices))
        return take(self, indices)

    monkeypatch.setattr(ArrayRows, "take", counting)
    return counts


# -- elements ------------------------------------------------------------------------------


def test_elements_are_numpy_arrays_with_their_own_dtypes():
    image, label = next(iter(pairs()))
    assert image.dtype == np.float32
    assert type(label) is np.int64
    batch = next(iter(pairs().batch(4)))
    assert [type(part) for part in batch] == [np.ndarray, np.ndarray]


def test_64_bits_are_kept():
    large = np.array([2**40, 2**53 + 1])
    assert [int(x) for x in Dataset.from_tensor_slices(large)] == large.tolist()
    assert next(iter(Dataset.from_tensor_slices(large).batch(2))).tolist() == large.tolist()


def test_the_data_of_a_source_cannot_be_written_through_its_elements():
    with pytest.raises(ValueError, match="read-only"):
        next(iter(pairs()))[0][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        next(iter(pairs().batch(4)))[0][0] = 1


def test_arrays_are_not_copied_when_a_dataset_is_made():
    source = np.zeros((4, 2))
    dataset = Dataset.from_tensor_slices(source).batch(4)
    assert np.shares_memory(next(iter(dataset)), source)


def test_a_memory_map_is_read_where_it_is_asked_for(tmp_path):
    written = np.memmap(tmp_path / "rows", "float32", "w+", shape=(20, 3))
    written[:] = IMAGES
    mapped = np.memmap(tmp_path / "rows", "float32", "r", shape=(20, 3))
    batch = next(iter(Dataset.from_tensor_slices(mapped).shuffle(20, seed=1).batch(5)))
    assert batch.shape == (5, 3)


def test_jax_arrays_are_sources_and_results():
    dataset = Dataset.from_tensor_slices(jnp.arange(3.0)).map(lambda x: jnp.stack([x, -x]))
    assert [x.tolist() for x in dataset] == [[0, 0], [1, -1], [2, -2]]
    assert all(type(x) is np.ndarray for x in dataset)


def test_a_dataset_can_be_iterated_again_and_twice_at_once():
    dataset = Dataset.range(3).map(lambda x: x + 1)
    first, second = iter(dataset), iter(dataset)
    assert [next(first), next(second), next(first)] == [1, 1, 2]
    assert [int(x) for x in dataset] == [1, 2, 3]


def test_a_generator_without_a_signature_gives_what_its_first_element_is():
    dataset = Dataset.from_generator(lambda: ({"n": n, "t": "x" * n} for n in range(3)))
    assert list(dataset)[2] == {"n": 2, "t": b"xx"}
    assert set(dataset.element_spec) == {"n", "t"}


def test_an_element_of_a_generator_that_does_not_fit_is_named_by_its_number():
    rows = [np.zeros(2), np.zeros(2), np.zeros(3)]
    signature = Dataset.from_tensors(np.zeros(2)).element_spec
    iterator = iter(Dataset.from_generator(lambda: iter(rows), output_signature=signature))
    next(iterator), next(iterator)
    with pytest.raises(InvalidArgumentError, match="Element 2 of the generator"):
        next(iterator)


def test_get_next_ends_with_an_error_of_its_own():
    iterator = iter(Dataset.range(1))
    assert iterator.get_next() == 0
    with pytest.raises(OutOfRangeError, match="End of sequence"):
        iterator.get_next()
    assert iterator.get_next_as_optional().has_value() is False


# -- errors in functions -------------------------------------------------------------------


def fail_at(number):
    def function(x):
        if x == number:
            raise KeyError("mine")
        return x

    return function


@pytest.mark.parametrize(
    ("transform", "stage"),
    [
        (lambda d: d.map(fail_at(3)), "map"),
        (lambda d: d.map(fail_at(3), num_parallel_calls=2), "map"),
        (lambda d: d.filter(lambda x: bool(fail_at(3)(x) >= 0)), "filter"),
        (lambda d: d.flat_map(lambda x: Dataset.from_tensors(fail_at(3)(x))), "flat_map"),
    ],
)
def test_an_error_in_a_function_is_the_users_own_with_a_note_that_says_where(transform, stage):
    iterator = iter(transform(Dataset.range(5)))
    for _ in range(3):
        next(iterator)
    with pytest.raises(KeyError, match="mine") as caught:
        next(iterator)
    (note,) = caught.value.__notes__
    assert note == f"In the function of {stage}, called for element 3 of the dataset."


def test_after_an_error_the_iterator_goes_on_behind_it():
    iterator = iter(Dataset.range(4).map(fail_at(1)))
    seen = []
    for _ in range(5):
        with contextlib.suppress(KeyError):
            seen.append(next(iterator, "end"))
    assert seen == [0, 2, 3, "end"]


def test_errors_can_be_ignored():
    assert [int(x) for x in Dataset.range(4).map(fail_at(1)).ignore_errors()] == [0, 2, 3]


def test_a_function_must_return_the_same_structure_every_time():
    dataset = Dataset.range(3).map(lambda x: x if x < 2 else (x, x))
    with pytest.raises(InvalidArgumentError, match="different shapes or dtypes"):
        next(iter(dataset.map(lambda x: np.zeros(x)).batch(3)))
    pairs = Dataset.range(3).map(lambda x: (x, x) if x < 2 else x)
    with pytest.raises(TypeError, match="same structure every time"):
        list(pairs)


def test_a_predicate_must_return_a_truth_value():
    with pytest.raises(ValueError, match="must return one bool"):
        list(Dataset.range(3).filter(lambda x: x))


# -- whole batches -------------------------------------------------------------------------


def test_shuffled_batches_are_taken_at_once(taken):
    list(pairs().shuffle(20).batch(8))
    assert taken == [8, 8, 4]


def test_batches_of_arrays_in_order_are_views():
    for batch in pairs().batch(8):
        assert np.shares_memory(batch[0], IMAGES)


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.batch(6),
        lambda d: d.shuffle(20, seed=3).batch(6),
        lambda d: d.shuffle(5, seed=3).batch(6),
        lambda d: d.take(7).batch(3),
        lambda d: d.skip(13).batch(3),
        lambda d: d.shard(3, 1).batch(4),
        lambda d: d.shard(3, 1).shuffle(4, seed=1).batch(4),
        lambda d: d.enumerate(5).batch(6),
        lambda d: d.enumerate().shuffle(9, seed=1).batch(6),
        lambda d: d.repeat(3).batch(7),
        lambda d: d.shuffle(20, seed=2).repeat(3).batch(7),
        lambda d: d.concatenate(pairs().take(3)).batch(7),
        lambda d: Dataset.zip((d, Dataset.range(9))).batch(4),
        lambda d: Dataset.zip((d, Dataset.range(9))).shuffle(4, seed=1).batch(4),
        lambda d: d.map(lambda image, label: (image + 1, label)).batch(6),
        lambda d: d.filter(lambda image, label: label % 3 == 0).batch(2),
        lambda d: d.cache().batch(6),
        lambda d: d.batch(6).unbatch().batch(4),
        lambda d: d.batch(6).unbatch().skip(2).shuffle(7, seed=1).batch(4),
        lambda d: d.batch(3).batch(2),
        lambda d: d.prefetch(2).batch(6),
        lambda d: d.flat_map(lambda image, label: Dataset.from_tensors((image, label))).batch(6),
    ],
)
def test_whole_batches_are_what_the_elements_one_by_one_are(transform):
    fast, slow = transform(pairs()), transform(one_by_one(pairs()))
    fast_elements, slow_elements = list(fast), list(slow)
    assert len(fast_elements) == len(slow_elements) > 0
    for one, two in zip(fast_elements, slow_elements, strict=True):
        np.testing.assert_equal(one, two)
    if fast.plan.cardinality() >= 0:
        assert fast.plan.cardinality() == len(fast_elements)


@pytest.mark.parametrize(("count", "buffer_size"), [(50, 1), (50, 7), (50, 50), (50, 99), (1, 3)])
def test_the_order_out_of_a_buffer_is_a_permutation_that_reaches_no_further(count, buffer_size):
    order = shuffled_indices(count, buffer_size, seed=5, epoch=2)
    assert sorted(order.tolist()) == list(range(count))
    assert (order - np.arange(count)).max() < buffer_size


def test_a_buffer_draws_uniformly():
    first = [shuffled_indices(8, 4, seed, 0)[0] for seed in range(2000)]
    assert np.bincount(first, minlength=4).min() > 400
    last = [shuffled_indices(3, 3, seed, 0)[2] for seed in range(2000)]
    assert np.bincount(last, minlength=3).min() > 550


def test_an_order_depends_on_seed_and_epoch_alone():
    orders = [shuffled_indices(30, 30, seed, epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[3] == shuffled_indices(30, 30, 2, 1).tolist()


def test_without_a_seed_numpys_global_one_decides():
    def order():
        np.random.seed(4)
        return [int(x) for x in Dataset.range(30).shuffle(30)]

    assert order() == order() != list(range(30))


def test_every_example_comes_once_an_epoch():
    dataset = pairs().shuffle(6).batch(7)
    for _ in range(3):
        assert sorted(int(label) for _, labels in dataset for label in labels) == list(range(20))


# -- cache ---------------------------------------------------------------------------------


def test_a_cache_computes_every_element_once_and_then_has_access_by_index(taken):
    calls = []
    dataset = Dataset.range(10).map(lambda x: calls.append(1) or x).cache()
    assert isinstance(dataset.plan, Cache)
    assert dataset.plan.rows() is None
    first = [int(x) for batch in dataset.shuffle(10, seed=1).batch(4) for x in batch]
    assert dataset.plan.rows() is not None
    taken.clear()
    second = [int(x) for batch in dataset.shuffle(10, seed=1).batch(4) for x in batch]
    assert taken == [4, 4, 2]
    assert first == second
    assert len(calls) == 10


def test_a_cache_of_elements_of_different_shapes_keeps_them_one_by_one():
    dataset = Dataset.range(1, 4).map(lambda n: np.zeros(n)).cache()
    assert [len(x) for x in dataset] == [len(x) for x in dataset] == [1, 2, 3]
    assert sorted(len(x) for x in dataset.shuffle(3)) == [1, 2, 3]


def test_a_cache_keeps_text():
    dataset = Dataset.from_generator(lambda: iter(["a", "bcd"])).cache()
    assert list(dataset) == list(dataset) == [b"a", b"bcd"]


def test_a_pass_that_was_not_finished_is_not_kept():
    calls = []
    dataset = Dataset.range(4).map(lambda x: calls.append(1) or x).cache()
    next(iter(dataset))
    assert len(list(dataset)) == 4
    assert len(calls) == 5


def test_a_cache_in_files_serves_later_datasets(tmp_path):
    elements = [
        {"n": np.int64(2**40 + n), "t": "é" * n, "h": np.full((2,), n, jnp.bfloat16)}
        for n in range(5)
    ]
    source = Dataset.from_generator(lambda: iter(elements))
    kept = tmp_path / "folder" / "kept"
    first = list(source.cache(kept))
    nothing = Dataset.from_generator(lambda: iter([]), output_signature=source.element_spec)
    later = nothing.cache(kept)
    assert len(later) == 5
    for one, two in zip(first, later, strict=True):
        assert one["t"] == two["t"]
        assert one["n"] == two["n"]
        assert two["h"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(one["h"], two["h"])
    assert len(list(later.shuffle(5).batch(2))) == 3


def test_a_pass_that_was_not_finished_leaves_no_cache_in_files(tmp_path):
    dataset = Dataset.range(4).map(lambda x: x).cache(tmp_path / "kept")
    next(iter(dataset))
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_of_a_cache_are_named(tmp_path):
    list(Dataset.range(4).cache(tmp_path / "kept"))
    (file,) = (tmp_path / "kept.cache").glob("run-*/shard-00000/leaf0.values")
    file.write_bytes(b"nonsense")
    with pytest.raises(
        DataLossError, match=r"leaf0.values is corrupt: it should have 32 bytes.*Remove .*kept"
    ):
        Dataset.range(4).cache(tmp_path / "kept")


# -- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "compress"), [("", bytes), ("GZIP", gzip.compress), ("ZLIB", zlib.compress)]
)
def test_lines_are_read_out_of_compressed_files(tmp_path, compression, compress):
    text = b"".join(b"%d\n" % number for number in range(10_000))
    path = tmp_path / "lines"
    path.write_bytes(compress(text))
    lines = list(TextLineDataset(str(path), compression))
    assert lines == [b"%d" % number for number in range(10_000)]


def test_files_are_read_in_turn_where_several_are_read_at_a_time(tmp_path):
    paths = []
    for name in "ab":
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    lines = TextLineDataset(paths, num_parallel_reads=2)
    assert list(lines) == [b"a1", b"b1", b"a2", b"b2"]


def test_a_missing_file_is_named_when_it_is_read(tmp_path):
    dataset = TextLineDataset(str(tmp_path / "missing.txt"))
    with pytest.raises(NotFoundError, match=r"missing\.txt"):
        next(iter(dataset))


def test_files_behind_fsspec_are_listed_and_read():
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/corpus/a.txt", b"one\ntwo\n")
    system.pipe("/corpus/b.txt", b"three")
    names = Dataset.list_files("memory://corpus/*.txt", shuffle=False)
    assert list(TextLineDataset(names)) == [b"one", b"two", b"three"]


def test_listed_files_come_in_another_order_in_every_pass(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}").touch()
    dataset = Dataset.list_files(f"{tmp_path}/*", seed=1)
    assert list(dataset) != list(dataset)
    assert sorted(dataset) == sorted(dataset)
