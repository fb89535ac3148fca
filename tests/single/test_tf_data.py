"""`tf.data`: the elements and the functions' arguments are tensors; functions are compiled."""

import logging
import time

import jax
import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.tf.data import functions

Dataset = tf.data.Dataset


@pytest.fixture
def programs(monkeypatch):
    """The programs that functions became: `None` for one that is called in Python."""
    made = []
    trace = functions.TensorFunction._trace

    def noting(self, *args):
        made.append(trace(self, *args))
        return made[-1]

    monkeypatch.setattr(functions.TensorFunction, "_trace", noting)
    return made


@pytest.fixture
def block_sizes(monkeypatch):
    """The sizes of the blocks that compiled functions were called for."""
    sizes = []
    on_block = functions._Program.on_block

    def noting(self, epoch, block, indices):
        sizes.append(len(indices))
        return on_block(self, epoch, block, indices)

    monkeypatch.setattr(functions._Program, "on_block", noting)
    return sizes


def numbers(dataset):
    return [float(x) for x in dataset]


# -- elements ------------------------------------------------------------------------------


def test_elements_are_arrays_of_jax_that_keep_64_bits():
    (element,) = Dataset.from_tensor_slices(np.array([2**40]))
    assert isinstance(element, jax.Array)
    assert element.dtype == tf.int64
    assert int(element.numpy()) == 2**40


def test_text_elements_are_string_tensors():
    dataset = Dataset.from_tensor_slices(["a", "bc"])
    assert [text.numpy() for text in dataset] == [b"a", b"bc"]
    (batch,) = dataset.batch(2)
    assert batch.dtype == tf.string
    assert batch.numpy().tolist() == [b"a", b"bc"]


def test_what_numpy_makes_an_array_of_keeps_its_dtype():
    class Column:
        """As a pandas Series."""

        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    assert Dataset.from_tensor_slices({"n": Column()}).element_spec["n"].dtype == tf.int64


def test_nested_datasets_are_datasets_of_tensors():
    for window in Dataset.range(4).window(2):
        assert isinstance(window, tf.data.Dataset)
        assert all(isinstance(x, jax.Array) for x in window)


def test_every_transformation_returns_a_dataset_of_tensors():
    dataset = Dataset.range(4)
    for made in (
        dataset.batch(2),
        dataset.map(lambda x: x).filter(lambda x: True),
        dataset.shuffle(2).repeat(2).take(3),
        dataset.apply(lambda d: d.prefetch(1)),
        Dataset.zip((dataset, dataset)),
        tf.data.TextLineDataset("x").skip(1),
    ):
        assert type(made) is tf.data.Dataset


def test_arguments_of_tensorflow_without_a_meaning_are_accepted():
    dataset = Dataset.range(4, name="numbers").map(lambda x: x, name="same", synchronous=True)
    dataset = dataset.batch(2, num_parallel_calls=2, deterministic=True, name="batches")
    assert len(dataset.repeat(2, name="twice")) == 4
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        dataset.batch(2, size=3)


def test_a_subclass_that_returns_a_dataset_works_as_in_tensorflows_guide():
    class Slow(tf.data.Dataset):
        @staticmethod
        def _generator(num_samples):
            yield from range(num_samples)

        def __new__(cls, num_samples=3):
            return tf.data.Dataset.from_generator(
                cls._generator,
                output_signature=tf.TensorSpec(shape=(), dtype=tf.int64),
                args=(num_samples,),
            )

    assert numbers(Slow(2)) == [0, 1]


# -- compiled functions --------------------------------------------------------------------


def test_a_function_of_arrays_is_traced_once_and_called_for_whole_batches(programs, block_sizes):
    calls = []
    dataset = Dataset.range(100).map(lambda x: calls.append(1) or x * 2).batch(32)
    for _ in range(2):
        assert np.concatenate(list(dataset)).tolist() == list(range(0, 200, 2))
    assert len(calls) == len(programs) == 1
    assert block_sizes == [32, 32, 32, 4] * 2


def test_a_mapped_dataset_is_shuffled_by_index(block_sizes):
    dataset = Dataset.range(20).map(lambda x: x * x).shuffle(20, seed=1).batch(8)
    assert sorted(np.concatenate(list(dataset)).tolist()) == [x * x for x in range(20)]
    assert block_sizes == [8, 8, 4]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_compiled_functions_keep_dtypes(dtype):
    values = np.array([0, 1, 2**33 if dtype in ("int64", "float64") else 1]).astype(dtype)
    for dataset in (
        Dataset.from_tensor_slices(values),
        Dataset.from_tensor_slices(values).batch(3),
    ):
        mapped = list(dataset.map(lambda x: (x, tf.cast(x, tf.int64))))
        assert {x.dtype for x, _ in mapped} == {np.dtype(dtype)}
        assert np.hstack([y for _, y in mapped]).tolist() == values.astype("int64").tolist()


def test_batches_of_many_sizes_are_padded_to_few(programs):
    sizes = [5, 6, 7, 9, 10, 11, 12, 13]
    dataset = Dataset.range(73).map(lambda x: x + 1)
    for size in sizes:
        assert np.concatenate(list(dataset.batch(size))).tolist() == list(range(1, 74))
    (program,) = programs
    assert len(program._sizes) <= functions._EXACT_SIZES


def test_a_function_whose_results_need_values_is_called_with_values(programs):
    dataset = Dataset.range(6).map(lambda x: x if x > 3 else -x)
    assert numbers(dataset) == [0, -1, -2, -3, 4, 5]
    assert programs == [None]
    assert numbers(Dataset.range(1, 4).map(lambda n: tf.reduce_sum(tf.range(int(n))))) == [0, 1, 3]


def test_a_function_that_uses_numpy_is_called_with_values(programs):
    assert numbers(Dataset.range(3).map(lambda x: np.asarray(x) * 2)) == [0, 2, 4]
    assert programs == [None]


def test_effects_happen_for_every_element(capfd):
    assert len(list(Dataset.range(3).map(lambda x: tf.print("seen", x) or x))) == 3
    assert capfd.readouterr().err.count("seen") == 3


def test_python_functions_are_called_for_every_element():
    seen = []

    def note(x):
        seen.append(int(x))
        return x

    mapped = Dataset.range(3).map(lambda x: tf.py_function(note, [x], tf.int64))
    assert numbers(mapped) == [0, 1, 2]
    assert seen == [0, 1, 2]


def test_a_function_that_fails_raises_its_own_error():
    with pytest.raises(TypeError, match="positional argument"):
        list(Dataset.zip((Dataset.range(2), Dataset.range(2))).map(lambda x: x))
    with pytest.raises(KeyError, match="absent"):
        list(Dataset.from_tensor_slices({"a": [1]}).map(lambda d: d["absent"]))


def test_a_tf_function_is_mapped():
    @tf.function
    def double(x):
        return 2 * x

    assert numbers(Dataset.range(3).map(double)) == [0, 2, 4]


def test_functions_are_seen_as_they_are_in_debug_mode(monkeypatch):
    monkeypatch.setattr(functions, "_debug", True)
    seen = []
    list(Dataset.range(3).map(lambda x: seen.append(int(x)) or x))
    assert seen == [0, 1, 2]


def test_the_element_spec_of_a_compiled_function_keeps_open_what_is_open():
    dataset = Dataset.range(10).batch(3).map(lambda x: (x, tf.stack([x, x]), tf.reduce_sum(x)))
    assert [spec.shape.as_list() for spec in dataset.element_spec] == [[None], [2, None], []]


# -- variables -----------------------------------------------------------------------------


def test_a_function_sees_what_a_variable_holds_when_it_is_called(programs):
    offset = tf.Variable(1.0)
    dataset = Dataset.from_tensor_slices([1.0, 2.0]).map(lambda x: x + offset)
    assert numbers(dataset) == [2, 3]
    offset.assign(10.0)
    assert numbers(dataset) == [11, 12]
    assert programs == [None]


def test_a_function_may_assign_a_variable_once_an_element():
    count = tf.Variable(0)
    list(Dataset.range(5).map(lambda x: count.assign_add(1), num_parallel_calls=2))
    assert int(count) == 5


def test_a_keras_layer_with_weights_is_mapped_with_the_weights_it_has(programs):
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    dataset = Dataset.from_tensor_slices(np.ones((4, 3), "float32")).batch(2).map(layer)
    assert np.concatenate(list(dataset)).tolist() == [[3.0]] * 4
    layer.kernel.assign(2 * layer.kernel)
    assert np.concatenate(list(dataset)).tolist() == [[6.0]] * 4


# -- random numbers ------------------------------------------------------------------------


def noise(x):
    return x + tf.random.uniform([], dtype=tf.float32)


def zeros(count):
    return Dataset.from_tensor_slices(np.zeros(count, "float32"))


def test_every_element_and_every_pass_gets_other_numbers(programs, block_sizes):
    dataset = zeros(64).map(noise).batch(16)
    first, second = np.concatenate(list(dataset)), np.concatenate(list(dataset))
    assert len({*first.tolist(), *second.tolist()}) == 128
    assert None not in programs
    assert block_sizes == [16] * 8


def test_the_numbers_of_an_element_do_not_depend_on_how_it_is_computed():
    def drawn(make):
        tf.random.set_seed(3)
        return np.hstack(list(make(zeros(12).map(noise)))).tolist()

    alone = drawn(lambda d: d)
    assert drawn(lambda d: d.batch(5)) == alone
    assert drawn(lambda d: d.batch(4).prefetch(2)) == alone
    assert sorted(drawn(lambda d: d.shuffle(12, seed=1).batch(5))) == sorted(alone)


def test_set_seed_makes_a_pipeline_repeatable():
    def passes():
        tf.random.set_seed(8)
        dataset = zeros(6).shuffle(6).map(noise)
        return numbers(dataset), numbers(dataset)

    first, second = passes()
    assert (first, second) == passes()
    assert first != second


def test_several_draws_for_an_element_are_different():
    dataset = zeros(3).map(lambda x: tf.stack([noise(x), noise(x), noise(x)]))
    assert len(set(np.concatenate(list(dataset)).tolist())) == 9


def test_states_of_elements_are_far_from_each_other():
    numbers_of = [0, 1, 2**22 - 1, 2**22, 2**31]
    states = functions._states_from(7, np.array(numbers_of))
    assert len({tuple(state) for state in states.tolist()}) == len(numbers_of)
    assert np.diff(sorted(counter for _, counter in states.tolist()))[-1] >= 1 << 10


@pytest.mark.parametrize("is_batched_first", [True, False])
def test_keras_augmentation_layers_are_compiled(programs, is_batched_first):
    flip = tf.keras.layers.RandomFlip("horizontal", seed=1)
    image = np.tile(np.arange(4, dtype="float32")[:, None], (64, 4, 1, 1))
    images = Dataset.from_tensor_slices(image)
    if is_batched_first:
        dataset = images.batch(16).map(lambda x: flip(x, training=True))
    else:
        dataset = images.map(lambda x: flip(x[None], training=True)[0]).batch(16)
    flipped = np.concatenate(list(dataset))[:, 0, 0, 0] == 3
    assert 15 < flipped.sum() < 49
    assert None not in programs
    again = np.concatenate(list(dataset))[:, 0, 0, 0] == 3
    assert (flipped != again).any()
    # The layer itself is as usable as before.
    assert np.asarray(flip(image, training=True)).shape == image.shape


def test_a_layer_that_is_made_in_every_call_is_called_in_python(programs):
    def flip(x):
        return tf.keras.layers.RandomFlip("horizontal")(x[None], training=True)[0]

    dataset = Dataset.from_tensor_slices(np.ones((2, 2, 2, 1), "float32")).map(flip)
    assert [x.shape for x in dataset] == [(2, 2, 1)] * 2
    assert programs == [None]


def test_a_generator_object_goes_on_from_pass_to_pass():
    generator = tf.random.Generator.from_seed(4)
    dataset = zeros(8).map(lambda x: x + generator.uniform([]))
    first, second = numbers(dataset), numbers(dataset)
    assert len({*first, *second}) == 16


# -- where a dataset is used ---------------------------------------------------------------


def test_a_dataset_is_iterated_inside_a_tf_function():
    @tf.function
    def total(dataset):
        result = tf.constant(0, tf.int64)
        for x in dataset:
            result += x
        return result

    assert int(total(Dataset.range(5))) == 10


def test_an_iterator_is_passed_into_a_tf_function():
    @tf.function
    def step(iterator):
        return next(iterator) * 2

    iterator = iter(Dataset.range(3))
    assert [int(step(iterator)) for _ in range(3)] == [0, 2, 4]


def test_an_optional_is_asked_inside_a_tf_function():
    @tf.function
    def total(iterator):
        result = tf.constant(0, tf.int64)
        optional = iterator.get_next_as_optional()
        while optional.has_value():
            result += optional.get_value()
            optional = iterator.get_next_as_optional()
        return result

    assert int(total(iter(Dataset.range(4)))) == 6


def test_a_dataset_inside_a_replica_program_is_an_error_that_says_why():
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = iter(Dataset.range(4))
    for program in (lambda: next(iterator), lambda: list(Dataset.range(2))):
        with pytest.raises(RuntimeError, match="every step would see the same elements"):
            strategy.run(program)


def test_a_pipeline_works_under_an_open_tape():
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        (scale,) = Dataset.from_tensors(3.0).map(lambda v: v + 1)
        y = scale * x * x
    assert float(tape.gradient(y, x)) == 16.0


def test_a_pipeline_works_in_a_scope_and_where_jax_traces():
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        assert numbers(Dataset.range(3).map(lambda x: x + 1)) == [1, 2, 3]
    dataset = Dataset.range(3).map(lambda x: x + 1)
    assert float(jax.jit(lambda y: y + sum(map(int, dataset.as_numpy_iterator())))(1.0)) == 7.0


def test_options_are_groups_and_refuse_what_they_do_not_have():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 4
    options.experimental_optimization.map_parallelization = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = Dataset.range(3).with_options(options).batch(2).with_options(tf.data.Options())
    policy = dataset.options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF
    with pytest.raises(AttributeError, match="Cannot set the property map_parallelism"):
        options.experimental_optimization.map_parallelism = True


def test_names_that_are_missing_say_what_to_use_instead():
    with pytest.raises(AttributeError, match=r"experimental\.SqlDataset is not support.*sqlite3"):
        tf.data.experimental.SqlDataset  # noqa: B018
    with pytest.raises(AttributeError, match=r"Dataset\.sparse_batch is not support.*padded_batch"):
        tf.data.Dataset.range(3).sparse_batch(2)
    with pytest.raises(AttributeError, match="no attribute 'shufle'"):
        tf.data.Dataset.range(3).shufle(2)


def test_why_a_function_is_called_in_python_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="unison"):
        list(Dataset.range(1).map(lambda x: x if x else -x))
    assert "The function of map is called in Python" in caplog.text


def test_an_epoch_of_small_images_takes_milliseconds():
    images = np.zeros((60_000, 28, 28), "uint8")
    labels = np.zeros(60_000, "int64")
    dataset = Dataset.from_tensor_slices((images, labels)).shuffle(60_000).batch(64)
    elements = dataset.as_numpy_iterator()
    next(elements)
    begin = time.perf_counter()
    assert sum(1 for _ in elements) == 937
    # 0.02 s alone on this kind of machine; element by element it would be 0.3 s and more.
    assert time.perf_counter() - begin < 1.0
