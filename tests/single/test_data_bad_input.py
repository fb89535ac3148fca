"""Bad input ends in one clear error: it says what, at which element, and in which stage."""

import logging
import threading
import time

import keras
import numpy as np
import pytest

import unison.tf as tf
from unison.data import Dataset, TextLineDataset
from unison.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from unison.keras.datasets import teach_keras

BAD = 5
COUNT = 8


def uneven_rows():
    """Rows of two numbers; that at `BAD` has three."""
    return Dataset.from_generator(lambda: [np.zeros(2 + (n == BAD)) for n in range(COUNT)])


def fails_at_bad(x):
    if x == BAD:
        raise RuntimeError("cannot read the image")
    return x


def said(error):
    """All that the user reads."""
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def have_ended_but_for(before, seconds=30.0):
    """Whether all threads have ended, within a time, that were not there before."""
    end = time.monotonic() + seconds
    while {*threading.enumerate()} - before and time.monotonic() < end:
        time.sleep(0.01)
    return not {*threading.enumerate()} - before


# -- a function that fails -----------------------------------------------------------------

STAGES = {
    "map": lambda ds: ds.map(fails_at_bad),
    "map ": lambda ds: ds.map(fails_at_bad, num_parallel_calls=3),
    "map  ": lambda ds: ds.map(fails_at_bad, num_parallel_calls=3, deterministic=False),
    "filter": lambda ds: ds.filter(lambda x: fails_at_bad(x) is not None),
    "take_while": lambda ds: ds.take_while(lambda x: fails_at_bad(x) is not None),
    "scan": lambda ds: ds.scan(0, lambda state, x: (state, fails_at_bad(x))),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.from_tensors(fails_at_bad(x))),
    "interleave": lambda ds: ds.interleave(lambda x: Dataset.from_tensors(fails_at_bad(x))),
    "group_by_window": lambda ds: ds.group_by_window(
        fails_at_bad, lambda key, window: window, window_size=1
    ),
    "bucket_by_sequence_length": lambda ds: ds.bucket_by_sequence_length(fails_at_bad, [3], [2, 2]),
    "batch_by_size": lambda ds: ds.batch_by_size(100, fails_at_bad),
    "stratified_batch": lambda ds: ds.stratified_batch(2, fails_at_bad, 8),
    "rejection_resample": lambda ds: ds.rejection_resample(
        fails_at_bad, np.arange(8.0), np.ones(8), seed=1
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("behind", [lambda ds: ds, lambda ds: ds.prefetch(2)], ids=["", "ahead"])
def test_a_function_that_fails_names_its_stage_and_the_element(stage, behind):
    with pytest.raises(RuntimeError, match="cannot read the image") as error:
        list(behind(STAGES[stage](Dataset.range(COUNT))))
    assert f"In the function of {stage.strip()}, called for element {BAD} of" in said(error)


def test_the_function_of_reduce_names_the_element():
    with pytest.raises(RuntimeError) as error:
        Dataset.range(COUNT).reduce(0, lambda state, x: state + fails_at_bad(x))
    assert f"reduce, called for element {BAD} of" in said(error)


@pytest.mark.parametrize("calls", [None, 1, 3])
def test_after_an_error_the_iterator_goes_on_with_the_next_element(calls):
    iterator = iter(Dataset.range(COUNT).map(fails_at_bad, num_parallel_calls=calls))
    seen = []
    for _ in range(COUNT):
        try:
            seen.append(int(next(iterator)))
        except RuntimeError:
            seen.append("failed")
    assert seen == [0, 1, 2, 3, 4, "failed", 6, 7]
    with pytest.raises(StopIteration):
        next(iterator)


def test_tensors_that_do_not_fit_together_name_the_element():
    dataset = tf.data.Dataset.from_tensor_slices(["1", "2", "x"]).map(
        lambda text: tf.strings.to_number(text)
    )
    with pytest.raises(Exception, match="x") as error:
        list(dataset)
    assert "map, called for element 2" in said(error)


# -- elements of another structure or shape ------------------------------------------------


@pytest.mark.parametrize("calls", [None, 2])
def test_a_function_returns_the_same_structure_every_time(calls):
    dataset = Dataset.range(COUNT).map(lambda x: x if x != BAD else (x, x), calls)
    with pytest.raises(TypeError, match="same structure every time") as error:
        list(dataset)
    assert f"map, called for element {BAD} of" in said(error)


def test_functions_make_datasets_of_the_same_elements_every_time():
    def make(x):
        return Dataset.range(2) if x != BAD else Dataset.from_tensors("text")

    for dataset in (Dataset.range(COUNT).flat_map(make), Dataset.range(COUNT).interleave(make)):
        with pytest.raises(TypeError, match="same elements every time") as error:
            list(dataset)
        assert f"called for element {BAD} of" in said(error)


def test_what_is_no_dataset_is_named():
    dataset = Dataset.range(COUNT).interleave(lambda x: Dataset.range(2) if x != BAD else 3)
    with pytest.raises(TypeError, match="interleave must return a Dataset"):
        list(dataset)


def test_a_batch_of_elements_of_several_shapes_names_the_one_that_does_not_fit():
    with pytest.raises(InvalidArgumentError, match="element 1 of the batch has shape") as error:
        list(uneven_rows().batch(4))
    assert "In batch, where element 0 of the batch is element 4 of" in said(error)


def test_after_a_batch_that_failed_comes_the_next_one():
    iterator = iter(uneven_rows().batch(3))
    next(iterator)
    with pytest.raises(InvalidArgumentError):
        next(iterator)
    assert next(iterator).shape == (2, 2)


def test_a_padded_batch_names_the_element_that_would_be_cut():
    with pytest.raises(DataLossError, match="element 1 of the batch has the shape") as error:
        list(uneven_rows().padded_batch(4, padded_shapes=[2]))
    assert "In padded_batch, where element 0 of the batch is element 4 of" in said(error)


def test_a_padded_batch_names_the_element_of_another_rank():
    rows = Dataset.from_generator(lambda: [[1], [1], [[2]]])
    with pytest.raises(InvalidArgumentError, match="element 0 of the batch has the shape") as error:
        list(rows.padded_batch(2))
    assert "element 2 of" in said(error)


def test_rows_of_different_lengths_cannot_be_cut():
    rows = Dataset.from_generator(lambda: [(np.zeros(2), np.zeros(2)), (np.zeros(2), np.zeros(3))])
    with pytest.raises(InvalidArgumentError, match="same number"):
        list(rows.unbatch())


@pytest.mark.parametrize(
    ("elements", "received"),
    [
        ([(1, 2), (3, 4), 5], "Received: 5"),
        ([(1, 2), (3, 4), (5, 6, 7)], r"Received: \(5, 6, 7\)"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], r"Received: \{'b': 1\}"),
        ([np.zeros(2), np.zeros(2), object()], "Received: <object"),
    ],
)
@pytest.mark.parametrize("behind", [lambda ds: ds, lambda ds: ds.prefetch(1)], ids=["", "ahead"])
def test_an_element_of_a_generator_with_another_structure_is_named(elements, received, behind):
    iterator = iter(behind(Dataset.from_generator(lambda: iter(elements))))
    next(iterator), next(iterator)
    with pytest.raises(InvalidArgumentError, match=f"Element 2 of the generator.*{received}"):
        next(iterator)


def test_a_filter_names_the_element_of_which_it_is_not_told_whether():
    dataset = Dataset.range(COUNT).filter(lambda x: x if x == BAD else True)
    with pytest.raises(ValueError, match="filter must return one bool") as error:
        list(dataset)
    assert f"filter, called for element {BAD} of" in said(error)


# -- sources that fail ---------------------------------------------------------------------


def breaking():
    yield from range(3)
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize(
    "behind",
    [
        lambda ds: ds,
        lambda ds: ds.prefetch(2),
        lambda ds: ds.map(lambda x: x, num_parallel_calls=2),
        lambda ds: ds.map(lambda x: x, num_parallel_calls=2).prefetch(2),
        lambda ds: ds.shuffle(2).map(lambda x: x),
        lambda ds: Dataset.range(1).interleave(lambda _: ds, num_parallel_calls=1),
    ],
)
def test_a_generator_that_raises_says_where_and_leaves_no_thread(behind):
    before = {*threading.enumerate()}
    iterator = iter(behind(Dataset.from_generator(breaking)))
    seen = []
    with pytest.raises(ConnectionError, match="gone") as error:
        seen.extend(iterator)
    assert "In the generator, asked for element 3 of the dataset" in said(error)
    # As Python's generators: behind the error is the end.
    rest = list(iterator)
    assert sorted(map(int, seen + rest)) == [0, 1, 2]
    del iterator
    assert have_ended_but_for(before)


def test_a_generator_that_raises_fails_the_batch_and_not_those_before():
    iterator = iter(Dataset.from_generator(breaking).batch(2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ConnectionError) as error:
        next(iterator)
    assert "batch, where element 0 of the batch is element 2 of" in said(error)
    with pytest.raises(StopIteration):
        next(iterator)


def test_errors_can_be_passed_over_and_are_said(caplog):
    dataset = Dataset.range(COUNT).map(fails_at_bad).ignore_errors(log_warning=True)
    with caplog.at_level(logging.WARNING):
        assert len(list(dataset)) == COUNT - 1
    assert "cannot read the image" in caplog.text


def test_a_missing_file_is_named(tmp_path):
    for dataset in (
        TextLineDataset(str(tmp_path / "none.txt")),
        TextLineDataset([str(tmp_path / "none.txt")], num_parallel_reads=2),
        TextLineDataset(str(tmp_path / "none.txt")).prefetch(1),
    ):
        with pytest.raises(NotFoundError, match=r"none\.txt"):
            list(dataset)
    with pytest.raises(InvalidArgumentError, match=r"No files matched pattern: .*\*\.txt"):
        Dataset.list_files(str(tmp_path / "*.txt"))


# -- datasets without elements -------------------------------------------------------------


def empty():
    return Dataset.from_tensor_slices(np.zeros((0, 3), "float32"))


def empty_generator():
    return Dataset.from_generator(list)


@pytest.mark.parametrize("make", [empty, empty_generator])
@pytest.mark.parametrize(
    "transform",
    [
        lambda ds: ds.map(lambda x: x),
        lambda ds: ds.map(lambda x: x, num_parallel_calls=2),
        lambda ds: ds.filter(lambda x: True),
        lambda ds: ds.batch(2),
        lambda ds: ds.shuffle(4),
        lambda ds: ds.repeat(),
        lambda ds: ds.repeat(3),
        lambda ds: ds.take(2),
        lambda ds: ds.skip(2),
        lambda ds: ds.shard(2, 1),
        lambda ds: ds.enumerate(),
        lambda ds: ds.window(2),
        lambda ds: ds.cache(),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.unbatch(),
        lambda ds: ds.rebatch(2),
        lambda ds: ds.flat_map(Dataset.from_tensors),
        lambda ds: ds.interleave(Dataset.from_tensors),
        lambda ds: ds.scan(0, lambda state, x: (state, x)),
        lambda ds: ds.take_while(lambda x: True),
        lambda ds: ds.group_by_window(lambda x: 0, lambda key, window: window, 2),
        lambda ds: ds.bucket_by_sequence_length(len, [3], [2, 2]),
        lambda ds: Dataset.zip(ds, ds),
        lambda ds: Dataset.sample_from_datasets([ds, ds]),
    ],
)
def test_a_dataset_without_elements_gives_none(make, transform):
    assert list(transform(make())) == []


def test_what_must_know_its_elements_beforehand_says_how_to_tell():
    with pytest.raises(ValueError, match="inferred from an element, and there is none"):
        _ = empty_generator().element_spec
    assert list(empty().padded_batch(2)) == []
    assert list(empty_generator().padded_batch(2)) == []


def test_reducing_nothing_gives_the_first_state():
    assert empty().reduce(7, lambda state, x: state + 1) == 7


def test_what_needs_an_element_says_that_there_is_none():
    with pytest.raises(InvalidArgumentError, match="empty"):
        empty().get_single_element()
    with pytest.raises(OutOfRangeError):
        iter(empty()).get_next()
    assert not iter(empty()).get_next_as_optional().has_value()


def test_keras_says_that_a_dataset_is_empty():
    teach_keras()
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pairs = Dataset.zip(empty(), empty()).batch(2)
    for loop in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="empty: it yielded no batch"):
            loop(pairs, verbose=0)


# -- datasets without end ------------------------------------------------------------------


def test_what_would_never_end_is_an_error():
    endless = Dataset.range(3).repeat()
    with pytest.raises(TypeError, match="infinite"):
        len(endless)
    with pytest.raises(InvalidArgumentError, match="reduce would never end"):
        endless.reduce(0, lambda state, x: state + x)
    with pytest.raises(InvalidArgumentError, match="would never be full"):
        endless.shuffle(tf.data.UNKNOWN_CARDINALITY)


def test_keras_asks_how_many_batches_of_an_endless_dataset_it_is_to_take():
    teach_keras()
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = Dataset.from_tensor_slices((np.ones((4, 3)), np.ones((4, 1)))).repeat().batch(2)
    for loop in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ValueError, match="is infinite"):
            loop(rows, verbose=0)


# -- wrong arguments -----------------------------------------------------------------------

RANGE = Dataset.range(4)
ROWS = Dataset.from_tensor_slices(np.zeros((4, 3)))

WRONG = {
    "from_tensor_slices(3)": (
        lambda: Dataset.from_tensor_slices(3), ValueError, "without one: np.int64\\(3\\)"
    ),
    "from_tensor_slices of two lengths": (
        lambda: Dataset.from_tensor_slices(([1], [1, 2])), ValueError, r"lengths: \[1, 2\]"
    ),
    "from_tensor_slices of a ragged list": (
        lambda: Dataset.from_tensor_slices([[1], [1, 2]]), ValueError, r"\[\[1\], \[1, 2\]\]"
    ),
    "from_tensors of an object": (
        lambda: Dataset.from_tensors(object()), TypeError, "of type object"
    ),
    "from_generator of a list": (
        lambda: Dataset.from_generator([1]), TypeError, r"`generator`.*\[1\]"
    ),
    "from_generator of two signatures": (
        lambda: Dataset.from_generator(iter, np.int32, output_signature=np.zeros(2)),
        TypeError,
        "output_signature",
    ),
    "from_generator with a wrong signature": (
        lambda: Dataset.from_generator(iter, output_signature=3), TypeError, "Received: 3"
    ),
    "range()": (lambda: Dataset.range(), ValueError, "0 arguments"),
    "range with step 0": (lambda: Dataset.range(0, 5, 0), InvalidArgumentError, "step"),
    "zip()": (lambda: Dataset.zip(), TypeError, "at least one"),
    "zip of a number": (lambda: Dataset.zip(RANGE, 4), TypeError, "type int: 4"),
    "sample_from_datasets of none": (
        lambda: Dataset.sample_from_datasets([]), ValueError, "at least one dataset"
    ),
    "sample_from_datasets with a weight too many": (
        lambda: Dataset.sample_from_datasets([RANGE], [1, 2]), ValueError, r"weights.*\[1, 2\]"
    ),
    "sample_from_datasets of two kinds": (
        lambda: Dataset.sample_from_datasets([RANGE, ROWS]), TypeError, "Incompatible"
    ),
    "choose_from_datasets by floats": (
        lambda: Dataset.choose_from_datasets([RANGE], Dataset.from_tensors(1.0)),
        TypeError,
        "choice_dataset.*float64",
    ),
    "map of a number": (lambda: RANGE.map(3), ValueError, "map needs a function.*3"),
    "map with -3 calls": (
        lambda: RANGE.map(abs, -3), InvalidArgumentError, "num_parallel_calls.*-3"
    ),
    "filter of a number": (lambda: RANGE.filter(3), ValueError, "filter needs a function.*3"),
    "reduce of a number": (lambda: RANGE.reduce(0, 3), ValueError, "reduce needs a function.*3"),
    "shuffle(0)": (lambda: RANGE.shuffle(0), InvalidArgumentError, "buffer_size=0"),
    "repeat(text)": (lambda: RANGE.repeat("x"), TypeError, "count.*'x'"),
    "shard(0, 0)": (lambda: RANGE.shard(0, 0), InvalidArgumentError, "num_shards.*0"),
    "shard(3, 3)": (lambda: RANGE.shard(3, 3), InvalidArgumentError, "index.*3"),
    "concatenate of two kinds": (lambda: RANGE.concatenate(ROWS), TypeError, "Incompatible"),
    "batch(0)": (lambda: RANGE.batch(0), InvalidArgumentError, "batch size.*0"),
    "padded_batch(-1)": (lambda: ROWS.padded_batch(-1), InvalidArgumentError, "batch size.*-1"),
    "padded_batch with a wrong rank": (
        lambda: ROWS.padded_batch(2, [None, None]), ValueError, r"\(None, None\)"
    ),
    "padded_batch with a wrong value": (
        lambda: ROWS.padded_batch(2, padding_values="x"), TypeError, "padding value.*'x'"
    ),
    "unbatch of scalars": (lambda: RANGE.unbatch(), ValueError, "scalars"),
    "rebatch([])": (lambda: ROWS.rebatch([]), InvalidArgumentError, r"\[\]"),
    "rebatch([-1])": (lambda: ROWS.rebatch([-1]), InvalidArgumentError, r"\[-1\]"),
    "group_by_window without a size": (
        lambda: RANGE.group_by_window(abs, abs), ValueError, "window_size or window_size_func"
    ),
    "bucket_by_sequence_length with a size too few": (
        lambda: RANGE.bucket_by_sequence_length(abs, [3, 5], [2, 2]),
        ValueError,
        "2 bucket_batch_sizes and 2 bucket_boundaries",
    ),
    "interleave(cycle_length=0)": (
        lambda: RANGE.interleave(abs, cycle_length=0), InvalidArgumentError, "cycle_length.*0"
    ),
    "interleave(block_length=0)": (
        lambda: RANGE.interleave(abs, block_length=0), InvalidArgumentError, "block_length.*0"
    ),
    "window(0)": (lambda: RANGE.window(0), InvalidArgumentError, "size.*0"),
    "window(shift=0)": (lambda: RANGE.window(2, shift=0), InvalidArgumentError, "shift.*0"),
    "window(stride=0)": (lambda: RANGE.window(2, stride=0), InvalidArgumentError, "stride.*0"),
    "prefetch(-2)": (lambda: RANGE.prefetch(-2), InvalidArgumentError, "buffer_size.*-2"),
    "apply of what makes no dataset": (
        lambda: RANGE.apply(lambda ds: 3), TypeError, "must return a Dataset.*3"
    ),
    "with_options of a dictionary": (lambda: RANGE.with_options({}), TypeError, "Options.*{}"),
    "unique of pairs": (lambda: Dataset.zip(RANGE, RANGE).unique(), TypeError, "unique needs"),
    "batch_by_size of a number": (
        lambda: RANGE.batch_by_size(4, 3), ValueError, "batch_by_size needs a function.*3"
    ),
    "rejection_resample to nothing": (
        lambda: RANGE.rejection_resample(abs, []), ValueError, r"target_dist.*\[\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_with_what_it_is(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: d.batch(2.7), "an integer for batch_size. Received: 2.7"),
        (lambda d: d.take("3"), "an integer for count. Received: '3'"),
        (lambda d: d.prefetch(None), "an integer for buffer_size. Received: None"),
        (lambda d: d.shard(2, 0.5), "an integer for index. Received: 0.5"),
        (lambda d: Dataset.range(2.5), "an integer for the bounds of a range. Received: 2.5"),
        (lambda d: d.concatenate([1]), r"concatenate takes a dataset. Received: \[1\]"),
    ],
    ids=["batch", "take", "prefetch", "shard", "range", "concatenate"],
)
def test_what_is_no_integer_or_dataset_is_named(make, said):
    with pytest.raises(TypeError, match=said):
        make(Dataset.range(10))


def test_weights_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        Dataset.sample_from_datasets([Dataset.range(2)] * 2, [float("nan"), 1.0])


def test_an_endless_dataset_is_not_saved(tmp_path):
    with pytest.raises(InvalidArgumentError, match="An endless dataset cannot be saved"):
        Dataset.range(3).repeat().save(str(tmp_path / "data"))
