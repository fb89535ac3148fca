"""What programs do with tensors: dtypes, shapes, structures, text, and the common functions."""

from __future__ import annotations

import numpy as np

from parity.answers import plain
from parity.facts import attempt, fact, raises


def dtype_of(value):
    return value.dtype.name


# -- dtypes --------------------------------------------------------------------------------


@fact
def constants_take_the_dtype_of_what_they_are_made_of(tf):
    made = [
        1,
        1.0,
        True,
        [1, 2],
        [1, 2.5],
        np.float64(1),
        np.arange(2),
        np.ones(2, np.float32),
        np.uint8(3),
        1j,
        2**40,
    ]
    return [attempt(lambda value=value: dtype_of(tf.constant(value))) for value in made]


@fact
def a_named_dtype_is_kept(tf):
    names = "int8 int16 int32 int64 uint8 uint16 float16 float32 float64 bfloat16 complex64"
    return [dtype_of(tf.constant(1, getattr(tf, name))) for name in names.split()]


@fact
def large_integers_keep_their_bits(tf):
    return [tf.constant(2**53 + 1, tf.int64), tf.constant([2**40, -(2**40)], tf.int64) + 1]


@fact(
    ours=[
        plain(np.float32(2)),
        plain(np.float64(1)),
        plain(np.int64(2)),
        plain(np.float32(2)),
    ],
    because="tensors are jax.Arrays, whose dtypes are promoted; TensorFlow wants a cast",
)
def mixed_dtypes(tf):
    one = tf.constant(1.0)
    return [
        attempt(lambda: one + tf.constant(1)),
        attempt(lambda: one * tf.constant(1.0, tf.float64)),
        attempt(lambda: tf.constant(1) + tf.constant(1, tf.int64)),
        attempt(lambda: tf.add(one, tf.constant(1))),
    ]


@fact
def python_numbers_take_the_tensors_dtype(tf):
    return [
        tf.constant(1.0) + 1,
        tf.constant(1, tf.int64) * 2,
        2.5 * tf.constant(2.0, tf.float16),
        tf.constant(1.0, tf.float64) - 1,
    ]


@fact(
    ours=plain(np.array([2.5, 3.5], np.float32)),
    because="tensors are jax.Arrays, whose operators promote dtypes; TensorFlow wants a cast",
)
def a_python_float_and_an_integer_tensor(tf):
    return attempt(lambda: tf.constant([1, 2]) + 1.5)


@fact
def whole_division_of_integers(tf):
    a = tf.constant([7, -7])
    return [a // 2, a % 4]


@fact(
    ours=plain(np.array([3.5, -3.5], np.float32)),
    because="tensors are jax.Arrays, whose division of int32 gives float32; TensorFlow's float64",
)
def division_of_integers(tf):
    return tf.constant([7, -7]) / 2


@fact
def casts_truncate(tf):
    return [
        tf.cast([1.9, -1.9], tf.int32),
        tf.cast([0, 3], tf.bool),
        tf.cast([True, False], tf.float32),
        tf.cast(tf.constant([255, 256]), tf.uint8),
    ]


@fact
def dtypes_describe_themselves(tf):
    return [
        tf.float32.name,
        tf.float32.is_floating,
        tf.int64.is_integer,
        tf.bool.is_bool,
        tf.float64.size,
        tf.int32.max,
        tf.int8.min,
        tf.as_dtype("float16").name,
        tf.as_dtype(np.int64).name,
        tf.float32.as_numpy_dtype is np.float32,
        tf.float32 == np.float32,
        tf.float32 == "float32",
        tf.dtypes.int64.name,
    ]


@fact
def reductions_keep_the_dtype(tf):
    integers = tf.constant([1, 2, 4])
    return [
        tf.reduce_mean(integers),
        tf.reduce_sum(integers),
        tf.reduce_max(integers),
        tf.reduce_prod(integers),
        tf.reduce_mean(tf.constant([1.0, 2.0], tf.float64)),
    ]


@fact
def indices_are_int64_and_shapes_int32(tf):
    x = tf.constant([[1.0, 3.0], [2.0, 0.0]])
    return [
        tf.argmax(x, axis=1),
        tf.argmin(x),
        tf.shape(x),
        tf.size(x),
        tf.rank(x),
        tf.where(x > 1),
    ]


@fact
def ranges_take_the_dtype_of_their_limits(tf):
    return [tf.range(3), tf.range(3.0), tf.range(1, 7, 2), tf.range(2, dtype=tf.int64)]


@fact
def one_hot_is_float32(tf):
    return [tf.one_hot([0, 2], 3), tf.one_hot([1], 2, on_value=5, off_value=1)]


# -- tensors -------------------------------------------------------------------------------


@fact
def shapes_of_tensors(tf):
    x = tf.zeros((2, 3))
    return [x.shape, list(x.shape), x.shape[0], len(x.shape), x.ndim, x.shape == (2, 3)]


@fact(
    ours=raises("AttributeError"),
    because="the shape of a jax.Array is a tuple: list(x.shape) and len(x.shape) work in both",
)
def methods_of_a_tensors_shape(tf):
    return attempt(lambda: [tf.zeros((2, 3)).shape.as_list(), tf.zeros(1).shape.rank])


@fact
def tensors_are_sliced(tf):
    x = tf.reshape(tf.range(24), (2, 3, 4))
    return [x[0, 1], x[..., -1], x[:, 1:, ::2], x[1][2][3], x[:, tf.newaxis].shape, x[0, ::-1, 0]]


@fact
def tensors_convert_to_python(tf):
    x = tf.constant(2.5)
    return [
        float(x),
        int(x),
        bool(x),
        f"{x:.2f}",
        x.numpy().item(),
        [float(v) for v in tf.constant([1.0, 2.0])],
        len(tf.constant([1, 2, 3])),
    ]


@fact
def tensors_index_python_lists(tf):
    return ["a", "b", "c"][tf.constant(1)]


@fact
def an_ambiguous_truth_value_is_refused(tf):
    return attempt(lambda: bool(tf.constant([True, False])))


@fact(
    ours=plain(np.int32(2)),
    because="an index beyond the end of a jax.Array takes the last element, as on an accelerator",
)
def an_index_beyond_the_end(tf):
    return attempt(lambda: tf.constant([1, 2])[5])


@fact
def tensors_cannot_be_assigned_to(tf):
    def assign():
        tf.constant([1, 2])[0] = 5

    return attempt(assign)


@fact
def operators_with_lists(tf):
    x = tf.constant([1.0, 2.0])
    n = tf.constant([1, 2])
    b = tf.constant([True, False])
    return [
        x * [2, 3],
        [2.5, 3.5] - x,
        x - [x, [1.0, 1.0]],
        n // [2, 1],
        [5, 6] % n,
        n < [2, 2],
        n == [1, 3],
        n != [1, 3],
        b & [True, True],
        x ** [2.0, 0.5],
        tf.function(lambda x: x / [2.0, 4.0])(x),
        attempt(lambda: n * [0.5, 1.5]),
    ]


@fact
def tensors_are_known_as_such(tf):
    x = tf.constant(1.0)
    return [isinstance(x, tf.Tensor), tf.is_tensor(x), tf.is_tensor(1.0), tf.is_tensor(np.ones(1))]


@fact
def making_tensors(tf):
    return [
        tf.zeros(2),
        tf.ones((1, 2), tf.int32),
        tf.fill([2], 7.0),
        tf.zeros_like([1, 2]),
        tf.ones_like(tf.constant([1.0])),
        tf.eye(2),
        tf.constant(1.0, shape=(2, 2)),
        tf.linspace(0.0, 1.0, 3),
        tf.convert_to_tensor([[1, 2]]),
    ]


@fact
def shaping(tf):
    x = tf.reshape(tf.range(6), (2, 3))
    return [
        tf.transpose(x),
        tf.reshape(x, (-1,)),
        tf.expand_dims(x, 0).shape,
        tf.squeeze(x[None]).shape,
        tf.stack([x[0], x[1]], axis=1),
        tf.concat([x, x], 0),
        tf.unstack(x)[1],
        tf.split(x, 3, axis=1)[2],
        tf.split(tf.range(5), [2, 3])[1],
        tf.tile(x, [1, 2]),
        tf.repeat([1, 2], 2),
        tf.reverse(x, [1]),
        tf.roll(tf.range(4), 1, 0),
        tf.pad([[1, 2]], [[0, 1], [1, 0]]),
        tf.broadcast_to(tf.constant([1, 2]), (2, 2)),
    ]


@fact
def selecting(tf):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    return [
        tf.gather(x, [1, 0]),
        tf.gather(x, [1], axis=1),
        tf.gather_nd(x, [[0, 1]]),
        tf.where(x > 2, x, -x),
        tf.boolean_mask(x, x > 1),
        tf.slice(x, [0, 1], [2, 1]),
        tf.sort([3, 1, 2], direction="DESCENDING"),
        tf.argsort([3, 1, 2]),
        tf.math.top_k([1.0, 3.0, 2.0], k=2).values,
        tf.unique([1, 2, 1, 3]).y,
        tf.tensor_scatter_nd_update([1, 2, 3], [[1]], [9]),
        tf.scatter_nd([[1], [2]], [5, 6], [4]),
        tf.searchsorted([1, 3, 5], [2, 5]),
    ]


@fact
def reducing_along_axes(tf):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    return [
        tf.reduce_sum(x, axis=0),
        tf.reduce_mean(x, axis=-1, keepdims=True),
        tf.reduce_max(x),
        tf.reduce_min(x, [0, 1]),
        tf.reduce_any(x > 3),
        tf.reduce_all(x > 0),
        tf.math.reduce_std(x),
        tf.math.reduce_variance(x, axis=0),
        tf.reduce_logsumexp(x),
        tf.norm(x),
        tf.cumsum([1, 2, 3]),
        tf.math.cumprod([1, 2, 3], exclusive=True),
    ]


@fact
def elementwise_functions(tf):
    x = tf.constant([0.5, 2.0])
    functions = (
        "abs ceil cos cosh digamma erf exp expm1 floor is_nan lgamma log log1p negative "
        "reciprocal rint rsqrt sigmoid sign sin sinh softplus sqrt square tan tanh"
    )
    return {name: getattr(tf.math, name)(x) for name in functions.split()}


@fact
def rounding_is_to_even(tf):
    return tf.round([0.5, 1.5, 2.5, -0.5, -1.5])


@fact
def functions_of_two(tf):
    a, b = tf.constant([5.0, -3.0]), tf.constant([2.0, 2.0])
    functions = "add divide floordiv floormod greater maximum minimum multiply pow subtract"
    found = {name: getattr(tf.math, name)(a, b) for name in functions.split()}
    return found | {
        "squared difference": tf.math.squared_difference(a, b),
        "divide without nan": tf.math.divide_no_nan(a, tf.constant([0.0, 2.0])),
        "truncated remainder": tf.truncatemod(a, b),
    }


@fact
def clipping(tf):
    x = tf.constant([-3.0, 0.5, 4.0])
    clipped, norm = tf.clip_by_global_norm([x, tf.constant([1.0])], 2.0)
    return [tf.clip_by_value(x, -1.0, 1.0), tf.clip_by_norm(x, 1.0), clipped, norm]


@fact
def sums_of_products(tf):
    a, b = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])
    return [
        tf.matmul(a, b),
        tf.tensordot(a, b, 1),
        tf.einsum("ij,jk->ik", b, a),
        tf.linalg.matmul(a, a, transpose_b=True),
        tf.add_n([a, a, a]),
        tf.linalg.det([[1.0, 2.0], [3.0, 4.0]]),
        tf.linalg.inv([[2.0, 0.0], [0.0, 4.0]]),
    ]


@fact
def neural_functions(tf):
    x = tf.constant([[1.0, -2.0, 3.0]])
    mean, variance = tf.nn.moments(x, axes=[1])
    return [
        tf.nn.relu(x),
        tf.nn.softmax(x),
        tf.nn.log_softmax(x),
        tf.nn.sigmoid(x),
        tf.nn.leaky_relu(x),
        tf.nn.elu(x),
        tf.nn.gelu(x),
        tf.nn.softplus(x),
        tf.nn.l2_loss(x),
        tf.nn.l2_normalize(x, axis=1),
        mean,
        variance,
        tf.nn.bias_add(x, [1.0, 1.0, 1.0]),
        tf.nn.sigmoid_cross_entropy_with_logits(labels=[[1.0, 0.0, 1.0]], logits=x),
        tf.nn.softmax_cross_entropy_with_logits(labels=[[0.0, 0.5, 0.5]], logits=x),
        tf.nn.embedding_lookup(tf.eye(3), [2, 0]),
        tf.nn.in_top_k([0], x, 2),
    ]


@fact
def convolution_and_pooling(tf):
    image = tf.reshape(tf.range(16.0), (1, 4, 4, 1))
    kernel = tf.ones((2, 2, 1, 1))
    return [
        tf.nn.conv2d(image, kernel, strides=1, padding="VALID"),
        tf.nn.conv2d(image, kernel, strides=2, padding="SAME"),
        tf.nn.max_pool2d(image, 2, 2, "VALID"),
        tf.nn.avg_pool2d(image, 2, 2, "SAME"),
    ]


@fact
def zero_fraction_and_counts(tf):
    return [
        tf.math.count_nonzero([0, 1, 2]),
        tf.math.bincount([1, 1, 3]),
        tf.math.confusion_matrix([0, 1, 1], [0, 1, 0]),
        tf.nn.zero_fraction([0.0, 1.0]),
        tf.math.in_top_k([1], [[0.1, 0.9]], 1),
    ]


@fact
def segments(tf):
    data, ids = tf.constant([1.0, 2.0, 3.0, 4.0]), tf.constant([0, 0, 1, 1])
    return [
        tf.math.segment_sum(data, ids),
        tf.math.segment_mean(data, ids),
        tf.math.unsorted_segment_sum(data, tf.constant([1, 0, 1, 0]), 2),
    ]


# -- shapes and specs ----------------------------------------------------------------------


@fact
def tensor_shapes(tf):
    shape = tf.TensorShape([None, 3])
    return [
        shape,
        shape.rank,
        shape[1],
        shape.is_fully_defined(),
        shape.is_compatible_with([5, 3]),
        shape.is_compatible_with([5, 4]),
        shape.merge_with([7, None]),
        shape.concatenate([2]),
        tf.TensorShape(None).rank,
        tf.TensorShape([2, 3]).num_elements(),
        tf.TensorShape([2, 3]) == [2, 3],
        list(tf.TensorShape([2, 3])),
        tf.TensorShape([4]).as_list(),
    ]


@fact
def tensor_specs(tf):
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")
    return [
        spec.shape,
        spec.dtype.name,
        spec.name,
        spec.is_compatible_with(tf.zeros((3, 2))),
        spec.is_compatible_with(tf.zeros((3, 3))),
        spec == tf.TensorSpec([None, 2], tf.float32, name="x"),
        tf.TensorSpec.from_tensor(tf.zeros((1, 2), tf.int32)).shape,
    ]


# -- structures ----------------------------------------------------------------------------


@fact
def nests_are_flattened_in_the_order_of_keys(tf):
    structure = {"b": 2, "a": [1, (3, None)]}
    flat = tf.nest.flatten(structure)
    return [
        flat,
        tf.nest.pack_sequence_as(structure, [10, 20, 30, 40]),
        tf.nest.map_structure(lambda x: x if x is None else x * 2, structure),
        tf.nest.is_nested([1]),
        tf.nest.is_nested(tf.constant([1])),
    ]


@fact
def structures_that_differ_are_refused(tf):
    return [
        attempt(lambda: tf.nest.assert_same_structure([1, 2], [1, (2,)])),
        attempt(lambda: tf.nest.map_structure(lambda a, b: a + b, {"a": 1}, {"b": 1})),
        tf.nest.assert_same_structure({"a": 1}, {"a": 2}) is None,
    ]


# -- text ----------------------------------------------------------------------------------


@fact
def text_is_a_tensor_of_bytes(tf):
    x = tf.constant(["ab", "c"])
    return [
        x,
        x.dtype == tf.string,
        x.shape,
        x.numpy()[0],
        x[1].numpy(),
        tf.constant("word").numpy(),
    ]


@fact
def functions_of_text(tf):
    x = tf.constant(["Ab c", "d"])
    return [
        tf.strings.length(x),
        tf.strings.lower(x),
        tf.strings.upper(x),
        tf.strings.join([x, "!"], separator="-"),
        tf.strings.substr(x, 0, 1),
        tf.strings.to_number(["1.5", "2"]),
        tf.strings.as_string([1, 2]),
        tf.strings.regex_replace(x, "[a-c]", "_"),
        tf.strings.strip([" a "]),
        tf.strings.reduce_join(["a", "b"], separator=","),
        tf.strings.format("{} of {}", (tf.constant(1), tf.constant(2))),
        tf.equal(x, "d"),
        x == "d",
    ]


# -- random numbers and errors -------------------------------------------------------------


@fact
def random_tensors_have_their_shape_dtype_and_range(tf):
    uniform = tf.random.uniform((100,), 2.0, 3.0)
    whole = tf.random.uniform((100,), maxval=5, dtype=tf.int32)
    normal = tf.random.normal((2, 3), dtype=tf.float64)
    return [
        uniform.shape,
        bool(tf.reduce_all((uniform >= 2.0) & (uniform < 3.0))),
        whole.dtype.name,
        bool(tf.reduce_all((whole >= 0) & (whole < 5))),
        normal.dtype.name,
        sorted(tf.random.shuffle(tf.range(5)).numpy().tolist()),
    ]


@fact
def a_seed_repeats_random_numbers(tf):
    def drawn():
        tf.random.set_seed(5)
        return tf.random.normal((3,)).numpy(), tf.random.normal((3,)).numpy()

    (a, b), (c, d) = drawn(), drawn()
    return [bool((a == c).all()), bool((b == d).all()), bool((a == b).all())]


@fact
def stateless_random_numbers_depend_on_their_seed(tf):
    def drawn(seed):
        return tf.random.stateless_uniform((3,), seed=seed).numpy().tolist()

    return [drawn((1, 2)) == drawn((1, 2)), drawn((1, 2)) == drawn((1, 3))]


@fact
def shapes_that_do_not_fit_are_refused(tf):
    return [
        attempt(lambda: tf.matmul(tf.ones((2, 3)), tf.ones((2, 3)))),
        attempt(lambda: tf.reshape(tf.range(6), (4, 2))),
        attempt(lambda: tf.concat([tf.ones((1, 2)), tf.ones((1, 3))], 0)),
        attempt(lambda: tf.constant([1.0, 2.0]) + tf.constant([1.0, 2.0, 3.0])),
        attempt(lambda: tf.stack([tf.ones(2), tf.ones(3)])),
    ]


@fact
def errors_are_caught_by_their_tf_names(tf):
    def caught(action):
        try:
            action()
        except tf.errors.OpError as error:
            return "OpError" if isinstance(error, tf.errors.OpError) else "another"
        except ValueError:
            return "ValueError"

    return [
        issubclass(tf.errors.OutOfRangeError, tf.errors.OpError),
        issubclass(tf.errors.NotFoundError, tf.errors.OpError),
        issubclass(tf.errors.UnavailableError, tf.errors.OpError),
        issubclass(tf.errors.InvalidArgumentError, tf.errors.OpError),
        caught(lambda: tf.debugging.assert_equal(1, 2)),
    ]


@fact
def checks_of_values(tf):
    return [
        attempt(lambda: tf.debugging.assert_equal(1, 2)),
        attempt(lambda: tf.debugging.assert_less(3, 2)),
        attempt(lambda: tf.debugging.assert_near(1.0, 1.1)),
        attempt(lambda: tf.debugging.check_numerics(tf.constant(float("nan")), "bad")),
        attempt(lambda: tf.debugging.assert_shapes([(tf.ones((2, 3)), (2, 4))])),
        attempt(lambda: tf.Assert(False, [1])),
    ]


@fact
def files_are_handled(tf, folder):
    gfile = tf.io.gfile
    gfile.makedirs(f"{folder}/a/b")
    with gfile.GFile(f"{folder}/a/x.txt", "w") as file:
        file.write("hello")
    gfile.copy(f"{folder}/a/x.txt", f"{folder}/a/y.txt")
    listed = sorted(name.rstrip("/") for name in gfile.listdir(f"{folder}/a"))
    gfile.rename(f"{folder}/a/y.txt", f"{folder}/a/z.txt")
    gfile.remove(f"{folder}/a/x.txt")
    found = [
        listed,
        gfile.exists(f"{folder}/a/z.txt"),
        gfile.exists(f"{folder}/a/x.txt"),
        gfile.isdir(f"{folder}/a"),
        gfile.GFile(f"{folder}/a/z.txt").read(),
        [path.rpartition("/")[2] for path in gfile.glob(f"{folder}/a/*.txt")],
        attempt(lambda: gfile.remove(f"{folder}/nothing")),
        tf.io.read_file(f"{folder}/a/z.txt"),
    ]
    gfile.rmtree(f"{folder}/a")
    return [*found, gfile.exists(f"{folder}/a")]


# -- with NumPy ----------------------------------------------------------------------------


@fact
def functions_of_numpy_return_values_of_numpy(tf):
    x = tf.constant([[3.0, 1.0, 2.0]])
    results = [
        np.mean(x),
        np.argmax(x),
        np.squeeze(x),
        np.sum(x, axis=0),
        np.std(x),
        np.round(x),
        np.concatenate([x, x]),
        np.sort(x),
        np.linalg.norm(x),
        np.max(x, axis=1),
        np.array_equal(x, x),
        np.where(x > 1, x, 0 * x),
        list(np.shape(x)),
        np.ndim(x),
        np.size(x),
    ]
    return [[type(result).__name__, result] for result in results]
