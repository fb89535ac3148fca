"""The aggregation methods: equal sums, and different programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import unison
from hlo import all_reduces
from unison.collectives.aggregation import AggregationMethod, aggregate
from unison.lockstep import LockstepError
from unison.runtime.devices import default_devices
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.slices import IndexedSlices

METHODS = ["ADD_N", "TREE", "ACCUMULATE_N", "DEFAULT"]
MEBIBYTE = 2**20

rng = np.random.default_rng(7)


def on_replicas(function, count):
    """`function` of one replica's values as a function of all replicas', without devices."""

    def run(*values):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unison.collectives.tree.lax.ppermute", permuted_by_some)
            mapped = jax.vmap(function, axis_name=REPLICA_AXIS, axis_size=count)
            return jax.jit(mapped)(*values)

    return run


def permuted_by_some(value, axis_name, pairs, ppermute=lax.ppermute):
    """`lax.ppermute`, which under `vmap` knows only permutations of all replicas."""
    target_of = dict(pairs)
    everybody = range(lax.axis_size(axis_name))
    idle = [replica for replica in everybody if replica not in target_of]
    left = [replica for replica in everybody if replica not in target_of.values()]
    received = ppermute(value, axis_name, [*pairs, *zip(idle, left, strict=True)])
    receives = jnp.isin(lax.axis_index(axis_name), jnp.array(list(target_of.values())))
    return jnp.where(receives, received, jnp.zeros_like(received))


def gradients(count, dtype=np.float32):
    """A small model's gradients on `count` replicas, along the first axes."""
    shapes = {"kernel": (5, 7), "bias": (7,), "scale": (), "empty": (0, 3)}
    return {
        name: (100 * rng.normal(size=(count, *shape))).astype(dtype)
        for name, shape in shapes.items()
    }


def compiled(method, sizes, replicas=4, dtype="float32", **options):
    """The compiled program that aggregates vectors of `sizes` elements, which it may overwrite."""
    placement = Placement(default_devices()[:replicas])

    def program(vectors):
        return jax.tree.map(
            lambda x: x[None], aggregate([x[0] for x in vectors], method, **options)
        )

    axis = PartitionSpec(REPLICA_AXIS)
    mapped = jax.shard_map(
        program, mesh=placement.mesh, in_specs=axis, out_specs=axis, check_vma=False
    )
    avals = [
        jax.ShapeDtypeStruct((replicas, size), dtype, sharding=placement.per_replica)
        for size in sizes
    ]
    return jax.jit(mapped, donate_argnums=0).lower(avals).compile()


def traced(method, sizes, replicas=4, **options):
    """The traced program that aggregates vectors of `sizes` elements."""
    return jax.make_jaxpr(
        functools.partial(aggregate, method=method, **options),
        axis_env=[(REPLICA_AXIS, replicas)],
    )([jax.ShapeDtypeStruct((size,), "float32") for size in sizes])


def reduced_sizes(trace):
    """The elements that the collective operations of a traced program take, by their names."""
    sizes = {}
    for equation in trace.eqns:
        if equation.primitive.name in ("psum", "ppermute"):
            sizes.setdefault(equation.primitive.name, []).append(equation.invars[0].aval.size)
    return sizes


def exchanges(program):
    return len(re.findall(r" collective-permute(?:-start)?\(", program.as_text()))


# -- the sums ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_every_method_sums_over_any_number_of_replicas(method, count):
    values = gradients(count)
    sums = on_replicas(lambda tree: aggregate(tree, method), count)(values)
    for name, value in values.items():
        # Two orders of addition differ by at most this.
        bound = 2 * (count - 1) * np.finfo(np.float32).eps * np.abs(value).sum(axis=0)
        exact = value.astype(np.float64).sum(axis=0)
        for replica in np.asarray(sums[name]):
            assert np.all(np.abs(replica - exact) <= bound)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_integers_are_summed_exactly(method, count):
    values = gradients(count, np.int32)
    sums = on_replicas(lambda tree: aggregate(tree, method), count)(values)
    for name, value in values.items():
        assert sums[name].dtype == np.int32
        np.testing.assert_array_equal(sums[name], np.broadcast_to(value.sum(axis=0), value.shape))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [3, 4, 8])
def test_all_replicas_get_equal_bits(method, count):
    values = gradients(count)
    for total in jax.tree.leaves(on_replicas(lambda t: aggregate(t, method), count)(values)):
        np.testing.assert_array_equal(total, np.broadcast_to(total[:1], total.shape))


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_divides_by_the_number_of_replicas(method):
    values = np.array([1, 2, 6], np.int32)
    means = on_replicas(lambda x: aggregate(x, method, op="MEAN"), 3)(values)
    np.testing.assert_allclose(means, [3, 3, 3])


@pytest.mark.parametrize("method", METHODS)
def test_truth_values_are_counted(method):
    counts = on_replicas(lambda x: aggregate(x, method), 3)(np.array([True, False, True]))
    assert counts.tolist() == [2, 2, 2]


@pytest.mark.parametrize("method", METHODS)
def test_each_dtype_keeps_its_own(method):
    values = {"a": np.ones((4, 3), np.float32), "b": np.ones((4, 2), jnp.bfloat16)}
    sums = on_replicas(lambda tree: aggregate(tree, method), 4)(values)
    assert {name: value.dtype.name for name, value in sums.items()} == {
        "a": "float32",
        "b": "bfloat16",
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [3, 4])
def test_the_gradient_is_the_sum_of_the_replicas_gradients(method, count):
    values = rng.normal(size=(count, 5)).astype(np.float32)
    weights = rng.normal(size=(count, 5)).astype(np.float32)

    def loss(value, weight):
        return jnp.sum(aggregate({"x": value}, method)["x"] * weight)

    gradient = on_replicas(lambda value, weight: jax.grad(loss)(value, weight), count)
    expected = np.broadcast_to(weights.sum(axis=0), weights.shape)
    np.testing.assert_allclose(gradient(values, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_pieces_of_a_long_tensor_are_put_back_in_their_places(method):
    # More than 1 MiB: the second is reduced in two pieces, which overlap; the others together.
    values = [rng.integers(0, 9, (2, size)).astype(np.int32) for size in (200_000, 300_001, 17)]
    sums = on_replicas(lambda vectors: aggregate(vectors, method), 2)(values)
    for value, total in zip(values, sums, strict=True):
        np.testing.assert_array_equal(total[1], value.sum(axis=0))


# -- hosts ---------------------------------------------------------------------------------

HOSTS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 1, 2], [3, 4, 5]],
    [[0, 1, 2, 3, 4], [5]],
    [[4, 0], [1, 2, 3], [5, 6]],
    [[0], [1], [2]],
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("size", [3, 70_001], ids=["whole", "halved"])
def test_a_tree_over_hosts_of_any_sizes_sums_exactly(hosts, size):
    count = sum(map(len, hosts))
    values = rng.integers(-9, 9, (count, size)).astype(np.int32)
    sums = on_replicas(lambda x: aggregate(x, "TREE", hosts=hosts), count)(values)
    np.testing.assert_array_equal(sums, np.broadcast_to(values.sum(axis=0), values.shape))


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3], []]], ids=str)
def test_hosts_must_name_every_replica_once(hosts):
    with pytest.raises(ValueError, match="each of the 4 replicas once"):
        on_replicas(lambda x: aggregate(x, "TREE", hosts=hosts), 4)(np.ones(4))


def sent_across_hosts(hosts, size):
    """The elements that each replica sends to another host, from the traced program."""
    count = sum(map(len, hosts))
    host_of = {replica: index for index, host in enumerate(hosts) for replica in host}
    sent = dict.fromkeys(range(count), 0)
    for equation in traced("TREE", [size], count, hosts=hosts).eqns:
        if equation.primitive.name == "ppermute":
            for source, target in equation.params["perm"]:
                if host_of[source] != host_of[target]:
                    sent[source] += equation.invars[0].aval.size
    return sent


def test_a_replica_sends_only_its_part_of_a_large_tensor_to_another_host():
    size = 2**20
    assert sent_across_hosts([[0, 1, 2, 3], [4, 5, 6, 7]], size) == dict.fromkeys(
        range(8), size // 4
    )


def test_a_tree_that_knows_no_hosts_sends_more_across_them():
    size = 2**20
    assert reduced_sizes(traced("TREE", [size], 8)) == {"ppermute": [size] * 3}


def test_the_hosts_of_a_strategy_are_the_processes_of_its_devices(monkeypatch):
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    class TwoHosts:
        devices = tuple(map(Device, [0, 0, 1, 1]))

    monkeypatch.setattr("unison.collectives.aggregation.placement_in_scope", TwoHosts)
    from unison.collectives import aggregation

    hosts = []
    on_replicas(lambda x: hosts.append(aggregation._hosts_in_scope(REPLICA_AXIS)) or x, 4)(
        np.ones(4)
    )
    assert hosts == [((0, 1), (2, 3))]


# -- the programs --------------------------------------------------------------------------


def test_add_n_is_one_all_reduce_of_everything():
    program = compiled("ADD_N", [1000, 20, 3])
    assert all_reduces(program.as_text()) == ["f32[1023]{0}"]
    assert exchanges(program) == 0


@pytest.mark.parametrize(("replicas", "depth"), [(2, 1), (3, 3), (4, 2)])
def test_a_tree_is_log2_exchanges_and_no_all_reduce(replicas, depth):
    # Three replicas: the third gives its values to the first, and gets the sum in the end.
    program = compiled("TREE", [1000, 20, 3], replicas)
    assert exchanges(program) == depth
    assert all_reduces(program.as_text()) == []


@pytest.mark.parametrize(("count", "depth"), [(8, 3), (16, 4), (15, 5), (64, 6)])
def test_the_depth_of_a_tree_grows_with_the_logarithm(count, depth):
    # 15 = 8 + 7: two more exchanges than for 8, for the seven.
    assert reduced_sizes(traced("TREE", [9], count)) == {"ppermute": [9] * depth}


def test_accumulate_n_is_a_loop_over_pieces_for_what_is_large():
    program = compiled("ACCUMULATE_N", [MEBIBYTE, 200_000, 50_000])
    pieces = [f"f32[{MEBIBYTE // 4}]{{0}}", "f32[125000]{0}"]  # 1 MiB; half of the other two
    assert sorted(all_reduces(program.as_text())) == sorted(pieces)


def extra_memory(method, sizes):
    """The bytes that aggregating vectors of `sizes` elements takes beside themselves."""
    return compiled(method, sizes, 2).memory_analysis().temp_size_in_bytes


LARGE = [2**21 - index for index in range(3)]  # 8 MiB each
SMALL = [2**16 + index for index in range(16)]  # 0.25 MiB each


@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=["large", "small"])
def test_accumulate_n_needs_no_memory_but_for_its_pieces(sizes):
    assert extra_memory("ACCUMULATE_N", sizes) <= 2.1 * MEBIBYTE


def test_add_n_needs_memory_for_all_gradients():
    assert extra_memory("ADD_N", LARGE) >= 2 * 24 * 0.99 * MEBIBYTE
    assert extra_memory("ADD_N", SMALL) >= 2 * 4 * 0.99 * MEBIBYTE


def test_default_packs_small_tensors_and_lets_large_ones_travel_alone():
    trace = traced("DEFAULT", [1000, MEBIBYTE, 20])
    assert reduced_sizes(trace) == {"psum": [1020, MEBIBYTE]}


def test_default_fills_several_buffers_with_tensors_that_are_many():
    trace = traced("DEFAULT", [100_000, 100_000, 100_000, 7])
    assert reduced_sizes(trace) == {"psum": [200_000, 100_007]}


def test_default_is_a_tree_across_hosts_for_what_is_small():
    trace = traced("DEFAULT", [1000, MEBIBYTE], hosts=[[0, 1], [2, 3]])
    assert reduced_sizes(trace) == {"ppermute": [1000, 1000], "psum": [MEBIBYTE]}


@pytest.mark.parametrize(
    ("method", "sums"), [("DEFAULT", [1000, MEBIBYTE]), ("ADD_N", [1000 + MEBIBYTE])]
)
def test_xla_combines_sums_on_accelerators_unless_one_buffer_is_asked_for(
    method, sums, monkeypatch
):
    class Accelerators:
        class Device:
            process_index = 0

        devices = (Device,) * 4
        platform = "gpu"

        rules = None

    for module in ("aggregation", "packing"):
        monkeypatch.setattr(f"unison.collectives.{module}.placement_in_scope", Accelerators)
    assert reduced_sizes(traced(method, [1000, MEBIBYTE])) == {"psum": sums}


# -- naming a method -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "member"),
    [
        (None, AggregationMethod.DEFAULT),
        ("tree", AggregationMethod.TREE),
        ("experimental_tree", AggregationMethod.TREE),
        ("EXPERIMENTAL_ACCUMULATE_N", AggregationMethod.ACCUMULATE_N),
        (0, AggregationMethod.ADD_N),
        (AggregationMethod.TREE, AggregationMethod.TREE),
    ],
)
def test_a_method_is_named_by_member_name_or_number(named, member):
    assert AggregationMethod.parse(named) is member


def test_the_numbers_are_those_of_tensorflow():
    # TF 2.21; its DEFAULT is its ADD_N, ours chooses.
    assert AggregationMethod.ADD_N == 0
    assert AggregationMethod.EXPERIMENTAL_TREE == 1
    assert AggregationMethod.EXPERIMENTAL_ACCUMULATE_N == 2


def test_the_mean_of_small_integers_is_a_float32():
    means = on_replicas(lambda x: aggregate(x, "TREE", op="MEAN"), 2)(np.array([1, 2], np.int16))
    assert means.dtype == np.float32
    assert means.tolist() == [1.5, 1.5]


def test_slices_of_an_array_are_summed_as_that_array(two_replicas):
    def lookup(row):
        return unison.aggregate(IndexedSlices(jnp.ones((1, 2)), row, dense_shape=(3, 2)))

    rows = unison.PerReplica([np.array([0]), np.array([2])])
    assert two_replicas.run(lookup, (rows,)).values[1].tolist() == [[1, 1], [0, 0], [1, 1]]


def test_gradients_are_aggregated_by_sums_and_means_only():
    with pytest.raises(ValueError, match="SUM or MEAN"):
        aggregate(jnp.ones(2), op="MAX")


@pytest.mark.parametrize("method", ["NCCL", 7, 1.5, [1]])
def test_an_unknown_method_is_refused_with_those_that_there_are(method):
    with pytest.raises(ValueError, match="ADD_N, TREE, ACCUMULATE_N or DEFAULT"):
        AggregationMethod.parse(method)


# -- in replica programs -------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_replicas_of_a_strategy_aggregate_what_they_computed(four_replicas, method):
    batch = unison.PerReplica([float(index) for index in range(4)])
    sums = four_replicas.run(lambda x: unison.aggregate({"w": x, "b": 2 * x}, method), (batch,))
    assert [float(value) for value in sums["w"].values] == [6.0] * 4
    assert [float(value) for value in sums["b"].values] == [12.0] * 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [5, 300_000], ids=["small", "large"])
def test_replicas_with_batches_of_different_sizes_aggregate_in_one_program(
    request, four_replicas, method, size
):
    if (method, size) == ("ACCUMULATE_N", 300_000):
        reason = "replicas of different shapes share no loop with a collective in it yet"
        request.applymarker(pytest.mark.xfail(raises=LockstepError, strict=True, reason=reason))
    batch = unison.PerReplica([np.ones(rows, np.float32) for rows in (3, 3, 2, 0)])
    sums = four_replicas.run(
        lambda x: unison.aggregate(jnp.sum(x) * jnp.arange(float(size)), method), (batch,)
    )
    for total in sums.values:
        np.testing.assert_array_equal(total, 8 * np.arange(size, dtype=np.float32))


def test_a_hand_written_shard_map_aggregates_over_an_axis_of_its_own():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((3,), ("data",), devices=default_devices()[:3], axis_types=auto)
    total = jax.jit(
        jax.shard_map(
            lambda x: aggregate(x, "TREE", axis_name="data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(jnp.arange(3.0))
    assert total.tolist() == [3.0]


def test_aggregating_outside_a_replica_program_names_the_axis():
    with pytest.raises(NameError, match=REPLICA_AXIS):
        aggregate(jnp.ones(2))


def test_one_replica_needs_no_collective_operation():
    assert reduced_sizes(traced("TREE", [2], replicas=1)) == {}
