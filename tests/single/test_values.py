"""`PerReplica` and `Mirrored`: values with one component a replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
import unison.tf as tf


@pytest.mark.parametrize("kind", [unison.PerReplica, unison.Mirrored])
def test_components_are_in_replica_order(kind):
    assert kind([3, 1, 2]).values == (3, 1, 2)


@pytest.mark.parametrize("kind", [unison.PerReplica, unison.Mirrored])
def test_the_components_are_shown(kind):
    assert repr(kind([1, "b"])) == f"{kind.__name__}:{{\n  0: 1\n  1: 'b'\n}}"


OPERATORS = pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: 1 - x, lambda x: jnp.ones(2) * x, lambda x: -x, lambda x: x > 0],
    ids=["left", "right", "array", "unary", "comparison"],
)


@OPERATORS
def test_an_operator_says_how_to_compute_with_the_components(compute):
    value = unison.PerReplica([jnp.ones(2), jnp.ones(2)])
    with pytest.raises(TypeError, match=r"PerReplica: .*strategy\.reduce\(\)"):
        compute(value)


@pytest.mark.parametrize(
    "use",
    [
        jnp.sum,
        np.sum,
        np.asarray,
        tf.reduce_sum,
        tf.convert_to_tensor,
        tf.Variable,
        tf.function(lambda x: tf.reduce_sum(x)),
        float,
        list,
        lambda value: value[0],
        lambda value: value.numpy(),
    ],
)
def test_a_function_of_arrays_says_how_to_compute_with_the_components(use):
    value = unison.PerReplica([1.0, 2.0])
    with pytest.raises(
        (TypeError, ValueError, AttributeError), match="experimental_local_results"
    ) as raised:
        use(value)
    assert "one value for each replica" in str(raised.value)


def test_tensors_of_a_distributed_value_are_not_made_as_in_tensorflow():
    with pytest.raises(ValueError, match="Conversion to a tensor of a PerReplica"):
        tf.convert_to_tensor(unison.PerReplica([1.0, 2.0]))


def test_local_results_of_what_is_nested_are_one_for_each_replica():
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.experimental_local_results((1.0, [2.0])) == ((1.0, [2.0]),) * 2
    assert strategy.experimental_local_results({}) == ({}, {})
    assert strategy.experimental_local_results(3.0) == (3.0,)
    mixed = {"own": unison.PerReplica([1.0, 2.0]), "whole": 3.0}
    each = [{"own": 1.0, "whole": 3.0}, {"own": 2.0, "whole": 3.0}]
    assert list(strategy.experimental_local_results(mixed)) == each


def test_components_are_printed():
    assert "0: 1.0" in f"{unison.PerReplica([1.0, 2.0])}"


@OPERATORS
def test_mirrored_value_computes_as_its_value_does(compute):
    value = unison.Mirrored([jnp.full(2, 3.0)] * 2)
    assert compute(value).tolist() == compute(jnp.full(2, 3.0)).tolist()
    assert (value + value).tolist() == [6.0, 6.0]
    assert jnp.sum(value) == 6.0
    assert (value[0], value.ndim, len(value), f"{value[0]:.1f}") == (3.0, 1, 2, "3.0")
    assert value.sum() == 6.0
    assert not hasattr(value, "no_such_method")


@pytest.mark.parametrize("kind", [unison.PerReplica, unison.Mirrored])
def test_no_component_is_an_error(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} needs one value a replica"):
        kind([])


@pytest.mark.parametrize("kind", [unison.PerReplica, unison.Mirrored])
def test_a_tree_map_keeps_the_kind(kind):
    doubled = jax.tree.map(lambda x: 2 * x, {"x": kind([1, 2])})
    assert isinstance(doubled["x"], kind)
    assert doubled["x"].values == (2, 4)


def test_the_leaves_of_a_value_are_its_components():
    assert jax.tree.leaves(unison.PerReplica([1, 2])) == [1, 2]


def test_a_stacked_array_is_cut_into_components_on_their_devices(two_replicas):
    placement = two_replicas.placement
    stacked = placement.spread(np.arange(6.0).reshape(2, 3))
    first, second = unison.PerReplica.from_stacked(stacked, placement).components
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5]
    assert [first.devices(), second.devices()] == [{device} for device in placement.devices]


def test_values_of_several_devices_can_be_computed_with_each_other(two_replicas):
    placement = two_replicas.placement
    stacked = placement.spread(np.arange(6.0).reshape(2, 3))
    first, second = unison.PerReplica.from_stacked(stacked, placement).values
    assert (first + second).tolist() == [3, 5, 7]
    placed = [jax.device_put(1.0, device) for device in placement.devices]
    assert float(sum(unison.PerReplica(placed).values)) == 2.0


def test_values_are_brought_together_once(two_replicas):
    value = two_replicas.run(lambda: 1.0)
    assert value.values is value.values


def test_components_of_one_device_are_passed_on_as_they_are():
    arrays = (jnp.ones(2), jnp.zeros(2))
    first, second = unison.PerReplica(arrays).values
    assert first is arrays[0]
    assert second is arrays[1]


def test_a_stacked_array_is_passed_on_as_it_is(two_replicas):
    placement = two_replicas.placement
    stacked = placement.spread(np.zeros((2, 3)))
    assert unison.PerReplica.from_stacked(stacked, placement).stacked(placement) is stacked


@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_equal_shapes_are_stacked_over_the_devices(two_replicas, make):
    stacked = unison.PerReplica([make([1, 2]), make([3, 4])]).stacked(two_replicas.placement)
    assert stacked.sharding == two_replicas.placement.per_replica
    assert stacked.tolist() == [[1, 2], [3, 4]]


def test_numbers_are_stacked_as_scalars(two_replicas):
    stacked = unison.PerReplica([1.5, 2.5]).stacked(two_replicas.placement)
    assert stacked.dtype == jnp.float32
    assert stacked.tolist() == [1.5, 2.5]


def test_different_shapes_have_no_stacked_array(two_replicas):
    value = unison.PerReplica([np.zeros(2), np.zeros(3)])
    assert value.stacked(two_replicas.placement) is None


def test_a_component_a_replica_is_needed(two_replicas):
    with pytest.raises(ValueError, match=r"each of the 2 replicas. Received: 3 components"):
        unison.PerReplica([1, 2, 3]).stacked(two_replicas.placement)
