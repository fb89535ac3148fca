"""Numbers of 64 bits keep all of them, as on TensorFlow: in variables, operands, and arguments."""

import operator

import numpy as np
import pytest

import unison.tf as tf

LARGE = 2**42 + 6


def replicas():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def read(variable):
    return [variable.numpy(), variable.value().numpy(), int(variable), tf.identity(variable)]


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"aggregation": tf.VariableAggregation.SUM},
        {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA},
        {
            "aggregation": tf.VariableAggregation.SUM,
            "synchronization": tf.VariableSynchronization.ON_READ,
        },
        {
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
            "synchronization": tf.VariableSynchronization.ON_READ,
        },
    ],
    ids=str,
)
def test_variables_on_replicas_keep_64_bits(annotations, tmp_path):
    strategy = replicas()
    with strategy.scope():
        variable = tf.Variable(0, dtype=tf.int64, **annotations)
    for value in (LARGE, np.int64(LARGE), np.array(LARGE), tf.constant(LARGE, tf.int64)):
        variable.assign(value)
        assert read(variable) == [LARGE] * 4
    is_sum = annotations.get("aggregation") is tf.VariableAggregation.SUM
    if not (is_sum and "synchronization" in annotations):
        variable.assign_add(0)
        assert read(variable) == [LARGE] * 4
    path = tf.train.Checkpoint(v=variable).save(tmp_path / "checkpoint")
    variable.assign(0)
    tf.train.Checkpoint(v=variable).restore(path)
    assert read(variable) == [LARGE] * 4
    strategy.run(lambda: variable.assign_add(tf.constant(1 if is_sum else 2, tf.int64)))
    assert read(variable) == [LARGE + 2] * 4


def test_copies_that_begin_to_differ_keep_64_bits():
    strategy = replicas()
    with strategy.scope():
        variable = tf.Variable([LARGE, 1], dtype=tf.int64)
    strategy.run(
        lambda: variable.assign_add(
            [tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64), 0]
        )
    )
    copies = [copy.numpy().tolist() for copy in variable.values]
    assert copies == [[LARGE, 1], [LARGE + 1, 1]]


@pytest.mark.parametrize("number", [LARGE, np.int64(LARGE), np.array(LARGE)], ids=type)
def test_a_large_integer_beside_a_tensor(number):
    two = tf.constant(2, tf.int64)
    assert (two + number).numpy() == LARGE + 2
    assert (number - two).numpy() == LARGE - 2
    assert tf.add(two, number).numpy() == LARGE + 2
    assert tf.maximum(two, number).numpy() == LARGE
    assert (tf.Variable(2, dtype=tf.int64) + number).numpy() == LARGE + 2
    assert bool(two < number)
    assert (
        tf.while_loop(lambda i: i < number, lambda i: [i + number], [two])[0].numpy() == LARGE + 2
    )


@pytest.mark.parametrize("number", [0.1, np.float64(0.1), np.array(0.1)], ids=type)
@pytest.mark.parametrize(
    "operation",
    [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, tf.add, tf.maximum],
)
def test_a_number_beside_a_tensor_of_64_bits_is_not_rounded(operation, number):
    expected = {tf.add: np.add, tf.maximum: np.maximum}.get(operation, operation)
    tensor, variable = tf.constant(3.0, tf.float64), tf.Variable(3.0, dtype=tf.float64)
    for three in (tensor, variable):
        assert operation(three, number).numpy() == expected(np.float64(3.0), 0.1)
        assert operation(number, three).numpy() == expected(np.float64(0.1), 3.0)
    assert operation(tf.constant(3.0), number).dtype == tf.float32


def test_complex_numbers_beside_tensors_of_128_bits_are_not_rounded():
    assert (tf.constant(1.0, tf.complex128) + 0.1j).numpy() == 1 + 0.1j
