"""Elements that are kept: `cache`, `save` and `load`, `snapshot`."""

import collections
import gc
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import unison.tf as tf
from subprocess_program import SOURCE
from unison.data import Dataset
from unison.data.caching import column_files
from unison.data.state import decode, encode
from unison.errors import DataLossError, InvalidArgumentError, NotFoundError

Point = collections.namedtuple("Point", "x y")

ELEMENTS = [
    {
        "point": Point(np.full((number % 3, 2), number, "float32"), "é" * number),
        "pair": (np.int64(2**40 + number), np.array(["a", "b" * number])),
        "half": np.full(2, number, ml_dtypes.bfloat16),
        "none": None,
    }
    for number in range(20)
]


def mixed():
    """Ragged arrays, text, arrays of text, bfloat16, in dictionaries and tuples of all kinds."""
    return Dataset.from_generator(lambda: iter(ELEMENTS))


def counted(calls, length=10):
    return Dataset.range(length).map(lambda x: calls.append(1) or x * x)


def ints(dataset):
    return [int(x) for x in dataset]


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_equal(one, two)


def assert_restores_everywhere(make):
    """Wherever a pass is saved, as bytes, one over an equal dataset goes on from there."""
    whole = ints(make())
    for passed in range(len(whole) + 1):
        iterator = iter(make())
        for _ in range(passed):
            next(iterator)
        kept = encode(iterator.get_state())
        restored = iter(make())
        restored.set_state(decode(*kept))
        assert ints(restored) == whole[passed:], passed


@pytest.fixture(params=["none", "GZIP", "SNAPPY"])
def compression(request):
    return None if request.param == "none" else request.param


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_files, "BLOCK_BYTES", 64)


# -- save and load -------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(tmp_path, compression, small_blocks):
    mixed().save(tmp_path / "kept", compression)
    loaded = Dataset.load(tmp_path / "kept", element_spec=mixed().element_spec)
    assert_same(mixed(), loaded)
    assert len(loaded) == 20
    first = next(iter(loaded))
    assert type(first["point"]) is Point
    assert first["half"].dtype == ml_dtypes.bfloat16
    assert list(first) == list(ELEMENTS[0])


def test_the_element_spec_is_kept(tmp_path):
    rows = Dataset.from_tensor_slices({"x": np.zeros((4, 3), "uint8"), "y": ["a"] * 4})
    rows.save(tmp_path / "kept")
    assert Dataset.load(tmp_path / "kept").element_spec == rows.element_spec


def test_a_named_tuple_is_loaded_by_its_name_and_fields(tmp_path):
    Dataset.from_tensors(Point(1, 2)).save(tmp_path / "kept")
    loaded = Dataset.load(tmp_path / "kept").get_single_element()
    assert (type(loaded).__name__, loaded._fields, tuple(loaded)) == ("Point", ("x", "y"), (1, 2))


def test_what_is_loaded_is_mapped_into_memory_and_shuffled_by_index(tmp_path, small_blocks):
    Dataset.from_tensor_slices(np.arange(100.0)).save(tmp_path / "kept")
    loaded = Dataset.load(tmp_path / "kept")
    whole = next(iter(loaded.batch(100)))
    assert np.shares_memory(whole, next(iter(loaded.batch(50))))
    assert not whole.flags.writeable
    shuffled = loaded.shuffle(100, seed=1)
    expected = Dataset.range(100).shuffle(100, seed=1)
    assert ints(shuffled) == ints(expected)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_batches_cross_blocks(tmp_path, compression, small_blocks, size):
    elements = [(np.arange(3) + number, "t" * number) for number in range(40)]
    source = Dataset.from_generator(lambda: iter(elements))
    source.save(tmp_path / "kept", compression)
    assert_same(Dataset.load(tmp_path / "kept").batch(size), source.batch(size))
    shuffled = Dataset.load(tmp_path / "kept").shuffle(40, seed=2).batch(size)
    assert_same(shuffled, source.cache().shuffle(40, seed=2).batch(size))


def test_elements_of_different_shapes_cannot_be_stacked_and_can_be_padded(tmp_path):
    Dataset.range(1, 5).map(lambda n: np.ones(n)).save(tmp_path / "kept")
    loaded = Dataset.load(tmp_path / "kept")
    with pytest.raises(InvalidArgumentError, match="Use padded_batch"):
        list(loaded.batch(4))
    assert next(iter(loaded.padded_batch(4))).sum(axis=1).tolist() == [1, 2, 3, 4]


def test_elements_may_have_different_numbers_of_axes(tmp_path):
    shapes = [(), (2,), (3, 1), (0, 4), (1, 1, 1)]
    source = Dataset.from_generator(lambda: (np.ones(shape) for shape in shapes))
    source.save(tmp_path / "kept")
    assert [x.shape for x in Dataset.load(tmp_path / "kept")] == shapes


def test_an_empty_dataset_is_kept(tmp_path):
    Dataset.range(0).save(tmp_path / "kept")
    loaded = Dataset.load(tmp_path / "kept")
    assert (list(loaded), len(loaded)) == ([], 0)
    assert loaded.element_spec == Dataset.range(0).element_spec


def test_of_nothing_nothing_is_kept_where_nobody_knows_what_it_would_be(tmp_path):
    nothing = Dataset.from_generator(lambda: iter([]))
    for kept in (nothing.cache(tmp_path / "cache"), nothing.snapshot(tmp_path / "snapshot")):
        assert list(kept) == list(kept) == []
    with pytest.raises(ValueError, match=r"there is none. Use the element_spec"):
        nothing.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_takes_the_place_of_what_was_there(tmp_path):
    Dataset.range(5).save(tmp_path)
    before = Dataset.load(tmp_path)
    Dataset.from_tensor_slices(["a"]).save(tmp_path)
    assert list(Dataset.load(tmp_path)) == [b"a"]
    assert ints(before) == [0, 1, 2, 3, 4]  # its maps are still there
    assert len(list(tmp_path.glob("run-*"))) == 1


def test_what_is_not_whole_is_not_there(tmp_path):
    def failing():
        yield from range(5)
        raise KeyError("mine")

    Dataset.range(3).save(tmp_path / "kept")
    with pytest.raises(KeyError, match="mine"):
        Dataset.from_generator(failing).save(tmp_path / "kept")
    assert ints(Dataset.load(tmp_path / "kept")) == [0, 1, 2]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    with pytest.raises(KeyError, match="mine"):
        Dataset.from_generator(failing).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_without_a_dataset_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"no dataset in .*nothing.*dataset.json"):
        Dataset.load(tmp_path / "nothing")


@pytest.mark.parametrize("byte", [0, 7, -1])
def test_a_flipped_byte_is_found(tmp_path, compression, small_blocks, byte):
    data = np.arange(64)
    Dataset.from_tensor_slices(data).save(tmp_path, compression)
    (values,) = tmp_path.glob("run-*/shard-00000/leaf0.values")
    damaged = bytearray(values.read_bytes())
    damaged[byte] ^= 1
    values.write_bytes(damaged)
    loaded = Dataset.load(tmp_path)
    with pytest.raises(
        DataLossError,
        match=r"leaf0.values is corrupt: checksum mismatch.*elements (0|56) to (7|63)",
    ):
        list(loaded.batch(10))
    with pytest.raises(DataLossError, match=r"leaf0.values is corrupt"):
        list(Dataset.load(tmp_path).shuffle(64))


def test_a_flipped_byte_in_the_description_is_found(tmp_path):
    Dataset.range(5).save(tmp_path)
    index = tmp_path / "dataset.json"
    index.write_bytes(index.read_bytes().replace(b"int64", b"int65"))
    with pytest.raises(DataLossError, match=r"dataset.json is corrupt: checksum mismatch"):
        Dataset.load(tmp_path)


def test_a_format_of_the_future_is_refused(tmp_path):
    Dataset.range(5).save(tmp_path)
    index = tmp_path / "dataset.json"
    described = json.loads(index.read_bytes().partition(b"\n")[2])
    body = json.dumps(described | {"format": "unison.data 9"}).encode()
    index.write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    with pytest.raises(InvalidArgumentError, match=r"another version.*unison.data 9"):
        Dataset.load(tmp_path)


@pytest.mark.parametrize("name", ["leaf0.values", "leaf0.lengths"])
def test_a_file_that_is_cut_or_gone_is_found(tmp_path, name):
    Dataset.from_tensor_slices(["ab", "c"]).save(tmp_path)
    (file,) = tmp_path.glob(f"run-*/shard-00000/{name}")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataLossError, match=f"{name} is corrupt: it should have"):
        Dataset.load(tmp_path)
    file.unlink()
    with pytest.raises(DataLossError, match=f"{name} is corrupt: it cannot be read"):
        Dataset.load(tmp_path)


def test_other_elements_than_expected_are_refused(tmp_path):
    Dataset.range(5).save(tmp_path)
    floats = Dataset.from_tensors(1.0).element_spec
    with pytest.raises(
        InvalidArgumentError, match=r"differ from the expected ones.*float64.*int64"
    ):
        Dataset.load(tmp_path, element_spec=floats)


def test_unknown_compression_is_refused_before_anything_is_read(tmp_path):
    calls = []
    with pytest.raises(InvalidArgumentError, match=r"'GZIP' or 'SNAPPY'. Received: 'LZ'"):
        counted(calls).save(tmp_path / "kept", compression="LZ")
    assert (calls, list(tmp_path.iterdir())) == ([], [])


def test_windows_cannot_be_kept(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be kept\. Keep them after flat_map"):
        Dataset.range(4).window(2).save(tmp_path / "kept")


def test_elements_are_kept_wherever_fsspec_reaches(compression, small_blocks):
    folder = "memory://kept-by-the-test"
    source = Dataset.from_generator(lambda: iter(ELEMENTS))
    source.save(folder, compression)
    source.save(folder, compression)
    assert_same(Dataset.load(folder), source)
    import fsspec

    assert len(fsspec.filesystem("memory").glob("/kept-by-the-test/run-*")) == 1


# -- shards --------------------------------------------------------------------------------


def test_a_function_tells_the_shard_and_another_how_to_read_them(tmp_path):
    Dataset.range(9).save(tmp_path, shard_func=lambda x: x % 3)
    assert ints(Dataset.load(tmp_path)) == list(range(9))
    one_after_the_other = Dataset.load(tmp_path, reader_func=lambda s: s.flat_map(lambda x: x))
    assert ints(one_after_the_other) == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert len(Dataset.load(tmp_path)) == 9


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path):
    Dataset.range(6).save(tmp_path, shard_func=lambda x: 4 - x // 2)
    read = Dataset.load(tmp_path, reader_func=lambda shards: shards.flat_map(lambda x: x))
    assert ints(read) == [4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize("number", [0.5, np.zeros(2, int), "a", (1, 2)])
def test_a_shard_has_a_whole_number(tmp_path, number):
    with pytest.raises(InvalidArgumentError, match="`shard_func` must return the number"):
        Dataset.range(3).save(tmp_path, shard_func=lambda x: number)


def test_a_reader_must_return_a_dataset(tmp_path):
    Dataset.range(3).save(tmp_path)
    with pytest.raises(TypeError, match="`reader_func` of load must return a Dataset"):
        Dataset.load(tmp_path, reader_func=lambda shards: 3)


# -- snapshot ------------------------------------------------------------------------------


def test_a_snapshot_computes_every_element_once_for_all_processes(tmp_path, compression):
    calls = []
    dataset = counted(calls).snapshot(tmp_path / "kept", compression)
    assert ints(dataset) == ints(dataset) == [x * x for x in range(10)]
    later = counted(calls).snapshot(tmp_path / "kept", compression)
    assert [x.tolist() for x in later.batch(6)][1] == [36, 49, 64, 81]
    assert len(calls) == 10


def test_a_snapshot_has_shards_and_a_reader(tmp_path):
    dataset = Dataset.range(4).snapshot(
        tmp_path,
        shard_func=lambda x: x % 2,
        reader_func=lambda shards: shards.flat_map(lambda x: x),
    )
    assert ints(dataset) == [0, 1, 2, 3]
    assert ints(dataset) == [0, 2, 1, 3]


def test_a_pass_that_ends_early_leaves_no_snapshot_and_says_so(tmp_path, small_blocks, caplog):
    dataset = Dataset.range(100).snapshot(tmp_path / "kept")
    iterator = iter(dataset.take(50))
    assert len(list(iterator)) == 50
    del iterator
    gc.collect()
    assert not (tmp_path / "kept").exists()
    assert "ended before its last element" in caplog.text
    assert len(ints(dataset)) == 100


def test_two_passes_at_once_both_give_everything_and_one_is_kept(tmp_path, small_blocks):
    dataset = Dataset.range(100).snapshot(tmp_path / "kept")
    first, second = iter(dataset), iter(dataset)
    next(first), next(first)
    assert ints(second) == list(range(100))
    assert ints(first) == list(range(2, 100))
    assert len(list((tmp_path / "kept").glob("run-*"))) == 1
    assert ints(dataset) == list(range(100))


def test_a_snapshot_of_another_pipeline_is_refused(tmp_path):
    list(Dataset.range(3).snapshot(tmp_path / "kept"))
    with pytest.raises(InvalidArgumentError, match="differ from the expected ones"):
        list(Dataset.from_tensors(1.0).snapshot(tmp_path / "kept"))


def test_a_snapshot_is_restored_in_its_first_pass_and_in_later_ones(tmp_path, small_blocks):
    folders = iter(range(1000))
    assert_restores_everywhere(lambda: Dataset.range(9).snapshot(tmp_path / str(next(folders))))
    assert_restores_everywhere(lambda: Dataset.range(9).snapshot(tmp_path / "same"))
    assert_restores_everywhere(
        lambda: Dataset.range(9).snapshot(tmp_path / "same", reader_func=shuffled_reader)
    )


def shuffled_reader(shards):
    return shards.flat_map(lambda shard: shard).shuffle(9, seed=3)


def test_a_first_pass_is_restored_as_it_was_when_the_snapshot_has_been_written_since(tmp_path):
    def make():
        return Dataset.range(20).snapshot(tmp_path, reader_func=shuffled_reader)

    iterator = iter(make())
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    list(iterator)
    restored = iter(make())
    restored.set_state(state)
    assert ints(restored) == list(range(5, 20))


@pytest.mark.parametrize("keep", [Dataset.snapshot, Dataset.cache])
def test_the_share_of_a_worker_is_kept_apart(tmp_path, keep):
    kept = keep(Dataset.range(4), tmp_path / "kept")
    share = Dataset(kept.plan.of(Dataset.range(2).plan, ".worker1"))
    assert [ints(share), ints(share), ints(kept), ints(kept)] == [[0, 1]] * 2 + [[0, 1, 2, 3]] * 2
    assert len(list(tmp_path.glob("kept*"))) == 2


# -- cache ---------------------------------------------------------------------------------


def test_a_cache_in_files_takes_any_elements(tmp_path, small_blocks):
    cached = mixed().cache(tmp_path / "kept")
    assert_same(cached, mixed())
    assert_same(cached, mixed())
    assert_same(mixed().cache(tmp_path / "kept"), mixed())


@pytest.mark.parametrize("where", ["memory", "files"])
def test_what_users_do_to_elements_does_not_change_a_cache(tmp_path, where):
    cached = Dataset.range(4).map(lambda x: np.full(2, x)).batch(2)
    cached = cached.cache(tmp_path / "kept" if where == "files" else "")
    for batch in cached:
        with pytest.raises(ValueError, match="read-only"):
            batch[:] = -1
    assert [batch.tolist() for batch in cached] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_pass_with_an_error_is_not_kept(tmp_path, where):
    fails = [True]

    def inverse(x):
        if x == 2 and fails:
            fails.clear()
            raise KeyError("mine")
        return x

    path = tmp_path / "kept" if where == "files" else ""
    cached = Dataset.range(4).map(inverse).cache(path)
    assert ints(cached.ignore_errors()) == [0, 1, 3]
    assert ints(cached) == [0, 1, 2, 3]
    assert ints(cached) == [0, 1, 2, 3]


def test_a_pass_that_ends_early_leaves_no_cache_and_says_so(tmp_path, small_blocks, caplog):
    cached = Dataset.range(100).cache(tmp_path / "kept")
    assert len(list(cached.take(50))) == 50
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert "take before cache" in caplog.text


def test_looking_at_the_first_element_leaves_no_word_and_no_files(tmp_path, caplog):
    dataset = Dataset.range(9).map(lambda x: x)
    kept = [dataset.cache(tmp_path / "cache"), dataset.snapshot(tmp_path / "snapshot")]
    assert [each.element_spec.shape for each in kept] == [(), ()]
    assert next(iter(kept[0].batch(2))).tolist() == [0, 1]
    gc.collect()
    assert (caplog.text, list(tmp_path.iterdir())) == ("", [])


def test_a_cache_of_another_pipeline_is_refused(tmp_path):
    list(Dataset.range(3).cache(tmp_path / "kept"))
    with pytest.raises(InvalidArgumentError, match="differ from the expected ones"):
        Dataset.from_tensors("text").cache(tmp_path / "kept")


WRITER = """
import sys, time
from unison.data import Dataset
from unison.data.caching import column_files
from unison.data.state import decode, encode
column_files.BLOCK_BYTES = 64

def slowly(x):
    if x == 50:
        print("half", flush=True)
        sys.stdin.readline()
    return x

print([int(x) for x in Dataset.range(100).map(slowly).cache(sys.argv[1])] == list(range(100)))
"""


@pytest.fixture
def writing_process(tmp_path):
    """Another process, halfway through a pass over the same cache."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "kept")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_two_processes_may_write_the_same_cache_at_once(tmp_path, writing_process, small_blocks):
    cached = Dataset.range(100).cache(tmp_path / "kept")
    assert ints(cached) == list(range(100))
    output, _ = writing_process.communicate("go on\n", timeout=60)
    assert output == "True\n"
    assert ints(Dataset.range(100).cache(tmp_path / "kept")) == list(range(100))
    assert len(list((tmp_path / "kept.cache").iterdir())) == 2


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(
    tmp_path, writing_process, small_blocks
):
    folder = Path(f"{tmp_path / 'kept'}.cache")
    (run,) = (path for path in folder.glob("run-*") if path.is_dir())
    iterator = iter(Dataset.range(100).cache(tmp_path / "kept"))
    for _ in range(20):
        next(iterator)
    assert run.exists()  # its process lives
    del iterator
    writing_process.kill()
    writing_process.wait(timeout=30)
    assert ints(Dataset.range(100).cache(tmp_path / "kept")) == list(range(100))
    assert not run.exists()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_cache_is_restored_in_its_first_pass_and_in_later_ones(tmp_path, where, small_blocks):
    folders = iter(range(1000))

    def make():
        path = tmp_path / str(next(folders)) if where == "files" else ""
        return Dataset.range(5).shuffle(5, seed=2).cache(path).repeat(3)

    assert_restores_everywhere(make)


@pytest.mark.parametrize(
    "transform",
    [
        lambda cached: cached.shuffle(4, seed=1).repeat(3),
        lambda cached: cached.take(4).repeat(3),
        lambda cached: cached.enumerate().map(lambda n, x: 10 * n + x).repeat(3),
        lambda cached: cached.shuffle(7, seed=1).prefetch(2).repeat(2),
        lambda cached: cached.repeat(3).prefetch(2),
    ],
)
@pytest.mark.parametrize("where", ["memory", "files", "same files"])
def test_what_stands_behind_a_cache_is_restored(tmp_path, transform, where, small_blocks):
    folders = iter(range(1000))

    def make():
        path = "" if where == "memory" else tmp_path / "same"
        if where == "files":
            path = tmp_path / str(next(folders))
        return transform(Dataset.range(6).shuffle(6, seed=2).cache(path))

    assert_restores_everywhere(make)


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_first_pass_is_restored_beside_elements_that_were_kept_since(
    tmp_path, where, small_blocks, caplog
):
    cached = Dataset.range(50).cache(tmp_path / "kept" if where == "files" else "")
    iterator = iter(cached.shuffle(5, seed=1))
    begin = [int(next(iterator)) for _ in range(3)]
    state = iterator.get_state()
    rest = ints(iterator)
    assert sorted(begin + rest) == list(range(50))
    restored = iter(cached.shuffle(5, seed=1))
    restored.set_state(state)
    assert ints(restored) == rest
    del restored
    gc.collect()
    assert caplog.text == ""
    assert cached.plan.rows() is not None


def test_a_restored_first_pass_completes_the_cache(tmp_path):
    first, second = [], []
    iterator = iter(counted(first).cache(tmp_path / "one"))
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    del iterator
    cached = counted(second).cache(tmp_path / "two")
    restored = iter(cached)
    restored.set_state(state)
    assert ints(restored) == [x * x for x in range(4, 10)]
    assert ints(cached) == [x * x for x in range(10)]
    assert len(second) == 10  # those before the position were computed again, to be kept


# -- tf.data -------------------------------------------------------------------------------


def test_tf_data_saves_loads_and_takes_snapshots_of_tensors(tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices(Point([1, 2, 3, 4], ["a", "b", "c", "d"]))
    kept = str(tmp_path / "kept")
    dataset.save(kept, shard_func=lambda element: tf.cast(element.x % 2, tf.int64))

    def one_after_the_other(shards):
        return shards.flat_map(lambda shard: shard)

    loaded = tf.data.Dataset.load(kept, dataset.element_spec, "GZIP", one_after_the_other)
    assert loaded.element_spec == dataset.element_spec
    assert [(int(e.x), e.y.numpy()) for e in loaded] == [(2, b"b"), (4, b"d"), (1, b"a"), (3, b"c")]
    snapshot = tf.data.Dataset.range(4).map(lambda x: 2 * x).snapshot(str(tmp_path / "snapshot"))
    assert [int(x) for x in snapshot] == [int(x) for x in snapshot] == [0, 2, 4, 6]


def test_the_experimental_names_are_the_same(tmp_path):
    experimental = tf.data.experimental
    experimental.save(tf.data.Dataset.range(3), str(tmp_path / "kept"), compression="GZIP")
    assert [int(x) for x in experimental.load(str(tmp_path / "kept"))] == [0, 1, 2]
    dataset = tf.data.Dataset.range(3).apply(experimental.snapshot(str(tmp_path / "snapshot")))
    assert [int(x) for x in dataset] == [int(x) for x in dataset] == [0, 1, 2]


def test_a_shard_function_of_tensors_must_return_one_whole_number(tmp_path):
    for wrong in (lambda x: tf.cast(x, tf.float32), lambda x: (x, x)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="`shard_func` must return"):
            tf.data.Dataset.range(3).save(str(tmp_path / "kept"), shard_func=wrong)
