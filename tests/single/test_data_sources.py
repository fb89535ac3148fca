"""`Dataset.from_source`, `from_parquet` and `from_array_record`: data that others hold.

PyTorch and Hugging Face's `datasets` are too large for the tests: classes of their protocols stand
for them here, made as the real ones behave. Grain, pyarrow and array_record are the real ones.
"""

import collections
import contextlib
import sys
import types

import grain
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from subprocess_program import run_program
from unison.data import Dataset
from unison.data.sources import parquet
from unison.data.sources.in_memory import ArrayRows
from unison.data.state import decode, encode
from unison.errors import DataLossError, InvalidArgumentError

Point = collections.namedtuple("Point", "x y")


def ints(dataset):
    return [int(x) for x in dataset]


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_equal(one, two)


def assert_restores_everywhere(make):
    """Wherever a pass is saved, as bytes, one over an equal dataset goes on from there."""
    whole = list(make())
    assert whole
    for passed in range(len(whole) + 1):
        iterator = iter(make())
        for _ in range(passed):
            next(iterator)
        kept = encode(iterator.get_state())
        restored = iter(make())
        restored.set_state(decode(*kept))
        assert_same(restored, whole[passed:])


# -- Python --------------------------------------------------------------------------------


class Squares:
    """A random-access source that counts what is asked of it."""

    def __init__(self, length=10):
        self.length = length
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert type(index) is int
        self.asked.append(index)
        if index == 7:
            raise KeyError("mine")
        return {"n": index, "square": np.full(2, index * index)}


class BatchedSquares(Squares):
    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [{"n": index, "square": np.full(2, index * index)} for index in indices]


def test_a_sequence_is_shuffled_by_index():
    source = Squares(6)
    dataset = Dataset.from_source(source).shuffle(6, seed=1)
    assert dataset.plan.inputs[0].rows() is not None
    assert [int(x["n"]) for x in dataset] == ints(Dataset.range(6).shuffle(6, seed=1))
    assert sorted(source.asked) == list(range(6))
    assert len(Dataset.from_source(source)) == 6


def test_whole_batches_are_asked_for_where_a_source_has_a_way():
    source = BatchedSquares(6)
    batches = list(Dataset.from_source(source).batch(4))
    assert source.asked == [[0, 1, 2, 3], [4, 5]]
    assert batches[1]["square"].tolist() == [[16, 16], [25, 25]]


def test_an_error_of_a_sequence_names_the_element():
    iterator = iter(Dataset.from_source(Squares()).skip(7))
    with pytest.raises(KeyError, match="mine") as caught:
        next(iterator)
    assert "In element 7 of the source Squares." in caught.value.__notes__
    assert next(iterator)["n"] == 8


def test_lists_and_ranges_are_sequences():
    assert ints(Dataset.from_source([3, 1, 2])) == [3, 1, 2]
    assert ints(Dataset.from_source(range(3)).shuffle(3, seed=1)) == ints(
        Dataset.range(3).shuffle(3, seed=1)
    )
    assert list(Dataset.from_source(["a", "é"])) == [b"a", "é".encode()]


def test_an_iterable_is_iterated_anew_in_every_pass():
    class Iterable:
        passes = 0

        def __iter__(self):
            Iterable.passes += 1
            yield from [{"x": 1.5}, {"x": 2.5}]

    dataset = Dataset.from_source(Iterable())
    assert list(dataset) == list(dataset) == [{"x": 1.5}, {"x": 2.5}]
    assert Iterable.passes == 2
    assert dataset.cardinality() == -2


def test_a_function_that_returns_an_iterable_is_a_source():
    assert ints(Dataset.from_source(lambda: iter([1, 2]))) == [1, 2]
    dictionary = {"a": 1, "b": 2}
    assert list(Dataset.from_source(dictionary.items)) == [(b"a", 1), (b"b", 2)]


def test_a_dataset_is_its_own_source():
    dataset = Dataset.range(3)
    assert Dataset.from_source(dataset).plan is dataset.plan


@pytest.mark.parametrize("value", [3, "text", b"text", None, {"a": 1}, {1, 2}])
def test_what_is_no_source_is_named(value):
    with pytest.raises(TypeError, match=r"Expected a source of elements.*Received: "):
        list(Dataset.from_source(value))


def test_an_iterator_is_no_source_as_it_has_one_pass():
    with pytest.raises(
        TypeError, match=r"yields its elements only once.*a function that returns it"
    ):
        Dataset.from_source(iter([1, 2]))


def test_elements_must_have_one_structure():
    iterator = iter(Dataset.from_source([(1, 2), (1, 2, 3), (5, 6)]))
    next(iterator)
    with pytest.raises(InvalidArgumentError, match="Element 1 of the source cannot be used"):
        next(iterator)
    with pytest.raises(InvalidArgumentError, match="Element 0 of the source cannot be used"):
        next(iter(Dataset.from_source([object()])))


def test_named_tuples_are_kept():
    assert next(iter(Dataset.from_source([Point(1, 2)]))) == Point(1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_source(list(range(5))),
        lambda: Dataset.from_source(list(range(5))).shuffle(5, seed=1).batch(2).repeat(2),
        lambda: Dataset.from_source(lambda: iter(range(5))),
        lambda: Dataset.from_source(lambda: iter(range(5))).shuffle(3, seed=1).repeat(2),
    ],
)
def test_python_sources_are_restored(make):
    assert_restores_everywhere(make)


# -- arrays --------------------------------------------------------------------------------


@pytest.fixture
def mapped(tmp_path):
    """Two memory maps of 5 and 3 rows."""
    maps = []
    for name, rows in [("a", 5), ("b", 3)]:
        np.save(tmp_path / name, np.arange(2.0 * rows).reshape(rows, 2) + 100 * len(maps))
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    return maps


def test_a_dictionary_of_memory_maps_has_columns(mapped):
    dataset = Dataset.from_source({"x": mapped[0], "y": np.arange(5)})
    assert dataset.element_spec["x"].shape == (2,)
    batch = next(iter(dataset.batch(5)))
    assert np.shares_memory(batch["x"], mapped[0])


def test_arrays_of_jax_are_cut_into_rows():
    dataset = Dataset.from_source((jnp.arange(6).reshape(3, 2), np.arange(3)))
    assert [(x.tolist(), int(y)) for x, y in dataset] == [([0, 1], 0), ([2, 3], 1), ([4, 5], 2)]
    assert isinstance(dataset.plan.rows(), ArrayRows)


def test_memory_maps_in_a_list_are_the_parts_of_one_array(mapped):
    dataset = Dataset.from_source(mapped)
    whole = np.concatenate(mapped)
    assert len(dataset) == 8
    for size in (1, 3, 5, 8):
        assert np.concatenate(list(dataset.batch(size))).tolist() == whole.tolist()
    order = ints(Dataset.range(8).shuffle(8, seed=3))
    shuffled = np.concatenate(list(dataset.shuffle(8, seed=3).batch(3)))
    assert shuffled.tolist() == whole[order].tolist()
    assert_restores_everywhere(lambda: Dataset.from_source(mapped).shuffle(8, seed=3).batch(3))


def test_parts_of_different_shapes_are_refused(mapped, tmp_path):
    np.save(tmp_path / "c", np.zeros((2, 3)))
    other = np.load(tmp_path / "c.npy", mmap_mode="r")
    with pytest.raises(ValueError, match="Put them in a tuple or a dictionary"):
        Dataset.from_source([mapped[0], other])


def test_the_kernel_reads_no_more_of_small_shuffled_rows_than_is_wanted(tmp_path):
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "uint8", (1 << 16, 8))
    source = np.load(tmp_path / "x.npy", mmap_mode="r")
    rows = ArrayRows((source,))

    def flags():
        with open("/proc/self/smaps") as file:
            maps = file.read().split(str(tmp_path / "x.npy"))[-1]
        return maps.partition("VmFlags:")[2].partition("\n")[0].split()

    rows.take(np.array([5, 3]))
    assert "rr" in flags()  # MADV_RANDOM
    rows.slice(0, 10)
    assert "rr" not in flags()


# -- PyTorch -------------------------------------------------------------------------------


class Tensor:
    """As `torch.Tensor`: no array, but it gives one that shares its memory."""

    def __init__(self, array, dtype=None):
        self.array = array
        self.dtype = dtype or str(array.dtype)

    def detach(self):
        return self

    def cpu(self):
        return self

    def resolve_conj(self):
        return self

    def view(self, dtype):
        assert dtype == "int16"
        return Tensor(self.array.view(dtype))

    def numpy(self):
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("tensors are not converted element by element")


@pytest.fixture
def torch(monkeypatch):
    module = types.ModuleType("torch")
    module.Tensor, module.bfloat16, module.int16 = Tensor, "bfloat16", "int16"
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


class Loader:
    """As `torch.utils.data.DataLoader`: iterable, with a length, its batches are lists."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        yield from self.batches


class LoaderOfIterable(Loader):
    def __len__(self):
        raise TypeError("object of type 'IterableDataset' has no len()")


def test_tensors_become_arrays_without_a_copy(torch):
    array = np.arange(4.0)
    (element,) = Dataset.from_source(Loader([Tensor(array)]))
    assert np.shares_memory(element, array)
    half = np.array([1.5, 2], ml_dtypes.bfloat16)
    (element,) = Dataset.from_source(Loader([Tensor(half.view("int16"), "bfloat16")]))
    assert element.dtype == ml_dtypes.bfloat16
    assert element.tolist() == [1.5, 2]


def test_a_dictionary_of_tensors_has_columns(torch):
    array = np.arange(6.0).reshape(3, 2)
    dataset = Dataset.from_source({"x": Tensor(array), "y": np.arange(3)})
    assert np.shares_memory(next(iter(dataset.batch(3)))["x"], array)


def test_a_loader_gives_its_batches(torch):
    batches = [[Tensor(np.zeros((2, 3))), {"y": Tensor(np.arange(2))}] for _ in range(3)]
    dataset = Dataset.from_source(Loader(batches))
    assert len(dataset) == 3
    x, y = next(iter(dataset))
    assert (x.shape, y["y"].tolist()) == ((2, 3), [0, 1])
    assert_restores_everywhere(lambda: Dataset.from_source(Loader(batches)))


def test_a_loader_of_unknown_length_gives_its_batches(torch):
    dataset = Dataset.from_source(LoaderOfIterable([Tensor(np.arange(2))]))
    assert dataset.cardinality() == -2
    assert [x.tolist() for x in dataset] == [[0, 1]]


# -- Hugging Face --------------------------------------------------------------------------


class Features(dict):
    def __init__(self, schema, **decoded):
        super().__init__({name: decoded.get(name) for name in schema.names})
        self.arrow_schema = schema


class HubDataset:
    """As `datasets.Dataset`: rows as dictionaries, or tables in the format "arrow"."""

    def __init__(self, table, kind=None, decoded=None):
        self.table = table
        self.format = {"type": kind, "columns": table.column_names}
        self.features = Features(table.schema, **(decoded or {}))
        self.decoded = decoded or {}

    def with_format(self, kind, columns):
        assert columns == self.format["columns"]
        return HubDataset(self.table, kind, self.decoded)

    def __len__(self):
        return len(self.table)

    def __getitem__(self, key):
        if self.format["type"] == "arrow":
            return self.table[key] if isinstance(key, slice) else self.table.take(key)
        assert not isinstance(key, slice), "whole columns are taken in the arrow format"
        (row,) = self.table[key : key + 1].to_pylist()
        return {name: self.decoded.get(name, np.asarray)(value) for name, value in row.items()}


class HubIterable:
    """As `datasets.IterableDataset`: rows as dictionaries."""

    def __init__(self, table):
        self.table = table
        self.features = Features(table.schema)

    def __iter__(self):
        yield from self.table.to_pylist()


@pytest.fixture
def hub(monkeypatch):
    module = types.ModuleType("datasets")
    module.Dataset, module.IterableDataset = HubDataset, HubIterable
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


TABLE = pa.table(
    {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype="float32")), 2),
        "label": pa.array(range(6), pa.int32()),
        "text": [f"é{number}" for number in range(6)],
    }
)


class RaySplit:
    """A worker's split of a Ray dataset, as far as it is read: blocks of different sizes."""

    def __init__(self, blocks):
        self.blocks = blocks

    def iter_batches(self, *, batch_size, batch_format):
        assert (batch_size, batch_format) == (None, "numpy")
        yield from self.blocks


def test_rows_of_a_ray_split_are_read_block_by_block(monkeypatch):
    module = types.ModuleType("ray.data")
    module.DataIterator = RaySplit
    monkeypatch.setitem(sys.modules, "ray.data", module)
    sizes = np.split(np.arange(9), [4, 5])
    blocks = [{"id": ids, "x": np.float32(ids)[:, None] * [1, 2]} for ids in sizes]

    def dataset():
        return Dataset.from_source(RaySplit(blocks))

    rows = list(dataset())
    assert [int(row["id"]) for row in rows] == list(range(9))
    np.testing.assert_array_equal(rows[5]["x"], [5, 10])
    batches = list(dataset().map(lambda row: (row["x"], row["id"])).batch(4))
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert_restores_everywhere(lambda: dataset().map(lambda row: row["id"]))


def test_columns_of_a_hub_dataset_are_taken_at_once(hub):
    dataset = Dataset.from_source(HubDataset(TABLE))
    assert dataset.element_spec["x"].shape == (2,)
    assert dataset.element_spec["label"].dtype == np.int32
    order = ints(Dataset.range(6).shuffle(6, seed=1))
    batches = list(dataset.shuffle(6, seed=1).batch(4))
    assert [int(x) for batch in batches for x in batch["label"]] == order
    assert batches[0]["x"].dtype == np.float32
    assert batches[1]["text"].tolist() == [f"é{number}".encode() for number in order[4:]]
    assert_restores_everywhere(lambda: Dataset.from_source(HubDataset(TABLE)).shuffle(6, seed=1))


def test_features_that_are_decoded_are_asked_for_row_by_row(hub):
    class Image:
        def decode_example(self):
            raise AssertionError

        def __call__(self, value):
            return np.full((2, 2), value)

    dataset = Dataset.from_source(HubDataset(TABLE.select(["label"]), decoded={"label": Image()}))
    assert [x["label"].shape for x in dataset] == [(2, 2)] * 6


def test_a_streamed_hub_dataset_has_the_dtypes_of_its_features(hub):
    dataset = Dataset.from_source(HubIterable(TABLE))
    assert next(iter(dataset))["label"].dtype == np.int32
    assert next(iter(dataset.batch(2)))["x"].dtype == np.float32
    assert_restores_everywhere(lambda: Dataset.from_source(HubIterable(TABLE)))


# -- Grain ---------------------------------------------------------------------------------


def map_dataset():
    return grain.MapDataset.source([{"n": np.int32(n), "x": np.full(2, n)} for n in range(6)])


def test_a_grain_map_dataset_has_access_by_index():
    dataset = Dataset.from_source(map_dataset().map(lambda e: {**e, "n": e["n"] * 2}))
    assert dataset.plan.rows() is not None
    assert [x["n"].tolist() for x in dataset.batch(4)] == [[0, 2, 4, 6], [8, 10]]


def test_what_grain_knows_of_its_elements_is_known_before_the_first():
    dataset = Dataset.from_source(grain.MapDataset.range(5).batch(2))
    spec = dataset.plan.known_signature.element_spec
    assert (spec.shape, spec.dtype) == ((None,), np.int64)


def test_an_endless_grain_dataset_is_endless():
    dataset = Dataset.from_source(map_dataset().repeat())
    assert dataset.cardinality() == -1
    assert [int(x["n"]) for x in dataset.take(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_filtered_grain_map_dataset_says_how_it_is_to_be_passed():
    filtered = map_dataset().filter(lambda e: e["n"] % 2 == 0)
    with pytest.raises(InvalidArgumentError, match=r"no element 1.*to_iter_dataset"):
        list(Dataset.from_source(filtered))
    dataset = Dataset.from_source(filtered.to_iter_dataset())
    assert [int(x["n"]) for x in dataset] == [0, 2, 4]


def loader():
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 7, 1),
        sampler=grain.samplers.IndexSampler(7, shuffle=True, seed=3, num_epochs=1),
    )


@pytest.mark.parametrize(
    "source",
    [
        lambda: map_dataset().shuffle(seed=1),
        lambda: map_dataset().shuffle(seed=1).to_iter_dataset().batch(2),
        lambda: grain.sources.RangeDataSource(3, 8, 1),
        loader,
    ],
)
def test_grain_sources_are_restored(source):
    assert_restores_everywhere(lambda: Dataset.from_source(source()))


def test_the_state_of_a_grain_iterator_is_kept_and_nothing_is_read_again():
    read = []
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    iterable = map_dataset().map(lambda e: read.append(int(e["n"])) or e).to_iter_dataset(options)
    iterator = iter(Dataset.from_source(iterable))
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    read.clear()
    restored = iter(Dataset.from_source(iterable))
    restored.set_state(state)
    assert [int(x["n"]) for x in restored] == [4, 5]
    assert 0 not in read[1:]


# -- Parquet -------------------------------------------------------------------------------

LARGE = pa.table(
    {
        "n": np.arange(50),
        "text": [f"é{number}" for number in range(50)],
        "ragged": [list(range(number % 3)) for number in range(50)],
        "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(100, dtype="float32")), 2),
        "kind": pa.array(["a", "b"] * 25).dictionary_encode(),
        "inner": pa.StructArray.from_arrays([pa.array(range(50)), pa.array([b"x"] * 50)], "qp"),
        "is_odd": pa.array([False, True] * 25),
        "half": np.arange(50).astype("float16"),
    }
)


@pytest.fixture
def files(tmp_path):
    pa.parquet.write_table(LARGE[:20], tmp_path / "a.parquet", row_group_size=7)
    pa.parquet.write_table(LARGE[20:], tmp_path / "b.parquet", row_group_size=11)
    return str(tmp_path / "*.parquet")


@pytest.fixture(params=["by index", "in order"])
def read(request, monkeypatch):
    if request.param == "in order":
        monkeypatch.setattr(parquet, "BYTES_IN_MEMORY", 0)
        monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 4)
    return request.param


def test_rows_are_dictionaries_of_columns(files, read):
    dataset = Dataset.from_parquet(files)
    assert (dataset.plan.rows() is None) == (read == "in order")
    assert len(dataset) == 50
    elements = list(dataset)
    for number, element in enumerate(elements):
        assert list(element) == LARGE.column_names
        assert element["n"] == number
        assert element["text"] == f"é{number}".encode()
        assert element["ragged"].tolist() == list(range(number % 3))
        assert element["pair"].tolist() == [2 * number, 2 * number + 1]
        assert element["kind"] == b"ab"[number % 2 : number % 2 + 1]
        assert element["inner"] == {"q": number, "p": b"x"}
        assert element["is_odd"] == bool(number % 2)
        assert element["half"].dtype == np.float16


def test_the_schema_tells_what_the_elements_are(files):
    spec = Dataset.from_parquet(files).element_spec
    assert [spec[name].shape for name in ("n", "text", "ragged", "pair")] == [(), (), (None,), (2,)]
    assert spec["pair"].dtype == np.float32
    assert spec["inner"]["q"].dtype == np.int64
    assert spec["kind"].dtype == object


def test_columns_are_chosen_and_read_in_batches(files, read):
    dataset = Dataset.from_parquet(files, ["text", "n", "pair"])
    batches = list(dataset.batch(16))
    assert list(batches[0]) == ["text", "n", "pair"]
    assert np.concatenate([batch["n"] for batch in batches]).tolist() == list(range(50))
    assert batches[3]["pair"].shape == (2, 2)
    assert [int(x["n"]) for x in dataset.skip(26).take(3)] == [26, 27, 28]


def test_what_users_do_to_elements_does_not_change_later_passes(files, read):
    dataset = Dataset.from_parquet(files, ["n", "text", "ragged"])
    for element in [*dataset.take(3), *Dataset.from_parquet(files, ["n", "text"]).batch(5)]:
        for column in element.values():
            with contextlib.suppress(ValueError, TypeError):
                column[:] = 0
    assert [int(x["n"]) for x in dataset] == list(range(50))
    assert next(iter(dataset.skip(2)))["ragged"].tolist() == [0, 1]


def test_lists_of_different_lengths_are_padded(files, read):
    dataset = Dataset.from_parquet(files, ["ragged"])
    with pytest.raises(InvalidArgumentError, match="Use padded_batch"):
        list(dataset.batch(3))
    assert next(iter(dataset.padded_batch(3)))["ragged"].tolist() == [[0, 0], [0, 0], [0, 1]]


def test_small_files_are_shuffled_by_index(files):
    order = ints(Dataset.range(50).shuffle(50, seed=2))
    shuffled = Dataset.from_parquet(files).shuffle(50, seed=2)
    assert [int(x["n"]) for x in shuffled] == order
    batches = Dataset.from_parquet(files, ["n", "text"]).shuffle(50, seed=2).batch(8)
    assert [int(n) for batch in batches for n in batch["n"]] == order


def test_a_pass_over_parquet_files_is_restored(files, read):
    def make():
        return Dataset.from_parquet(files, ["n", "ragged"])

    assert_restores_everywhere(make)
    assert_restores_everywhere(lambda: make().shuffle(5, seed=1))


def test_rows_in_order_hold_a_few_at_a_time(files, monkeypatch):
    monkeypatch.setattr(parquet, "BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 4)
    decoded = []
    columns_of = parquet.columns_of
    monkeypatch.setattr(
        parquet, "columns_of", lambda t, row: decoded.append(len(t)) or columns_of(t, row)
    )
    iterator = iter(Dataset.from_parquet(files))
    next(iterator)
    assert decoded == [4]


def test_a_missing_value_is_named_by_its_column_row_and_file(tmp_path, read):
    table = pa.table({"n": [1, 2, None, 4], "m": [[1], [None], [2], [3]], "k": range(4)})
    pa.parquet.write_table(table, tmp_path / "nulls")
    path = str(tmp_path / "nulls")
    with pytest.raises(InvalidArgumentError, match=r"'n' has no value in row 2.*columns=") as one:
        list(Dataset.from_parquet(path, ["n"]))
    assert path in one.value.__notes__[0]
    with pytest.raises(InvalidArgumentError, match=r"lists of the column 'm' have missing"):
        list(Dataset.from_parquet(path, ["m"]))
    assert len(list(Dataset.from_parquet(path, ["k"]))) == 4


@pytest.mark.parametrize(
    "column",
    [pa.array([[[1], [2, 3]]]), pa.array([None]), pa.array([1]).cast(pa.decimal128(20))],
)
def test_a_column_that_no_array_holds_is_named(tmp_path, column):
    pa.parquet.write_table(pa.table({"odd": column, "n": [1]}), tmp_path / "odd")
    with pytest.raises(InvalidArgumentError, match=r"column 'odd' is of the type"):
        Dataset.from_parquet(str(tmp_path / "odd"))
    assert len(Dataset.from_parquet(str(tmp_path / "odd"), ["n"])) == 1


def test_files_must_have_the_columns_and_the_same_ones(tmp_path):
    pa.parquet.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1")
    pa.parquet.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "2")
    pattern = str(tmp_path / "*")
    with pytest.raises(InvalidArgumentError, match="The files have different columns"):
        Dataset.from_parquet(pattern)
    assert len(Dataset.from_parquet(pattern, ["a"])) == 2
    with pytest.raises(InvalidArgumentError, match=r"no columns \['c'\]. It has: \['a', 'b'\]"):
        Dataset.from_parquet(pattern, ["c"])
    with pytest.raises(InvalidArgumentError, match="No files matched"):
        Dataset.from_parquet(str(tmp_path / "none*"))


def test_a_file_that_is_no_parquet_file_or_damaged_is_named(tmp_path, read):
    (tmp_path / "text").write_bytes(b"no parquet")
    with pytest.raises(DataLossError, match=r"Parquet file .*text is corrupt"):
        Dataset.from_parquet(str(tmp_path / "text"))
    pa.parquet.write_table(
        pa.table({"n": np.arange(10000)}), tmp_path / "numbers", write_page_checksum=True
    )
    damaged = bytearray((tmp_path / "numbers").read_bytes())
    damaged[4:400] = bytes(396)
    (tmp_path / "numbers").write_bytes(damaged)
    with pytest.raises(DataLossError, match=r"Parquet file .*numbers is corrupt"):
        list(Dataset.from_parquet(str(tmp_path / "numbers")))


def test_parquet_files_are_read_wherever_fsspec_reaches():
    import fsspec

    with fsspec.open("memory://rows/a.parquet", "wb") as file:
        pa.parquet.write_table(LARGE, file)
    dataset = Dataset.from_parquet("memory://rows/*.parquet", ["n"])
    assert [int(x["n"]) for x in dataset] == list(range(50))


# -- ArrayRecord ---------------------------------------------------------------------------


@pytest.fixture
def array_records(tmp_path):
    for name, numbers in [("a", range(6)), ("b", range(6, 10))]:
        writer = ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
        for number in numbers:
            writer.write(b"r%d" % number)
        writer.close()
    return str(tmp_path / "*.array_record")


def test_array_records_are_read_by_index(array_records):
    dataset = Dataset.from_array_record(array_records)
    records = [b"r%d" % number for number in range(10)]
    assert list(dataset) == records
    assert len(dataset) == 10
    assert dataset.element_spec.dtype == object
    order = ints(Dataset.range(10).shuffle(10, seed=4))
    shuffled = [x for batch in dataset.shuffle(10, seed=4).batch(4) for x in batch]
    assert shuffled == [records[index] for index in order]
    assert_restores_everywhere(
        lambda: Dataset.from_array_record(array_records).shuffle(10, seed=4).batch(3)
    )


def test_damaged_array_records_are_named(tmp_path, array_records):
    path = tmp_path / "a.array_record"
    damaged = bytearray(path.read_bytes())
    damaged[70] ^= 255
    path.write_bytes(damaged)
    with pytest.raises(DataLossError, match=r"ArrayRecord files cannot be read.*a.array_record"):
        list(Dataset.from_array_record(array_records))
    path.write_bytes(b"short")
    with pytest.raises(DataLossError, match=r"ArrayRecord files cannot be read"):
        Dataset.from_array_record(array_records)


def test_array_records_are_local():
    import fsspec

    with fsspec.open("memory://records/a.array_record", "wb") as file:
        file.write(b"")
    with pytest.raises(InvalidArgumentError, match="from local disks only"):
        Dataset.from_array_record("memory://records/*")


# -- packages that are not there -----------------------------------------------------------


def test_no_package_is_imported_that_a_source_is_not_of():
    program = (
        "import sys; from unison.data import Dataset; "
        "list(Dataset.from_source([1, 2]).batch(2)); list(Dataset.from_source(lambda: [1])); "
        "print([name for name in ('torch', 'datasets', 'grain', 'pyarrow') if name in sys.modules])"
    )
    finished = run_program(program, timeout=60)
    assert finished.stdout.strip() == "[]", finished.stderr


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("pyarrow", lambda: Dataset.from_parquet("x"), "parquet"),
        ("grain.sources", lambda: Dataset.from_array_record("x"), "grain"),
        ("pyarrow", lambda: Dataset.range(3).save("x", "SNAPPY"), "parquet"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch, package, make, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"unison\[{extra}\]"):
        make()
