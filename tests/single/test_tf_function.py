"""`tf.function`. Numbers and error families are TensorFlow 2.21's."""

import numpy as np
import pytest

import unison.tf as tf


@tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
def total(x):
    return tf.reduce_sum(x)


@pytest.mark.parametrize("value", [[[1, 2]], np.ones((1, 2), np.float32) * 1.5])
def test_an_input_signature_converts_what_is_no_tensor(value):
    assert float(total(value)) == 3.0


def test_arguments_may_be_named():
    assert float(total(x=tf.ones([2, 2]))) == 4.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((lambda: tf.constant([[1, 2]]),), "int32"),
        ((lambda: tf.ones([3]),), r"\(3,\)"),
        ((lambda: 1.0,), r"\(\)"),
        ((), "x"),
        ((lambda: tf.ones([1, 2]), lambda: 3), "too many"),
    ],
)
def test_what_does_not_fit_the_signature_is_a_type_error(args, message):
    with pytest.raises(TypeError, match=message):
        total(*(arg() for arg in args))


def test_nested_signatures():
    spec = {"a": tf.TensorSpec([], tf.float32), "b": [tf.TensorSpec([None], tf.int32)]}
    pick = tf.function(lambda d: (d["a"], d["b"][0]), input_signature=[spec])
    a, b = pick({"a": 1, "b": [[1, 2]]})
    assert (a.dtype, b.dtype) == (tf.float32, tf.int32)
    with pytest.raises(TypeError, match="structure"):
        pick({"a": 1})


def test_traces_are_counted_by_signature():
    scale = tf.function(lambda x, factor: x * factor)
    for args in [(tf.constant(1.0), 2.0), (tf.constant(2.0), 2.0), (tf.constant(2.0), 3.0)]:
        scale(*args)
    assert scale.experimental_get_tracing_count() == 2
    scale(1.0, 2.0)  # a Python number is part of the signature
    assert scale.experimental_get_tracing_count() == 3


def test_results_are_tensors():
    v = tf.Variable(1.0)
    assert isinstance(tf.function(lambda: v)(), tf.Tensor)
    assert tf.function(lambda: v.assign(3.0) and None)() is None
    assert tf.function(lambda: {"one": 1})()["one"].dtype == tf.int32


def test_a_variable_made_in_every_call_is_refused():
    with pytest.raises(ValueError, match="first call"):
        tf.function(lambda: tf.Variable(1.0))()


def test_variables_may_be_made_in_the_first_call():
    class Scale(tf.Module):
        factor = None

        @tf.function
        def __call__(self, x):
            if self.factor is None:
                self.factor = tf.Variable(2.0)
            return self.factor * x

    scale = Scale()
    assert [float(scale(tf.constant(x))) for x in (1.0, 2.0)] == [2.0, 4.0]
    assert len(scale.trainable_variables) == 1


def test_python_control_flow_on_tensors_works_outside_strategies():
    @tf.function
    def collatz(n):
        steps = 0
        while n > 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return steps

    assert int(collatz(tf.constant(6))) == 8


def test_loops_over_tensors_are_unrolled():
    @tf.function
    def add_up(n):
        total = 0
        for i in tf.range(5):
            total += i * n
        return total

    assert int(add_up(tf.constant(2))) == 20


def test_functions_nest():
    inner = tf.function(lambda x: x * 2)
    outer = tf.function(lambda x: inner(x) + 1)
    assert float(outer(tf.constant(3.0))) == 7.0


def test_functions_can_run_eagerly():
    seen = []
    look = tf.function(lambda x: seen.append(x.numpy()) or x)
    tf.config.run_functions_eagerly(True)
    try:
        look(tf.constant(2.0))
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [2.0]
    assert not tf.config.functions_run_eagerly()


def test_a_concrete_function_has_one_signature():
    scale = tf.function(lambda x, k, y=2: x * k + y)
    concrete = scale.get_concrete_function(tf.TensorSpec([None], tf.float32), 3.0)
    args, kwargs = concrete.structured_input_signature
    assert (args[0].shape, args[0].dtype, args[1:], kwargs) == ((None,), tf.float32, (3.0, 2), {})
    assert concrete(tf.ones([2])).tolist() == [5.0, 5.0]
    assert concrete(x=tf.ones([1])).tolist() == [5.0]
    with pytest.raises(TypeError, match=r"k=3\.0"):
        concrete(tf.ones([2]), 4.0)
    with pytest.raises(TypeError, match="int32"):
        concrete(tf.constant([1]))
    with pytest.raises(TypeError, match="misses a tensor"):
        concrete()


def test_a_concrete_function_knows_what_it_returns():
    v = tf.Variable(1.0)
    update = tf.function(lambda x: (v.assign_add(tf.reduce_sum(x)), x))
    concrete = update.get_concrete_function(tf.TensorSpec([3], tf.float32))
    value, same = concrete.structured_outputs
    assert (tuple(value.shape), tuple(same.shape), float(v)) == ((), (3,), 1.0)


def test_a_concrete_function_of_a_method_keeps_its_instance():
    class Scale(tf.Module):
        def __init__(self):
            self.factor = tf.Variable(3.0)

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def __call__(self, x):
            return self.factor * x

    concrete = Scale().__call__.get_concrete_function()
    assert float(concrete(tf.constant(2.0))) == 6.0


def test_the_outer_step_of_a_strategy(two_replicas):
    with two_replicas.scope():
        count = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)

    def replica_step(x):
        count.assign_add(1)
        return tf.reduce_sum(x)

    @tf.function
    def epoch(dataset):
        total = 0.0
        for batch in dataset:
            losses = two_replicas.run(replica_step, args=(batch,))
            total += two_replicas.reduce("SUM", losses, axis=None)
        return total

    batches = [np.arange(4.0, dtype="float32"), np.arange(3.0, dtype="float32")]
    distributed = two_replicas.experimental_distribute_dataset(batches)
    assert float(epoch(distributed)) == 9.0
    assert int(count) == 4


def test_a_function_of_a_distributed_iterator(two_replicas):
    dataset = tf.data.Dataset.range(8).batch(4)
    iterator = iter(two_replicas.experimental_distribute_dataset(dataset))

    @tf.function
    def step(iterator):
        batch = next(iterator)
        return two_replicas.reduce("SUM", two_replicas.run(tf.reduce_sum, (batch,)), axis=None)

    assert [int(step(iterator)), int(step(iterator))] == [6, 22]


def test_a_function_that_closes_over_an_iterator_takes_a_batch_in_every_call():
    iterator = iter(tf.data.Dataset.range(3))
    take = tf.function(lambda: next(iterator))
    assert [int(take()) for _ in range(3)] == [0, 1, 2]


def test_a_function_of_an_iterator_is_traced_once(two_replicas):
    @tf.function
    def step(iterator):
        return two_replicas.run(lambda x: tf.reduce_sum(x), args=(next(iterator),))

    dataset = tf.data.Dataset.range(8).batch(2)
    for batches in (dataset, dataset):
        iterator = iter(two_replicas.experimental_distribute_dataset(batches))
        for _ in range(3):
            step(iterator)
    assert step.experimental_get_tracing_count() == 1


def test_an_optional_decides_a_python_if(two_replicas):
    iterator = iter(two_replicas.experimental_distribute_dataset(tf.data.Dataset.range(3).batch(2)))

    @tf.function
    def count(iterator):
        batches = 0
        while True:
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                return batches
            batches += 1

    assert int(count(iterator)) == 2


def test_the_element_spec_of_a_dataset_is_a_signature(two_replicas):
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(6.0, dtype="float32")).batch(4)
    distributed = two_replicas.experimental_distribute_dataset(dataset)

    @tf.function(input_signature=[distributed.element_spec])
    def step(batch):
        return two_replicas.reduce("SUM", two_replicas.run(tf.reduce_sum, (batch,)), axis=None)

    assert [float(step(batch)) for batch in distributed] == [6.0, 9.0]


def test_options_of_tensorflow_are_accepted_and_others_are_not():
    assert float(tf.function(jit_compile=True, reduce_retracing=True)(lambda x: x)(1.0)) == 1.0
    with pytest.raises(TypeError, match="compile_fast"):
        tf.function(lambda: 0, compile_fast=True)
    with pytest.raises(TypeError, match="function"):
        tf.function(3)


def test_the_end_of_a_dataset_in_a_function_is_out_of_range():
    iterator = iter(tf.data.Dataset.range(2))
    step = tf.function(lambda: next(iterator) * 10)
    assert [int(step()), int(step())] == [0, 10]
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        step()
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_shape_of_indexed_slices_may_be_a_tensor():
    @tf.function
    def dense(rows):
        slices = tf.IndexedSlices(rows, tf.constant([2, 0]), dense_shape=tf.constant([3, 2]))
        assert slices.dense_shape == (3, 2)
        return tf.convert_to_tensor(slices)

    np.testing.assert_array_equal(dense(tf.ones((2, 2))), [[1, 1], [0, 0], [1, 1]])
