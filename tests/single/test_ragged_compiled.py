"""Ragged tensors in compiled programs, where their splits are traced and sizes are fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison.tf as tf


def padded(ragged, extra=3):
    """The same ragged tensor with padding, as those of a distributed batch have it."""
    flat = np.concatenate([ragged.flat_values, np.zeros(extra, ragged.flat_values.dtype)])
    outer, *inner = (np.asarray(splits) for splits in ragged.nested_row_splits)
    inner = [np.concatenate([splits, [splits[-1]] * extra]) for splits in inner]
    return tf.RaggedTensor.of(jnp.asarray(flat), [outer, *inner], is_padded=True)


ROWS = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0]]
NESTED = [[[1.0], [2.0, 3.0]], [], [[], [4.0, 5.0, 6.0]]]


def of(lists):
    return tf.ragged.constant(lists)


FUNCTIONS = {
    "sum of all": lambda x: tf.reduce_sum(x),
    "mean of all": lambda x: tf.reduce_mean(x),
    "max of all": lambda x: tf.reduce_max(-x),
    "min of all": lambda x: tf.reduce_min(x),
    "product of all": lambda x: tf.reduce_prod(x),
    "all": lambda x: tf.reduce_all(x > 0),
    "sum": lambda x: tf.reduce_sum(x, axis=1),
    "sum of the last axis": lambda x: tf.reduce_sum(x, axis=-1),
    "mean": lambda x: tf.reduce_mean(x, axis=1),
    "max": lambda x: tf.reduce_max(x, axis=-1),
    "any": lambda x: tf.reduce_any(x > 2, axis=-1),
    "size": tf.size,
    "softmax": tf.nn.softmax,
    "running sum": lambda x: tf.cumsum(x, axis=x.ragged_rank),
    "assertion": lambda x: (tf.debugging.assert_greater(x, 0), x)[1],
    "arithmetic": lambda x: 2 * x + x * x - 1,
    "concatenation of rows": lambda x: tf.concat([x, 10 * x], 0),
    "concatenation in rows": lambda x: tf.concat([x, 10 * x], 1),
    "stack": lambda x: tf.stack([x, -x]),
    "first rows": lambda x: x[:2],
    "last rows": lambda x: x[1:],
    "every other row": lambda x: x[::2],
    "rows in reverse": lambda x: x[::-1],
    "begin of rows": lambda x: x[:, :1],
    "end of rows": lambda x: x[:, -1:],
    "reversed rows": lambda x: tf.reverse(x, [1]),
    "mask": lambda x: tf.ragged.boolean_mask(x, x > 2),
    "tile": lambda x: tf.tile(x, [2] + [1] * x.ragged_rank),
    "new axis": lambda x: tf.expand_dims(x, 1),
    "row lengths": lambda x: x.row_lengths(),
    "bounding shape": lambda x: x.bounding_shape(),
    "merged": lambda x: tf.reduce_sum(x.merge_dims(0, 1)) if x.ragged_rank == 1 else x[:1],
    "padded": lambda x: x.to_tensor(shape=[None] + [4] * x.ragged_rank),
    "padded with ones": lambda x: x.to_tensor(-1.0, shape=[5] + [2] * x.ragged_rank),
    "embedding": lambda x: tf.nn.embedding_lookup(
        jnp.arange(14.0).reshape(7, 2), tf.cast(x, "int32")
    ),
    "where": lambda x: tf.where(x > 2, x, 0.0),
    "broadcast": lambda x: x + tf.reshape(tf.range(float(x.shape[0])), [-1] + [1] * x.ragged_rank),
}


def listed(value):
    return value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value).tolist()


@pytest.mark.parametrize("lists", [ROWS, NESTED], ids=["rows", "nested rows"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_of_padded_values_gives_what_it_gives_outside(name, lists):
    function = FUNCTIONS[name]
    expected = listed(function(of(lists)))
    found = listed(jax.jit(function)(padded(of(lists))))
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    else:
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-6)


def test_padding_is_not_seen_outside_of_the_program():
    ragged = padded(of(NESTED))
    assert ragged.flat_values.shape == (6,)
    assert ragged.to_list() == NESTED
    assert [len(splits) for splits in ragged.nested_row_splits] == [4, 5]


def test_gradients_by_values_do_not_see_padding():
    def loss(flat, ragged):
        x = ragged.with_flat_values(flat)
        return tf.reduce_mean(tf.square(x)) + tf.reduce_sum(tf.nn.softmax(x) * x)

    exact, longer = of(ROWS), padded(of(ROWS))
    expected = jax.grad(loss)(exact.flat_values, exact)
    found = jax.jit(jax.grad(loss))(jax.tree.leaves(longer)[0], longer)
    np.testing.assert_allclose(found[:6], expected, rtol=1e-5)
    assert found[6:].tolist() == [0, 0, 0]


def test_an_unknown_length_is_an_error_that_says_what_to_write():
    with pytest.raises(ValueError, match=r"to_tensor\(shape=\[None, 64\]\)"):
        jax.jit(lambda x: x.to_tensor())(of(ROWS))


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x: x[0], r"to_tensor\(shape=\[None, 64\]\)\[i\]"),
        (lambda x: tf.reduce_sum(x, axis=0), "along axis 1"),
        (lambda x: tf.gather(x, [0, 0]), r"to_tensor\(shape=\[None, 64\]\)"),
        (lambda x: tf.map_fn(tf.reduce_sum, x), "reductions along axis 1"),
        (lambda x: x.to_list(), "outside compiled programs"),
        (lambda x: list(x), "outside compiled programs"),
        (lambda x: tf.where(x > 1), "outside compiled programs"),
        (lambda x: tf.reshape(x, [-1]), "outside compiled programs"),
    ],
)
def test_what_needs_lengths_says_what_to_write(function, advice):
    with pytest.raises(ValueError, match=advice):
        jax.jit(function)(of(ROWS))


def test_a_tf_function_that_needs_lengths_runs_in_python():
    function = tf.function(lambda x: x.to_tensor())
    assert function(of([[1], [2, 3]])).tolist() == [[1, 0], [2, 3]]


def test_a_tf_function_is_traced_for_every_number_of_values():
    function = tf.function(lambda x: 2 * x)
    for lists in ([[1], [2]], [[], [1, 2]], [[1, 2, 3], []]):
        assert (
            function(of(lists).with_row_splits_dtype(tf.int32)).to_list()
            == (2 * of(lists)).to_list()
        )
    assert function.experimental_get_tracing_count() <= 3


def test_rows_of_two_arguments_that_differ_are_refused_when_the_program_runs():
    function = jax.jit(lambda x, y: x + y)
    assert function(of([[1], [2, 3]]), of([[1], [2, 3]])).to_list() == [[2], [4, 6]]

    def run():
        jax.block_until_ready(function(of([[1], [2, 3]]), of([[1, 2], [3]])))
        jax.effects_barrier()

    with pytest.raises(Exception, match="rows of the same lengths"):
        run()
