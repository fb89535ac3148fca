"""`import unison.tf as tf`: TensorFlow's names on JAX's arrays."""

import collections
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
import unison.tf as tf
from subprocess_program import run_program


@pytest.fixture
def two():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def output_of(program: str, **env: str) -> list[str]:
    finished = run_program(program, env=env, imported=("jax",))
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


# -- importing -----------------------------------------------------------------------------


def test_importing_it_starts_no_backend_and_leaves_keras_alone():
    program = """
import sys
import unison.tf as tf
from unison.runtime.private_jax import backend_is_started
print(backend_is_started(), "keras" in sys.modules, "tensorflow" in sys.modules)
"""
    assert output_of(program) == ["False False False"]


def test_keras_first_used_inside_a_scope_is_distributed():
    program = """
import unison.tf as tf
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
from unison.keras.trainer import trainer_of
print(trainer_of(model).strategy is strategy)
print(model.weights[0].cell.placement.num_replicas)
"""
    assert output_of(program, UNISON_CPU_DEVICES="2") == ["True", "2"]


def test_keras_can_be_imported_by_name():
    from unison.tf import keras
    from unison.tf.keras.layers import Dense

    assert keras.layers.Dense is Dense is tf.keras.layers.Dense


def test_tf_keras_is_keras_own():
    import keras

    assert tf.keras.Model is keras.Model


# -- names ---------------------------------------------------------------------------------


def test_every_listed_name_is_there():
    for module in (tf, tf.distribute, tf.distribute.experimental):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_core_has_the_same_objects():
    assert issubclass(tf.Variable, unison.Variable)
    assert tf.distribute.MirroredStrategy is unison.MirroredStrategy
    assert tf.distribute.ReduceOp is unison.ReduceOp
    assert tf.distribute.get_strategy is unison.get_strategy


@pytest.mark.parametrize(
    "choice",
    [
        tf.distribute.HierarchicalCopyAllReduce(num_packs=2),
        tf.distribute.NcclAllReduce(),
        tf.distribute.ReductionToOneDevice("CPU:0"),
    ],
)
def test_a_mirrored_strategy_takes_a_choice_of_all_reduce(choice):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=choice)
    assert strategy.num_replicas_in_sync == 2


def test_run_takes_options(two):
    options = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)
    assert two.run(lambda: 1, options=options).values == (1, 1)


# -- tensors -------------------------------------------------------------------------------


def test_arrays_have_numpy():
    array = tf.constant([1, 2]).numpy()
    array[0] = 5  # it is the caller's own
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [5, 2]


def test_a_scalar_gives_a_numpy_scalar():
    assert isinstance(tf.constant(1.5).numpy(), np.float32)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1, tf.int32), (1.0, tf.float32), (True, tf.bool), ([1, 2.0], tf.float32)]
)
def test_python_values_have_tensorflows_dtypes(value, dtype):
    constant = tf.constant(value)
    assert constant.dtype == dtype
    assert not constant.weak_type


def test_python_values_keep_32_bits_where_jax_has_64():
    program = """
import unison.tf as tf
print(tf.constant(1.0).dtype, tf.constant(1).dtype, tf.zeros(2).dtype)
print(tf.cast(1, tf.int64).dtype, tf.constant(1, tf.float64).dtype)
"""
    assert output_of(program, JAX_ENABLE_X64="1") == ["float32 int32 float32", "int64 float64"]


@pytest.mark.filterwarnings("error")
def test_64_bits_that_are_asked_for_stay_without_a_word():
    assert tf.cast([1.7, 2.2], tf.int64).dtype == tf.int64
    assert tf.constant(1.0, tf.float64).dtype == tf.float64


def test_a_tensor_made_before_the_strategy_leaves_it_all_devices():
    program = """
import unison.tf as tf
x = tf.constant([1.0, 2.0])
strategy = tf.distribute.MirroredStrategy()
print(strategy.num_replicas_in_sync, strategy.reduce("SUM", strategy.run(tf.reduce_sum, (x,))))
"""
    assert output_of(program, UNISON_CPU_DEVICES="2") == ["2 6.0"]


def test_a_constant_takes_a_shape():
    assert tf.constant(7, shape=(2, 2)).tolist() == [[7, 7], [7, 7]]
    assert tf.constant([1, 2, 3, 4], shape=(2, 2)).tolist() == [[1, 2], [3, 4]]


def test_tensors_lists_and_variables_are_operands():
    variable = tf.Variable([1.0, 2.0])
    assert tf.add(variable, [1.0, 1.0]).tolist() == [2.0, 3.0]
    assert tf.reduce_sum(variable).tolist() == 3.0
    assert tf.stack([variable, tf.zeros(2)]).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert tf.convert_to_tensor([variable, variable]).shape == (2, 2)
    assert tf.matmul([[1.0, 2.0]], [[3.0, 4.0]], transpose_b=True).tolist() == [[11.0]]


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (lambda: tf.reduce_mean([1, 2]), 1),  # an integer's mean stays an integer
        (lambda: tf.reduce_mean([[1.0, 2.0], [3.0, 4.0]], axis=[0]), [2.0, 3.0]),
        (lambda: tf.argmax([[1, 9], [5, 2]]), [1, 0]),  # along the first axis
        (lambda: tf.split(tf.range(5), [2, 3])[1], [2, 3, 4]),
        (lambda: tf.range(1, 6, 2), [1, 3, 5]),
        (lambda: tf.concat([[1], [2, 3]], 0), [1, 2, 3]),
        (lambda: tf.one_hot([1], 3), [[0.0, 1.0, 0.0]]),
        (lambda: tf.shape(tf.zeros((2, 3))), [2, 3]),
        (lambda: tf.where([True, False], 1, [2, 3]), [1, 3]),
        (lambda: tf.gather([5, 6, 7], [2, 0]), [7, 5]),
        (lambda: tf.reduce_sum([1, 2], keepdims=True), [3]),
        (lambda: tf.nn.softmax([0.0, 0.0]), [0.5, 0.5]),
        (lambda: tf.nn.relu([-1.0, 2.0], name="relu"), [0.0, 2.0]),
    ],
)
def test_operations_have_tensorflows_defaults(computed, expected):
    assert computed().tolist() == expected


def test_cross_entropies_agree():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    labels = np.array([0, 2, 1, 1])
    sparse = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    dense = tf.nn.softmax_cross_entropy_with_logits(np.eye(3)[labels], logits)
    by_hand = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), labels]
    np.testing.assert_allclose(sparse, by_hand, rtol=1e-5)
    np.testing.assert_allclose(dense, by_hand, rtol=1e-5)


# -- the average loss ----------------------------------------------------------------------


def test_only_the_first_axis_counts_as_the_batch():
    assert float(tf.nn.compute_average_loss([[1.0, 2.0], [3.0, 4.0]])) == 5.0


def test_the_default_batch_is_that_of_all_replicas(two):
    average = two.run(lambda: tf.nn.compute_average_loss([2.0, 4.0]))
    assert [float(part) for part in average.values] == [1.5, 1.5]


def test_weights_and_the_global_batch_can_be_stated():
    average = tf.nn.compute_average_loss([2.0, 4.0], sample_weight=[1.0, 0.5], global_batch_size=8)
    assert float(average) == 0.5


def test_an_average_needs_a_replica_or_a_batch_size(two):
    with two.scope(), pytest.raises(RuntimeError, match="cross-replica context"):
        tf.nn.compute_average_loss([1.0])


def test_a_scalar_loss_has_no_average():
    with pytest.raises(ValueError, match="reduction='none'"):
        tf.nn.compute_average_loss(1.0)


# -- functions, printing, random numbers ---------------------------------------------------


def test_a_function_is_called_through():
    @tf.function
    def double(x):
        """Doubles."""
        return 2 * x

    assert double(3) == 6
    assert double.__doc__ == "Doubles."


def test_a_function_takes_options_and_knows_them():
    assert tf.function(lambda: 1, jit_compile=True)() == 1
    assert tf.function(reduce_retracing=True)(lambda: 2)() == 2
    with pytest.raises(TypeError, match="Received: jit_compiled"):
        tf.function(jit_compiled=True)


def test_a_method_that_is_a_function_is_compiled_once(two):
    class Trainer:
        @tf.function
        def step(self, x):
            return x + 1

    trainer = Trainer()
    for _ in range(3):
        result = two.run(trainer.step, args=(tf.constant(1.0),))
    assert [float(value) for value in result.values] == [2.0, 2.0]
    assert two.trace_count == 1


def test_every_replica_prints_its_own_values(two):
    stream = io.StringIO()

    def show():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.print("replica:", index, output_stream=stream)
        return index

    for _ in range(2):
        two.run(show)
    jax.effects_barrier()
    assert sorted(stream.getvalue().splitlines()) == ["replica: 0"] * 2 + ["replica: 1"] * 2


def test_what_a_program_always_prints_is_printed_whenever_it_runs(two):
    """TensorFlow's lines, which it printed when this was written down."""
    stream = io.StringIO()

    @tf.function
    def steps(x):
        tf.print("step", 7, output_stream=stream)
        return x + 1

    def signs(x):
        if x > 0:
            tf.print("positive", output_stream=stream)
        else:
            tf.print("negative", output_stream=stream)

    for number in range(3):
        steps(tf.constant(number))
    for number in (1, -1, 1):
        two.run(signs, args=(tf.constant(number),))
    dataset = tf.data.Dataset.range(3)
    list(dataset.map(lambda x: (tf.print("element", output_stream=stream), x)[1]))
    jax.effects_barrier()
    printed = collections.Counter(stream.getvalue().splitlines())
    assert printed == {"step 7": 3, "positive": 4, "negative": 2, "element": 3}


def test_printing_goes_to_standard_error_at_once(capsys):
    tf.print("loss:", tf.constant(0.5), sep="", end="!")
    assert capsys.readouterr().err == "loss:0.5!"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.float32(1.0), "1"),
        (np.float32(0.1), "0.1"),
        (np.float32(np.pi), "3.14159274"),
        (np.array(True), "1"),
        (np.array([1.0, 2.5]), "[1 2.5]"),
        (np.arange(10), "[0 1 2 ... 7 8 9]"),
        (np.array([[1, 2], [3, 40]]), "[[1 2]\n [3 40]]"),
        ([np.int32(1), "a"], "[1, 'a']"),
        ({"loss": np.float32(2.0)}, "{'loss': 2}"),
        (None, "None"),
    ],
)
def test_values_are_printed_as_tensorflow_prints_them(value, shown):
    stream = io.StringIO()
    tf.print(value, output_stream=stream)
    assert stream.getvalue() == f"{shown}\n"


def test_all_elements_are_printed_when_asked_for():
    stream = io.StringIO()
    tf.print(jnp.arange(10), output_stream=stream, summarize=-1)
    assert stream.getvalue() == "[0 1 2 3 4 5 6 7 8 9]\n"


def test_what_is_no_stream_is_refused():
    with pytest.raises(ValueError, match="output_stream must be a text stream"):
        tf.print(1, output_stream=logging.INFO)


def test_a_seed_starts_the_random_stream_anew():
    tf.random.set_seed(3)
    first, second = tf.random.normal((4,)), tf.random.normal((4,))
    tf.random.set_seed(3)
    assert first.tolist() == tf.random.normal((4,)).tolist() != second.tolist()


def test_uniform_integers_stay_in_their_range():
    drawn = tf.random.uniform((100,), 2, 5, tf.int32)
    assert set(drawn.tolist()) == {2, 3, 4}


def test_a_stateless_draw_is_determined_by_its_seed(two):
    def draw(step):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.random.stateless_uniform((3,), seed=[step, index])

    first, second = two.run(draw, args=(tf.constant(7),)).values
    assert first.tolist() == tf.random.stateless_uniform((3,), seed=[7, 0]).tolist()
    assert first.tolist() != second.tolist()
