"""TensorFlow's answers where programs met others: names of results, text, tables, loops, layers."""

import io

import numpy as np
import pytest

import unison.tf as tf

Image = pytest.importorskip("PIL.Image")


def test_the_factors_of_a_matrix_have_names():
    matrix = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    factors = tf.linalg.qr(matrix)
    np.testing.assert_allclose(factors.q @ factors.r, matrix, atol=1e-5)
    packed = tf.linalg.lu(matrix)
    assert packed.p.numpy().tolist() == [1, 0]
    np.testing.assert_allclose(packed.lu, [[3.0, 4.0], [1 / 3, 2 / 3]], 1e-5)


def test_tensors_of_text_are_printed_with_quotes():
    stream = io.StringIO()
    text = tf.constant("b")
    tf.print("a", text, [text, "y"], {"k": text}, (text,), output_stream=stream)
    assert stream.getvalue() == 'a "b" ["b", \'y\'] {\'k\': "b"} ("b",)\n'
    assert tf.strings.format("{} {}", (text, 2)).numpy() == b'"b" 2'


def test_tables_are_looked_up_by_ragged_and_sparse_keys():
    names = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
    table = tf.lookup.StaticHashTable(names, -1)
    ragged = tf.ragged.constant([["a"], ["b", "c", "a"]])
    assert table.lookup(ragged).to_list() == [[1], [2, -1, 1]]
    assert table[ragged].to_list() == [[1], [2, -1, 1]]
    sparse = tf.sparse.from_dense([["a", ""], ["", "c"]])
    found = tf.sparse.to_dense(table.lookup(sparse))
    assert found.numpy().tolist() == [[1, 0], [0, -1]]


def lengthened(count):
    return tf.while_loop(
        lambda i, x: i < count,
        lambda i, x: (i + 1, tf.concat([x, [2.0]], 0)),
        [tf.constant(0), tf.ones([1])],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None])],
    )[1]


def test_a_loop_changes_shapes_where_it_may():
    assert lengthened(2).numpy().tolist() == [1.0, 2.0, 2.0]
    assert tf.function(lengthened)(tf.constant(2)).numpy().tolist() == [1.0, 2.0, 2.0]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match=r"keep their shapes.*tf.TensorArray"):
        strategy.run(lengthened, args=(tf.constant(2),))


def test_a_step_returns_a_variable_in_its_logs():
    class Counting(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.seen = tf.Variable(0.0)

        def call(self, x):
            return x

        def train_step(self, data):
            self.seen.assign_add(1.0)
            return {"seen": self.seen}

    model = Counting()
    model.compile("sgd", "mse")
    x = np.ones((8, 1), "float32")
    assert model.fit(x, x, batch_size=4, epochs=2, verbose=0).history == {"seen": [2.0, 4.0]}


def test_sparse_tensors_are_not_taken_for_their_parts():
    sparse = tf.sparse.from_dense([[0, 1], [2, 3]])
    for tensors in (sparse, (sparse, [1, 2])):
        with pytest.raises(TypeError, match="to_dense"):
            tf.data.Dataset.from_tensor_slices(tensors)


def test_a_gif_has_three_channels():
    frame = tf.constant(np.arange(12).reshape(2, 2, 3), tf.uint8)
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "GIF")
    assert tf.io.decode_image(buffer.getvalue(), channels=3).shape == (1, 2, 2, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="channels must be 0 or 3"):
        tf.io.decode_image(buffer.getvalue(), channels=1)


def test_a_grey_png_is_rounded_as_by_libpng():
    colors = np.random.RandomState(0).randint(0, 256, (4, 4, 3)).astype("uint8")
    grey = tf.io.decode_png(tf.io.encode_png(colors), channels=1)[..., 0]
    assert grey.numpy().tolist() == [  # TensorFlow's
        [92, 125, 119, 103],
        [69, 132, 156, 82],
        [92, 60, 102, 227],
        [142, 116, 196, 111],
    ]


def test_an_init_scope_executes_eagerly():
    seen = []

    @tf.function
    def function(x):
        seen.append(tf.executing_eagerly())
        with tf.init_scope():
            seen.append(tf.executing_eagerly())
            three = tf.constant(3.0).numpy()
        seen.append(tf.inside_function())
        return x + three

    assert function(tf.constant(1.0)).numpy() == 4.0
    assert seen == [False, True, True]
