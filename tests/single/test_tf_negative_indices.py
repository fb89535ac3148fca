"""Negative indices in compiled programs are out of range, as in TensorFlow's on accelerators.

NumPy and JAX count them from the end.
"""

import numpy as np
import pytest

import unison.tf as tf
from unison.errors import InvalidArgumentError

ROWS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")

#: By the operation: functions of `ROWS` and of computed indices, with the indices and the answer.
OPERATIONS = {
    "gather": (tf.gather, [0, -1, 3], [[1, 2], [0, 0], [0, 0]]),
    "gather of columns": (
        lambda x, i: tf.gather(x, i, axis=1),
        [-1, 1],
        [[0, 2], [0, 4], [0, 6]],
    ),
    "gather one to one": (lambda x, i: tf.gather(x, i, batch_dims=1), [0, -1, 1], [1, 0, 6]),
    "gather_nd": (tf.gather_nd, [[0, 1], [-1, 0]], [2, 0]),
    "embedding_lookup": (tf.nn.embedding_lookup, [2, -1], [[5, 6], [0, 0]]),
    "tensor_scatter_nd_update": (
        lambda x, i: tf.tensor_scatter_nd_update(x, i, [[9.0, 9.0]] * 2),
        [[-1], [0]],
        [[9, 9], [3, 4], [5, 6]],
    ),
    "scatter_nd": (lambda x, i: tf.scatter_nd(i, [8.0, 9.0], [3]), [[-1], [1]], [0, 9, 0]),
    "sparse_softmax_cross_entropy": (
        lambda x, i: tf.math.is_nan(tf.nn.sparse_softmax_cross_entropy_with_logits(i, x)),
        [0, -1, 2],
        [False, True, True],
    ),
    "bincount": (lambda x, i: tf.math.bincount(i, minlength=3, maxlength=3), [0, -1, 2], [1, 0, 1]),
    "in_top_k": (lambda x, i: tf.math.in_top_k(i, x, 1), [-1, 0, 1], [False, False, True]),
    "confusion_matrix": (
        lambda x, i: tf.math.confusion_matrix(i, i, num_classes=2),
        [-1, 0, 0],
        [[2, 0], [0, 0]],
    ),
    "unsorted_segment_sum": (
        lambda x, i: tf.math.unsorted_segment_sum(x, i, 2),
        [-1, 0, 0],
        [[8, 10], [0, 0]],
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_negative_index_is_out_of_range(name):
    operation, indices, expected = OPERATIONS[name]
    result = tf.function(operation)(tf.constant(ROWS), tf.constant(indices))
    np.testing.assert_array_equal(result, expected)


def test_outside_compiled_programs_it_is_an_error():
    for name in ("gather", "gather_nd", "embedding_lookup", "confusion_matrix"):
        operation, indices, _ = OPERATIONS[name]
        with pytest.raises(InvalidArgumentError, match="index -1 is not in"):
            operation(tf.constant(ROWS), tf.constant(indices))


def test_gradients_of_a_gather_leave_the_last_row_alone():
    @tf.function
    def gradient(x, i):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.gather(x, i))
        return tape.gradient(total, x)

    result = gradient(tf.constant(ROWS), tf.constant([1, -1]))
    np.testing.assert_array_equal(tf.convert_to_tensor(result), [[0, 0], [1, 1], [0, 0]])


def test_lookups_of_no_indices_check_the_axis():
    none = np.zeros((0,), np.int32)
    assert tf.keras.ops.take(np.ones((3, 2)), none, axis=-1).shape == (3, 0)
    for table, axis in ((np.ones((3, 2)), 7), (np.ones(()), 0)):
        with pytest.raises(ValueError, match="out of bounds"):
            tf.keras.ops.take(table, none, axis=axis)
