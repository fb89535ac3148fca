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


@pytest.mark.parametrize("compiles", [False, True])
def test_the_condition_of_a_loop_assigns_whenever_it_is_asked(compiles):
    asked = tf.Variable(0.0)

    def loop():
        def holds(i):
            asked.assign_add(1.0)
            return i < 3

        return tf.while_loop(holds, lambda i: [i + 1], [tf.constant(0)])

    assert (tf.function(loop) if compiles else loop)()[0] == 3
    assert asked.numpy() == 4.0


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


def test_a_mean_of_integers_is_not_narrowed():
    assert int(tf.reduce_mean(tf.constant([200, 101], tf.uint8))) == 150
    assert int(tf.reduce_mean(tf.zeros([28, 28], tf.uint8) + 9)) == 9
    assert int(tf.reduce_mean(tf.constant([2**30] * 3))) == 2**30
    assert int(tf.reduce_mean(tf.constant([-100, -101], tf.int8))) == -100
    images = tf.fill([2, 4, 4, 3], tf.constant(200, tf.uint8))
    means = tf.function(lambda x: tf.reduce_mean(x, axis=[1, 2]))(images)
    assert means.dtype == tf.uint8
    assert np.asarray(means).tolist() == [[200] * 3] * 2


def test_the_shortest_solution_of_fewer_equations_than_unknowns():
    matrix = tf.constant([[1.0, 2.0, 3.0], [0.0, 1.0, 1.0]])
    solved = tf.linalg.lstsq(matrix[:1], tf.constant([[6.0]]))
    np.testing.assert_allclose(solved[:, 0], [3 / 7, 6 / 7, 9 / 7], 1e-5)
    damped = tf.linalg.lstsq(matrix, tf.constant([[6.0], [1.0]]), l2_regularizer=0.5)
    np.testing.assert_allclose(damped[:, 0], [0.888889, 0.4, 1.288889], 1e-5)


@pytest.mark.parametrize(
    ("image", "target", "top", "left"),
    [((7, 9), (11, 20), 0, 2), ((300, 201), (224, 224), 0, 36), ((9, 4), (8, 3), 0, 0)],
)
def test_an_image_is_padded_by_half_of_what_is_missing(image, target, top, left):
    padded = np.asarray(tf.image.resize_with_pad(tf.ones([*image, 1]), *target))[..., 0]
    assert (np.argmax(padded.any(1)), np.argmax(padded.any(0))) == (top, left)


def test_what_is_computed_of_several_or_other_dtypes():
    roots = tf.linalg.sqrtm(tf.constant([[[4.0, 0.0], [0.0, 9.0]], [[1.0, 0.0], [0.0, 25.0]]]))
    np.testing.assert_allclose(roots, [[[2, 0], [0, 3]], [[1, 0], [0, 5]]], atol=1e-4)
    orders, x = tf.constant([1.0, 2.0, 0.5]), tf.constant([0.5, 1.0, 1.0])
    np.testing.assert_allclose(tf.math.polygamma(orders, x), [4.934802, -2.404114, np.nan], 1e-5)
    difference = tf.math.squared_difference(tf.constant([1 + 2j]), tf.constant([3 - 1j]))
    np.testing.assert_allclose(difference, [13.0])
    cast = tf.saturate_cast(tf.constant([1e20, -1e20, 3.7]), tf.int64)
    assert np.asarray(cast).tolist() == [9223371487098961920, -(2**63), 3]
    pooled = tf.nn.max_pool_with_argmax(tf.reshape(tf.range(4.0), [1, 2, 2, 1]), 2, 2, "VALID")
    assert (float(pooled.output[0, 0, 0, 0]), int(pooled.argmax[0, 0, 0, 0])) == (3.0, 3)


BAND = {
    "RIGHT_LEFT": [[0, 2, 6], [1, 5, 9], [4, 8, 0]],
    "LEFT_RIGHT": [[2, 6, 0], [1, 5, 9], [0, 4, 8]],
    "LEFT_LEFT": [[2, 6, 0], [1, 5, 9], [4, 8, 0]],
    "RIGHT_RIGHT": [[0, 2, 6], [1, 5, 9], [0, 4, 8]],
}


@pytest.mark.parametrize("align", BAND)
def test_several_diagonals_are_taken_and_set(align):
    matrix = tf.reshape(tf.range(1.0, 10.0), [3, 3])
    band = tf.linalg.diag_part(matrix, k=(-1, 1), align=align)
    assert np.asarray(band).tolist() == BAND[align]
    again = np.asarray(tf.linalg.diag(band, k=(-1, 1), align=align))
    np.testing.assert_equal(again, np.asarray(tf.linalg.band_part(matrix, 1, 1)))
    padded = tf.linalg.set_diag(tf.fill([3, 3], 8.0), band, k=(-1, 1), align=align)
    np.testing.assert_equal(np.asarray(padded), np.where(again == 0, 8, again))


def test_diagonals_are_numbered_from_the_lowest():
    with pytest.raises(tf.errors.InvalidArgumentError, match="lowest and the highest"):
        tf.linalg.diag_part(tf.eye(3), k=(1, -1))


def test_rows_of_several_dimensions_are_clipped_as_a_whole():
    table = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    rows = tf.nn.embedding_lookup(table, [0, 2], max_norm=2.0)
    expected = [[0, 0.534522, 1.069045, 1.603567], [0.836333, 0.940875, 1.045417, 1.149958]]
    np.testing.assert_allclose(np.reshape(rows, (2, 4)), expected, rtol=1e-5)


def test_the_gradient_of_a_product_is_the_product_of_the_others():
    def gradient(data, ids, count):
        data = tf.constant(data)
        with tf.GradientTape() as tape:
            tape.watch(data)
            products = tf.math.unsorted_segment_prod(data, ids, count)
        return np.asarray(tape.gradient(products, data)).tolist()

    data, ids = [2.0, 3.0, 0.0, 5.0, 4.0, 7.0], [1, 0, 1, -1, 0, 1]
    assert gradient(data, ids, 3) == [0, 4, 14, 0, 3, 0]
    assert gradient([2.0, 3.0, 0.0, 0.0], [0, 0, 1, 1], 2) == [3, 2, 0, 0]


def test_an_array_holds_text():
    array = tf.TensorArray(tf.string, size=0, dynamic_size=True)
    for number in range(3):
        array = array.write(number, "Fizz" if number == 1 else tf.as_string(number))
    assert array.stack().numpy().tolist() == [b"0", b"Fizz", b"2"]
    assert array.read(1).numpy() == b"Fizz"


def test_an_array_has_one_shape():
    array = tf.TensorArray(tf.float32, size=2, infer_shape=False).write(0, [1.0, 2.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="one shape here"):
        array.write(1, 3.0)


def test_nothing_is_among_the_highest_beside_a_nan():
    predictions = [[0.1, 0.5, np.nan], [0.3, 0.1, 0.2]]
    assert np.asarray(tf.math.in_top_k([1, 0], predictions, 2)).tolist() == [False, True]


def test_misuse_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="minval < maxval"):
        tf.random.uniform([2], 5, 1, tf.int32)
    with pytest.raises(TypeError, match="integer dtype"):
        tf.one_hot([1.0], 3)
