"""Tensors of the face: 64 bits, text, shapes in compiled programs, TensorFlow's idioms."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison.tf as tf
from unison.tf.host import HostTensor
from unison.tf.text import StringTensor, as_bytes, as_str_any, as_text


@pytest.fixture
def two():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


# -- dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [tf.int64, tf.float64, tf.uint64, tf.complex128])
def test_64_bits_stay(dtype):
    assert tf.cast([1, 2], dtype).dtype == dtype
    assert tf.zeros([2], dtype).dtype == dtype
    assert tf.constant(np.zeros(2, dtype)).dtype == dtype


def test_the_high_bits_stay():
    assert tf.constant([2**40 + 1], tf.int64).numpy().tolist() == [2**40 + 1]
    assert tf.constant(1 + 2**-40, tf.float64).numpy() == 1 + 2**-40


@pytest.mark.parametrize(
    "operation",
    [
        tf.reduce_max,
        tf.reduce_min,
        tf.reduce_sum,
        tf.argmax,
        tf.sort,
        tf.cumsum,
        tf.abs,
        tf.math.bincount,
        lambda x: tf.unique(x).y,
        lambda x: tf.math.segment_max(x, [0, 1]),
        lambda x: tf.clip_by_value(x, 0, 5),
        lambda x: tf.one_hot(x, 3),
        lambda x: tf.stack([x, x]),
        lambda x: tf.nn.max_pool1d(tf.reshape(x, [1, 2, 1]), 2, 1, "VALID"),
    ],
)
def test_operations_take_int64_also_inside_programs(operation):
    x = tf.constant([1, 2], tf.int64)
    expected = operation(x)
    if operation not in (tf.math.bincount,) and "unique" not in operation.__code__.co_names:
        assert tf.function(operation)(x).tolist() == expected.tolist()
    assert expected.shape is not None


def test_numpy_jax_and_keras_take_the_dtypes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.zeros(2, tf.float32).dtype == jnp.zeros(2, tf.float32).dtype == tf.float32
        assert jnp.zeros(2, tf.bfloat16).dtype == tf.bfloat16
        assert keras.layers.Dense(1, dtype=tf.float16).compute_dtype == "float16"
        assert keras.ops.cast([1], tf.int32).dtype == tf.int32
        assert np.issubdtype(tf.float32, np.floating)


def test_a_dtype_is_the_key_that_an_arrays_dtype_is():
    assert {tf.float32: "found"}[jnp.zeros(1).dtype] == "found"
    assert {jnp.zeros(1).dtype: "found"}[tf.float32] == "found"


def test_a_dtype_travels():
    assert pickle.loads(pickle.dumps(tf.bfloat16)) is tf.bfloat16


def test_mixed_dtypes_are_promoted_as_by_the_operators():
    i, f, d = tf.constant(1), tf.constant(1.0), tf.constant(1.0, tf.float64)
    assert tf.add(i, f).dtype == (i + f).dtype == tf.float32
    assert tf.multiply(f, d).dtype == (f * d).dtype == tf.float64


# -- idioms --------------------------------------------------------------------------------


def test_tensors_have_tensorflows_methods():
    x = tf.constant([[1.0, 2.0]])
    assert x.get_shape().as_list() == [1, 2]
    assert x.shape[0] == 1
    assert x[..., tf.newaxis].shape == (1, 2, 1)
    x.set_shape([None, 2])
    with pytest.raises(ValueError, match="incompatible"):
        x.set_shape([2, 2])


def test_a_reference_is_a_key():
    x, y = tf.constant(1), tf.constant(1)
    seen = {x.ref(): "x"}
    assert seen[x.ref()] == "x"
    assert y.ref() not in seen
    assert x.ref().deref() is x


def test_values_inside_programs_have_the_methods(two):
    found = {}

    def look(x):
        x.set_shape([2])
        found.update(shape=x.get_shape(), ref=x.ref() == x.ref())
        return x

    two.run(look, args=(tf.constant([1.0, 2.0]),))
    assert found == {"shape": tf.TensorShape([2]), "ref": True}


def test_a_replica_program_has_no_numpy_values(two):
    with pytest.raises(TypeError, match=r"x\.numpy\(\)"):
        two.run(lambda x: x.numpy(), args=(tf.constant(1.0),))


def test_a_function_that_wants_numpy_values_runs_step_by_step():
    assert tf.function(lambda x: tf.constant(x.numpy() * 2))(tf.constant(2.0)) == 4.0


def test_what_is_a_tensor():
    for value in (tf.constant(1), tf.constant("a")):
        assert isinstance(value, tf.Tensor)
        assert isinstance(value, (tf.Tensor, tf.Variable))
    assert not isinstance(np.ones(1), tf.Tensor)

    @tf.function
    def inside(x):
        assert isinstance(x, tf.Tensor)
        assert tf.is_symbolic_tensor(x)
        return x

    inside(tf.constant(1.0))


def test_shapes_are_known_inside_programs():
    @tf.function
    def flat(x):
        rows = tf.shape(x)[0]
        assert isinstance(tf.shape(x), HostTensor)
        assert isinstance(tf.shape(x), tf.Tensor)
        if rows > 1:  # Python decides
            x = x * 2
        for _ in range(rows):
            x = x + 1
        total = tf.reduce_prod(tf.shape(x)[1:])
        again = tf.reshape(x, tf.concat([tf.shape(x)[:1], [3, -1]], 0))
        tf.reshape(again, tf.stack([rows, total]))
        tf.zeros([rows * 2, tf.rank(x)])
        return tf.reshape(x, [rows, total]), tf.cast(rows, tf.float32) / tf.cast(
            tf.size(x), tf.float32
        )

    result, share = flat(tf.ones([2, 3, 4]))
    assert result.shape == (2, 12)
    assert result[0, 0] == 4.0
    assert float(share) == pytest.approx(2 / 24)


def test_sizes_that_constants_give_are_known_inside_programs(two):
    def step(x):
        rows = tf.constant(2) * 3
        return tf.reshape(x, [rows, -1])

    assert two.run(step, args=(tf.ones([12]),)).values[0].shape == (6, 2)


def test_the_shape_outside_programs_is_an_array():
    assert isinstance(tf.shape(tf.ones([2])), jax.Array)


def test_operations_of_the_surface_work_inside_replica_programs(two):
    def step(x):
        logits = tf.nn.relu(tf.matmul(x, tf.ones([3, 2])))
        best = tf.math.top_k(logits, 1).indices
        clipped, norm = tf.clip_by_global_norm([logits, None], 1.0)
        parts = tf.split(tf.gather(clipped[0], [0], axis=1), 2)
        return tf.concat(parts, 0), tf.one_hot(best, 2), norm, tf.argmax(logits, 1)

    merged, hot, norm, place = two.run(step, args=(tf.ones([2, 3]),))
    assert (merged.values[1].shape, hot.values[0].shape) == ((2, 1), (2, 1, 2))
    assert float(norm.values[0]) == 6.0
    assert place.values[0].dtype == tf.int64


# -- text ----------------------------------------------------------------------------------


def test_text_is_a_tensor_of_bytes():
    words = tf.constant([["a", "bc"], ["d", "é"]])
    assert isinstance(words, StringTensor)
    assert words.dtype == tf.string
    assert words.dtype.name == "string"
    assert words.shape == (2, 2)
    assert words.numpy().tolist() == [[b"a", b"bc"], [b"d", "é".encode()]]
    assert words[0, 1].numpy() == b"bc"
    assert [row.shape for row in words] == [(2,), (2,)]
    assert words[tf.constant(1)][0].numpy() == b"d"


def test_text_compares_by_value_and_is_no_key():
    word = tf.constant("a")
    assert word == "a"
    assert word != "b"
    assert word != b"c"
    with pytest.raises(TypeError, match="unhashable"):
        hash(word)
    assert word.ref() == word.ref()


def test_text_travels_and_prints():
    words = pickle.loads(pickle.dumps(tf.constant(["a"])))
    assert isinstance(words, StringTensor)
    assert words.numpy().tolist() == [b"a"]
    assert f"{tf.constant('a')}" == "tf.Tensor(b'a', shape=(), dtype=string)"


def test_text_and_numbers_do_not_mix():
    with pytest.raises(TypeError, match="tensor of dtype float32"):
        tf.constant("a", tf.float32)
    with pytest.raises(TypeError, match="Expected text"):
        tf.constant(1, tf.string)
    with pytest.raises(ValueError, match="mixed types"):
        tf.constant(["a", 1])


def test_text_is_converted():
    assert (as_bytes("é"), as_text(b"a"), as_str_any(5)) == ("é".encode(), "a", "5")
    with pytest.raises(TypeError, match="binary or unicode"):
        as_bytes(5)


def test_several_strings_split_into_a_ragged_tensor():
    assert tf.strings.split(["a b", "c"]).to_list() == [[b"a", b"b"], [b"c"]]


def test_the_label_of_a_path():
    parts = tf.strings.split(tf.constant("data/cats/1.jpg"), "/")
    label = tf.argmax(tf.cast(parts[-2] == tf.constant(["cats", "dogs"]), tf.int32))
    assert int(label) == 0


# -- devices, Python, assertions -----------------------------------------------------------


def test_a_device_holds_what_is_made_inside():
    with tf.device("/device:CPU:1"):
        made = tf.ones([2])
    assert made.device == jax.devices("cpu")[1]
    with tf.device(None):
        assert tf.ones([1]).device == jax.devices("cpu")[0]


def test_a_device_that_is_not_there_is_the_cpu_unless_placement_is_hard():
    with tf.device("GPU:7"):
        assert tf.ones([1]).device.platform == "cpu"
    tf.config.set_soft_device_placement(False)
    try:
        with pytest.raises(ValueError, match="Expected one of the devices"):
            tf.device("GPU:7")
    finally:
        tf.config.set_soft_device_placement(True)


def test_python_functions_are_called_when_the_program_runs(two):
    calls = []

    def on_host(x):
        calls.append(np.asarray(x).tolist())
        return np.float32(x * 2)

    result = two.run(
        lambda: tf.numpy_function(
            on_host,
            [tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)],
            tf.float32,
        )
    )
    assert [float(value) for value in result.values] == [0.0, 2.0]
    assert sorted(calls) == [0.0, 1.0]


def test_functions_know_whether_they_are_compiled():
    seen = []
    tf.function(lambda: seen.append(tf.executing_eagerly()))()
    assert (tf.executing_eagerly(), seen[0], tf.inside_function()) == (True, False, False)


def test_what_is_asserted_in_a_program_is_looked_at_when_it_runs():
    @tf.function
    def root(x):
        tf.debugging.assert_non_negative(x, message="roots of negative numbers")
        return tf.sqrt(x)

    assert float(root(tf.constant(4.0))) == 2.0
    with pytest.raises(Exception, match="roots of negative numbers"):
        jax.block_until_ready(root(tf.constant(-4.0)))


def test_a_loop_in_a_program_fills_a_tensor_array(two):
    def step(n):
        array = tf.TensorArray(tf.float32, size=4)
        _, array = tf.while_loop(
            lambda i, _: i < n,
            lambda i, a: (i + 1, a.write(i, tf.cast(i, tf.float32) * 2)),
            (tf.constant(0), array),
        )
        return array.stack()

    assert two.run(step, args=(tf.constant(3),)).values[1].tolist() == [0.0, 2.0, 4.0, 0.0]


def test_a_branch_in_a_program_assigns_variables(two):
    with two.scope():
        skipped = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def step(loss):
        return tf.cond(tf.math.is_finite(loss), lambda: loss, lambda: skipped.assign_add(1.0) * 0.0)

    two.run(step, args=(tf.constant(np.inf, tf.float32),))
    assert float(skipped) == 2.0


def test_a_choice_of_several_in_a_program(two):
    def step(index):
        return tf.switch_case(index, [lambda: 1.0, lambda: 2.0], default=lambda: 9.0), tf.case(
            [(index > 5, lambda: 1), (index > 0, lambda: 2)], default=lambda: 3
        )

    for index, chosen, case in [(0, 1.0, 3), (1, 2.0, 2), (7, 9.0, 1), (-1, 9.0, 3)]:
        found = two.run(step, args=(tf.constant(index),))
        assert [float(found[0].values[1]), int(found[1].values[1])] == [chosen, case]


def test_mapping_in_a_program_is_a_loop_of_it():
    @tf.function
    def scaled(xs):
        return (
            tf.map_fn(lambda x: x * 2, xs),
            tf.scan(lambda a, x: a + x, xs),
            tf.foldr(lambda a, x: a - x, xs),
        )

    mapped, sums, folded = scaled(tf.constant([1.0, 2.0, 5.0]))
    assert (mapped.tolist(), sums.tolist(), float(folded)) == ([2, 4, 10], [1, 3, 8], 2.0)


def test_an_optimizer_may_be_applied_in_a_branch(two):
    with two.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="ones")]
        )
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        count = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    weights = model.trainable_variables

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, weights)
        count.assign_add(1)

        def apply():
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return True

        return tf.cond(tf.equal(count % 2, 0), apply, lambda: False)

    applied = [two.run(step, args=(tf.ones([4, 2]),)).values[1] for _ in range(2)]
    assert [bool(one) for one in applied] == [False, True]
    # Each replica's gradient is 4, and they are summed.
    np.testing.assert_allclose(weights[0].numpy().ravel(), [0.2, 0.2], rtol=1e-6)
    assert int(optimizer.iterations) == 1


def test_the_sum_of_text_is_text():
    joined = tf.add(tf.constant(["a"]), tf.constant(["b"]))
    assert (type(joined), joined.numpy().tolist()) == (type(tf.constant(["a"])), [b"ab"])
