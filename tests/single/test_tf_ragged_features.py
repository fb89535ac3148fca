"""Ragged features whose partitions come from elsewhere: right rows, or a clear error."""

import numpy as np
import pytest

import unison.tf as tf
from peak_memory import peak_memory
from unison.errors import InvalidArgumentError

RaggedFeature = tf.io.RaggedFeature


def example(values, numbers):
    """An Example of some values, and of the numbers of their partition."""
    features = {
        key: tf.train.Feature(int64_list=tf.train.Int64List(value=of_key))
        for key, of_key in (("values", values), ("numbers", numbers))
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def parsed(partition, *numbers, values=(7, 8, 9)):
    """The rows of a batch of Examples with the same values, each with its own partition."""
    feature = RaggedFeature(tf.int64, value_key="values", partitions=[partition])
    batch = tf.constant([example(values, each) for each in numbers], tf.string)
    return tf.io.parse_example(batch, {"rows": feature})["rows"]


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([0, 0, 1], [[7, 8], [9]]),
        ([0, 2, 2], [[7], [], [8, 9]]),
        ([3, 3, 5], [[], [], [], [7, 8], [], [9]]),
    ],
)
def test_row_ids_may_leave_rows_out_as_in_tensorflow(ids, rows):
    assert parsed(RaggedFeature.ValueRowIds("numbers"), ids).to_list() == [rows]


# With validate=True, TensorFlow 2.21 refuses all of these; without it, it makes up rows of some.
@pytest.mark.parametrize("ids", [[-1, 0, 1], [-5, -4, -3], [1, 0, 1], [2, 1, 0], [-(2**63), 0, 5]])
def test_row_ids_that_are_negative_or_not_in_order_are_refused(ids):
    said = "feature 'rows' does not fit Example 1: expected row ids from 0 on, in the order"
    with pytest.raises(InvalidArgumentError, match=said):
        parsed(RaggedFeature.ValueRowIds("numbers"), [0, 0, 1], ids)


@pytest.mark.parametrize("last", [10**8, 2**31, 2**40, 2**62, 2**63 - 1])
def test_a_few_bytes_of_row_ids_do_not_take_much_memory(last):
    with peak_memory() as peak, pytest.raises(InvalidArgumentError, match=r"at most \d+ rows of 6"):
        parsed(RaggedFeature.ValueRowIds("numbers"), [0, 0, 1], [0, 0, last])
    assert peak.bytes < 10_000_000


def test_many_examples_do_not_take_more_memory_by_row_ids_than_one():
    ids = [[0, 0, 10**6]] * 100
    with peak_memory() as peak, pytest.raises(InvalidArgumentError, match=r"at most \d+ rows"):
        parsed(RaggedFeature.ValueRowIds("numbers"), *ids)
    assert peak.bytes < 10_000_000


def test_a_million_empty_rows_are_rows():
    rows = parsed(RaggedFeature.ValueRowIds("numbers"), [0, 0, 10**6])
    assert rows.row_lengths().numpy().tolist() == [10**6 + 1]


@pytest.mark.parametrize(
    ("partition", "numbers"),
    [
        (RaggedFeature.RowSplits, [1, 4]),
        (RaggedFeature.RowSplits, [0, 2**63 - 1, -2, 3]),
        (RaggedFeature.RowLengths, [2**62, 2**62, 2**62, 2**62 + 3]),
        (RaggedFeature.RowLengths, [-1, 4]),
        (RaggedFeature.RowStarts, [0, 2**63 - 1, -2]),
        (RaggedFeature.RowStarts, [1]),
        (RaggedFeature.RowLimits, [2**63 - 1, -2, 3]),
        (RaggedFeature.RowLimits, [0, 1]),
    ],
)
def test_rows_of_other_partitions_have_the_values_and_no_others(partition, numbers):
    with pytest.raises(InvalidArgumentError, match=r"does not fit Example 0"):
        parsed(partition("numbers"), numbers)


def test_the_error_about_many_numbers_is_short():
    with pytest.raises(InvalidArgumentError) as caught:
        parsed(RaggedFeature.RowLengths("numbers"), [9] * 100_000)
    assert len(str(caught.value)) < 300


def test_a_uniform_length_is_not_negative():
    with pytest.raises(ValueError, match=r"at least 0. Received: UniformRowLength\(length=-1\)"):
        parsed(RaggedFeature.UniformRowLength(-1), [])


@pytest.mark.parametrize("partition", [RaggedFeature.ValueRowIds, RaggedFeature.RowSplits])
def test_an_empty_batch_has_no_rows(partition):
    rows = parsed(partition("numbers"))
    assert rows.to_list() == []
    assert rows.values.row_splits.numpy().dtype == np.int32
