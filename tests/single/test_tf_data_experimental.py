"""`tf.data.experimental`: CSV files, parsed examples, and what else stands for older programs."""

import gzip

import numpy as np
import pytest

import unison.tf as tf
from unison.data.files import csv_records
from unison.data.plan import position_of, stream_at
from unison.data.sources.csv_columns import Fields
from unison.errors import InvalidArgumentError

CsvDataset = tf.data.experimental.CsvDataset
make_csv_dataset = tf.data.experimental.make_csv_dataset


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b'n,x,text\n1,2.5,a\n2,,"b\nc"\n3,4,"say ""hi"", please"\n4,1e3,d\n')
    return str(path)


def rows_of(dataset):
    return [tuple(np.asarray(leaf).item() for leaf in row) for row in dataset.as_numpy_iterator()]


# -- CSV -----------------------------------------------------------------------------------

TYPES = [tf.int32, tf.constant([-1.0]), tf.string]
ROWS = [(1, 2.5, b"a"), (2, -1, b"b\nc"), (3, 4, b'say "hi", please'), (4, 1000, b"d")]


def test_records_are_tuples_of_their_columns(table):
    dataset = CsvDataset(table, TYPES, header=True)
    assert rows_of(dataset) == ROWS
    assert [spec.dtype for spec in dataset.element_spec] == [tf.int32, tf.float32, tf.string]


@pytest.mark.parametrize("chunk", [1, 20, 30])
def test_records_over_several_lines_are_whole_wherever_a_chunk_ends(table, chunk, monkeypatch):
    monkeypatch.setattr(csv_records, "CHUNK", chunk)
    assert rows_of(CsvDataset(table, TYPES, header=True)) == ROWS


def test_compressed_files_and_other_delimiters(tmp_path):
    path = str(tmp_path / "table.csv.gz")
    with gzip.open(path, "wb") as file:
        file.write(b"1;a\n2;b,c\n")
    dataset = CsvDataset(path, [tf.int64, tf.string], "GZIP", field_delim=";")
    assert rows_of(dataset) == [(1, b"a"), (2, b"b,c")]


def test_batches_are_read_as_blocks_and_are_the_same(table):
    batched = CsvDataset(table, TYPES, header=True).batch(3)
    assert rows_of(batched.unbatch()) == ROWS


@pytest.mark.parametrize("taken", range(5))
def test_a_restored_stream_goes_on_exactly(table, taken, monkeypatch):
    monkeypatch.setattr(csv_records, "CHUNK", 20)

    def plan():
        return CsvDataset([table, table], TYPES, header=True).plan

    whole = list(iter(plan().stream().next, None))
    one = plan()
    stream = one.stream()
    for _ in range(taken):
        stream.next()
    position = position_of(one, stream)
    assert list(iter(stream_at(plan(), position).next, None)) == whole[taken:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"x,1.5,a", "Field 0 of record 4 of the dataset is to be int32. Received: 'x'"),
        (b"99999999999,1.5,a", "Field 0 of record 4 .* int32. Received: '99999999999'"),
        (b",1.5,a", "Field 0 of record 4 .* an empty field. Give the column a default"),
        (b"5,1.5", "Expected 3 fields in record 4 of the dataset. Received 2: b'5,1.5'"),
        (b"5,1.5,a,b", "Expected 3 fields in record 4 of the dataset. Received 4"),
        (b'5,1.5,"a"b', "Record 4 of the dataset is not valid CSV"),
        (b"", "Expected 3 fields in record 4 of the dataset. Received 0"),
    ],
)
def test_a_record_that_is_none_is_named_and_passed_over(table, line, message):
    with open(table, "ab") as file:
        file.write(line + b"\n5,6,e\n")
    iterator = iter(CsvDataset(table, TYPES, header=True))
    for _ in range(4):
        next(iterator)
    with pytest.raises(InvalidArgumentError, match=message):
        next(iterator)
    assert [int(n) for n, _, _ in iterator] == [5]


def test_columns_are_selected_or_left_out(table):
    assert rows_of(CsvDataset(table, [tf.string], header=True, select_cols=[2]))[0] == (b"a",)
    left = CsvDataset(table, [tf.int32, tf.string], header=True, exclude_cols=[1])
    assert rows_of(left)[3] == (4, b"d")
    with pytest.raises(ValueError, match="either select_cols or exclude_cols"):
        CsvDataset(table, [tf.int32], select_cols=[0], exclude_cols=[1])
    with pytest.raises(ValueError, match="as many select_cols as record_defaults, 1"):
        CsvDataset(table, [tf.int32], select_cols=[0, 1])


def test_batches_of_columns_find_their_names_and_dtypes(table):
    batches = make_csv_dataset(table, 3, label_name="n", num_epochs=1, shuffle=False)
    features, labels = next(iter(batches))
    assert list(features) == ["x", "text"]
    assert features["x"].tolist() == [2.5, 0, 4]
    assert labels.dtype == tf.int32
    assert batches.element_spec[0]["text"].dtype == tf.string


def test_dtypes_are_the_narrowest_that_hold_all_that_is_looked_at(tmp_path):
    path = tmp_path / "dtypes.csv"
    path.write_bytes(b"a,b,c,d,e,f\n1,1,1,1,1,\n2,3000000000,2.5,1e300,x,\n3,,,,,\n")
    (batch,) = make_csv_dataset(str(path), 3, num_epochs=1, shuffle=False)
    dtypes = [np.asarray(column).dtype.name for column in batch.values()]
    assert dtypes == ["int32", "int64", "float32", "float64", "object", "object"]
    two = make_csv_dataset(str(path), 3, num_epochs=1, num_rows_for_inference=1)
    with pytest.raises(InvalidArgumentError, match="Received: '3000000000'"):
        list(two)


def test_batches_of_columns_are_shuffled_and_repeated(table):
    dataset = make_csv_dataset(table, 2, shuffle_seed=1)
    batches = [batch["n"].tolist() for batch in dataset.take(4)]
    assert sorted(batches[0] + batches[1]) == [1, 2, 3, 4]
    assert batches[:2] != batches[2:]
    assert dataset.element_spec["n"].shape == [2]


def test_records_that_are_none_can_be_left_out(table):
    with open(table, "ab") as file:
        file.write(b"x,1,a\n6,7,b\n")
    options = {"num_epochs": 1, "shuffle": False, "num_rows_for_inference": 4}
    batches = make_csv_dataset(table, 10, ignore_errors=True, **options)
    assert next(iter(batches))["n"].tolist() == [1, 2, 3, 4, 6]


def test_files_of_one_dataset_have_the_same_columns(table, tmp_path):
    (tmp_path / "other.csv").write_bytes(b"n,y,text\n1,2,3\n")
    with pytest.raises(ValueError, match=r"same columns.*\['n', 'x', 'text'\] in .*table\.csv"):
        make_csv_dataset([table, str(tmp_path / "other.csv")], 2)
    (tmp_path / "empty.csv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.csv has no header"):
        make_csv_dataset(str(tmp_path / "empty.csv"), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_name": "z"}, "label_name.*'z'"),
        ({"select_columns": ["z"]}, "select_columns.*'z'"),
        ({"select_columns": [3]}, "places from 0 to 2. Received: 3"),
        ({"select_columns": ["n", 0]}, "different select_columns"),
        ({"column_defaults": [tf.int32]}, "as many column_defaults as columns, 3"),
        ({"header": False}, "column_names"),
        ({"column_names": ["a", "a", "b"]}, "different names"),
    ],
)
def test_wrong_columns_are_named(table, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_csv_dataset(table, 2, **arguments)


def test_a_quotation_mark_inside_a_field_is_one_only_without_quotes():
    assert Fields(has_quotes=False).of(b'5" pipe,"x') == ['5" pipe', '"x']
    assert Fields().of(b'"5"" pipe",x') == ['5" pipe', "x"]


# -- parsed examples -----------------------------------------------------------------------

FEATURES = {
    "x": tf.io.FixedLenFeature([2], tf.float32),
    "y": tf.io.FixedLenFeature([], tf.int64),
}


@pytest.fixture
def record_files(tmp_path):
    def example(number):
        numbers = tf.train.Int64List(value=[number])
        pair = tf.train.FloatList(value=[number, -number])
        feature = {
            "x": tf.train.Feature(float_list=pair),
            "y": tf.train.Feature(int64_list=numbers),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature))

    for file in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as writer:
            for number in range(5):
                writer.write(example(10 * file + number).SerializeToString())
    return str(tmp_path / "*.tfrecord")


def test_batches_of_features_are_parsed(record_files):
    make = tf.data.experimental.make_batched_features_dataset
    batches = make(record_files, 4, FEATURES, label_key="y", num_epochs=1, shuffle=False)
    found = [(features["x"].tolist(), labels.tolist()) for features, labels in batches]
    assert [labels for _, labels in found] == [[0, 1, 2, 3], [4, 10, 11, 12], [13, 14]]
    assert found[2][0] == [[13, -13], [14, -14]]
    shuffled = make(record_files, 5, FEATURES, num_epochs=1, shuffle_seed=1)
    numbers = [batch["y"].tolist() for batch in shuffled]
    assert sorted(numbers[0] + numbers[1]) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert len(list(make(record_files, 4, FEATURES, num_epochs=1, drop_final_batch=True))) == 2


def test_batches_of_examples_are_parsed(record_files):
    records = tf.data.TFRecordDataset(tf.data.Dataset.list_files(record_files, shuffle=False))
    parse = tf.data.experimental.parse_example_dataset(FEATURES)
    assert next(iter(records.batch(3).apply(parse)))["y"].tolist() == [0, 1, 2]


# -- the rest ------------------------------------------------------------------------------


def test_older_names_of_transformations():
    experimental = tf.data.experimental
    interleaved = tf.data.Dataset.range(2).apply(
        experimental.parallel_interleave(lambda x: tf.data.Dataset.from_tensors(x).repeat(2), 2)
    )
    assert [int(x) for x in interleaved] == [0, 1, 0, 1]
    numbers = experimental.RandomDataset(seed=3).take(4)
    assert [int(x) for x in numbers] == [int(x) for x in tf.data.Dataset.random(3).take(4)]


def test_random_numbers_are_the_same_one_by_one_and_as_blocks():
    dataset = tf.data.Dataset.random(seed=3)
    assert next(iter(dataset.batch(5))).tolist() == [int(x) for x in dataset.take(5)]
    assert [int(x) for x in dataset.skip(3).take(2)] == [int(x) for x in dataset.take(5)][3:]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("dense_to_sparse_batch", "padded_batch"),
        ("group_by_reducer", "group_by_window"),
        ("SqlDataset", "sqlite3"),
        ("at", "skip"),
        ("index_table_from_dataset", "StringLookup"),
    ],
)
def test_what_is_not_there_says_what_to_use_instead(name, advice):
    with pytest.raises(AttributeError, match=f"experimental.{name} is not supported.*{advice}"):
        getattr(tf.data.experimental, name)
