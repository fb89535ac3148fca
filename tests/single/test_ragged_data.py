"""Datasets of ragged tensors, and of `RaggedArray`s without the face."""

import numpy as np
import pytest

import unison.tf as tf
from unison import data
from unison.data.ragged import RaggedArray

ROWS = [[3, 1], [], [4], [1, 5, 9], [2, 6]]
NESTED = [[[1], [2, 3]], [], [[4, 5, 6], []], [[7]]]


def rows():
    return tf.data.Dataset.from_tensor_slices(tf.ragged.constant(ROWS))


def lists(dataset):
    return [tf.nest.map_structure(listed, element) for element in dataset]


def listed(value):
    return value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value).tolist()


# -- ragged arrays -------------------------------------------------------------------------


def test_rows_of_an_array_by_index_slice_and_indices():
    array = tf.ragged.constant(NESTED).ragged_array
    assert array.shape == (4, None, None)
    assert array[0].splits[0].tolist() == [0, 1, 3]
    assert array[1:3].flat.tolist() == [4, 5, 6]
    taken = array[np.array([3, 0])]
    assert (taken.flat.tolist(), [own.tolist() for own in taken.splits]) == (
        [7, 1, 2, 3],
        [[0, 1, 3], [0, 1, 2, 4]],
    )


def test_rows_are_counted_from_the_end_and_iterated():
    rows = RaggedArray.stacked([np.arange(1), np.arange(2), np.arange(3)])
    assert [np.asarray(rows[i].flat).tolist() for i in (-1, -2, -3)] == [[0, 1, 2], [0, 1], [0]]
    assert [len(row) for row in rows] == [1, 2, 3]
    for outside in (3, -4):
        with pytest.raises(IndexError, match="3 rows"):
            rows[outside]


def test_arrays_of_several_lengths_are_stacked():
    stacked = RaggedArray.stacked([np.arange(2), np.arange(0), np.arange(3)])
    assert (stacked.flat.tolist(), stacked.splits[0].tolist()) == ([0, 1, 0, 1, 2], [0, 2, 2, 5])


def test_arrays_of_several_inner_shapes_are_not_stacked():
    with pytest.raises(tf.errors.InvalidArgumentError, match="ragged axes only"):
        RaggedArray.stacked([np.zeros((2, 3)), np.zeros((1, 2))])
    with pytest.raises(tf.errors.InvalidArgumentError, match="one dtype"):
        RaggedArray.stacked([np.zeros(2), np.zeros(2, int)])


def test_datasets_without_the_face_have_ragged_arrays():
    batch = next(iter(data.Dataset.from_generator(lambda: iter([[1], [2, 3]])).ragged_batch(2)))
    assert isinstance(batch, RaggedArray)
    row = next(iter(data.Dataset.from_tensors(batch).unbatch().skip(1)))
    assert row.tolist() == [2, 3]


# -- transformations -----------------------------------------------------------------------


def test_shuffled_rows_are_the_same_rows():
    shuffled = lists(rows().shuffle(5, seed=1).batch(2))
    assert sorted(row for batch in shuffled for row in batch) == sorted(ROWS)


def test_rows_are_rebatched():
    assert lists(rows().batch(2).rebatch(3)) == [ROWS[:3], ROWS[3:]]


def test_rows_are_filtered_and_enumerated():
    long = rows().filter(lambda row: tf.size(row) > 1).enumerate()
    assert lists(long) == [[0, [3, 1]], [1, [1, 5, 9]], [2, [2, 6]]] or [
        row for _, row in lists(long)
    ] == [[3, 1], [1, 5, 9], [2, 6]]


def test_batches_in_parallel_threads_keep_their_order():
    mapped = rows().batch(2).map(lambda x: 2 * x, num_parallel_calls=2)
    assert lists(mapped) == [[[6, 2], []], [[8], [2, 10, 18]], [[4, 12]]]


def test_the_second_pass_of_a_cache_has_the_same_rows():
    cached = rows().batch(2).cache()
    assert lists(cached) == lists(cached) == [ROWS[:2], ROWS[2:4], ROWS[4:]]


def test_a_cache_of_rows_is_batched():
    cached = rows().cache()
    list(cached)
    assert lists(cached.batch(3)) == [ROWS[:3], ROWS[3:]]


def test_ragged_elements_are_not_written_to_files(tmp_path):
    with pytest.raises(TypeError, match="before ragged_batch"):
        rows().batch(2).save(str(tmp_path / "rows"))
    with pytest.raises(TypeError, match="before ragged_batch"):
        list(rows().batch(2).cache(str(tmp_path / "cache")))


def test_padded_batches_of_rows_say_what_to_use():
    with pytest.raises(TypeError, match=r"x\.to_tensor\(\)"):
        rows().padded_batch(2)


def test_elements_without_a_known_number_of_axes_are_not_batched():
    unknown = tf.data.Dataset.from_generator(lambda: iter([[1], [2, 3]]), output_types=tf.int32)
    with pytest.raises(TypeError, match="number of axes"):
        list(unknown.ragged_batch(2))


def test_a_state_in_the_middle_of_a_shuffle_buffer_is_resumed():
    dataset = rows().batch(2).shuffle(2, seed=3)
    iterator, other = iter(dataset), iter(dataset)
    next(iterator)
    other.set_state(iterator.get_state())
    assert lists(other) == lists(iterator)


def test_a_state_with_invalid_splits_is_refused():
    dataset = tf.data.Dataset.from_tensors(tf.ragged.constant(ROWS)).shuffle(2, seed=3)
    from unison.data.state import decode, encode

    array = tf.ragged.constant(ROWS).ragged_array
    array.splits = (array.splits[0][::-1].copy(),)
    text, content = encode([array])
    with pytest.raises(tf.errors.DataLossError, match="splits of a ragged array"):
        decode(text, content)
    assert dataset is not None


def test_a_map_in_processes_takes_and_returns_rows():
    mapped = rows().batch(3).map(lambda x: x[:, :1], num_parallel_calls=1)
    assert lists(mapped) == [[[3], [], [4]], [[1], [2]]]


def test_an_optional_holds_a_ragged_tensor():
    optional = tf.experimental.Optional.from_value(tf.ragged.constant(ROWS))
    assert optional.get_value().to_list() == ROWS
    assert optional.element_spec == tf.RaggedTensorSpec([5, None], tf.int32)


def test_a_reduction_over_ragged_batches():
    total = rows().batch(2).reduce(0, lambda state, x: state + tf.reduce_sum(x))
    assert int(total) == sum(map(sum, ROWS))


def test_keras_loops_say_how_to_pad():
    dataset = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(ROWS), np.zeros(5))).batch(2)
    model = tf.keras.Sequential([tf.keras.layers.Embedding(10, 2)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"x\.to_tensor\(shape=\[None, 64\]\)"):
        model.fit(dataset, verbose=0)


def test_a_layer_of_keras_is_called_with_the_values():
    ids = tf.ragged.constant(ROWS)
    layer = tf.keras.layers.Embedding(10, 2)
    embedded = tf.ragged.map_flat_values(layer, ids)
    assert embedded.shape.as_list() == [5, None, 2]
    with pytest.raises(TypeError, match="map_flat_values"):
        layer(ids)
