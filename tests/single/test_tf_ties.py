"""Gradients where two values are equal: TensorFlow's answers, which are not JAX's.

Recorded with TensorFlow 2.21: `tf.GradientTape` of the functions at the points.
"""

import numpy as np
import pytest

import unison.tf as tf

FACTS = {
    "abs": (tf.abs, [0.0, -1.0, 2.0], [0.0, -1.0, 1.0]),
    "maximum": (lambda x: tf.maximum(x, 1.0), [1.0, 0.0, 2.0], [1.0, 0.0, 1.0]),
    "minimum": (lambda x: tf.minimum(x, 1.0), [1.0, 0.0, 2.0], [1.0, 1.0, 0.0]),
    "second of maximum": (lambda x: tf.maximum(0.0, 1.0 - x), [1.0, 0.0], [0.0, -1.0]),
    "clip_by_value": (
        lambda x: tf.clip_by_value(x, 0.0, 1.0),
        [0.0, 1.0, 2.0, 0.5, -1.0],
        [1.0, 1.0, 0.0, 1.0, 0.0],
    ),
    "clip_by_value of whole bounds": (
        lambda x: tf.clip_by_value(x, -2, 2),
        [-2.0, 3.0, 1.0],
        [1.0, 0.0, 1.0],
    ),
    "maximum of a whole number": (lambda x: tf.maximum(x, 1), [1.0, 0.0], [1.0, 0.0]),
    "bound of clip_by_value": (
        lambda low: tf.clip_by_value([1.0, 2.0, 3.0], low, 9.0),
        2.0,
        1.0,
    ),
    "relu6": (tf.nn.relu6, [0.0, 6.0, 3.0], [0.0, 0.0, 1.0]),
    "total_variation": (
        lambda x: tf.image.total_variation(tf.reshape(x, [1, 2, 2, 1])),
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("function", "at", "expected"), FACTS.values(), ids=FACTS)
def test_a_gradient_at_a_tie_is_tensorflows(function, at, expected, compiled):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    gradient = tf.function(gradient) if compiled else gradient
    np.testing.assert_array_equal(gradient(tf.constant(at)), expected)


def test_values_and_dtypes_are_as_before():
    assert tf.maximum(tf.constant([1, 2]), 2).dtype == tf.int32
    assert float(tf.abs(tf.constant(3 + 4j))) == 5.0
    clipped = tf.clip_by_value(tf.constant([1, 5], tf.bfloat16), 2, 3)
    assert clipped.dtype == tf.bfloat16
    np.testing.assert_array_equal(np.asarray(clipped, "float32"), [2, 3])
    assert tf.maximum(1.0, tf.constant([[1.0], [2.0]])).shape == (2, 1)
