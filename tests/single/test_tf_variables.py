"""`tf.Variable` and `tf.distribute`: TensorFlow's signatures and names."""

import copy
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import unison.tf as tf
from unison.tf.missing import public_names


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_the_arguments_have_tensorflows_order():
    variable = tf.Variable(
        1.0,
        False,
        True,
        None,
        "v",
        None,
        tf.float16,
        None,
        abs,
        tf.VariableSynchronization.ON_READ,
        tf.VariableAggregation.SUM,
        [],
    )
    assert variable.name == "v:0"
    assert variable.dtype == "float16"
    assert not variable.trainable
    assert variable.constraint is abs
    assert variable.synchronization is tf.VariableSynchronization.ON_READ
    assert variable.aggregation is tf.VariableAggregation.SUM


def test_names_are_tensorflows():
    assert tf.Variable(1.0).name == "Variable:0"
    assert tf.Variable(1.0, name="foo").name == "foo:0"
    with tf.name_scope("outer"):
        assert tf.Variable(1.0, name="foo").name == "outer/foo:0"


def test_it_is_shown_as_tensorflow_shows_it(strategy):
    assert repr(tf.Variable([1.0, 2.0], name="w")) == (
        "<tf.Variable 'w:0' shape=(2,) dtype=float32, numpy=array([1., 2.], dtype=float32)>"
    )
    with strategy.scope():
        mirrored = tf.Variable(1.5, name="w")
        on_read = tf.Variable(3, synchronization=tf.VariableSynchronization.ON_READ)
    assert repr(mirrored) == (
        "MirroredVariable:{\n"
        "  0: <tf.Variable 'w:0' shape=() dtype=float32, numpy=1.5>\n"
        "  1: <tf.Variable 'w/replica_1:0' shape=() dtype=float32, numpy=1.5>\n"
        "}"
    )
    assert repr(on_read).startswith("SyncOnReadVariable:{\n  0: <tf.Variable 'Variable:0' shape=()")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "float32"),
        (1, "int32"),
        ([1, 2], "int32"),
        (True, "bool"),
        (np.float64(1.5), "float64"),
        (np.array([1, 2]), "int64"),
    ],
)
def test_the_dtype_of_an_initial_value(value, dtype):
    variable = tf.Variable(value)
    assert variable.dtype == dtype
    assert variable.value().dtype == dtype
    assert variable.assign_add(variable).numpy().dtype == dtype if dtype != "bool" else True


@pytest.mark.parametrize(
    ("value", "other", "dtype"),
    [
        (1.0, np.float64(2), "float32"),
        (1.0, np.array([1.0, 2.0]), "float32"),
        (1, np.int64(1), "int32"),
        (1.0, 1, "float32"),
    ],
)
def test_numpys_numbers_take_the_dtype_of_the_variable(value, other, dtype):
    variable = tf.Variable(value)
    assert (variable + other).dtype == dtype
    assert (other * variable).dtype == dtype


def test_a_tensor_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype float64 does not fit"):
        tf.Variable(1.0).assign(tf.constant(1.0, tf.float64))
    with pytest.raises(ValueError, match="dtype float32 does not fit"):
        tf.Variable(1).assign(tf.constant(1.0))
    with pytest.raises(TypeError, match=r"1.5 does not fit"):
        tf.Variable(1).assign(1.5)


def test_assignments_take_tensorflows_options():
    variable = tf.Variable(1.0)
    assert variable.assign(2.0, True, "name") is variable
    assert variable.assign_add(1.0, use_locking=False, name="n", read_value=False) is None
    assert variable.assign_sub(delta=0.5, read_value=False) is None
    assert float(variable) == 2.5
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
    vector = tf.Variable([1.0, 2.0])
    assert vector.scatter_add(slices, use_locking=True, name="n") is vector
    assert vector.scatter_sub(sparse_delta=slices).numpy().tolist() == [1.0, 2.0]
    assert vector.batch_scatter_update(slices, False, "n").numpy().tolist() == [1.0, 2.0]
    assert vector.scatter_nd_add([[1]], [3.0], name="n").numpy().tolist() == [1.0, 5.0]


def test_copies_without_a_common_value_are_assigned_and_not_returned(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
    with pytest.raises(ValueError, match="no common value"):
        variable.assign(2.0)
    variable.assign_add(3.0, read_value=False)
    strategy.run(lambda: variable.assign_sub(1.0))
    assert [float(copy) for copy in variable.values] == [4.0, 4.0]


def test_only_a_variable_of_several_replicas_has_values():
    assert not hasattr(tf.Variable(1.0), "values")


def test_parts_are_read():
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    assert variable.sparse_read([1, 0], name="n").numpy().tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert variable.gather_nd([[0, 1], [1, 0]]).numpy().tolist() == [2.0, 3.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Index 2 is outside axis 0"):
        variable.sparse_read([2])


def test_a_reference_is_a_key():
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    assert {first.ref(): "first", second.ref(): "second"}[first.experimental_ref()] == "first"
    assert first.ref() != second.ref()
    assert first.ref().deref() is first


def test_it_is_initialized():
    variable = tf.Variable(2.0)
    assert variable.is_initialized()
    assert float(variable.initialized_value()) == 2.0


def test_numpy_gives_numbers_for_scalars():
    assert isinstance(tf.Variable(1.0).numpy(), np.float32)
    assert isinstance(tf.Variable([1.0]).numpy(), np.ndarray)


def test_the_shape_may_be_open():
    variable = tf.Variable([[1.0, 2.0]], shape=tf.TensorShape([None, 2]))
    assert variable.get_shape().as_list() == [None, 2]
    variable.assign(np.ones((3, 2)))
    assert variable.shape.as_list() == [None, 2]
    assert variable.value().shape == (3, 2)
    assert tf.Variable([1.0]).shape == (1,)
    anything = tf.Variable(1.0, shape=tf.TensorShape(None))
    assert anything.assign([1.0]).value().shape == (1,)
    assert tf.Variable(1.0, validate_shape=False).assign([1.0]).get_shape().rank is None


def test_a_function_may_change_an_open_shape():
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape([None]))

    @tf.function
    def total(x):
        variable.assign(x)
        return tf.reduce_sum(variable)

    assert float(total(tf.constant([1.0, 2.0]))) == 3.0
    assert float(total(tf.constant([1.0, 2.0, 3.0]))) == 6.0
    assert variable.numpy().tolist() == [1.0, 2.0, 3.0]


def test_protocol_buffers_are_refused():
    with pytest.raises(ValueError, match="cannot be made from a variable_def"):
        tf.Variable(variable_def=object())


def test_functions_of_jax_take_it():
    assert float(jnp.sum(tf.Variable([1.0, 2.0]))) == 3.0


def test_a_module_creates_its_variables_at_the_first_call(strategy):
    class Dense(tf.Module):
        def __init__(self, units):
            super().__init__(name="dense")
            self.units = units
            self.w = None

        @tf.Module.with_name_scope
        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(tf.random.normal([x.shape[-1], self.units]) * 0.0, name="w")
                self.b = tf.Variable(tf.ones([self.units]), name="b")
            return tf.matmul(x, self.w) + self.b

    layer = Dense(3)
    with strategy.scope():
        result = strategy.run(tf.function(lambda x: layer(x)), args=(tf.ones([4, 2]),))
    assert [variable.name for variable in layer.variables] == ["dense/b:0", "dense/w:0"]
    assert layer.w.shape == (2, 3)
    assert result.values[1].tolist() == [[1.0] * 3] * 4


def test_an_initial_value_may_be_drawn_from_a_stream_that_is_in_use(two_replicas):
    class Layer:
        weights = None

    def step():
        if Layer.weights is None:
            Layer.weights = tf.Variable(tf.random.normal([2, 3]))
        return tf.reduce_sum(Layer.weights)

    with two_replicas.scope():
        two_replicas.run(lambda: tf.random.normal([2]))
        two_replicas.run(step)
    copies = [np.asarray(copy) for copy in two_replicas.experimental_local_results(Layer.weights)]
    np.testing.assert_array_equal(*copies)
    assert np.std(copies[0]) > 0


# -- tf.distribute -------------------------------------------------------------------------

MODULES = {
    "tf.distribute": tf.distribute,
    "tf.distribute.experimental": tf.distribute.experimental,
    "tf.distribute.cluster_resolver": tf.distribute.cluster_resolver,
}


@pytest.mark.parametrize("path", MODULES)
def test_every_name_of_tensorflow_is_there_or_says_what_to_use(path):
    for name in public_names(path):
        try:
            getattr(MODULES[path], name)
        except AttributeError as error:
            message = str(error)
            assert message.startswith(f"{path}.{name} is not supported by Unison: ")
            assert "tensors are jax.Arrays" not in message  # the hint for everything


def test_collective_hints_are_communication_options():
    hints = tf.distribute.experimental.CollectiveHints(bytes_per_pack=5, timeout_seconds=1.0)
    options = tf.distribute.experimental.CommunicationOptions(5, 1.0)
    assert hints == options
    communication = tf.distribute.experimental.CollectiveCommunication
    assert communication.NCCL is tf.distribute.experimental.CommunicationImplementation.NCCL


def test_run_options_are_accepted(strategy):
    result = strategy.run(lambda: tf.constant(1), options=tf.distribute.RunOptions())
    assert int(result.values[1]) == 1


def test_a_strategy_may_be_set_for_the_program(strategy):
    tf.distribute.experimental_set_strategy(strategy)
    try:
        assert tf.distribute.get_strategy() is strategy
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert not tf.distribute.has_strategy()


def test_the_values_of_the_replicas_are_concatenated(strategy):
    def fn():
        return tf.fill([2], tf.distribute.get_replica_context().replica_id_in_sync_group)

    per_replica = strategy.run(fn)
    assert isinstance(per_replica, tf.distribute.DistributedValues)
    assert tf.concat(per_replica.values, 0).numpy().tolist() == [0, 0, 1, 1]
    local = strategy.experimental_local_results(per_replica)
    assert (local[0] + local[1]).numpy().tolist() == [1, 1]


def test_lists_are_operands_of_variables():
    v = tf.Variable([1.0, 2.0])
    assert ([2.0, 3.0] * v).tolist() == (v * [2.0, 3.0]).tolist() == [2.0, 6.0]
    assert ([2] - v).tolist() == [1.0, 0.0]
    with pytest.raises(TypeError):  # which would be cut off to integers
        _ = tf.Variable([1, 2]) * [0.5, 1.5]


def test_variable_knows_the_strategy_of_its_scope(strategy):
    with strategy.scope():
        v = tf.Variable(1.0)
    assert v.distribute_strategy is strategy
    assert v.initializer is None
    assert not hasattr(tf.Variable(1.0), "distribute_strategy")


def test_slices_with_computed_indices_are_assigned(strategy):
    v = tf.Variable([1.0, 2.0, 3.0])
    matrix = tf.Variable(tf.zeros([2, 3]))
    tf.function(lambda i: v[i].assign(9.0))(tf.constant(-1))
    tf.function(lambda i: v[i : i + 2].assign([7.0, 8.0]))(tf.constant(0))
    tf.function(lambda i: matrix[i, 1:].assign([5.0, 6.0]))(tf.constant(1))
    assert v.numpy().tolist() == [7.0, 8.0, 9.0]
    assert matrix.numpy().tolist() == [[0.0, 0.0, 0.0], [0.0, 5.0, 6.0]]
    with strategy.scope():
        mirrored = tf.Variable([1.0, 2.0, 3.0])
    strategy.run(lambda i: mirrored[i : i + 2].assign([5.0, 4.0]), args=(tf.constant(1),))
    assert [copy.numpy().tolist() for copy in mirrored.values] == [[1.0, 5.0, 4.0]] * 2


@pytest.mark.parametrize("part", [lambda v, i: v[i], lambda v, i: v[i - 1 : i + 1]])
def test_computed_index_outside_of_a_variable_is_an_error(part):
    v = tf.Variable([1.0, 1.0, 1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="3 elements"):
        tf.function(lambda i: part(v, i).assign(tf.zeros(part(v, i).shape)).read_value())(
            tf.constant(3)
        ).block_until_ready()
    assert v.numpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("index", [slice(None), ..., slice(0, 4), 0])
def test_slice_does_not_keep_its_variable_alive(index):
    v = tf.Variable(tf.zeros([4]))
    assert float(tf.reduce_sum(v[index])) == 0.0
    reference = weakref.ref(v)
    del v
    gc.collect()
    assert reference() is None


def test_copies_that_differ_are_added_to_and_copied(strategy):
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
    v.values[1].assign([5.0, 6.0])
    delta = strategy.reduce("SUM", strategy.run(lambda: tf.ones([2])), axis=None)
    v.assign_add(delta * 2.0)
    v[0:1].assign(delta[0:1])
    assert [copy.numpy().tolist() for copy in v.values] == [[2.0, 6.0], [2.0, 10.0]]
    twin = copy.deepcopy(v.values[1])
    twin.assign([0.0, 0.0])
    assert v.values[1].numpy().tolist() == [2.0, 10.0]
