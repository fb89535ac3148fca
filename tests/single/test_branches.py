"""Branches and loops of compiled programs that read and assign variables."""

import jax
import jax.numpy as jnp
import pytest

import unison
from unison.branches import scan, shapes_of, switch, while_loop

SUM = unison.VariableAggregation.SUM
MEAN = unison.VariableAggregation.MEAN
FIRST = unison.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = unison.VariableSynchronization.ON_READ


@pytest.fixture
def two():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


def variable(strategy, aggregation=unison.VariableAggregation.NONE, value=0.0, **options):
    with strategy.scope():
        return unison.Variable(value, aggregation=aggregation, **options)


def replica():
    return unison.get_replica_context().replica_id_in_sync_group


def values(result):
    return [value.tolist() for value in result.values]


# -- branches ------------------------------------------------------------------------------


def test_without_variables_a_switch_is_jaxs(two):
    chosen = jax.jit(lambda i: switch(i, [lambda: 10, lambda: 20, lambda: 30]))
    assert [int(chosen(i)) for i in (-1, 0, 1, 2, 9)] == [10, 10, 20, 30, 30]


def test_only_the_branch_that_is_taken_assigns(two):
    total = variable(two, SUM, synchronization=ON_READ)

    def step():
        switch(replica(), [lambda: total.assign_add(1.0), lambda: total.assign_add(10.0)])

    two.run(step)
    assert float(total) == 11.0


def test_what_replicas_add_in_different_branches_is_combined(two):
    count = variable(two, SUM)

    def step():
        return switch(replica(), [lambda: count, lambda: count.assign_add(3.0)])

    result = two.run(step)
    assert (float(count), values(result)) == (3.0, [3.0, 3.0])


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 5.0), (MEAN, 5.0), (FIRST, 1.0)])
def test_who_does_not_assign_takes_no_part(two, aggregation, expected):
    best = variable(two, aggregation, 1.0)
    two.run(lambda: switch(replica(), [lambda: None, lambda: (best.assign(5.0), None)[1]]))
    assert float(best) == expected


def test_if_nobody_assigns_the_value_stays(two):
    best = variable(two, SUM, 7.0)
    two.run(
        lambda x: switch(x > 0, [lambda: None, lambda: (best.assign(5.0), None)[1]]),
        args=(jnp.float32(-1),),
    )
    assert float(best) == 7.0


def test_updates_before_and_after_a_branch_count_too(two):
    total = variable(two, SUM)

    def step(x):
        total.assign_add(1.0)
        seen = switch(x > 0, [lambda: 0.0, lambda: total + 0.0])
        total.assign_add(1.0)
        return seen

    result = two.run(step, args=(jnp.float32(1),))
    assert (float(total), values(result)) == (4.0, [2.0, 2.0])


def test_a_branch_may_read_what_it_wrote(two):
    total = variable(two, SUM)

    def doubled():
        total.assign_add(1.0)
        return total * 2.0

    result = two.run(lambda x: switch(x > 0, [lambda: 0.0, doubled]), args=(jnp.float32(1),))
    assert (float(total), values(result)) == (2.0, [4.0, 4.0])


def test_without_aggregation_each_replica_keeps_its_own(two, caplog):
    own = variable(two)
    two.run(lambda: switch(replica(), [lambda: own.assign(1.0), lambda: own.assign(2.0)]))
    assert [copy.tolist() for copy in own.cell.copies()] == [1.0, 2.0]
    assert "each replica now updates its own copy" in caplog.text


def test_branches_may_be_nested(two):
    total = variable(two, SUM)

    def inner(x):
        return switch(x > 1, [lambda: total.assign_add(1.0), lambda: total.assign_add(5.0)])

    two.run(lambda x: switch(x > 0, [lambda: total, lambda: inner(x)]), args=(jnp.float32(2),))
    assert float(total) == 10.0


def test_a_function_of_one_replica_has_branches(two):
    state = unison.Variable(1.0)

    @unison.Function
    def step(x):
        return switch(x > 0, [lambda: state.assign(-1.0), lambda: state.assign_add(x)])

    assert [float(step(jnp.float32(2))), float(step(jnp.float32(-2)))] == [3.0, -1.0]
    assert step.trace_count == 1


def test_branches_must_have_one_structure(two):
    with pytest.raises(TypeError, match="one structure"):
        two.run(lambda: switch(replica(), [lambda: 1.0, lambda: (1.0, 2.0)]))


# -- loops ---------------------------------------------------------------------------------


def test_a_loop_adds_up_and_combines_once(two):
    total = variable(two, SUM)

    def step():
        def body(i):
            total.assign_add(1.0)
            return i + 1

        # The replicas go round 2 and 3 times: nothing communicates inside.
        return while_loop(lambda i: i < replica() + 2, body, 0)

    assert values(two.run(step)) == [2, 3]
    assert float(total) == 5.0


def test_a_loop_sees_what_it_wrote(two):
    total = variable(two, SUM, 1.0)

    def step():
        def body(i):
            total.assign_add(total.value())  # both replicas add it
            return i + 1

        while_loop(lambda i: i < 2, body, 0)

    two.run(step)
    assert float(total) == 9.0


def test_the_condition_sees_what_the_body_wrote(two):
    count = variable(two, SUM, synchronization=ON_READ)
    two.run(lambda: while_loop(lambda _: count < 3.0, lambda x: (count.assign_add(1.0), x)[1], 0))
    assert float(count) == 6.0


@pytest.mark.parametrize("bound", [None, 8])
def test_a_condition_assigns_once_more_than_the_body_runs(two, bound):
    count = variable(two, SUM)

    def holds(i):
        count.assign_add(0.5)
        return i < 3

    assert values(two.run(lambda: while_loop(holds, lambda i: i + 1, 0, bound))) == [3, 3]
    assert float(count) == 4.0


def test_a_loop_with_a_bound_can_be_differentiated(two):
    @jax.jit
    @jax.grad
    def gradient(x):
        return while_loop(lambda y: y < 10.0, lambda y: y * 2, x, maximum_iterations=8)

    assert float(gradient(1.0)) == 16.0


def test_a_bound_ends_the_loop(two):
    count = variable(two, SUM)

    def step():
        return while_loop(
            lambda i: i < 100, lambda i: (count.assign_add(1.0), i + 1)[1], 0, maximum_iterations=4
        )

    assert values(two.run(step)) == [4, 4]
    assert float(count) == 8.0


def test_a_scan_uses_variables(two):
    seen = variable(two, SUM)
    scale = variable(two, value=2.0)

    def step(xs):
        def body(carry, x):
            seen.assign_add(1.0)
            return carry + scale * x, carry

        return scan(body, 0.0, xs)

    last, passed = two.run(step, args=(jnp.array([1.0, 2.0, 3.0]),))
    assert (values(last), values(passed)[0]) == ([12.0, 12.0], [0.0, 2.0, 6.0])
    assert float(seen) == 6.0


def test_shapes_are_found_without_writing(two):
    total = variable(two, SUM)

    def step():
        found = shapes_of(lambda: (total.assign_add(1.0), jnp.zeros((2, 3))))
        return jnp.zeros(found[1].shape)

    assert two.run(step).values[0].shape == (2, 3)
    assert float(total) == 0.0
