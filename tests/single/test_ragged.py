"""`tf.RaggedTensor` outside compiled programs, where facts recorded on TensorFlow do not reach.

What TensorFlow answers is in `tests/parity/programs/ragged.py`.
"""

import jax
import numpy as np
import pytest

import unison.tf as tf


@pytest.fixture
def rows():
    return tf.ragged.constant([[1, 2], [], [3]])


def random_rows(seed, depth=1, inner=()):
    """A ragged tensor, and the same as nested lists of arrays."""
    rng = np.random.default_rng(seed)
    partitions = []
    count = 5
    for _ in range(depth):
        lengths = rng.integers(0, 4, count)
        partitions.append(lengths)
        count = int(lengths.sum())
    flat = rng.normal(size=(count, *inner)).astype(np.float32)
    return tf.RaggedTensor.from_nested_row_lengths(flat, partitions)


# -- values --------------------------------------------------------------------------------


def test_an_array_of_numpy_on_the_left_leaves_the_operator_to_the_ragged_tensor(rows):
    total = np.array([[10], [20], [30]], np.int32) + rows
    assert total.to_list() == [[11, 12], [], [33]]


def test_a_jax_array_on_the_left_too(rows):
    assert (tf.constant(10) - rows).to_list() == [[9, 8], [], [7]]


def test_an_array_of_it_is_refused_with_what_to_use(rows):
    with pytest.raises(TypeError, match="to_tensor"):
        np.asarray(rows)


def test_an_operation_that_takes_none_says_what_to_use(rows):
    with pytest.raises(ValueError, match=r"tf\.sort does not take .*map_flat_values.*to_tensor"):
        tf.sort(rows)


def test_a_ragged_tensor_in_a_list_is_found(rows):
    with pytest.raises(ValueError, match="does not take a RaggedTensor"):
        tf.meshgrid(rows, [1])


@pytest.mark.parametrize("axis", [0, 1, 2, [0, 1], [1, 2]])
@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod"])
def test_reductions_of_nested_rows_are_those_of_padded_ones(name, axis):
    neutral = {"reduce_sum": 0, "reduce_prod": 1, "reduce_max": -9, "reduce_min": 9}[name]
    ragged = random_rows(3, depth=2)
    reduce = getattr(tf, name)
    found, expected = reduce(ragged, axis), reduce(ragged.to_tensor(float(neutral)), axis)
    if isinstance(found, tf.RaggedTensor):
        found = found.to_tensor(float(neutral))
    is_there = np.abs(np.asarray(found)) < 1e30
    np.testing.assert_allclose(
        np.asarray(found)[is_there], np.asarray(expected)[is_there], rtol=1e-6
    )


def test_rows_have_the_variance_of_numpy():
    ragged = random_rows(4)
    expected = [np.var(row) if len(row) else np.nan for row in ragged.to_list()]
    np.testing.assert_allclose(tf.math.reduce_variance(ragged, 1), expected, rtol=1e-4, atol=1e-6)


def test_a_running_sum_of_long_rows_is_not_a_difference_of_large_sums():
    ragged = tf.RaggedTensor.from_row_lengths(np.array([1e8, 1.0, 2.0], np.float32), [1, 2])
    assert tf.cumsum(ragged, axis=1).to_list() == [[1e8], [1.0, 3.0]]


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_tensors_with_inner_axes_are_concatenated_as_lists_are(axis):
    ragged = random_rows(5, depth=2, inner=(2,))
    joined = tf.concat([ragged, ragged], axis).to_list()

    def expected(value, axis):
        if axis == 0:
            return value + value
        return [expected(item, axis - 1) for item in value]

    assert joined == expected(ragged.to_list(), axis)


def test_every_slice_is_that_of_lists():
    ragged = random_rows(6, depth=2)
    lists = ragged.to_list()
    for key in np.s_[1:, :-1, ::2, ::-1, 3:1:-1, -3:]:
        assert ragged[key].to_list() == lists[key]
        assert ragged[:, key].to_list() == [row[key] for row in lists]
        assert ragged[:, :, key].to_list() == [[part[key] for part in row] for row in lists]


def test_text_is_padded_with_empty_text():
    padded = tf.strings.split(["a b", "c"]).to_tensor()
    assert padded.numpy().tolist() == [[b"a", b"b"], [b"c", b""]]


def test_words_are_looked_up_in_a_table():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), 0
    )
    ids = tf.ragged.map_flat_values(table.lookup, tf.strings.split(["a b", "c"]))
    assert ids.to_list() == [[1, 2], [0]]


# -- trees ---------------------------------------------------------------------------------


def test_it_is_a_pytree(rows):
    doubled = jax.tree.map(lambda leaf: leaf, {"x": rows})["x"]
    assert doubled.to_list() == rows.to_list()
    assert len(jax.tree.leaves(rows)) == 2


def test_jax_transforms_functions_of_its_values():
    ragged = tf.ragged.constant([[1.0, 2.0], [], [3.0]])
    gradient = jax.grad(lambda x: tf.reduce_sum(tf.reduce_sum(x, axis=1) ** 2), allow_int=True)
    assert gradient(ragged).flat_values.tolist() == [6.0, 6.0, 6.0]


def test_printing_is_that_of_tensorflow(rows, capsys):
    tf.print("rows:", rows)
    assert capsys.readouterr().err == "rows: [[1, 2], [], [3]]\n"


def test_operations_of_dense_tensors_do_not_look_for_ragged_ones_before_there_is_one():
    from unison.tf import dispatch

    before, dispatch.made[:] = dispatch.made[:], []
    try:
        assert int(tf.add(1, 2)) == 3
        assert not dispatch.made
        tf.ragged.constant([[1], []])
        assert dispatch.made
    finally:
        dispatch.made[:] = before or dispatch.made


def test_operations_keep_their_names_signatures_and_documentation():
    import inspect

    assert list(inspect.signature(tf.reduce_sum).parameters)[:2] == ["input_tensor", "axis"]
    assert tf.reduce_sum.__name__ == "reduce_sum"
    assert "tf.math.reduce_sum" in tf.reduce_sum.__doc__


def test_products_of_rows_have_gradients():
    values = tf.Variable([1.0, 2.0, 0.0, 4.0, 5.0])
    with tf.GradientTape() as tape:
        ragged = tf.RaggedTensor.from_row_splits(values, [0, 2, 2, 5])
        products = tf.reduce_prod(ragged, axis=1)
    assert products.numpy().tolist() == [2.0, 1.0, 0.0]
    assert tape.gradient(products, values).numpy().tolist() == [2.0, 1.0, 20.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "dtype", "variance"),
    [
        ([[1.0, 2.0], [4.0, 4.0, 7.0]], "float32", [0.25, 2.0]),
        ([[1 + 2j, 3 - 1j], [2j]], "complex64", [3.25, 0.0]),
    ],
)
def test_a_variance_is_real(rows, dtype, variance):
    x = tf.ragged.constant(rows, dtype=dtype)
    np.testing.assert_allclose(tf.math.reduce_variance(x, axis=1), variance, rtol=1e-6)
    np.testing.assert_allclose(tf.math.reduce_std(x, axis=1), np.sqrt(variance), rtol=1e-6)


@pytest.mark.parametrize("rows", [[[True], [False, True]], [[1], [2, 3]]])
def test_only_real_and_complex_numbers_have_a_variance(rows):
    with pytest.raises(TypeError, match="real or complex"):
        tf.math.reduce_variance(tf.ragged.constant(rows))


def test_running_sums_over_rows_have_the_rows_of_the_tensor():
    x = tf.ragged.constant([[1, 2], [3]], row_splits_dtype=tf.int32)
    assert (x + tf.cumsum(x, axis=0)).to_list() == [[2, 4], [7]]


def test_assertions_say_what_they_compare():
    x = tf.ragged.constant([[1], [2, 3]])
    with pytest.raises(ValueError, match="not structures"):
        tf.debugging.assert_equal([x], [x])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"x values:\n\[b'a'\]"):
        tf.debugging.assert_equal("a", "b")
