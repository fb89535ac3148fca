"""What a variable is to a program: its attributes, operators and assignments."""

from __future__ import annotations

import numpy as np

from parity.answers import plain
from parity.facts import attempt, fact, raises


@fact
def a_variable_has_the_dtype_and_shape_of_its_value(tf):
    variables = [
        tf.Variable(1),
        tf.Variable(1.0),
        tf.Variable(True),
        tf.Variable([1.0, 2.0]),
        tf.Variable(np.ones((2, 3), np.float64)),
        tf.Variable(np.arange(3)),
        tf.Variable(1, dtype=tf.int64),
        tf.Variable(tf.constant(2, tf.uint8)),
    ]
    return [[variable.dtype.name, variable.shape] for variable in variables]


@fact(ours=raises("ValueError"), because="variables live on devices, which hold no text")
def a_text_variable_is_a_string(tf):
    def text():
        variable = tf.Variable("word")
        return [variable.dtype == tf.string, variable.numpy()]

    return attempt(text)


@fact
def arithmetic_with_a_variable_gives_tensors(tf):
    v = tf.Variable([4.0, 9.0])
    return [v + 1, 1 - v, v * v, v / 2, v // 2, v % 5, v**2, -v, abs(-v), 2**v]


@fact
def comparisons_with_a_variable_are_elementwise(tf):
    v = tf.Variable([1.0, 2.0, 3.0])
    return [v < 2, v <= 2, v > 2, v >= 2, v == 2, v != 2]


@fact
def matrix_products_take_variables(tf):
    a = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    return [a @ a, tf.matmul(a, a, transpose_b=True), tf.linalg.matvec(a, [1.0, 1.0])]


@fact
def a_variable_is_indexed_like_a_tensor(tf):
    v = tf.Variable(tf.reshape(tf.range(12.0), (3, 4)))
    return [v[0], v[1:, ::2], v[-1, -1], v[..., 1], v[:, tf.newaxis, 0]]


@fact
def assigning_returns_a_variable_that_can_go_on(tf):
    v = tf.Variable(1.0)
    return [v.assign(2.0).assign_add(3.0).read_value(), v.assign_sub(1.0).numpy()]


@fact
def assigning_another_shape_is_refused(tf):
    return attempt(lambda: tf.Variable([1.0, 2.0]).assign([1.0, 2.0, 3.0]))


@fact
def assigning_a_float_tensor_to_an_integer_variable_is_refused(tf):
    return attempt(lambda: tf.Variable([1, 2]).assign(tf.constant([1.0, 2.0])))


@fact
def a_variable_of_open_shape_takes_any(tf):
    v = tf.Variable([1.0], shape=tf.TensorShape([None]))
    v.assign([1.0, 2.0, 3.0])
    return [v.read_value(), v.shape]


@fact
def scatter_updates_write_rows(tf):
    def slices(values, rows):
        return tf.IndexedSlices(tf.constant(values), tf.constant(rows))

    v = tf.Variable([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    v.scatter_update(slices([[9.0, 9.0]], [1]))
    v.scatter_add(slices([[1.0, 2.0], [3.0, 4.0]], [0, 0]))
    v.scatter_sub(slices([[1.0, 1.0]], [2]))
    v.scatter_mul(slices([[2.0, 2.0]], [1]))
    return v.read_value()


@fact
def scatter_minima_and_maxima(tf):
    v = tf.Variable([1.0, 5.0, 9.0])
    v.scatter_max(tf.IndexedSlices(tf.constant([7.0, 4.0]), tf.constant([0, 1])))
    v.scatter_min(tf.IndexedSlices(tf.constant([2.0]), tf.constant([2])))
    v.scatter_div(tf.IndexedSlices(tf.constant([2.0]), tf.constant([2])))
    return v.read_value()


@fact
def scatter_nd_writes_elements(tf):
    v = tf.Variable([1, 2, 3, 4])
    v.scatter_nd_update([[1], [3]], [20, 40])
    v.scatter_nd_add([[0]], [5])
    v.scatter_nd_sub([[2]], [1])
    return v.read_value()


@fact
def rows_are_read_with_sparse_read_and_gather_nd(tf):
    v = tf.Variable([[1, 2], [3, 4], [5, 6]])
    return [v.sparse_read([2, 0]), v.gather_nd([[1, 1], [0, 0]])]


@fact
def scattering_into_a_mirrored_variable(tf, two):
    with two.scope():
        v = tf.Variable([1.0, 2.0, 3.0], aggregation=tf.VariableAggregation.SUM)
    v.assign([1.0, 1.0, 1.0])
    return v.read_value()


@fact
def a_variable_converts_to_numbers_and_arrays(tf):
    v = tf.Variable(2.5)
    return [float(v), int(v), bool(v), np.asarray(v), v.numpy(), f"{v.numpy():.1f}"]


@fact
def tensor_functions_take_variables(tf):
    v = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    return [
        tf.reduce_sum(v),
        tf.reduce_mean(v, axis=0),
        tf.convert_to_tensor(v),
        tf.identity(v),
        tf.cast(v, tf.int32),
        tf.stack([v, v]),
        tf.concat([v, v], axis=1),
        tf.transpose(v),
        tf.reshape(v, [-1]),
        tf.square(v),
        tf.shape(v),
    ]


@fact
def a_variable_is_known_by_its_reference(tf):
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    table = {a.ref(): "a", b.ref(): "b"}
    return [table[a.ref()], table[b.ref()], a.ref() == a.ref(), a.ref() == b.ref(), a is a]


@fact(
    ours=1,
    because="a variable is hashed by what it is, not by its value, as JAX and Keras want it; "
    "TensorFlow wants v.ref(), which works in both",
)
def a_variable_as_the_key_of_a_dictionary(tf):
    return attempt(lambda: len({tf.Variable(1.0): 1}))


@fact
def the_name_ends_in_a_zero(tf):
    return tf.Variable(1.0, name="weight").name


@fact
def a_variable_is_neither_a_tensor_nor_none(tf):
    v = tf.Variable(1.0)
    return [isinstance(v, tf.Variable), isinstance(v, tf.Tensor), tf.is_tensor(v)]


@fact
def a_constraint_is_kept_and_not_applied(tf):
    v = tf.Variable(1.0, constraint=lambda value: tf.clip_by_value(value, 0.0, 1.0))
    v.assign(5.0)
    return [v.read_value(), v.constraint(v.read_value())]


@fact
def trainable_is_true_by_default(tf):
    return [tf.Variable(1.0).trainable, tf.Variable(1.0, trainable=False).trainable]


@fact
def an_initial_value_that_no_tensor_can_hold_is_refused(tf):
    return [
        attempt(lambda: tf.Variable(None)),
        attempt(lambda: tf.Variable([[1.0], [2.0, 3.0]])),
        attempt(lambda: tf.Variable(1.5, dtype=tf.int32)),
    ]


@fact
def a_variable_without_a_strategy_is_not_copied(tf):
    v = tf.Variable(1.0)
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_local_results(v.read_value())


@fact
def experimental_ref_of_a_mirrored_variable(tf, two):
    with two.scope():
        v = tf.Variable(1.0)
    return v.ref().deref() is v


@fact
def a_mirrored_variable_is_used_outside_like_any(tf, two):
    with two.scope():
        v = tf.Variable([1.0, 2.0])
    v.assign_add([1.0, 1.0])
    return [v + 1, v.numpy(), v[0], tf.reduce_sum(v), v.shape, v.dtype.name, float(v[1])]


@fact(
    ours=plain(np.float32(2.0)),
    because="a variable reads as a jax.Array, whose operators promote dtypes; TensorFlow wants a "
    "cast",
)
def a_variable_and_a_tensor_of_another_dtype(tf):
    return attempt(lambda: tf.Variable(1.0) + tf.constant(1, tf.int32))
