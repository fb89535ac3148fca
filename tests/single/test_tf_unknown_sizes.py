"""`tf.shape` in the layers of a model whose inputs have unknown sizes, and what follows from it."""

import keras
import numpy as np
import pytest

import unison.tf as tf
from unison.errors import InvalidArgumentError

S = tf.shape


def _flat(x, batch, height, width):
    return tf.reshape(x, [batch, height * width])


#: By what a layer's author does with the sizes: functions of inputs of shape (2, 6, 8).
IDIOMS = {
    "sampling": lambda x: tf.random.normal((S(x)[0], S(x)[-1])) * 0 + x[:, 0],
    "a shape": lambda x: tf.ones(S(x)) + tf.random.truncated_normal(S(x)) * 0,
    "filled": lambda x: tf.fill([S(x)[0], 1], 2.0),
    "of a dtype": lambda x: tf.zeros((tf.cast(S(x)[0], tf.int64), 2)),
    "as a number": lambda x: x / tf.math.sqrt(tf.cast(S(x)[-1], tf.float32)) + S(x)[0] * 1.0,
    "flat": lambda x: tf.reshape(x, [S(x)[0], tf.reduce_prod(S(x)[1:])]),
    "products": lambda x: tf.reshape(x, [S(x)[0] * S(x)[1], -1]),
    "products by name": lambda x: tf.reshape(x, [tf.multiply(S(x)[0], S(x)[1]), 8]),
    "halves": lambda x: tf.reshape(x, [S(x)[0], S(x)[1] // 2, 2, S(x)[2]]),
    "sums": lambda x: tf.zeros(tf.add(S(x), 1) - 1),
    "the least": lambda x: x[:, : tf.minimum(S(x)[1], 3)],
    "the greatest": lambda x: tf.zeros((tf.maximum(S(x)[0], 1), 3)),
    "stacked": lambda x: tf.reshape(x, tf.stack([S(x)[0], S(x)[1], 4, 2])),
    "joined with a list": lambda x: tf.reshape(x, tf.concat([S(x)[:-1], [2, 4]], 0)),
    "joined with a constant": lambda x: tf.reshape(
        x, tf.concat([S(x)[:-1], tf.constant([2, 4])], axis=0)
    ),
    "one by one": lambda x: _flat(x, *tf.unstack(S(x))),
    "unpacked": lambda x: _flat(x, *S(x)),
    "a class token": lambda x: tf.concat([tf.broadcast_to(x[:1, :1], [S(x)[0], 1, 8]), x], 1),
    "the last one": lambda x: x[:, S(x)[1] - 1] + x[0, 0, S(x)[-1] - 2],
    "one of a row": lambda x: x[0, S(x)[1] // 2, None],
    "enlarged images": lambda x: tf.image.resize(x[..., None], 2 * S(x)[1:3]),
    "smaller images": lambda x: tf.image.resize(x[..., None], S(x)[1:] // 2, "area"),
    "smooth images": lambda x: tf.image.resize(x[..., None], [S(x)[1] + 3, 4], "bicubic"),
    "nearest pixels": lambda x: tf.image.resize(x[..., None], S(x)[1:] * 2, "nearest"),
    "halves of a batch": lambda x: tf.concat(tf.split(x, [S(x)[0] // 2, -1], 0)[::-1], 0),
    "a chosen branch": lambda x: tf.cond(tf.greater(S(x)[1], 3), lambda: x * 2, lambda: x),
    "tiles": lambda x: tf.tile(
        tf.constant([[1, 2]]), tf.concat([tf.expand_dims(S(x)[0], -1), tf.constant([1])], 0)
    ),
    "repeats": lambda x: tf.repeat(tf.constant([[1.0, 2.0]]), S(x)[0], axis=0),
    "positions": lambda x: x + tf.cast(tf.range(0, S(x)[1]), tf.float32)[None, :, None],
    "backwards": lambda x: tf.gather(x, tf.range(S(x)[1] - 1, -1, -1), axis=1),
    "the rest": lambda x: x[:, S(x)[1] - 2 :],
    "a part": lambda x: tf.slice(x, [0, 0, 0], [S(x)[0], 2, -1]),
    "padding": lambda x: tf.pad(x, [[0, 0], [0, S(x)[1]], [0, 0]]),
    "a causal mask": lambda x: tf.cast(tf.range(S(x)[1])[:, None] >= tf.range(S(x)[1]), tf.int32),
    "a band": lambda x: tf.linalg.band_part(tf.ones((S(x)[1], S(x)[1])), -1, 0),
    "identities": lambda x: tf.eye(3, batch_shape=[S(x)[0]]),
    "one hot": lambda x: tf.one_hot(tf.zeros(S(x)[0], tf.int32), S(x)[1]),
    "a sequence's mask": lambda x: tf.sequence_mask(tf.fill([S(x)[0]], 3), S(x)[1]),
    "pairs": lambda x: tf.gather_nd(
        x, tf.stack([tf.range(S(x)[0]), tf.zeros(S(x)[0], tf.int32)], 1)
    ),
    "scattered": lambda x: tf.scatter_nd(
        tf.range(S(x)[0])[:, None], x[:, 0], tf.stack([S(x)[0], 8])
    ),
    "evenly": lambda x: tf.linspace(0.0, 1.0, S(x)[1]),
    "all elements": lambda x: tf.reshape(x, [tf.size(x)]),
    "sizes of x.shape": lambda x: tf.reshape(x, [x.shape[0], -1]),
    "a checked shape": lambda x: tf.ensure_shape(x, [None, 6, 8]),
    "a loop's end": lambda x: tf.while_loop(
        lambda i, total: i < S(x)[1],
        lambda i, total: (i + 1, total + tf.gather(x, i, axis=1)),
        [tf.constant(0), x[:, 0] * 0],
    )[1],
    "operations of keras": lambda x: keras.ops.reshape(x, (S(x)[0], -1)),
    "shapes of keras": lambda x: keras.ops.broadcast_to(x[:, :1], S(x)),
    "a constant mask": lambda x: tf.boolean_mask(x, tf.range(6) > 2, axis=1),
}


class Calling(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", IDIOMS)
def test_layers_of_unknown_sizes_give_what_known_sizes_give(name):
    function = IDIOMS[name]
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    expected = np.asarray(function(tf.constant(x)))
    for sizes in [(6, 8)] if name == "a constant mask" else [(6, 8), (None, 8)]:
        inputs = keras.Input(sizes)
        model = keras.Model(inputs, Calling(function)(inputs))
        inferred = model.output_shape
        assert len(inferred) == expected.ndim
        assert all(
            size in (None, actual) for size, actual in zip(inferred, expected.shape, strict=True)
        )
        np.testing.assert_allclose(np.asarray(model(x)), expected, rtol=1e-6)


def test_sizes_stay_known_in_compiled_layers():
    def halves(x):
        return tf.reshape(x, [S(x)[0], tf.math.floordiv(S(x)[1], 2), tf.multiply(2, S(x)[2])])

    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, Calling(halves)(inputs))
    x = np.arange(96, dtype="float32").reshape(2, 6, 8)
    np.testing.assert_array_equal(model.predict(x, verbose=0), x.reshape(2, 3, 16))


def test_sizes_of_compiled_functions_are_computed_as_those_of_the_program():
    x = tf.zeros((10,))

    def of(function):
        return tf.function(function)(x)

    wide = of(lambda x: tf.add(tf.shape(x)[0], tf.constant(5, tf.int64)))
    assert (wide.dtype, int(wide)) == (tf.int64, 15)
    size = of(lambda x: tf.multiply(tf.size(x, tf.int64), tf.constant(3_000_000_000, tf.int64)))
    assert int(size) == 30_000_000_000
    many = of(lambda x: tf.multiply(S(x)[0] * 100_000, S(x)[0] * 100_000))
    assert int(many) == int(np.int64(10**12).astype(np.int32))
    assert of(lambda x: tf.math.floordiv(S(x)[0], 0)) == tf.math.floordiv(tf.constant(10), 0)


def test_comparisons_and_quotients_take_unknown_sizes():
    def used(x):
        near = tf.cast(tf.less(tf.range(S(x)[1]), S(x)[1]), tf.float32)[None, :, None]
        return tf.add(tf.divide(x, tf.cast(S(x)[1], tf.float32)) * near, tf.shape(x)[2] * 0.0)

    inputs = keras.Input((None, 8))
    assert keras.Model(inputs, Calling(used)(inputs)).output_shape == (None, None, 8)


def test_an_unknown_size_has_the_dtype_of_a_tensor():
    seen = {}

    def look(x):
        seen["shape"] = S(x)
        seen["dtypes"] = S(x).dtype, tf.convert_to_tensor(S(x)[0]).dtype
        seen["static"] = tf.TensorShape(x.shape)
        return x

    inputs = keras.Input((6, 8))
    Calling(look)(inputs)
    assert tf.is_tensor(seen["shape"])
    assert seen["dtypes"] == (tf.int32, tf.int32)
    assert seen["static"].as_list() == [None, 6, 8]


def test_the_message_of_an_error_in_a_layer_is_kept():
    inputs = keras.Input((6, 8))
    with pytest.raises(InvalidArgumentError, match=r"tf\.concat: "):
        Calling(lambda x: tf.concat([x, x[:, 0]], 1))(inputs)
