"""Slices with bounds that a compiled program computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.runtime.private_jax import constant_difference

ROWS = np.arange(60.0, dtype="float32").reshape(5, 4, 3)

#: By what is written: slices of `ROWS`, in which `i` is computed and is 1.
SLICES = {
    "a window": lambda x, i: x[i : i + 2],
    "from a multiple": lambda x, i: x[2 * i : 2 * i + 3],
    "of the second axis": lambda x, i: x[:, i : i + 2],
    "of the last axis": lambda x, i: x[..., i : i + 2],
    "between others": lambda x, i: x[0, i : i + 2, ::2],
    "with a new axis": lambda x, i: x[:, None, i : i + 2],
    "beside a mask": lambda x, i: x[np.array([True, False, True, False, True]), i : i + 2],
    "two at once": lambda x, i: x[i : i + 2, i - 1 : i + 1],
    "with a step": lambda x, i: x[i : i + 4, ::-1][i : i + 3 : 2],
    "of another dtype": lambda x, i: x[tf.cast(i, tf.int64) : tf.cast(i, tf.int64) + 2],
    "empty": lambda x, i: x[i:i],
    "down to it": lambda x, i: x[i - 1 : i],
    "beside a Boolean": lambda x, i: x[i - 1 : i + 1, True, i : i + 1],
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_fixed_length_is_that_of_numpy(name):
    cut = SLICES[name]
    expected = cut(ROWS, 1)
    held = tf.constant(ROWS)
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    for result in (
        tf.function(cut)(tf.constant(ROWS), tf.constant(1)),
        tf.function(lambda i: cut(held, i))(tf.constant(1)),
        strategy.run(cut, args=(tf.constant(ROWS), tf.constant(1))).values[1],
    ):
        np.testing.assert_array_equal(np.asarray(result), expected)


def test_gradients_go_to_the_elements_of_the_slice():
    def loss(x, i):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(x[i : i + 2] ** 2)
        return tape.gradient(total, x)

    gradient = tf.function(loss)(tf.constant([1.0, 2.0, 3.0, 4.0]), tf.constant(1))
    np.testing.assert_array_equal(gradient, [0.0, 4.0, 6.0, 0.0])


def test_elements_beyond_the_end_are_not_numbers():
    cut = tf.function(lambda x, i: x[i : i + 3])
    floats, masks = tf.constant([1.0, 2.0, 3.0]), tf.constant([True, True, True])
    np.testing.assert_array_equal(cut(floats, tf.constant(1)), [2.0, 3.0, np.nan])
    np.testing.assert_array_equal(cut(floats, tf.constant(-1)), [np.nan, 1.0, 2.0])
    np.testing.assert_array_equal(cut(masks, tf.constant(2)), [True, False, False])


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (lambda x: x[: tf.constant(2) * 50], ROWS),
        (lambda x: x[: tf.constant(1) - 2], ROWS[:-1]),
        (lambda x: x[tf.constant(1) - 3 : 5], ROWS[-2:]),
        (lambda x: x[tf.constant(1) + 2 :], ROWS[3:]),
    ],
)
def test_bounds_that_constants_determine_are_those_of_python(cut, expected):
    np.testing.assert_array_equal(tf.function(cut)(tf.constant(ROWS)), expected)


def test_a_slice_that_is_longer_than_the_axis_is_refused():
    with pytest.raises(IndexError, match=r"a length of 6, of 5 elements"):
        tf.function(lambda x, i: x[i : i + 6])(tf.constant(ROWS), tf.constant(0))


def test_a_mapped_bound_is_refused_with_advice():
    with pytest.raises(IndexError, match="Write both bounds with the same start"):
        jax.vmap(lambda i: tf.constant(ROWS)[i : i + 2])(jnp.array([0, 1]))


def test_bounds_may_be_computed_in_many_steps():
    def total(x, i):
        result = tf.zeros((2,))
        for _ in range(80):
            result += x[i : i + 2]
            i = i + 1
        return result

    x = np.arange(90, dtype="float32")
    expected = np.stack([x[i : i + 2] for i in range(80)]).sum(0)
    np.testing.assert_array_equal(tf.function(total)(tf.constant(x), tf.constant(0)), expected)

    def doubled(x, i):
        for _ in range(30):
            i = i + i
        return x[i : i + 2]

    np.testing.assert_array_equal(tf.function(doubled)(tf.constant(x), tf.constant(0)), [0, 1])


@pytest.mark.parametrize(
    "cut",
    [lambda x, i: x[i:], lambda x, i: x[:i], lambda x, i: x[i : 2 * i], lambda x, i: x[i::-1]],
)
def test_a_slice_whose_length_is_computed_says_what_to_write(cut):
    strategy = unison.MirroredStrategy(["CPU:0"])
    with pytest.raises(IndexError, match=r"Write both bounds with the same start"):
        strategy.run(cut, args=(tf.constant(ROWS), tf.constant(1)))


def test_tf_slice_takes_a_computed_begin_in_a_list():
    cut = tf.function(lambda x, i: tf.slice(x, [i, 0], [2, 1]))
    np.testing.assert_array_equal(cut(tf.constant(ROWS[0]), tf.constant(1)), ROWS[0][1:3, :1])


def test_the_difference_of_traced_integers_is_known_if_nothing_changes_it():
    found = []

    def program(i, j):
        narrow = i.astype(jnp.int16)
        for end, start in [
            (i + 3, i),
            (3 * i - j - 1, 2 * i - j + i),
            (5 - (2 - i), i),
            (narrow.astype(jnp.int32), narrow),
            (narrow, i),
            (i + j, i),
            (i * j, j * i),
            (i // 2 + 1, i // 2),
        ]:
            found.append(constant_difference(end, start))
        return i

    jax.make_jaxpr(program)(1, 2)
    # Two quotients are two values: that they are the same is not found out. A cast may wrap.
    assert found == [3, -1, 3, 0, None, None, None, None]
