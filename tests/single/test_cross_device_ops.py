"""The choice of how a strategy combines the values of its devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from hlo import compiled_programs, count_all_reduces
from unison import Mirrored, PerReplica, ReduceOp, VariableAggregation, get_replica_context
from unison.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)

CHOICES = {
    "nccl": NcclAllReduce,
    "nccl in packs": lambda: NcclAllReduce(num_packs=2),
    "nccl unpacked": lambda: NcclAllReduce(num_packs=0),
    "hierarchical": HierarchicalCopyAllReduce,
    "one device": ReductionToOneDevice,
    "second device": lambda: ReductionToOneDevice("CPU:1"),
}
every_choice = pytest.mark.parametrize("name", CHOICES)
FOUR = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
PAIR = PerReplica([np.array([1.0, 2.0], "float32"), np.array([3.0, 6.0], "float32")])


def strategy_by(ops, devices=("CPU:0", "CPU:1")):
    return unison.MirroredStrategy(list(devices), cross_device_ops=ops)


def count(operation, text):
    """How often an operation of XLA stands in a compiled program."""
    return len(re.findall(rf"= \S+ {operation}(?:-start)?\(", text))


# -- in replica programs -------------------------------------------------------------------


@every_choice
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_the_replicas_get_the_sum_and_the_mean(name, replicas):
    strategy = strategy_by(CHOICES[name](), FOUR[:replicas])
    values = [np.arange(3, dtype="float32") + 10 * replica for replica in range(replicas)]

    def fn(x):
        replica = get_replica_context()
        tree = {"x": x, "flag": True, "n": (2, x[:0])}
        return replica.all_reduce("SUM", tree), replica.all_reduce("MEAN", x)

    total, mean = strategy.run(fn, args=(PerReplica(values),))
    for replica in range(replicas):
        np.testing.assert_allclose(total["x"].values[replica], np.sum(values, axis=0))
        np.testing.assert_allclose(mean.values[replica], np.mean(values, axis=0))
        assert int(total["flag"].values[replica]) == replicas
        assert int(total["n"][0].values[replica]) == 2 * replicas
        assert total["n"][1].values[replica].shape == (0,)


@every_choice
def test_updates_of_variables_are_combined(name):
    strategy = strategy_by(CHOICES[name]())
    with strategy.scope():
        total = unison.Variable([0.0, 0.0], aggregation=VariableAggregation.SUM)
        mean = unison.Variable([0.0, 0.0], aggregation=VariableAggregation.MEAN)

    def fn(x):
        total.assign_add(x)
        mean.assign(x)

    strategy.run(fn, args=(PAIR,))
    assert total.numpy().tolist() == [4.0, 8.0]
    assert mean.numpy().tolist() == [2.0, 4.0]


@every_choice
def test_the_gradient_is_the_sum_of_the_gradients(name):
    strategy = strategy_by(CHOICES[name]())

    def gradient(x):
        replica = get_replica_context()
        factor = 1.0 + replica.replica_id_in_sync_group
        return jax.grad(lambda x: jnp.sum(factor * sum(replica.all_reduce("SUM", [x, 2 * x]))))(x)

    result = strategy.run(gradient, args=(PAIR,))
    assert [component.tolist() for component in result.values] == [[9.0, 9.0]] * 2


def program_of(strategy, monkeypatch):
    """The optimized program of one all-reduce."""
    texts = compiled_programs(monkeypatch)
    strategy.run(lambda x: get_replica_context().all_reduce("SUM", x), args=(PAIR,))
    (text,) = texts
    return text


def sums_asked_for(fn, *args):
    """How many all-reduces `fn` asks XLA for, which may combine them."""
    jaxpr = jax.make_jaxpr(fn, axis_env=[("replica", 2)])(*args)
    return [equation.primitive.name for equation in jaxpr.eqns].count("psum")


@pytest.mark.parametrize(("num_packs", "asked"), [(0, 5), (1, 1), (2, 2), (9, 5)])
def test_tensors_are_put_into_so_many_packs(num_packs, asked):
    ops = NcclAllReduce(num_packs)
    tensors = [np.ones(size, "float32") for size in (1, 2, 3, 4, 5)]
    assert sums_asked_for(lambda *x: ops.sum_over_replicas(x, "replica"), *tensors) == asked


def test_a_hierarchy_exchanges_between_pairs(monkeypatch):
    text = program_of(strategy_by(HierarchicalCopyAllReduce()), monkeypatch)
    assert count("collective-permute", text) >= 1
    assert count_all_reduces(text) == 0


def test_one_device_gathers_adds_and_sends(monkeypatch):
    text = program_of(strategy_by(ReductionToOneDevice()), monkeypatch)
    assert count("all-gather", text) == 1
    assert count("conditional", text) == 1


def test_the_accumulation_of_the_program_is_used(two_replicas):
    def alternating(values):
        return values[0] - values[1]

    strategy = strategy_by(ReductionToOneDevice(accumulation_fn=alternating))
    result = strategy.run(lambda x: get_replica_context().all_reduce("SUM", x), args=(PAIR,))
    assert [component.tolist() for component in result.values] == [[-2.0, -4.0]] * 2
    assert strategy.reduce("SUM", PAIR).tolist() == [-2.0, -4.0]


def test_one_device_adds_in_the_order_of_the_replicas():
    strategy = strategy_by(ReductionToOneDevice(), FOUR)
    values = [1.0, 1e8, -1e8, 1.0]
    total = strategy.run(
        lambda x: get_replica_context().all_reduce("SUM", x), args=(PerReplica(values),)
    )
    in_turn = np.float32(0)
    for value in values:
        in_turn += np.float32(value)
    assert [float(component) for component in total.values] == [float(in_turn)] * 4


def test_other_axes_are_reduced_by_xla(two_replicas, monkeypatch):
    texts = compiled_programs(monkeypatch)
    strategy_by(HierarchicalCopyAllReduce()).run(
        lambda x: get_replica_context().all_reduce("MAX", x), args=(PAIR,)
    )
    assert count_all_reduces(texts[0]) == 1


# -- around the replicas -------------------------------------------------------------------


@every_choice
def test_values_are_reduced_for_their_destinations(name):
    ops = CHOICES[name]()
    both = ops.reduce(ReduceOp.SUM, PAIR, PAIR)
    assert isinstance(both, Mirrored)
    assert [component.tolist() for component in both.values] == [[4.0, 8.0]] * 2
    assert ops.reduce("mean", PAIR, "CPU:0").tolist() == [2.0, 4.0]
    assert ops.reduce("MAX", PAIR, ["CPU:0"]).tolist() == [3.0, 6.0]
    one, two = ops.batch_reduce("SUM", [(PAIR, "CPU:0"), (PAIR, ["CPU:0", "CPU:1"])])
    assert one.tolist() == [4.0, 8.0]
    assert len(two.values) == 2


@every_choice
def test_booleans_are_counted(name):
    ops = CHOICES[name]()
    flags = PerReplica([np.array([True, True]), np.array([True, False])])
    total = ops.reduce("SUM", flags, "CPU:0")
    assert (total.dtype, total.tolist()) == (jnp.int32, [2, 1])
    assert ops.reduce("MEAN", flags, "CPU:0").tolist() == [1.0, 0.5]


@every_choice
def test_a_strategy_reduces_by_its_choice(name):
    strategy = strategy_by(CHOICES[name]())
    assert strategy.reduce("SUM", PAIR).tolist() == [4.0, 8.0]
    assert float(strategy.reduce("MEAN", PAIR, axis=0)) == 3.0
    assert strategy.extended.reduce_to("SUM", PAIR, "CPU:0").tolist() == [4.0, 8.0]


def test_a_value_is_broadcast_to_its_destinations(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(0.0)
    ops = NcclAllReduce()
    for several in (variable, PAIR, ["CPU:0", "CPU:1"]):
        assert [float(x) for x in ops.broadcast(3.0, several).values] == [3.0, 3.0]
    assert ops.broadcast(3.0, "CPU:1") == 3.0


def test_one_device_does_the_adding():
    seen = []

    def look(values):
        seen.extend(value.devices() for value in values)
        return values[0] + values[1]

    ReductionToOneDevice("CPU:1", accumulation_fn=look).reduce("SUM", PAIR, "CPU:1")
    assert seen == [{jax.devices()[1]}] * 2


def test_a_program_may_bring_its_own():
    class Doubling(CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return 2 * sum(per_replica_value.values)

        def sum_over_replicas(self, tensors, axis_name):
            return [2 * total for total in super().sum_over_replicas(tensors, axis_name)]

    strategy = strategy_by(Doubling())
    assert strategy.reduce("SUM", PAIR).tolist() == [8.0, 16.0]
    result = strategy.run(lambda x: get_replica_context().all_reduce("SUM", x), args=(PAIR,))
    assert result.values[0].tolist() == [8.0, 16.0]


def test_the_base_reduces_nothing():
    with pytest.raises(NotImplementedError, match="CrossDeviceOps does not implement reduce"):
        CrossDeviceOps().reduce("SUM", PAIR, PAIR)


@pytest.mark.parametrize("choice", [NcclAllReduce, HierarchicalCopyAllReduce])
def test_there_cannot_be_less_than_no_packs(choice):
    with pytest.raises(ValueError, match=r"num_packs must be 0 or more. Received: num_packs=-1"):
        choice(num_packs=-1)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match=r"must be a CrossDeviceOps.*Received: 'nccl'"):
        unison.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops="nccl")


# -- communication options -----------------------------------------------------------------


@pytest.mark.parametrize(("bytes_per_pack", "asked"), [(1, 5), (16, 3), (1000, 1)])
def test_a_tree_is_asked_for_in_packs_of_about_so_many_bytes(bytes_per_pack, asked):
    options = unison.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    tree = [np.ones(2, "float32")] * 5  # of 8 bytes each
    count = sums_asked_for(lambda tree: unison.all_reduce("SUM", tree, options=options), tree)
    assert count == asked


def test_a_replica_asks_with_options(two_replicas):
    options = unison.CommunicationOptions(bytes_per_pack=1)

    def fn(x):
        return get_replica_context().all_reduce("MEAN", {"a": x, "b": 2 * x}, options)

    mean = two_replicas.run(fn, args=(PAIR,))
    assert mean["a"].values[1].tolist() == [2.0, 4.0]
    assert mean["b"].values[0].tolist() == [4.0, 8.0]


def test_communication_options_are_checked():
    options = unison.CommunicationOptions(5, 1.0, "nccl")
    assert (options.bytes_per_pack, options.timeout_seconds) == (5, 1.0)
    assert options.implementation.name == "NCCL"
    with pytest.raises(ValueError, match=r"bytes_per_pack must be 0 or more. Received: -1"):
        unison.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="is not a valid CommunicationImplementation"):
        unison.CommunicationOptions(implementation="pigeon")
