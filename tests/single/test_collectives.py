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
from unison.runtime.precision import device_dtype

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


# -- reduce, and operations other than sums ------------------------------------------------


def of_all(strategy, fn, x):
    """What `fn` of its row of `x` gives each replica."""
    result = strategy.run(fn, args=(PerReplica(list(x)),))
    return np.stack([np.asarray(component) for component in result.values])


OPERATIONS = {
    "SUM": lambda x: x.sum(0),
    "MEAN": lambda x: x.mean(0),
    "MIN": lambda x: x.min(0),
    "MAX": lambda x: x.max(0),
    "PROD": lambda x: x.prod(0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_reduce_by_every_operation(strategy, name):
    x = rows(strategy, 2, 3) * np.where(np.arange(3) == 1, -1, 1).astype("float32")
    for value in of_all(strategy, lambda x: unison.all_reduce(ReduceOp[name], x), x):
        np.testing.assert_allclose(value, OPERATIONS[name](x))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("destination", [0, 1])
def test_reduce_gives_the_result_to_one_replica(strategy, name, destination):
    x = rows(strategy, 2)
    result = of_all(strategy, lambda x: unison.reduce(x, name, destination), x)
    np.testing.assert_allclose(result[destination], OPERATIONS[name](x))
    assert not np.delete(result, destination, axis=0).any()


@pytest.mark.parametrize("name", ["MIN", "MAX", "PROD"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float16"])
def test_other_dtypes(two_replicas, name, dtype):
    x = np.array([[1, 0], [1, 1]], dtype)
    value = of_all(two_replicas, lambda x: unison.all_reduce(name, x), x)[1]
    assert value.dtype == dtype
    np.testing.assert_array_equal(value, OPERATIONS[name](x))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_an_associative_function_is_applied_in_the_order_of_the_replicas(replicas):
    """x -> a x + b after x -> c x + d is no commutative operation."""
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    maps = np.array([[2, 1], [3, -1], [-1, 4], [5, 2]], "float32")[:replicas]

    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    def fn(x):
        return jnp.stack(unison.all_reduce(then, (x[0], x[1])))

    factor, offset = maps[0]
    for a, b in maps[1:]:
        factor, offset = factor * a, a * offset + b
    result = strategy.run(fn, args=(PerReplica(list(maps)),))
    for component in strategy.experimental_local_results(result):
        assert component.tolist() == [factor, offset]


def test_an_associative_function_takes_logarithmically_many_exchanges(four_replicas, monkeypatch):
    texts = compiled_programs(monkeypatch)
    of_all(four_replicas, lambda x: unison.all_reduce(jnp.multiply, x), rows(four_replicas, 2))
    assert texts[0].count(" collective-permute(") == 2


def test_an_associative_function_meets_no_values_but_those_of_the_replicas(four_replicas):
    def product_by_logarithms(x, y):
        return jnp.exp(jnp.log(x) + jnp.log(y))  # of zero, a gradient would not be finite

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(unison.all_reduce(product_by_logarithms, x)))(x)

    x = rows(four_replicas, 2)
    np.testing.assert_allclose(of_all(four_replicas, gradient, x), 4 * x.prod(0) / x, rtol=1e-4)


def test_a_replica_that_is_not_there_is_an_error(two_replicas):
    for call in (
        lambda x: unison.reduce(x, "SUM", destination=2),
        lambda x: unison.broadcast(x, source=-1),
    ):
        with pytest.raises(ValueError, match="the index of one of 2 replicas"):
            two_replicas.run(call, args=(1.0,))


@pytest.mark.parametrize(("op", "scale"), [("SUM", 1.0), ("MEAN", 0.5)])
def test_the_slices_of_all_replicas_are_gathered(two_replicas, op, scale):
    def fn(x):
        slices = unison.IndexedSlices(x, jnp.array([2, 0]), dense_shape=(3,))
        return unison.all_reduce(op, {"slices": slices, "x": x})

    result = two_replicas.run(fn, args=(PerReplica(np.array([[1.0, 2.0], [3.0, 4.0]], "f")),))
    slices = result["slices"]
    assert slices.dense_shape == (3,)
    assert slices.values.values[1].tolist() == [1 * scale, 2 * scale, 3 * scale, 4 * scale]
    assert slices.indices.values[0].tolist() == [2, 0, 2, 0]
    assert result["x"].values[0].tolist() == [4 * scale, 6 * scale]


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [("int32", "float64"), ("int8", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
def test_the_dtype_of_a_mean(two_replicas, dtype, mean):
    result = two_replicas.run(lambda: unison.all_reduce("MEAN", jnp.ones(2, dtype)))
    assert result.values[0].dtype == device_dtype(mean)


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


@pytest.mark.parametrize("is_compiled", [True, False], ids=["buffers", "XLA"])
def test_packed_tensors_travel_by_dtype(monkeypatch, is_compiled):
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    monkeypatch.setattr(strategy.placement, "exchanges_buffers", is_compiled)
    texts = compiled_programs(monkeypatch)
    tensors = [np.ones(3, "float32"), np.ones(2, "int32"), np.full((2, 2), 2.0, "float32")]
    sums = strategy.run(lambda *tensors: all_reduce_packed(tensors), args=tuple(tensors))
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


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_the_gradient_of_an_extremum_goes_to_who_holds_it(strategy, op, check_vma):
    count = strategy.num_replicas_in_sync

    def gradient(x):
        factor = cotangent(jax.lax.axis_index("replica"), 3)
        return jax.grad(lambda x: jnp.sum(unison.all_reduce(op, x) * factor))(x)

    total = sum(np.asarray(cotangent(replica, 3)) for replica in range(count))
    holder = count - 1 if op == "MAX" else 0
    expected = np.zeros((count, 3))
    expected[holder] = total
    result = on_replicas(strategy, gradient, rows(strategy, 3), check_vma=check_vma)
    np.testing.assert_allclose(result, expected)


def test_who_hold_an_extremum_together_share_its_gradient(four_replicas):
    x = np.array([[5.0], [7.0], [7.0], [1.0]], "float32")

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(unison.all_reduce("MAX", x)))(x)

    assert of_all(four_replicas, gradient, x).tolist() == [[0.0], [2.0], [2.0], [0.0]]


@pytest.mark.parametrize("op", ["PROD", jnp.multiply])
def test_the_gradient_of_a_product(strategy, op):
    count = strategy.num_replicas_in_sync
    x = rows(strategy, 2)
    x[0, 1] = 0.0  # where dividing the product by the factor would not do

    def gradient(x):
        factor = cotangent(jax.lax.axis_index("replica"), 2)
        return jax.grad(lambda x: jnp.sum(unison.all_reduce(op, x) * factor))(x)

    total = sum(np.asarray(cotangent(replica, 2)) for replica in range(count))
    others = np.stack([np.delete(x, replica, axis=0).prod(0) for replica in range(count)])
    np.testing.assert_allclose(of_all(strategy, gradient, x), total * others, rtol=1e-5)


def test_the_gradient_of_reduce_comes_from_its_destination(four_replicas):
    def gradient(x):
        factor = cotangent(jax.lax.axis_index("replica"), 2)
        return jax.grad(lambda x: jnp.sum(unison.reduce(x, "SUM", 2) * factor))(x)

    result = of_all(four_replicas, gradient, rows(four_replicas, 2))
    np.testing.assert_allclose(result, np.broadcast_to(cotangent(2, 2), (4, 2)))


def test_directional_derivatives_of_an_extremum(two_replicas):
    def derivative(x):
        return jax.jvp(lambda x: unison.all_reduce("MAX", x), (x,), (10 * x,))[1]

    x = np.array([[1.0, 4.0], [3.0, 2.0]], "float32")
    assert of_all(two_replicas, derivative, x).tolist() == [[30.0, 40.0]] * 2


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
