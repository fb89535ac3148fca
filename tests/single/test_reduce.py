"""`reduce`, `gather` and local results: from one component a replica to one value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison import PerReplica, VariableAggregation, VariableSynchronization
from unison.runtime.precision import device_dtype

UNEVEN = PerReplica([np.array([1.0, 2.0, 3.0], "float32"), np.array([10.0], "float32")])


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("SUM", None, [11.0, 22.0]),
        ("MEAN", None, [5.5, 11.0]),
        ("SUM", 0, 33.0),
        ("MEAN", 0, 8.25),
        ("SUM", -1, 33.0),
    ],
)
def test_even_components(two_replicas, op, axis, expected):
    value = PerReplica([np.array([1.0, 2.0], "float32"), np.array([10.0, 20.0], "float32")])
    result = two_replicas.reduce(op, value, axis=axis)
    np.testing.assert_array_equal(result, np.float32(expected))
    assert result.dtype == jnp.float32


def test_the_mean_of_uneven_components_divides_by_the_true_count(two_replicas):
    assert float(two_replicas.reduce("MEAN", UNEVEN, axis=0)) == 4.0
    assert float(two_replicas.reduce("SUM", UNEVEN, axis=0)) == 16.0


def test_a_replica_without_examples_does_not_count(four_replicas):
    batch = PerReplica([np.full((rows, 2), 3.0) for rows in (2, 2, 1, 0)])
    assert four_replicas.reduce("MEAN", batch, axis=0).tolist() == [3.0, 3.0]


def test_another_axis_than_the_first(two_replicas):
    value = PerReplica([np.ones((2, 1)), np.full((2, 3), 5.0)])
    assert two_replicas.reduce("MEAN", value, axis=1).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize(
    ("dtype", "mean_dtype"), [("int32", "float64"), ("int8", "float32"), ("uint8", "float32")]
)
def test_integers_sum_to_integers_and_have_a_floating_mean(two_replicas, axis, dtype, mean_dtype):
    value = PerReplica([np.array([1, 1], dtype), np.array([2, 2], dtype)])
    assert two_replicas.reduce("SUM", value, axis=axis).dtype == dtype
    mean = two_replicas.reduce("MEAN", value, axis=axis)
    assert mean.dtype == device_dtype(mean_dtype)
    np.testing.assert_array_equal(mean, 1.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0])
def test_inexact_values_keep_their_dtype(two_replicas, dtype, op, axis):
    value = PerReplica([jnp.ones(2, dtype), jnp.ones(2, dtype)])
    assert two_replicas.reduce(op, value, axis=axis).dtype == dtype


def test_the_mean_of_large_integers_does_not_overflow(two_replicas):
    value = PerReplica([np.full(2, 2**30, "int32")] * 2)
    assert float(two_replicas.reduce("MEAN", value, axis=0)) == 2.0**30


@pytest.mark.parametrize(("axis", "expected"), [(None, [2, 1]), (0, 3)])
def test_truth_values_are_counted(two_replicas, axis, expected):
    value = PerReplica([np.array([True, True]), np.array([True, False])])
    assert two_replicas.reduce("SUM", value, axis=axis).tolist() == expected


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_halves_are_added_in_a_wider_dtype(two_replicas, op):
    value = PerReplica([jnp.ones(1024, jnp.bfloat16)] * 2)
    result = two_replicas.reduce(op, value, axis=0)
    assert result.dtype == jnp.bfloat16
    assert float(result) == {"SUM": 2048.0, "MEAN": 1.0}[op]


def test_a_nested_structure_is_reduced_leaf_by_leaf(two_replicas):
    value = {"a": (PerReplica([1.0, 2.0]), PerReplica([3, 4])), "b": PerReplica([5.0, 7.0])}
    assert two_replicas.reduce("SUM", value) == {"a": (3.0, 7), "b": 12.0}


def test_what_run_returned_is_reduced(strategy):
    replicas = strategy.num_replicas_in_sync
    ranks = strategy.run(lambda: unison.get_replica_context().replica_id_in_sync_group)
    assert int(strategy.reduce(unison.ReduceOp.SUM, ranks)) == sum(range(replicas))


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), 3.0, unison.Mirrored([2.0, 2.0])])
def test_the_sum_of_a_value_without_components_is_refused(two_replicas, value, axis):
    with pytest.raises(ValueError, match=r"The SUM over 2 replicas .* is ambiguous"):
        two_replicas.reduce("SUM", value, axis=axis)


def test_the_mean_of_a_value_without_components_is_the_value(two_replicas):
    assert two_replicas.reduce("MEAN", jnp.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert float(two_replicas.reduce("MEAN", jnp.array([1.0, 2.0]), axis=0)) == 1.5
    assert float(two_replicas.reduce("MEAN", unison.Mirrored([2.0, 2.0]))) == 2.0


def test_with_one_replica_a_plain_value_has_a_sum():
    strategy = unison.OneDeviceStrategy("CPU:0")
    assert strategy.reduce("SUM", jnp.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert float(strategy.reduce("SUM", jnp.array([1.0, 2.0]), axis=0)) == 3.0


def test_an_unknown_operation_is_refused(two_replicas):
    with pytest.raises(ValueError, match=r"Expected a reduce operation.*Received: 'MEDIAN'"):
        two_replicas.reduce("MEDIAN", PerReplica([1, 2]))


@pytest.mark.parametrize(
    ("op", "whole", "along"),
    [
        ("MIN", [1.0, 20.0], 1.0),
        ("MAX", [10.0, 30.0], 30.0),
        ("PROD", [10.0, 600.0], 6000.0),
    ],
)
def test_the_other_operations(two_replicas, op, whole, along):
    value = PerReplica([np.array([1.0, 20.0], "float32"), np.array([10.0, 30.0], "float32")])
    assert two_replicas.reduce(op, value).tolist() == whole
    assert float(two_replicas.reduce(op, value, axis=0)) == along


def test_a_replica_without_examples_holds_no_extremum(two_replicas):
    value = PerReplica([np.array([3.0, 7.0], "float32"), np.zeros(0, "float32")])
    assert float(two_replicas.reduce("MAX", value, axis=0)) == 7.0
    assert float(two_replicas.reduce("MIN", value, axis=(0,))) == 3.0


def test_several_axes(two_replicas):
    value = PerReplica([np.ones((2, 2), "float32"), np.full((2, 2), 3.0, "float32")])
    assert float(two_replicas.reduce("SUM", value, axis=(0, 1))) == 16.0
    assert float(two_replicas.reduce("MEAN", value, axis=[0, 1])) == 2.0


@pytest.mark.parametrize("axis", [1, -2])
def test_an_axis_that_is_not_there_is_an_error(two_replicas, axis):
    with pytest.raises(ValueError, match=rf"axis={axis}, a component of shape \(2,\)"):
        two_replicas.reduce("SUM", PerReplica([np.ones(2)] * 2), axis=axis)


def test_a_result_can_be_computed_with_what_is_read_of_a_variable(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable([1.0, 2.0])
    total = two_replicas.reduce("SUM", two_replicas.run(lambda: jnp.ones(2)))
    assert (total + variable.value()).tolist() == [3.0, 4.0]


# -- slices --------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "values"), [("SUM", [1, 2, 1, 2]), ("MEAN", [0.5, 1, 0.5, 1])])
def test_the_slices_of_all_replicas_are_joined(two_replicas, op, values):
    def rows():
        return unison.IndexedSlices(jnp.array([1.0, 2.0]), jnp.array([2, 0]), dense_shape=(3,))

    joined = two_replicas.reduce(op, two_replicas.run(rows))
    assert joined.values.tolist() == values
    assert joined.indices.tolist() == [2, 0, 2, 0]
    assert joined.dense_shape == (3,)


def test_slices_have_no_other_reduction(two_replicas):
    slices = two_replicas.run(lambda: unison.IndexedSlices(jnp.ones(1), jnp.array([0])))
    with pytest.raises(ValueError, match="IndexedSlices can be reduced by SUM and MEAN"):
        two_replicas.reduce("MAX", slices)


# -- variables -----------------------------------------------------------------------------


def test_the_copies_of_a_variable_without_aggregation_are_reduced(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(0.0, synchronization=VariableSynchronization.ON_READ)
    two_replicas.run(
        lambda: variable.assign(unison.get_replica_context().replica_id_in_sync_group + 1.0)
    )
    assert float(two_replicas.reduce("SUM", variable)) == 3.0
    assert float(two_replicas.reduce("MEAN", variable)) == 1.5


def test_the_copies_are_still_there_after_reducing(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, synchronization=VariableSynchronization.ON_READ)
    for _ in range(2):
        assert float(two_replicas.reduce("SUM", variable)) == 2.0
        two_replicas.run(lambda: variable.assign_add(0.0))


def test_the_equal_copies_of_a_variable_have_a_mean_and_no_sum(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(3.0, aggregation=VariableAggregation.SUM)
    assert float(two_replicas.reduce("MEAN", variable)) == 3.0
    with pytest.raises(ValueError, match="is ambiguous"):
        two_replicas.reduce("SUM", variable)


# -- gather and local results --------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, -1])
def test_gather_concatenates_uneven_components(two_replicas, axis):
    assert two_replicas.gather(UNEVEN, axis=axis).tolist() == [1.0, 2.0, 3.0, 10.0]


def test_gather_along_the_second_axis(two_replicas):
    value = PerReplica([np.zeros((2, 1)), np.ones((2, 2))])
    assert two_replicas.gather(value, axis=1).tolist() == [[0.0, 1.0, 1.0]] * 2


def test_gather_takes_structures(two_replicas):
    gathered = two_replicas.gather({"x": UNEVEN, "y": PerReplica([[1], [2]])}, axis=0)
    assert gathered["x"].shape == (4,)
    assert gathered["y"].tolist() == [1, 2]


def test_gather_of_a_value_without_components_is_the_value(two_replicas):
    assert two_replicas.gather(jnp.array([1, 2]), axis=0).tolist() == [1, 2]


def test_gather_of_a_variable_joins_its_copies(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable([1.0])
    assert two_replicas.gather(variable, axis=0).tolist() == [1.0, 1.0]


def test_gather_with_one_replica_is_the_value():
    strategy = unison.OneDeviceStrategy("CPU:0")
    assert strategy.gather(jnp.array([1, 2]), axis=0).tolist() == [1, 2]


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((2,), 1), ((2,), -2)])
def test_gather_along_an_axis_that_is_not_there_is_an_error(two_replicas, shape, axis):
    with pytest.raises(ValueError, match=f"axis={axis}, components of shape"):
        two_replicas.gather(PerReplica([np.zeros(shape)] * 2), axis=axis)


def test_local_results_are_the_components(two_replicas):
    assert two_replicas.experimental_local_results(PerReplica([1, 2])) == (1, 2)
    assert two_replicas.experimental_local_results(5) == (5,)


def test_the_local_results_of_a_structure_are_structures(two_replicas):
    value = {"a": PerReplica([1, 2]), "b": 3}
    local = two_replicas.experimental_local_results(value)
    assert local == ({"a": 1, "b": 3}, {"a": 2, "b": 3})


def test_the_local_results_of_a_variable_are_its_copies(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(0.0, synchronization=VariableSynchronization.ON_READ)
    two_replicas.run(
        lambda: variable.assign(unison.get_replica_context().replica_id_in_sync_group + 1.0)
    )
    copies = two_replicas.experimental_local_results(variable)
    assert [float(copy) for copy in copies] == [1.0, 2.0]


def test_values_are_made_for_each_replica(two_replicas):
    made = two_replicas.experimental_distribute_values_from_function(
        lambda context: {"x": context.replica_id_in_sync_group, "n": context.num_replicas_in_sync}
    )
    assert made["x"].values == (0, 1)
    assert made["n"].values == (2, 2)


@pytest.mark.parametrize("devices", [["CPU:3"], ["CPU:0", "CPU:1"]], ids=["one", "two"])
def test_arrays_that_are_made_for_a_replica_are_copied_to_its_device_once(devices):
    """On GPUs, a program that is given an array of the host copies it at every call."""
    strategy = unison.MirroredStrategy(devices)
    reused = np.arange(3.0)
    value = strategy.experimental_distribute_values_from_function(lambda _: reused)
    reused[:] = 7
    arrays = strategy.experimental_local_results(value)
    assert [array.tolist() for array in arrays] == [[0, 1, 2]] * len(devices)
    cpus = [jax.devices()[int(name[-1])] for name in devices]
    placed = [value] if len(devices) == 1 else value.components
    assert [array.devices() for array in placed] == [{cpu} for cpu in cpus]
    strategy.run(lambda x: x * 2, args=(value,))
    with jax.transfer_guard("disallow"):
        strategy.run(lambda x: x * 2, args=(value,))


def test_one_replica_gets_its_value_as_it_is():
    strategy = unison.OneDeviceStrategy("CPU:0")
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert value == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy: strategy.reduce("SUM", 1.0),
        lambda strategy: strategy.gather(jnp.ones(1), axis=0),
        lambda strategy: strategy.extended.reduce_to("SUM", 1.0, "CPU:0"),
        lambda strategy: strategy.experimental_distribute_values_from_function(lambda _: 1),
    ],
    ids=["reduce", "gather", "reduce_to", "distribute_values"],
)
def test_they_are_called_around_the_replicas_only(two_replicas, call):
    with pytest.raises(RuntimeError, match="must be called in cross-replica context"):
        two_replicas.run(lambda: call(two_replicas))
