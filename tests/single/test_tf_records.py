"""Records and Examples: TensorFlow's answers, and what it says nothing about.

The expressions and TensorFlow's answers are in `record_facts.txt`.
"""

import numpy as np
import pytest
from google.protobuf.message import DecodeError

import unison.tf as tf
from record_facts import Setting, agree, facts
from unison.data import Dataset
from unison.data.examples import (
    ExampleParser,
    FixedLenFeature,
    FixedLenSequenceFeature,
    VarLenFeature,
    message,
    parse_example,
    wire,
)
from unison.data.examples.columns import columns_of
from unison.errors import InvalidArgumentError

FACTS = list(facts())


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting(tf, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(("expression", "answer"), FACTS, ids=[fact[0] for fact in FACTS])
def test_the_answer_is_tensorflows(expression, answer, setting):
    given = setting.answer(expression)
    assert agree(given, answer), f"Unison: {given}\nTensorFlow: {answer}"


def test_there_are_many_facts():
    assert len(FACTS) > 110


# -- reading side by side ---------------------------------------------------------------------

KINDS = {"text": wire.Kind.BYTES, "real": wire.Kind.FLOAT, "whole": wire.Kind.INT64}


def random_example(rng: np.random.Generator) -> bytes:
    """An Example of some of three features, and of others, in any order."""
    example = message("Example")()
    feature = example.features.feature
    for key in rng.permutation(["text", "real", "whole", "other", "unsaid", "näme"]):
        count = int(rng.integers(4))
        if rng.random() < 0.2:
            continue
        if key in ("text", "näme"):
            feature[key].bytes_list.value.extend([rng.bytes(rng.integers(200))] * count)
        elif key == "real":
            feature[key].float_list.value.extend(rng.normal(size=count))
        elif key != "unsaid":
            bits = rng.integers(63, size=count)
            feature[key].int64_list.value.extend(int(rng.integers(-(2**b), 2**b)) for b in bits)
        else:
            feature[key].SetInParent()
    return example.SerializeToString()


def as_protobuf_reads(serialized: list[bytes]) -> dict[str, list]:
    """What each Example has, by key."""
    fields = {"text": "bytes_list", "real": "float_list", "whole": "int64_list"}
    found: dict[str, list] = {key: [] for key in fields}
    for text in serialized:
        feature = message("Example").FromString(text).features.feature
        for key, field in fields.items():
            kind = feature[key].WhichOneof("kind") if key in feature else None
            assert kind in (None, field)
            found[key].append(None if kind is None else list(getattr(feature[key], field).value))
    return found


def as_columns_say(columns: dict[str, wire.Column]) -> dict[str, list]:
    found = {}
    for key, (counts, values) in columns.items():
        stops = np.cumsum(np.maximum(counts, 0))
        parts = [
            values[stop - count : stop].tolist() for count, stop in zip(counts, stops, strict=True)
        ]
        found[key] = [
            None if count < 0 else part for count, part in zip(counts, parts, strict=True)
        ]
    return found


def read_side_by_side(serialized: list[bytes]) -> dict[str, wire.Column] | None:
    kinds = {key.encode(): kind for key, kind in KINDS.items()}
    columns = wire.read_columns(serialized, kinds)
    return columns and dict(zip(KINDS, columns, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_examples_are_read_side_by_side_as_protobuf_reads_them(seed):
    rng = np.random.default_rng(seed)
    serialized = [random_example(rng) for _ in range(rng.integers(1, 40))]
    columns = read_side_by_side(serialized)
    assert columns is not None, "These are written in the usual way."
    assert as_columns_say(columns) == as_protobuf_reads(serialized)


def assert_equal(said: dict[str, list], expected: dict[str, list]) -> None:
    """Raises an AssertionError unless both have the same values; a flipped bit may make a NaN."""
    assert {key: repr(said[key]) for key in KINDS} == {key: repr(expected[key]) for key in KINDS}


@pytest.mark.parametrize("seed", range(10))
def test_damaged_examples_are_left_to_protobuf(seed):
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(100):
        serialized = [random_example(rng) for _ in range(6)]
        damaged = bytearray(serialized[2])
        if not damaged:
            continue
        damaged[rng.integers(min(len(damaged), 60))] ^= 1 << rng.integers(8)
        serialized[2] = bytes(damaged)
        columns = read_side_by_side(serialized)
        if columns is None:
            refused += 1
            continue
        said = as_columns_say(columns)
        try:
            assert_equal(said, as_protobuf_reads(serialized))
        except DecodeError:  # damage in a feature that nobody wants is not looked at
            del serialized[2]
            for of_all in said.values():
                del of_all[2]
            assert_equal(said, as_protobuf_reads(serialized))
    assert refused > 10


def test_what_is_not_written_in_the_usual_way_is_read_all_the_same():
    usual = message("Example")()
    usual.features.feature["whole"].int64_list.value.extend([1, 2])
    unusual = b"\n\x0d\n\x0b\n\x05whole\x12\x02\x1a\x00" + usual.SerializeToString() + b"\x78\x01"
    serialized = [usual.SerializeToString()] * 8 + [unusual]
    assert read_side_by_side(serialized) is None
    counts, values = columns_of(serialized, {"whole": wire.Kind.INT64})["whole"]
    assert counts.tolist() == [2] * 9
    assert values.tolist() == [1, 2] * 9


# -- without TensorFlow's names ---------------------------------------------------------------


def labelled(*labels: int) -> list[bytes]:
    example = message("Example")()
    serialized = []
    for label in labels:
        example.features.feature["label"].int64_list.value[:] = [label]
        example.features.feature["text"].bytes_list.value[:] = [b"x" * label]
        serialized.append(example.SerializeToString())
    return serialized


def test_examples_become_numpy_arrays():
    features = {"label": FixedLenFeature([], np.int64), "text": FixedLenFeature([], bytes)}
    found = parse_example(labelled(1, 2), features)
    assert found["label"].dtype == np.int64
    assert found["label"].tolist() == [1, 2]
    assert found["text"].tolist() == [b"x", b"xx"]
    assert parse_example(labelled(3)[0], features) == {"label": 3, "text": b"xxx"}


def test_a_parser_is_a_function_of_batches_in_a_dataset():
    parse = ExampleParser({"label": FixedLenFeature([], np.int64)})
    dataset = Dataset.from_tensor_slices(labelled(*range(5))).batch(2).map(parse)
    assert [batch["label"].tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({}, ValueError, "Expected features to read"),
        ({"a": 3}, TypeError, "Expected a FixedLenFeature, .* for 'a'. Received: 3"),
        ({"a": FixedLenFeature([], np.int32)}, ValueError, "float32, int64 or text"),
        ({"a": FixedLenFeature([None], np.int64)}, ValueError, "FixedLenSequenceFeature"),
        ({"a": FixedLenFeature([], np.int64, "x")}, InvalidArgumentError, "default_value of a"),
        ({"a": FixedLenSequenceFeature([], np.int64)}, ValueError, "allow_missing to be True"),
        (
            {"label": VarLenFeature(np.float32)},
            InvalidArgumentError,
            "Data type: int64 but expected",
        ),
    ],
)
def test_features_that_cannot_be_read_are_errors(features, error, message):
    with pytest.raises(error, match=message):
        parse_example(labelled(1), features)


def test_the_error_names_the_example_that_lacks_a_feature():
    serialized = [*labelled(*range(1, 9)), b"\n\x00"]
    with pytest.raises(InvalidArgumentError, match="required but could not be found in example 8"):
        parse_example(serialized, {"label": FixedLenFeature([], np.int64)})


# -- the function of map ----------------------------------------------------------------------

DESCRIPTION = {
    "label": tf.io.FixedLenFeature([], tf.int64),
    "text": tf.io.FixedLenFeature([], tf.string),
}


def counting(function):
    """The function, and a list that grows with every call in Python."""
    calls = []

    def counted(*args):
        calls.append(args)
        return function(*args)

    return counted, calls


def test_records_are_parsed_in_blocks_in_the_function_of_map():
    def decode(record):
        parsed = tf.io.parse_single_example(record, DESCRIPTION)
        numbers = tf.io.decode_raw(parsed["text"], tf.uint8)
        return tf.cast(numbers, tf.float32) / 2.0, parsed["label"], parsed["text"]

    function, calls = counting(decode)
    dataset = tf.data.Dataset.from_tensor_slices(labelled(*[2] * 500)).map(function)
    batches = list(dataset.batch(100))
    assert len(calls) < 10, "It is called to be traced, and not for every record."
    numbers, labels, texts = batches[-1]
    assert numbers.shape == (100, 2)
    assert np.unique(numbers) == [60.0]
    assert labels.dtype == tf.int64
    assert texts[99].numpy() == b"xx"
    assert len(batches) == 5


def test_records_of_different_sizes_are_parsed_one_by_one():
    def decode(record):
        return tf.io.decode_raw(tf.io.parse_single_example(record, DESCRIPTION)["text"], tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(labelled(*range(1, 20))).map(decode)
    assert [len(numbers) for numbers in dataset] == [*range(1, 20)]
    with pytest.raises(InvalidArgumentError, match="Cannot batch elements of different shapes"):
        list(dataset.batch(2))


def test_the_functions_of_interleaved_datasets_are_traced_for_the_first_one():
    def label(record):
        return tf.io.parse_single_example(record, DESCRIPTION)["label"]

    function, calls = counting(label)

    def make(number):
        records = tf.data.Dataset.from_tensor_slices(labelled(*range(30)))
        return records.map(lambda record: function(record))

    dataset = tf.data.Dataset.range(10).interleave(make, cycle_length=2)
    assert sorted(int(x) for x in dataset) == sorted([*range(30)] * 10)
    assert len(calls) < 10


def test_the_functions_of_interleaved_datasets_see_what_each_refers_to():
    def make(number):
        return tf.data.Dataset.range(3).map(lambda x: x + number)

    dataset = tf.data.Dataset.range(0, 30, 10).flat_map(make)
    assert [int(x) for x in dataset] == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_a_function_that_asks_for_the_value_of_a_record_is_called_for_each():
    def first_letter(record):
        return len(record.numpy())

    function, calls = counting(first_letter)
    dataset = tf.data.Dataset.from_tensor_slices([b"a", b"bc"]).map(function)
    assert [int(x) for x in dataset] == [1, 2]
    assert len(calls) >= 2


def test_the_error_of_a_record_names_its_number():
    records = [*labelled(*range(1, 30)), b"garbage"]
    dataset = tf.data.Dataset.from_tensor_slices(records).map(
        lambda record: tf.io.parse_single_example(record, DESCRIPTION)["label"]
    )
    with pytest.raises(InvalidArgumentError, match="Could not parse example input") as caught:
        list(dataset.batch(10))
    assert "called for element 29 of the dataset" in "".join(caught.value.__notes__)


def test_random_numbers_for_records_do_not_depend_on_the_batches():
    def noisy(record):
        label = tf.io.parse_single_example(record, DESCRIPTION)["label"]
        return label, tf.random.uniform([])

    def drawn(batch_size):
        tf.random.set_seed(7)
        dataset = tf.data.Dataset.from_tensor_slices(labelled(*range(12))).map(noisy)
        return np.concatenate([noise for _, noise in dataset.batch(batch_size)])

    assert len(set(drawn(3).tolist())) == 12
    np.testing.assert_array_equal(drawn(3), drawn(12))


def test_a_list_of_a_sequence_example_is_not_ragged():
    with pytest.raises(ValueError, match="VarLenFeature"):
        tf.io.parse_sequence_example([b""], sequence_features={"x": tf.io.RaggedFeature(tf.int64)})


@pytest.mark.parametrize("taken", [0, 1, 7, 40, 63])
def test_a_pipeline_of_records_goes_on_exactly_where_it_was(taken, tmp_path):
    for number in range(4):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as writer:
            for record in labelled(*range(16 * number, 16 * number + 16)):
                writer.write(record)

    def label(record):
        return tf.io.parse_single_example(record, DESCRIPTION)["label"] * 2

    def pipeline():
        files = tf.data.Dataset.list_files(f"{tmp_path}/*", shuffle=True, seed=3)
        return files.interleave(tf.data.TFRecordDataset, cycle_length=3).map(label).shuffle(8, 5)

    everything = [int(x) for x in pipeline()]
    assert sorted(everything) == [*range(0, 128, 2)]
    iterator = iter(pipeline())
    for expected in everything[:taken]:
        assert int(next(iterator)) == expected
    restored = iter(pipeline())
    restored.set_state(iterator.get_state())
    assert [int(x) for x in restored] == everything[taken:]
