"""Collective operations, in `run` and in a hand-written `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import unison
from hlo import compiled_programs, count_all_reduces
from unison import PerReplica, ReduceOp, get_replica_context
from unison.collectives import all_reduce_packed
from unison.collectives.packing import pack, unpack

SPLIT = PartitionSpec("replica")


def on_replicas(strategy, fn, x, *, check_vma=False):
    """`fn` of every replica's row of `x`, by a hand-written `shard_map`."""
    mapped = jax.shard_map(
        lambda row: fn(row[0])[None],
        mesh=strategy.placement.mesh,
        in_specs=SPLIT,
        out_specs=SPLIT,
        check_vma=check_vma,
    )
    return np.asarray(jax.jit(mapped)(x))


def rows(strategy, *shape):
    count = strategy.num_replicas_in_sync
    size = count * int(np.prod(shape))
    return np.arange(1.0, size + 1, dtype="float32").reshape(count, *shape)


COLLECTIVES = {
    "sum": (lambda x: unison.all_reduce("SUM", x), lambda x: x.sum(0)),
    "mean": (lambda x: unison.all_reduce(ReduceOp.MEAN, x), lambda x: x.mean(0)),
    "gather 0": (lambda x: unison.all_gather(x, 0), lambda x: np.concatenate(x, 0)),
    "gather 1": (lambda x: unison.all_gather(x, 1), lambda x: np.concatenate(x, 1)),
    "gather -1": (lambda x: unison.all_gather(x, -1), lambda x: np.concatenate(x, -1)),
    "broadcast": (unison.broadcast, lambda x: x[0]),
    "broadcast 1": (lambda x: unison.broadcast(x, source=1), lambda x: x[1]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_in_run(strategy, name):
    collective, expected = COLLECTIVES[name]
    x = rows(strategy, 2, 3)
    result = strategy.run(collective, args=(PerReplica(x),))
    for value in result.values:
        np.testing.assert_allclose(value, expected(x))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_in_a_hand_written_shard_map(strategy, name, check_vma):
    collective, expected = COLLECTIVES[name]
    x = rows(strategy, 2, 3)
    for value in on_replicas(strategy, collective, x, check_vma=check_vma):
        np.testing.assert_allclose(value, expected(x))


def test_the_context_has_them_too(two_replicas):
    def fn(x):
        replica = get_replica_context()
        return replica.all_reduce("SUM", {"x": x}), replica.all_gather([x], axis=0)

    total, gathered = two_replicas.run(fn, args=(PerReplica([np.ones(1), np.ones(1)]),))
    assert total["x"].values[1].tolist() == [2.0]
    assert gathered[0].values[1].tolist() == [1.0, 1.0]


def test_a_tree_of_numbers_and_arrays_of_several_dtypes(two_replicas):
    value = {"n": 3, "x": (np.ones(2, "float32"), np.ones(2, "int32")), "flag": True}
    total = two_replicas.run(lambda: unison.all_reduce("SUM", value))
    assert int(total["n"].values[0]) == 6
    assert total["x"][0].values[0].tolist() == [2.0, 2.0]
    assert total["x"][1].values[0].dtype == jnp.int32
    assert int(total["flag"].values[0]) == 2


def test_the_mean_of_integers_is_floating(two_replicas):
    mean = two_replicas.run(lambda x: unison.all_reduce("MEAN", x), args=(PerReplica([1, 2]),))
    assert float(mean.values[0]) == 1.5


def test_truth_values_are_broadcast_as_such(two_replicas):
    sent = two_replicas.run(unison.broadcast, args=(PerReplica([True, False]),))
    assert [value.tolist() for value in sent.values] == [True, True]
    assert sent.values[0].dtype == jnp.bool_


def test_a_tree_travels_in_one_all_reduce(two_replicas, monkeypatch):
    texts = compiled_programs(monkeypatch)
    tree = [np.ones(shape, "float32") for shape in [(3,), (), (2, 5), (7,)]]
    two_replicas.run(lambda tree: unison.all_reduce("SUM", tree), args=(tree,))
    assert [count_all_reduces(text) for text in texts] == [1]


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((2,), 1), ((2,), -2)])
def test_gathering_along_an_axis_that_is_not_there_is_an_error(two_replicas, shape, axis):
    with pytest.raises(ValueError, match=r"Add the axis first \(value\[None\]\)"):
        two_replicas.run(lambda: unison.all_gather(jnp.ones(shape), axis))


def test_packing_is_undone_by_unpacking():
    tensors = [jnp.arange(6.0).reshape(2, 3), jnp.ones(()), jnp.zeros((0, 2)), jnp.full(4, 7.0)]
    packed = pack(tensors)
    assert packed.shape == (11,)
    for tensor, unpacked in zip(tensors, unpack(packed, tensors), strict=True):
        np.testing.assert_array_equal(tensor, unpacked)


def test_packed_tensors_travel_by_dtype(two_replicas, monkeypatch):
    texts = compiled_programs(monkeypatch)
    tensors = [np.ones(3, "float32"), np.ones(2, "int32"), np.full((2, 2), 2.0, "float32")]
    sums = two_replicas.run(lambda *tensors: all_reduce_packed(tensors), args=tuple(tensors))
    for tensor, total in zip(tensors, sums, strict=True):
        np.testing.assert_array_equal(total.values[1], 2 * tensor)
        assert total.values[1].dtype == tensor.dtype
    assert [count_all_reduces(text) for text in texts] == [2]


# -- gradients -----------------------------------------------------------------------------


def cotangent(replica, size):
    """What the loss of a replica multiplies the result of the collective by: not all the same."""
    return jnp.arange(1.0, size + 1) + 10.0 * replica


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_gradient_of_all_reduce_is_the_all_reduce_of_the_gradients(strategy, op, check_vma):
    def gradient(x):
        factor = cotangent(jax.lax.axis_index("replica"), 3)
        return jax.grad(lambda x: jnp.sum(unison.all_reduce(op, x) * factor))(x)

    count = strategy.num_replicas_in_sync
    factors = np.stack([cotangent(replica, 3) for replica in range(count)])
    expected = factors.sum(0) if op == "SUM" else factors.mean(0)
    result = on_replicas(strategy, gradient, rows(strategy, 3), check_vma=check_vma)
    np.testing.assert_allclose(result, np.broadcast_to(expected, (count, 3)))


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_gradient_of_all_gather_is_the_slice_of_the_summed_gradient(strategy, check_vma):
    count = strategy.num_replicas_in_sync

    def gradient(x):
        factor = cotangent(jax.lax.axis_index("replica"), 2 * count)
        return jax.grad(lambda x: jnp.sum(unison.all_gather(x, 0) * factor))(x)

    total = sum(np.asarray(cotangent(replica, 2 * count)) for replica in range(count))
    result = on_replicas(strategy, gradient, rows(strategy, 2), check_vma=check_vma)
    np.testing.assert_allclose(result, total.reshape(count, 2))


def test_gradients_in_run(two_replicas):
    def gradient(x):
        factor = 1.0 + get_replica_context().replica_id_in_sync_group
        return jax.grad(lambda x: factor * get_replica_context().all_reduce("SUM", x))(x)

    result = two_replicas.run(gradient, args=(PerReplica([5.0, 7.0]),))
    assert [float(value) for value in result.values] == [3.0, 3.0]


def test_a_loss_that_is_equal_on_all_replicas_counts_once_for_each(two_replicas):
    def gradient(x):
        return jax.grad(lambda x: get_replica_context().all_reduce("SUM", x * x))(x)

    result = two_replicas.run(gradient, args=(PerReplica([5.0, 7.0]),))
    assert [float(value) for value in result.values] == [20.0, 28.0]
