"""Programs whose Python code depends on the replica, and all-gathers of different sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison import get_replica_context


def batch_of(strategy, examples):
    dataset = strategy.experimental_distribute_dataset([np.arange(float(examples))])
    return next(iter(dataset))


def components(value):
    return [np.asarray(component).tolist() for component in value.values]


def test_python_may_branch_on_the_replica(strategy):
    def sign():
        if get_replica_context().replica_id_in_sync_group == 0:
            return jnp.float32(-1)
        return jnp.float32(1)

    count = strategy.num_replicas_in_sync
    assert components(strategy.run(sign)) == [-1] + [1] * (count - 1)


def test_python_may_index_a_list_by_the_replica(four_replicas):
    rates = [0.1, 0.2, 0.3, 0.4]

    def rate():
        return rates[get_replica_context().replica_id_in_sync_group]

    assert components(four_replicas.run(rate)) == pytest.approx(rates)


def test_replicas_that_python_tells_apart_share_their_collectives(four_replicas):
    def total(x):
        context = get_replica_context()
        if context.replica_id_in_sync_group == 2:
            x = x * 100
        return context.all_reduce("SUM", jnp.sum(x))

    assert components(four_replicas.run(total, (batch_of(four_replicas, 4),))) == [204.0] * 4


def test_replicas_may_not_choose_whether_to_take_part_in_a_collective(two_replicas):
    def skip():
        context = get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return context.all_reduce("SUM", jnp.float32(1))
        return jnp.float32(1)

    with pytest.raises(ValueError, match="same collective operations"):
        two_replicas.run(skip)


def test_a_replica_id_that_no_python_code_needs_leaves_one_trace(four_replicas):
    traced = []

    def scaled(x):
        traced.append(x)
        return x * get_replica_context().replica_id_in_sync_group

    assert components(four_replicas.run(scaled, (2.0,))) == [0.0, 2.0, 4.0, 6.0]
    assert len(traced) == 1


def test_an_if_on_an_array_is_in_the_program(two_replicas):
    def choose(x):
        if x > 0:
            return x
        return -x

    assert components(two_replicas.run(choose, (jnp.float32(-1),))) == [1.0, 1.0]


def test_an_array_that_python_needs_names_the_line_and_the_mend(two_replicas):
    def count(x):
        return len([value for value in x if value > 0])

    line = r"test_known_replicas.py:\d+, `return len\(\[value for value in x .*tf\.cond"
    with pytest.raises(TypeError, match=line):
        two_replicas.run(count, (jnp.float32([1, -1]),))


@pytest.mark.parametrize("examples", [4, 5, 6, 9])
def test_all_gather_joins_what_each_replica_has(four_replicas, examples):
    gather = lambda x: get_replica_context().all_gather(x, axis=0)  # noqa: E731
    gathered = components(four_replicas.run(gather, (batch_of(four_replicas, examples),)))
    assert gathered == [list(range(examples))] * 4


def test_the_sizes_of_a_gather_may_depend_on_an_earlier_one(four_replicas):
    def twice(x):
        context = get_replica_context()
        everything = context.all_gather(x, axis=0)
        return context.all_gather(everything[: x.shape[0]] * 10, axis=0)

    gathered = components(four_replicas.run(twice, (batch_of(four_replicas, 6),)))
    assert gathered == [[0, 10, 0, 10, 0, 10]] * 4


def test_a_gather_along_another_axis_may_be_uneven(two_replicas):
    rows = unison.PerReplica([np.ones((2, 1), np.float32), np.zeros((2, 3), np.float32)])
    gather = lambda x: get_replica_context().all_gather(x, axis=1)  # noqa: E731
    assert components(two_replicas.run(gather, (rows,))) == [[[1, 0, 0, 0]] * 2] * 2


def test_the_gradient_of_an_uneven_gather_is_the_local_slice_of_the_sum(four_replicas):
    weights = jnp.arange(1.0, 7.0)

    def gradient(x):
        gather = get_replica_context().all_gather
        return jax.grad(lambda x: jnp.sum(gather(x, 0) ** 2 * weights))(x)

    slices = components(four_replicas.run(gradient, (batch_of(four_replicas, 6),)))
    whole = 4 * 2 * np.arange(6.0) * np.arange(1.0, 7.0)
    assert slices == [whole[:2].tolist(), whole[2:4].tolist(), whole[4:].tolist(), []]
