"""Batches that leave the replicas with different shapes, in one program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import unison
from hlo import compiled_programs, count_all_reduces
from unison import PerReplica, VariableAggregation, get_replica_context
from unison.lockstep import ByClass, LockstepError, run_in_lockstep


def ragged(*sizes, features=2) -> PerReplica:
    """Components of so many rows; row r is filled with r + 1, counted over all components."""
    numbers = iter(range(1, sum(sizes) + 1))
    return PerReplica(
        [
            np.array([[next(numbers)] * features for _ in range(size)], "float32").reshape(
                size, features
            )
            for size in sizes
        ]
    )


def all_rows(value: PerReplica) -> np.ndarray:
    return np.concatenate(value.values)


def total(value):
    return get_replica_context().all_reduce("SUM", value)


def check(strategy, fn, x, expected):
    """Asserts that `fn` of the ragged `x` gives `expected` on every replica."""
    for value in strategy.run(fn, args=(x,)).values:
        np.testing.assert_allclose(value, expected, rtol=1e-6)


NINE = (3, 3, 3, 0)

# -- shapes --------------------------------------------------------------------------------


def test_each_replica_sees_its_own_shape(four_replicas):
    shapes = []

    def fn(x):
        shapes.append(x.shape)
        return x.shape[0]

    counts = four_replicas.run(fn, args=(ragged(*NINE),))
    assert [int(count) for count in counts.values] == [3, 3, 3, 0]
    assert shapes == [(3, 2), (0, 2)]  # one trace for all replicas of one shape


def test_three_classes(four_replicas):
    x = ragged(3, 3, 1, 0)
    sums = four_replicas.run(lambda x: x.sum(0), args=(x,))
    for value, component in zip(sums.values, x.values, strict=True):
        np.testing.assert_array_equal(value, component.sum(0))


def test_results_may_differ_in_shape(four_replicas):
    x = ragged(*NINE)
    doubled = four_replicas.run(lambda x: {"y": 2 * x, "n": x.shape[0]}, args=(x,))
    for value, component in zip(doubled["y"].values, x.values, strict=True):
        np.testing.assert_array_equal(value, 2 * component)
    assert [int(n) for n in doubled["n"].values] == [3, 3, 3, 0]


def test_each_result_lies_on_the_device_of_its_replica(four_replicas):
    doubled = four_replicas.run(lambda x: 2 * x, args=(ragged(*NINE),))
    devices = [value.devices() for value in doubled.components]
    assert devices == [{device} for device in four_replicas.placement.devices]


def test_a_ragged_result_goes_into_the_next_call(four_replicas):
    doubled = four_replicas.run(lambda x: 2 * x, args=(ragged(*NINE),))
    check(four_replicas, lambda x: total(jnp.sum(x)), doubled, 2 * 2 * 45.0)


def test_several_ragged_arguments_are_classed_together(two_replicas):
    def fn(x, y, scale):
        return total(jnp.sum(x) * scale), total(jnp.sum(y))

    results = two_replicas.run(fn, args=(ragged(2, 1), ragged(1, 4), 10.0))
    assert [float(result.values[0]) for result in results] == [120.0, 30.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool"])
def test_dtypes(two_replicas, dtype):
    x = PerReplica([np.ones((2,), jnp.dtype(dtype)), np.ones((1,), jnp.dtype(dtype))])
    assert two_replicas.run(lambda x: x, args=(x,)).values[1].dtype == dtype
    check(two_replicas, lambda x: total(jnp.sum(x)), x, 3)


def test_the_same_shapes_are_traced_once(two_replicas):
    def fn(x):
        return x.sum()

    before = two_replicas.trace_count
    for x in (ragged(2, 1), ragged(2, 1), ragged(1, 2)):
        two_replicas.run(fn, args=(x,))
    assert two_replicas.trace_count - before == 2


# -- collectives ---------------------------------------------------------------------------


def test_an_exact_mean_over_all_examples(four_replicas):
    def mean(x):
        rows, count = total((jnp.sum(x, 0), x.shape[0]))
        return rows / count

    x = ragged(*NINE)
    check(four_replicas, mean, x, all_rows(x).mean(0))


def test_several_collectives_one_after_the_other(four_replicas):
    def variance(x):
        count = total(jnp.float32(x.shape[0]))
        mean = total(jnp.sum(x, 0)) / count
        return total(jnp.sum((x - mean) ** 2, 0)) / count

    x = ragged(*NINE)
    check(four_replicas, variance, x, all_rows(x).var(0))


def test_collectives_are_shared_by_all_classes(four_replicas, monkeypatch):
    texts = compiled_programs(monkeypatch)
    four_replicas.run(lambda x: total(jnp.sum(x) / total(x.shape[0])), (ragged(3, 2, 1, 0),))
    assert [count_all_reduces(text) for text in texts] == [2]


def test_other_collectives(two_replicas):
    def fn(x):
        largest = lax.pmax(jnp.max(x), "replica")
        gathered = get_replica_context().all_gather(jnp.sum(x)[None], axis=0)
        first = unison.broadcast(jnp.sum(x))
        return largest, gathered, first

    largest, gathered, first = two_replicas.run(fn, args=(ragged(2, 1),))
    assert [float(value) for value in largest.values] == [3.0, 3.0]
    assert gathered.values[1].tolist() == [6.0, 6.0]
    assert [float(value) for value in first.values] == [6.0, 6.0]


def inside(wrap):
    """Sums of squares over all examples, with the collective inside what `wrap` makes."""
    return wrap(lambda x: total(jnp.sum(x * x)))


@jax.custom_vjp
def doubled_backwards(x):
    return total(jnp.sum(x * x))


doubled_backwards.defvjp(
    lambda x: (doubled_backwards(x), x), lambda x, cotangent: (2 * 2 * x * total(cotangent),)
)


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f))), jax.named_call],
    ids=["jit", "remat", "nested", "named"],
)
def test_a_collective_inside_a_call(four_replicas, wrap):
    x = ragged(*NINE)
    check(four_replicas, inside(wrap), x, (all_rows(x) ** 2).sum())


def test_a_collective_inside_custom_derivatives(four_replicas):
    x = ragged(*NINE)
    check(four_replicas, doubled_backwards, x, (all_rows(x) ** 2).sum())
    gradients = four_replicas.run(jax.grad(doubled_backwards), args=(x,))
    for gradient, component in zip(gradients.values, x.values, strict=True):
        np.testing.assert_allclose(gradient, 2 * 2 * component * 4)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"]
)
def test_the_gradient_of_a_loss_over_all_examples(four_replicas, wrap):
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(w, x):
        count = total(x.shape[0])
        return total(jax.grad(wrap(loss))(w, x)) / count

    x, w = ragged(*NINE), np.array([0.1, -0.3], "float32")
    expected = jax.grad(loss)(jnp.asarray(w), jnp.asarray(all_rows(x))) / 9
    check(four_replicas, functools.partial(step, w), x, expected)


def test_the_gradient_through_a_collective(four_replicas):
    def centered(x):
        return jnp.sum((x - total(jnp.sum(x, 0)) / 9) ** 3)

    x = ragged(*NINE)
    rows = jnp.asarray(all_rows(x))
    expected = jax.grad(lambda x: jnp.sum((x - jnp.sum(x, 0) / 9) ** 3))(rows)
    gradients = four_replicas.run(jax.grad(centered), args=(x,))
    np.testing.assert_allclose(np.concatenate(gradients.values), expected, rtol=1e-4)


def test_loops_without_collectives_are_of_no_concern(four_replicas):
    def fn(x):
        summed, _ = lax.scan(lambda carry, row: (carry + row, None), jnp.zeros(2), x)
        return total(lax.cond(summed[0] > 10, lambda: summed, lambda: summed * 0))

    check(four_replicas, fn, ragged(*NINE), [39.0, 39.0])


def test_random_keys_cross_a_collective(two_replicas):
    def fn(key, x):
        own = jax.random.fold_in(key, get_replica_context().replica_id_in_sync_group)
        count = total(x.shape[0])
        return jax.random.uniform(own) * count

    x = ragged(2, 1)
    for impl in ("threefry2x32", "rbg"):
        key = jax.random.key(3, impl=impl)
        drawn = two_replicas.run(fn, args=(key, x))
        expected = [3 * float(jax.random.uniform(jax.random.fold_in(key, r))) for r in range(2)]
        np.testing.assert_allclose([float(value) for value in drawn.values], expected, rtol=1e-6)


def test_keys_of_which_each_class_has_its_own_number(two_replicas):
    def fn(key, x):
        keys = jax.random.split(key, x.shape[0])
        count = total(x.shape[0])
        return jax.vmap(jax.random.uniform)(keys) * count

    key = jax.random.key(5)
    drawn = two_replicas.run(fn, args=(key, ragged(2, 1)))
    for value, size in zip(drawn.values, (2, 1), strict=True):
        expected = 3 * jax.vmap(jax.random.uniform)(jax.random.split(key, size))
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_a_plain_number_meets_an_array(four_replicas):
    def fn(x):
        return total(jnp.sum(x) if x.shape[0] else 0.0)

    check(four_replicas, fn, ragged(*NINE), 90.0)


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.pmean(x, "replica"),
        lambda x: lax.psum_scatter(x, "replica", tiled=True),
        lambda x: lax.all_to_all(x, "replica", 0, 0),
        lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
        lambda x: lax.pshuffle(x, "replica", [1, 0]),
        lambda x: lax.all_gather(x, "replica"),
    ],
    ids=["pmean", "psum_scatter", "all_to_all", "ppermute", "pshuffle", "all_gather"],
)
def test_every_collective_of_jax_is_a_meeting_point(two_replicas, collective):
    """A collective that is not recognized would hang: some devices would never come."""

    def fn(x):
        return collective(jnp.sum(x, 0))

    sums = PerReplica([component.sum(0) for component in ragged(2, 1).values])
    results = two_replicas.run(fn, args=(ragged(2, 1),))
    expected = two_replicas.run(collective, args=(sums,))
    for value, other in zip(results.values, expected.values, strict=True):
        np.testing.assert_array_equal(value, other)


# -- variables -----------------------------------------------------------------------------


def test_variables_are_updated_by_all_classes_together(four_replicas):
    with four_replicas.scope():
        seen = unison.Variable(0, aggregation=VariableAggregation.SUM)
        sums = unison.Variable(
            np.zeros(2),
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def fn(x):
        seen.assign_add(x.shape[0])
        sums.assign_add(jnp.sum(x, 0))

    four_replicas.run(fn, args=(ragged(*NINE),))
    assert int(seen) == 9
    assert sums.numpy().tolist() == [45.0, 45.0]


def test_a_class_may_leave_a_variable_alone(two_replicas):
    with two_replicas.scope():
        last = unison.Variable(
            7.0,
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def fn(x):
        if x.shape[0]:
            last.assign(jnp.sum(x))

    two_replicas.run(fn, args=(ragged(2, 0),))
    copies = two_replicas.experimental_local_results(last)
    assert [float(copy) for copy in copies] == [6.0, 7.0]


def test_a_step_equals_that_of_one_device(four_replicas):
    with four_replicas.scope():
        weight = unison.Variable([0.5, -0.5], aggregation=VariableAggregation.SUM)

    def loss(w, x):
        return jnp.sum((x @ w - 1.0) ** 2)

    def step(x):
        weight.assign_sub(0.001 * jax.grad(loss)(weight.value(), x) / total(x.shape[0]))

    expected = jnp.array([0.5, -0.5])
    x = ragged(*NINE)
    for _ in range(3):
        four_replicas.run(step, args=(x,))
        expected -= 0.001 * jax.grad(loss)(expected, jnp.asarray(all_rows(x))) / 9
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)


# -- refusals ------------------------------------------------------------------------------


def test_collectives_of_different_shapes_are_an_error_that_shows_them(two_replicas):
    with pytest.raises(LockstepError, match=r"psum of float32\[2,2\] .* psum of float32\[1,2\]"):
        two_replicas.run(total, args=(ragged(2, 1),))


def test_a_collective_that_only_some_replicas_perform_is_an_error(two_replicas):
    def fn(x):
        return total(jnp.sum(x)) if x.shape[0] > 1 else jnp.sum(x)

    with pytest.raises(LockstepError, match=r"performs psum of float32\[\] .*, another none"):
        two_replicas.run(fn, args=(ragged(2, 1),))


def test_different_collectives_are_an_error(two_replicas):
    def fn(x):
        reduce = lax.psum if x.shape[0] > 1 else lax.pmax
        return reduce(jnp.sum(x), "replica")

    with pytest.raises(LockstepError, match=r"psum of float32\[\] .* another pmax of float32\[\]"):
        two_replicas.run(fn, args=(ragged(2, 1),))


def test_equal_operations_over_different_permutations_are_an_error(two_replicas):
    def fn(x):
        pairs = [(0, 1)] if x.shape[0] > 1 else [(1, 0)]
        return lax.ppermute(jnp.sum(x), "replica", pairs)

    with pytest.raises(LockstepError, match=r"perm=\(\(0, 1\),\).*perm=\(\(1, 0\),\)"):
        two_replicas.run(fn, args=(ragged(2, 1),))


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (lambda x: lax.scan(lambda c, r: (c + total(r), None), jnp.zeros(2), x)[0], "scan"),
        (lambda x: lax.cond(x.sum() > 0, lambda: total(x.sum()), lambda: 0.0), "cond"),
        (lambda x: lax.fori_loop(0, x.sum().astype(int), lambda _, c: total(c), 1.0), "while"),
    ],
    ids=["scan", "cond", "while"],
)
def test_a_collective_inside_a_loop_is_an_error_that_names_it(two_replicas, loop, name):
    with pytest.raises(LockstepError, match=f"inside '{name}' .*drop the uneven last batch"):
        two_replicas.run(loop, args=(ragged(2, 1),))


def test_results_of_different_structure_are_an_error(two_replicas):
    def fn(x):
        return [jnp.sum(row) for row in x]

    with pytest.raises(LockstepError, match="the same structure on all replicas"):
        two_replicas.run(fn, args=(ragged(2, 1),))


def test_an_error_leaves_the_variables_usable(two_replicas):
    with two_replicas.scope():
        variable = unison.Variable(1.0, aggregation=VariableAggregation.SUM)

    def fn(x):
        variable.assign_add(1.0)
        return total(x)

    with pytest.raises(LockstepError):
        two_replicas.run(fn, args=(ragged(2, 1),))
    assert float(variable) == 1.0
    two_replicas.run(fn, args=(ragged(2, 2),))
    assert float(variable) == 3.0


def test_operations_keep_the_named_scopes_in_which_they_were_traced(two_replicas, monkeypatch):
    """Profiles name the regions of a step by them."""

    @jax.jit
    def called(x):
        with jax.named_scope("inner"):
            return total(jnp.sin(x).sum())

    def fn(x):
        with jax.named_scope("outer"):
            return called(x)

    programs = compiled_programs(monkeypatch)
    two_replicas.run(fn, args=(ragged(2, 1),))
    (text,) = programs
    assert re.search(r'op_name="[^"]*outer/[^"]*inner/sin"', text)


# -- the mechanism -------------------------------------------------------------------------


def in_lockstep(strategy, bodies, class_of_replica, *args):
    mapped = jax.shard_map(
        lambda *args: run_in_lockstep(bodies, class_of_replica)(*args)[None],
        mesh=strategy.placement.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(*args))


def test_each_replica_computes_the_body_of_its_class(four_replicas):
    bodies = [lambda x: x + 1, lambda x: lax.sin(x) * 0 + 7]
    assert in_lockstep(four_replicas, bodies, [0, 1, 0, 1], 1.0).tolist() == [2, 7, 2, 7]


def test_one_body_is_left_as_it_is():
    def body(x):
        return x

    assert run_in_lockstep([body], [0, 0]) is body


def test_a_result_that_differs_in_shape_is_kept_by_class(two_replicas):
    def sizes(x):
        kept = run_in_lockstep([lambda x: x[:1], lambda x: x[:2]], [0, 1])(x)
        assert isinstance(kept, ByClass)
        return jnp.array([array.shape[0] for array in kept.arrays])[None]

    mapped = jax.shard_map(
        sizes,
        mesh=two_replicas.placement.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    assert mapped(jnp.ones(3)).tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_any_division_of_the_examples_gives_the_same(four_replicas, seed):
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(7, 2)).astype("float32")
    cuts = sorted(generator.integers(0, 8, size=3))
    x = PerReplica(np.split(rows, cuts))

    def standardized(x):
        count, mean = total((x.shape[0], jnp.sum(x, 0)))
        centered = x - mean / count
        return centered / jnp.sqrt(total(jnp.sum(centered**2, 0)) / count)

    result = four_replicas.gather(four_replicas.run(standardized, args=(x,)), axis=0)
    np.testing.assert_allclose(result, (rows - rows.mean(0)) / rows.std(0), rtol=1e-4, atol=1e-5)
