"""Gradients where a derivative is infinite, undefined or has a step, beside TensorFlow's answers.

The answers are those of TensorFlow 2.21.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
import unison.tf as tf

INF, NAN = np.inf, np.nan
ZERO_AND_OTHER = [[0.0, 0.0], [3.0, 4.0]]


def gradient(function, x):
    x = tf.constant(x, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return np.asarray(tape.gradient(y, x))


def positive(x):
    return tf.where(x > 0, x, 0)


def assert_is(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


KERNELS = {
    "sqrt": (tf.sqrt, [-1.0, 0.0, 4.0, NAN], [NAN, INF, 0.25, NAN]),
    "sqrt of some": (lambda x: tf.sqrt(x) * [0, 0, 1, 0], [-1, 0, 4, NAN], [0, 0, 0.25, 0]),
    "sqrt where": (lambda x: tf.where(x > 0, tf.sqrt(x), 0), [-1.0, 0.0, 4.0], [0, 0, 0.25]),
    "rsqrt": (tf.math.rsqrt, [-1.0, 0.0, 4.0], [NAN, -INF, -0.0625]),
    "rsqrt of some": (lambda x: tf.math.rsqrt(x) * [0, 0, 1], [-1, 0, 4], [0, 0, -0.0625]),
    "reciprocal": (tf.math.reciprocal, [-1.0, 0.0, 4.0], [-1, -INF, -0.0625]),
    "reciprocal of some": (lambda x: tf.math.reciprocal(x) * [1, 0], [2, 0], [-0.25, 0]),
    "norm": (lambda x: tf.norm(x, axis=-1), ZERO_AND_OTHER, [[NAN, NAN], [0.6, 0.8]]),
    "norm of some": (lambda x: tf.norm(x, axis=1)[1], ZERO_AND_OTHER, [[0, 0], [0.6, 0.8]]),
    "norm 1": (lambda x: tf.norm(x, 1, axis=1), ZERO_AND_OTHER, [[0, 0], [1, 1]]),
    "deviation of some": (
        lambda x: tf.math.reduce_std(x, 1)[1],
        [[2, 2], [3, 5]],
        [[0, 0], [-0.5, 0.5]],
    ),
    "ragged deviation where": (
        lambda x: positive(tf.math.reduce_std(tf.RaggedTensor.from_row_splits(x, [0, 2, 5]), 1)),
        [1, 1, 2, 3, 4],
        [0, 0, -0.408248, 0, 0.408248],
    ),
    "global norm where": (lambda x: positive(tf.linalg.global_norm([x])), [0, 0], [0, 0]),
    "image of one colour": (
        lambda x: tf.image.per_image_standardization(tf.reshape(x, (2, 2, 2, 1))),
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0] * 8,
    ),
    "short rows": (
        lambda x: tf.nn.embedding_lookup(x, [0, 1], max_norm=2.0),
        ZERO_AND_OTHER,
        [[1, 1], [0.064, -0.048]],
    ),
    "xlogy": (lambda x: tf.math.xlogy(x, x), [0.0, 2.0], [0, 1.693147]),
    "xlogy by x": (lambda x: tf.math.xlogy(x, [0.0, 2.0, 2.0]), [0, 0, 1], [0, 0, 0.693147]),
    "xlog1py": (lambda x: tf.math.xlog1py(x, x), [0.0, 2.0], [0, 1.765279]),
    "xdivy": (lambda x: tf.math.xdivy(x, x), [0.0, 2.0], [0, 0]),
}

IN_KERAS = {
    "sqrt": (lambda k, x: k.ops.sqrt(x)[1], ZERO_AND_OTHER, [[0, 0], [0.288675, 0.25]]),
    "norm": (lambda k, x: k.ops.norm(x, axis=-1)[1], ZERO_AND_OTHER, [[0, 0], [0.6, 0.8]]),
    "std": (lambda k, x: k.ops.std(x, axis=-1)[1], ZERO_AND_OTHER, [[0, 0], [-0.5, 0.5]]),
    "unit": (lambda k, x: k.layers.UnitNormalization()(x)[1, 0], ZERO_AND_OTHER,
     [[0, 0], [0.128, -0.096]]),
    "abs": (lambda k, x: k.ops.abs(x), ZERO_AND_OTHER, [[0, 0], [1, 1]]),
    "maximum": (lambda k, x: k.ops.maximum(x, 0.0), ZERO_AND_OTHER, [[1, 1], [1, 1]]),
    "minimum": (lambda k, x: k.ops.minimum(0.0, x), ZERO_AND_OTHER, [[0, 0], [0, 0]]),
    "clip": (lambda k, x: k.ops.clip(x, 0.0, 4.0), ZERO_AND_OTHER, [[1, 1], [1, 1]]),
    "L1": (lambda k, x: k.regularizers.L1(0.1)(x), ZERO_AND_OTHER, [[0, 0], [0.1, 0.1]]),
    "orthogonal": (lambda k, x: k.regularizers.OrthogonalRegularizer(0.1)(x),
     [[0, 0], [3, 4], [1, 1]], [[0, 0], [7.5425e-4, -5.6569e-4], [-2.35702e-3, 2.35702e-3]]),
}  # fmt: skip


@pytest.mark.parametrize(("function", "x", "expected"), KERNELS.values(), ids=KERNELS)
def test_gradients_are_those_of_tensorflows_kernels(function, x, expected):
    assert_is(gradient(function, x), expected)
    assert_is(gradient(tf.function(function), x), expected)


@pytest.mark.parametrize(("function", "x", "expected"), IN_KERAS.values(), ids=IN_KERAS)
def test_keras_has_the_gradients_that_it_has_on_tensorflow(function, x, expected):
    assert_is(gradient(lambda x: function(tf.keras, x), x), expected)


def test_what_keras_computes_is_as_before():
    ops = tf.keras.ops
    assert ops.maximum(np.array([1, 2]), 3).tolist() == [3, 3]
    assert ops.clip(np.array([1, 5]), 2, 3).tolist() == [2, 3]
    assert ops.sqrt(np.array([4, 9])).tolist() == [2.0, 3.0]
    assert float(ops.norm(np.array([3, 4]))) == 5.0
    for dtype in ("bfloat16", "float16"):
        x = ops.cast([3.0, 4.0], dtype)
        for result in (ops.norm(x), ops.std(x), ops.clip(x, 0.0, 0.5), ops.sqrt(x), ops.abs(x)):
            assert result.dtype == dtype


def test_they_have_further_derivatives_and_batches():
    x = jnp.array([1.0, 4.0])

    def total(x):
        return jnp.sum(tf.sqrt(x) + tf.math.rsqrt(x) + tf.math.reciprocal(x) + tf.math.xlogy(x, x))

    def by_jax(x):
        return jnp.sum(jnp.sqrt(x) + 1 / jnp.sqrt(x) + 1 / x + x * jnp.log(x))

    assert_is(jax.hessian(total)(x), jax.hessian(by_jax)(x))
    assert_is(jax.jacfwd(total)(x), jax.grad(by_jax)(x))
    assert_is(jax.vmap(jax.grad(total))(x[:, None])[:, 0], jax.grad(by_jax)(x))


def test_a_loss_of_distances_trains_where_one_is_zero(two_replicas):
    def distance(truth, guess):
        squared = tf.reduce_sum(tf.square(guess - truth), -1)
        return tf.where(squared > 0, tf.sqrt(squared), 0.0)

    with two_replicas.scope():
        layer = tf.keras.layers.Dense(3, "relu", kernel_initializer="ones")
        model = tf.keras.Sequential([tf.keras.Input((2,)), layer])
        model.compile(tf.keras.optimizers.SGD(0.1), distance)
    x = np.array([[1, 2], [0, 0], [-1, -1], [2, 1]], np.float32)
    model.fit(x, np.zeros((4, 3), np.float32), batch_size=4, epochs=2, verbose=0)
    # Each of two examples of four pulls all weights by 1.5 / sqrt(3) / 4 for an input of 1.5.
    assert_is(model.get_weights()[0], np.full((2, 3), 1 - 2 * 0.1 * 3 / np.sqrt(3) / 4))


CHOOSING = {
    "maximum": lambda x: tf.maximum(x, 0.0),
    "minimum": lambda x: tf.minimum(0.0, x),
    "clip": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "where": lambda x: tf.where(x < 0, 0.0, x),
    "abs": tf.abs,
    "sqrt": tf.sqrt,
    "xlogy": lambda x: tf.math.xlogy(x, x),
    "Keras' clip": lambda x: tf.keras.ops.clip(x, -1.0, 1.0),
    "Keras' maximum": lambda x: tf.keras.ops.maximum(0.0, x),
}


@pytest.mark.parametrize("function", CHOOSING.values(), ids=CHOOSING)
def test_the_gradient_of_no_examples_reaches_the_sums_of_all(two_replicas, function):
    weight = tf.Variable(0.5)

    def step(x):
        with tf.GradientTape() as tape:
            total = tf.distribute.get_replica_context().all_reduce("SUM", weight * 2.0)
            loss = tf.reduce_sum(function(x * total))
        return tape.gradient(loss, weight)

    rows = [np.full((2, 3), 0.1, np.float32), np.zeros((0, 3), np.float32)]
    gradients = two_replicas.run(step, (unison.PerReplica(rows),)).values
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(function(rows[0] * (weight * 4.0)))
    expected = float(tape.gradient(loss, weight)) / 2
    assert_is([float(gradient) for gradient in gradients], [expected, expected])


@pytest.mark.parametrize("rows", [2, 0])
def test_a_choice_of_numbers_takes_the_dtype_of_what_it_is_multiplied_by(rows):
    x = tf.zeros((rows, 3), tf.bfloat16)
    assert (tf.where(x > 0, 1.0, 0.0) * x).dtype == tf.bfloat16
