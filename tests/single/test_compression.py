"""Gradients with fewer bytes on the wire: the methods as functions."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

import unison
from unison import compression
from unison.compression import LargeMatrices, everything
from unison.compression.reporting import bytes_sent
from unison.runtime.private_jax import shard_map

MEMORYLESS = {
    "bfloat16": compression.bfloat16,
    "float16": compression.float16,
    "int8": compression.int8,
    "int4": compression.int4,
}
WITH_RESIDUAL = {
    "sign": partial(compression.sign, momentum=0),
    "topk": partial(compression.topk, 0.05, momentum=0),
    "powersgd": partial(compression.powersgd, 2),
    "int8 with feedback": partial(compression.int8, error_feedback=True),
    "int4 with feedback": partial(compression.int4, error_feedback=True),
}
ALL = MEMORYLESS | WITH_RESIDUAL

everyone = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
with_residual = pytest.mark.parametrize("make", WITH_RESIDUAL.values(), ids=WITH_RESIDUAL)


class Replicas:
    """A hand-written `shard_map` in which replicas combine their gradients, step by step."""

    def __init__(self, compressed, gradients, **options):
        self.count = len(gradients)
        mesh = jax.make_mesh(
            (self.count,),
            ("workers",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[: self.count],
        )
        of_replica, of_all = PartitionSpec("workers"), PartitionSpec()

        def step(gradients, state, own):
            gradients, own = jax.tree.map(lambda stacked: stacked[0], (gradients, own))
            state = state._replace(of_replica=own)
            sums, state = compressed.apply(gradients, state, axis_name="workers", **options)
            return jax.tree.map(lambda own: own[None], (sums, state.of_replica)), state

        mapped = shard_map(
            step,
            mesh=mesh,
            in_specs=(of_replica, of_all, of_replica),
            out_specs=(of_replica, of_all),
            check_vma=False,
        )
        self._step = jax.jit(mapped)
        self.state = compressed.init(gradients[0])
        self.own = jax.tree.map(lambda x: jnp.stack([x] * self.count), self.state.of_replica)
        self.gradients = gradients

    def _arguments(self, gradients):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
        return stacked, self.state._replace(of_replica={}), self.own

    def step(self, gradients=None):
        """Returns every replica's sums, stacked."""
        arguments = self._arguments(self.gradients if gradients is None else gradients)
        (sums, self.own), self.state = self._step(*arguments)
        return jax.tree.map(np.asarray, sums)

    def compiled(self):
        return self._step.lower(*self._arguments(self.gradients)).compile().as_text()

    def residuals(self):
        return [np.asarray(stacked) for stacked in self.own["residual"]]


def normal(seed, *shapes, replicas=4, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [
        {f"w{i}": rng.normal(size=shape).astype(dtype) for i, shape in enumerate(shapes)}
        for _ in range(replicas)
    ]


def total(gradients, name="w0"):
    return sum(np.asarray(tree[name], "float64") for tree in gradients)


# -- sums --------------------------------------------------------------------------------------


@everyone
def test_replicas_get_equal_bits(make):
    gradients = normal(0, (33, 65), (64, 40))
    replicas = Replicas(make(), gradients)
    for _ in range(3):
        for sums in replicas.step().values():
            assert all(np.array_equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (compression.bfloat16, 2**-8),
        (compression.float16, 2**-11),
        (compression.int8, 1 / 127),
        (compression.int4, 1 / 7),
    ],
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_an_element_is_off_by_the_resolution_of_its_block_at_most(make, error, replicas):
    gradients = normal(1, (40, 50), replicas=replicas)
    sums = Replicas(make(), gradients).step()["w0"][0]
    largest = np.abs([tree["w0"] for tree in gradients]).max()
    # One encoding of every contribution, and one of the sum.
    bound = error * largest * replicas * (2 + error)
    assert 0 < np.abs(sums - total(gradients)).max() <= bound


@pytest.mark.parametrize(("make", "levels"), [(compression.int8, 127), (compression.int4, 7)])
def test_stochastic_rounding_is_right_on_average(make, levels):
    # Whole blocks; a tensor that ends within a block; one of a single block that is not full.
    gradients = normal(0, (32, 64), (37, 29), (7, 5), replicas=2)
    replicas = Replicas(make(rule=everything), gradients)
    steps = [replicas.step() for _ in range(200)]
    for name in gradients[0]:
        sums = np.stack([step[name][0] for step in steps])
        off = sums.mean(axis=0) - total(gradients, name)
        # A rounding deviates by half its resolution at most: two of contributions, one of their
        # sum.
        resolution = np.abs([tree[name] for tree in gradients]).max() / levels
        deviation = resolution / 2 * np.sqrt(1 + 1 + 2**2) / np.sqrt(len(sums))
        assert deviation / 100 < np.abs(off).max() < 5 * deviation
        assert np.abs(off.mean()) < 5 * deviation / np.sqrt(off.size)


@with_residual
@pytest.mark.parametrize("seed", range(3))
def test_what_was_sent_and_what_is_kept_are_the_gradients(make, seed):
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(33, 70, 2)), tuple(rng.integers(11, 14, 3))]
    replicas = Replicas(make(), normal(seed, *shapes))
    sent, given = [0, 0], [0, 0]
    for step in range(4):
        gradients = normal(10 * seed + step, *shapes)
        sums = replicas.step(gradients)
        for i, name in enumerate(("w0", "w1")):
            sent[i] = sent[i] + sums[name][0].astype("float64")
            given[i] = given[i] + total(gradients, name)
    for i, residual in enumerate(replicas.residuals()):
        np.testing.assert_allclose(sent[i] + residual.sum(axis=0), given[i], atol=1e-4)
        assert np.abs(residual).max() > 1e-3  # it does lose something


# -- without loss ------------------------------------------------------------------------------


def multiples(most, seed=0, unit=2.0**-9):
    """Gradients of which each block has the largest and else multiples of a `most`-th of it."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-most, most + 1, (64, 64))
    numbers[:, ::16] = most
    return [{"w0": (numbers * unit).astype("float32")} for _ in range(4)]


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        (compression.bfloat16(), multiples(127)),
        (compression.float16(), multiples(1023)),
        (compression.int8(), multiples(127)),
        (compression.int8(error_feedback=True), multiples(127)),
        (compression.int4(), multiples(7)),
        (compression.topk(1.0, momentum=0), normal(3, (64, 64))),
    ],
    ids=["bfloat16", "float16", "int8", "int8 with feedback", "int4", "topk"],
)
def test_what_a_method_can_represent_is_summed_exactly(method, gradients):
    replicas = Replicas(method, gradients)
    expected = sum(tree["w0"] for tree in gradients)
    for _ in range(2):
        np.testing.assert_allclose(replicas.step()["w0"][2], expected, rtol=1e-6, atol=1e-6)
    if "residual" in replicas.own:
        assert max(np.abs(residual).max() for residual in replicas.residuals()) < 1e-6


def test_what_a_replica_adds_to_the_part_that_it_sums_is_not_rounded():
    sums = multiples(7, seed=1, unit=3 * 2.0**-9)[0]["w0"]
    sent = multiples(7)[0]["w0"]
    kept = sums - sent  # which no block of int4 has room for
    gradients = [
        {"w0": np.concatenate([kept[:32], sent[32:]])},
        {"w0": np.concatenate([sent[:32], kept[32:]])},
    ]
    received = Replicas(compression.int4(), gradients).step()["w0"]
    np.testing.assert_allclose(received[1], sums, rtol=1e-6)


def test_what_signs_owe_of_uneven_gradients_does_not_pile_up():
    rng = np.random.default_rng(0)
    unevenness = np.exp(rng.normal(size=(64, 64)))
    gradients = [{"w0": (rng.normal(size=(64, 64)) * unevenness).astype("float32")}] * 2
    replicas = Replicas(compression.sign(momentum=0), gradients)
    for _ in range(60):
        replicas.step()
    owed, given = replicas.residuals()[0].sum(axis=0), total(gradients)
    assert np.linalg.norm(owed) < 10 * np.linalg.norm(given)
    # The largest element is in arrears by a few steps, not by most of them.
    assert np.abs(owed).max() < 8 * np.abs(given).max()


@pytest.mark.parametrize("replicas", [2, 3])
def test_signs_of_a_block_that_is_not_full_are_scaled_as_others(replicas):
    gradients = [{"w0": np.ones((43, 24), "float32")}] * replicas  # 2 blocks of 512, and 8 elements
    sums = Replicas(compression.sign(momentum=0), gradients).step()["w0"][0]
    np.testing.assert_allclose(sums, sums[0, 0], rtol=1e-6)


def test_powersgd_is_exact_for_gradients_of_its_rank():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(50, 3)), rng.normal(size=(4, 3, 40))
    gradients = [{"w0": (left @ right[i]).astype("float32")} for i in range(4)]
    replicas = Replicas(compression.powersgd(3), gradients)
    np.testing.assert_allclose(replicas.step()["w0"][0], total(gradients), atol=1e-4)


def test_powersgd_goes_on_after_gradients_of_zeros():
    gradients = [{"w0": np.outer(np.arange(40.0), np.ones(40)).astype("float32")}] * 4
    replicas = Replicas(compression.powersgd(2), gradients)
    replicas.step([{"w0": np.zeros((40, 40), "float32")}] * 4)
    np.testing.assert_allclose(replicas.step()["w0"][0], total(gradients), atol=1e-3)


def test_powersgd_sends_what_factors_would_not_make_smaller_as_it_is():
    gradients = normal(0, (64, 64))
    replicas = Replicas(compression.powersgd(64), gradients)
    np.testing.assert_allclose(replicas.step()["w0"][0], total(gradients), atol=1e-5)
    assert compression.powersgd(64).names(gradients[0]) == []


def test_topk_with_everything_and_momentum_sends_the_momentum():
    gradients = normal(0, (32, 32))
    replicas = Replicas(compression.topk(1.0, momentum=0.5), gradients)
    replicas.step()
    np.testing.assert_allclose(replicas.step()["w0"][0], 1.5 * total(gradients), atol=1e-5)


def test_topk_forgets_the_momentum_of_what_it_sends():
    gradients = [{"w0": np.zeros((32, 32), "float32")} for _ in range(2)]
    for tree in gradients:
        tree["w0"][0, :2] = 8, 1
    replicas = Replicas(compression.topk(1 / 1024, momentum=0.5), gradients)
    first, second = replicas.step()["w0"][0], replicas.step()["w0"][0]
    # The smaller element's momentum goes on while it waits: 1, then 1 + 1.5.
    assert (first[0, 0], second[0, 0]) == (16, 16)
    assert np.asarray(replicas.own["velocity"][0])[0, 0, :2].tolist() == [0, 1.5]
    assert replicas.residuals()[0][0, 0, :2].tolist() == [0, 2.5]


@everyone
def test_steps_of_the_warm_up_lose_nothing(make):
    gradients = normal(0, (40, 40))
    replicas = Replicas(make(warmup_steps=2), gradients)
    errors = [np.abs(replicas.step()["w0"][1] - total(gradients)).max() for _ in range(3)]
    assert max(errors[:2]) < 1e-5 < errors[2]


def test_what_topk_sends_falls_from_a_quarter_to_its_fraction():
    gradients = normal(0, (32, 32), replicas=1) * 2
    method = compression.topk(1 / 64, momentum=0.5, warmup_steps=1, ramp_steps=6)
    replicas = Replicas(method, gradients)
    sent = [np.count_nonzero(replicas.step()["w0"][0]) for _ in range(9)]
    assert sent == [1024, 256, 256, 256, 64, 64, 64, 16, 16]
    alike = compression.topk(1 / 64, momentum=0.5)
    assert compression.report(method, gradients[0], 2) == compression.report(alike, gradients[0], 2)


def test_each_replica_clips_its_part_of_the_gradients():
    gradients = normal(0, (40, 40), (9,))
    norms = [np.linalg.norm([*tree["w0"].ravel(), *tree["w1"]]) for tree in gradients]
    gradients[3] = {name: tensor / 1e6 for name, tensor in gradients[3].items()}
    limit = 3 / np.sqrt(4)
    factors = [*(limit / norm for norm in norms[:3]), 1]
    expected = {
        name: sum(tree[name] * factor for tree, factor in zip(gradients, factors, strict=True))
        for name in ("w0", "w1")
    }
    method = compression.topk(1.0, momentum=0, clipnorm=3.0)
    summed = Replicas(method, gradients).step()
    larger = [{name: 4 * tensor for name, tensor in tree.items()} for tree in gradients]
    means = Replicas(method, larger, op="MEAN").step()
    for name, clipped in expected.items():
        np.testing.assert_allclose(summed[name][2], clipped, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(means[name][2], clipped, rtol=1e-4, atol=1e-6)


@with_residual
def test_one_replica_sends_what_several_have_kept(make):
    gradients = normal(0, (40, 40), replicas=1)
    alone = Replicas(make(), gradients)
    alone.own = {**alone.own, "residual": tuple(map(jnp.ones_like, alone.own["residual"]))}
    np.testing.assert_allclose(alone.step()["w0"][0], gradients[0]["w0"] + 1, rtol=1e-6)
    assert not alone.residuals()[0].any()
    np.testing.assert_array_equal(alone.step()["w0"][0], gradients[0]["w0"])


@everyone
def test_one_replica_loses_nothing(make):
    gradients = normal(0, (40, 40), replicas=1)
    method = make()
    alone = Replicas(method, gradients)
    np.testing.assert_array_equal(alone.step()["w0"][0], gradients[0]["w0"])
    assert not re.findall(r" (?:all-\w+|collective-\w+|reduce-scatter)\(", alone.compiled())
    outside, state = method.apply(gradients[0], method.init(gradients[0]))
    np.testing.assert_array_equal(outside["w0"], gradients[0]["w0"])
    assert int(state.step) == 1


# -- on the wire -------------------------------------------------------------------------------


def collectives(text):
    """The kind, element type and number of elements that each collective of a program returns."""
    found = []
    for results, kind in re.findall(
        r"= (\S+|\([^=]*?\)) (all-reduce|all-gather|all-to-all|collective-permute)\(", text
    ):
        of_kind = {}
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            size = int(np.prod([int(d) for d in shape.split(",") if d], initial=1))
            of_kind[dtype] = of_kind.get(dtype, 0) + size
        found += [(kind, dtype, size) for dtype, size in of_kind.items()]
    return sorted(found)


SIZE = 64 * 128  # a multiple of all block sizes, and of the replicas


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (compression.bfloat16(), {("all-to-all", "u16", SIZE), ("all-gather", "u16", SIZE)}),
        (
            compression.float16(),
            {("all-to-all", "u16", SIZE + 2 * 8), ("all-gather", "u16", SIZE + 2 * 8)},
        ),
        (
            compression.int8(),
            {("all-to-all", "u8", SIZE + 4 * 32), ("all-gather", "u8", SIZE + 4 * 32)},
        ),
        (
            compression.int4(),
            {("all-to-all", "u8", SIZE // 2 + 4 * 128), ("all-gather", "u8", SIZE // 2 + 4 * 128)},
        ),
        (
            compression.sign(),
            {("all-to-all", "u8", SIZE // 8 + 4 * 16), ("all-gather", "u8", SIZE // 8 + 4 * 16)},
        ),
        (compression.topk(1 / 128), {("all-gather", "s32", 4 * 2 * SIZE // 128)}),
        (
            compression.powersgd(2),
            {("all-reduce", "f32", 2 * 64), ("all-reduce", "f32", 2 * 128)},
        ),
    ],
    ids=["bfloat16", "float16", "int8", "int4", "sign", "topk", "powersgd"],
)
def test_the_wire_carries_the_small_type(method, expected):
    gradients = normal(0, (64, 128))
    assert set(collectives(Replicas(method, gradients).compiled())) == expected


@everyone
def test_a_program_is_as_long_for_many_replicas_as_for_two(make):
    method, gradients = make(), normal(0, (64, 128), (40, 40))[0]

    def length(jaxpr):
        bodies = [body for one in jaxpr.eqns for body in jaxprs_in_params(one.params)]
        return len(jaxpr.eqns) + sum(map(length, bodies))

    def program_of(replicas):
        trace = jax.make_jaxpr(
            lambda tree: method.apply(tree, method.init(tree)), axis_env=[("replica", replicas)]
        )
        return trace(gradients).jaxpr

    assert length(program_of(2)) == length(program_of(64))


@everyone
def test_the_report_counts_what_the_compiled_program_sends(make):
    gradients = normal(0, (64, 128), (100,))
    sent = 0.0
    width = {"u8": 1, "u16": 2, "s32": 4, "f32": 4}
    share = {"all-reduce": 2 * 3 / 4, "all-to-all": 3 / 4, "all-gather": 3 / 4}
    for kind, dtype, size in collectives(Replicas(make(), gradients).compiled()):
        sent += share[kind] * width[dtype] * size
    told = compression.report(make(warmup_steps=3), gradients[0], 4)
    assert told.bytes_sent == pytest.approx(sent)
    assert told.bytes_uncompressed == 1.5 * 4 * (64 * 128 + 100)
    assert told.bytes_saved == told.bytes_uncompressed - told.bytes_sent > 0
    assert told.compressed == ("w0",)


@pytest.mark.parametrize(
    ("operation", "share"),
    [(jax.lax.pmax, 1.5), (jax.lax.pmin, 1.5), (jax.lax.psum, 1.5), (jax.lax.all_gather, 3.0)],
)
def test_the_bytes_of_every_collective_are_counted(operation, share):
    like = jax.ShapeDtypeStruct((100,), "float32")
    sent = bytes_sent(lambda x: operation(x, "replica") + jnp.sum(x), like, 4)
    assert sent == share * 400


def test_local_training_sends_the_weights_every_so_many_steps():
    told = compression.report(compression.local_sgd(8), normal(0, (64, 64))[0], 2)
    assert told.bytes_sent == told.bytes_uncompressed / 8


def test_what_is_left_out_is_summed_by_the_aggregation_method():
    gradients = normal(0, (64, 128), (100,))
    kinds = collectives(Replicas(compression.int8(), gradients, method="TREE").compiled())
    assert {kind for kind, dtype, _ in kinds if dtype == "f32"} == {"collective-permute"}


def test_a_mean_is_the_sum_over_the_replicas_divided():
    gradients = normal(0, (64, 64), (9,))
    means = Replicas(compression.bfloat16(), gradients, op="MEAN").step()
    np.testing.assert_allclose(means["w1"][0], total(gradients, "w1") / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means["w0"][0], total(gradients) / 4, atol=0.05)


# -- what is compressed ------------------------------------------------------------------------


def test_small_tensors_vectors_and_named_ones_are_left_out():
    tensors = {
        "dense": {"kernel": np.ones((64, 64)), "bias": np.ones(4096)},
        "norm": [np.ones((64, 64))],
        "small": np.ones((4, 4)),
        "count": np.ones((64, 64), int),
    }
    assert compression.int8().names(tensors) == ["dense/kernel", "norm/0"]
    rule = LargeMatrices(left_out=("norm", "^small"), smallest_size=1)
    assert compression.int8(rule=rule).names(tensors) == ["dense/kernel"]
    assert compression.int8(rule=lambda name, tensor: name == "small").names(tensors) == ["small"]


@everyone
def test_integers_and_truth_values_are_summed_exactly(make):
    gradients = [{"n": np.arange(2000) + i, "t": np.ones((2, 3), bool)} for i in range(4)]
    sums = Replicas(make(rule=everything), gradients).step()
    np.testing.assert_array_equal(sums["n"][0], 4 * np.arange(2000) + 6)
    np.testing.assert_array_equal(sums["t"][0], np.full((2, 3), 4))


@everyone
def test_tensors_of_any_shape_can_be_compressed(make):
    shapes = [(), (1,), (0, 5), (7, 3), (1, 1), (2, 3, 5)]
    gradients = [{str(shape): np.full(shape, 2.0, "float32") for shape in shapes}] * 4
    sums = Replicas(make(rule=everything), gradients).step()
    for shape in shapes:
        assert sums[str(shape)].shape == (4, *shape)
        assert np.isfinite(sums[str(shape)]).all()


@everyone
def test_gradients_keep_their_dtype(make):
    with jax.enable_x64(True):
        dtypes = ["bfloat16", "float16", "float32", "float64"]
        gradients = [{dtype: jnp.ones((40, 40), dtype) for dtype in dtypes}] * 2
        replicas = Replicas(make(), gradients)
        for dtype, sums in replicas.step().items():
            assert sums.dtype == dtype
            # An even block of signs is sent too large, at first.
            most = 4 if make is WITH_RESIDUAL["sign"] else 2.02
            assert 1.98 <= float(sums.astype("float64").max()) <= most
        if "residual" in replicas.own:
            kept = [str(residual.dtype) for residual in replicas.residuals()]
            assert kept == ["float32", "float32", "float32", "float64"]


def test_sums_of_doubles_are_doubles_throughout():
    with jax.enable_x64(True):
        gradients = [{"w0": np.full((64, 64), 1e300)} for _ in range(2)]
        for make in (compression.int8, compression.float16):
            np.testing.assert_allclose(
                Replicas(make(), gradients).step()["w0"][0], 2e300, rtol=1e-3
            )
        signs = Replicas(compression.sign(), gradients).step()["w0"][0]
        assert (signs > 2e300).all()
        assert np.isfinite(signs).all()


def test_slices_of_rows_become_dense():
    rows = unison.IndexedSlices(np.ones((2, 64), "float32"), np.array([1, 3]), (64, 64))
    dense, _ = compression.int8().apply(rows, compression.int8().init(rows))
    assert dense.shape == (64, 64)
    assert float(dense.sum()) == 128


# -- numbers that are none ---------------------------------------------------------------------


@everyone
def test_what_is_not_finite_reaches_all_replicas_and_leaves_the_state(make):
    gradients = normal(0, (40, 40))
    replicas = Replicas(make(), gradients)
    replicas.step()
    before = jax.tree.map(np.asarray, (replicas.own, replicas.state.of_all))
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = [{"w0": tree["w0"].copy()} for tree in gradients]
        spoiled[2]["w0"][3, 5] = bad
        assert not np.isfinite(replicas.step(spoiled)["w0"][:, 3, 5]).any()
        after = jax.tree.map(np.asarray, (replicas.own, replicas.state.of_all))
        assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert np.isfinite(replicas.step()["w0"]).all()


@everyone
def test_zeros_stay_zeros(make):
    gradients = [{"w0": np.zeros((40, 40), "float32")}] * 4
    assert not Replicas(make(), gradients).step()["w0"].any()


@pytest.mark.parametrize("make", MEMORYLESS.values(), ids=MEMORYLESS)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_very_small_and_large_gradients_are_scaled(make, scale):
    gradients = [{"w0": tree["w0"] * np.float32(scale)} for tree in normal(0, (40, 40))]
    sums = Replicas(make(), gradients).step()["w0"][0]
    assert np.abs(sums - total(gradients)).max() < 2 * scale


# -- the state ---------------------------------------------------------------------------------


def test_the_norm_of_the_residual_is_told():
    gradients = normal(0, (40, 40))
    replicas = Replicas(compression.sign(), gradients)
    assert float(compression.residual_norm(replicas.state)) == 0
    replicas.step()
    one = replicas.state._replace(of_replica=jax.tree.map(lambda x: x[1], replicas.own))
    expected = np.linalg.norm(replicas.residuals()[0][1])
    assert float(compression.residual_norm(one)) == pytest.approx(expected, rel=1e-5)


def test_the_state_of_other_gradients_is_refused():
    state = compression.sign().init({"w": np.ones((64, 64))})
    with pytest.raises(ValueError, match=r"of init\(params\).*\(32, 64\).*Received: \[\(64, 64\)"):
        compression.sign().apply({"w": np.ones((32, 64))}, state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compression.int8(block_size=0), "positive multiple of 1"),
        (lambda: compression.int4(block_size=7), "positive multiple of 2"),
        (lambda: compression.sign(block_size=12), "positive multiple of 8"),
        (lambda: compression.topk(0), "fraction must be above 0"),
        (lambda: compression.topk(1.5), "fraction must be above 0"),
        (lambda: compression.topk(momentum=1), "momentum must be 0 or more"),
        (lambda: compression.topk(ramp_steps=-1), "ramp_steps must be 0 or more"),
        (lambda: compression.sign(clipnorm=0), "clipnorm must be None or above 0"),
        (lambda: compression.powersgd(0), "rank must be 1 or more"),
        (lambda: compression.local_sgd(0), "every must be 1 or more"),
        (lambda: compression.diloco(outer_momentum=1), "outer_momentum must be"),
        (lambda: compression.diloco(outer_learning_rate=0), "outer_learning_rate must be above"),
        (lambda: compression.int8(warmup_steps=-1), "warmup_steps must be 0 or more"),
        (lambda: compression.local_sgd(warmup_steps=-1), "warmup_steps must be 0 or more"),
    ],
)
def test_arguments_out_of_bounds_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_rule_takes_several_patterns():
    with pytest.raises(TypeError, match="tuple of regular expressions"):
        LargeMatrices(left_out="norm")
