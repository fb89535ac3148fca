"""Where a thread is: scopes, cross-replica and replica context, `merge_call`."""

import contextlib
import threading

import jax.numpy as jnp
import pytest

import unison
from unison import PerReplica, VariableAggregation, get_replica_context
from unison.strategies import scope_observers
from unison.strategies.context import experimental_set_strategy


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# -- scopes --------------------------------------------------------------------------------


def test_a_scope_that_an_observer_refuses_is_not_open(monkeypatch):
    class Refuses:
        refused = 0

        def opened(self):
            self.refused += 1
            raise ImportError("Keras runs on another backend")

        def closed(self):
            pass

    refuses = Refuses()
    monkeypatch.setattr(scope_observers, "_observers", [refuses])
    strategy = unison.OneDeviceStrategy("CPU:0")
    for count in (1, 2):  # the second attempt is refused, too
        with pytest.raises(ImportError, match="another backend"), strategy.scope():
            pass
        assert refuses.refused == count
        assert not unison.has_strategy()


def test_outside_all_scopes_there_is_a_default_strategy_of_one_replica():
    assert not unison.has_strategy()
    assert unison.get_strategy().num_replicas_in_sync == 1
    assert unison.get_strategy() is unison.get_strategy()


def test_outside_all_scopes_the_thread_is_the_only_replica():
    replica = get_replica_context()
    assert not unison.in_cross_replica_context()
    assert replica.replica_id_in_sync_group == 0
    assert replica.num_replicas_in_sync == 1
    assert replica.strategy is unison.get_strategy()
    assert replica.all_reduce("SUM", 3.0) == 3.0
    assert replica.all_gather(jnp.ones(2), axis=0).tolist() == [1.0, 1.0]


def test_a_scope_makes_its_strategy_the_current_one(two_replicas):
    with two_replicas.scope() as entered:
        assert entered is two_replicas
        assert unison.get_strategy() is two_replicas
        assert unison.has_strategy()
        assert unison.in_cross_replica_context()
        assert get_replica_context() is None
    assert not unison.has_strategy()


def test_a_scope_is_left_when_something_is_raised(two_replicas):
    with contextlib.suppress(KeyError), two_replicas.scope():
        raise KeyError
    assert not unison.has_strategy()


def test_a_scope_may_be_entered_again(two_replicas):
    with two_replicas.scope(), two_replicas.scope():
        assert unison.get_strategy() is two_replicas
    with two_replicas.scope():
        assert unison.Variable(1.0).cell.placement == two_replicas.placement


def test_another_strategys_scope_inside_a_scope_is_an_error(two_replicas, four_replicas):
    with (
        two_replicas.scope(),
        pytest.raises(RuntimeError, match="inside the scope of another strategy"),
        four_replicas.scope(),
    ):
        pass
    with four_replicas.scope():
        assert unison.get_strategy() is four_replicas


def test_a_scope_holds_for_its_thread_only(two_replicas):
    with two_replicas.scope():
        assert in_a_thread(unison.has_strategy) is False


# -- experimental_set_strategy -------------------------------------------------------------


@pytest.fixture
def set_strategy():
    """`experimental_set_strategy`, undone after the test."""
    yield experimental_set_strategy
    experimental_set_strategy(None)


def test_a_strategy_may_be_set_for_the_rest_of_the_program(two_replicas, set_strategy):
    set_strategy(two_replicas)
    assert unison.get_strategy() is two_replicas
    assert unison.in_cross_replica_context()
    assert two_replicas.extended.variable_created_in_scope(unison.Variable(1.0))
    with two_replicas.scope():
        assert unison.get_strategy() is two_replicas
    set_strategy(None)
    assert not unison.has_strategy()


def test_another_strategy_may_be_set_instead(two_replicas, four_replicas, set_strategy):
    set_strategy(two_replicas)
    set_strategy(four_replicas)
    assert unison.get_strategy() is four_replicas
    with pytest.raises(RuntimeError, match="inside the scope of another"), two_replicas.scope():
        pass


def test_no_strategy_is_set_inside_a_scope(two_replicas, four_replicas, set_strategy):
    with two_replicas.scope(), pytest.raises(RuntimeError, match="and this is inside a scope"):
        set_strategy(four_replicas)
    set_strategy(two_replicas)
    with two_replicas.scope(), pytest.raises(RuntimeError, match="and this is inside a scope"):
        set_strategy(None)


def test_run_and_reduce_work_outside_the_scope(two_replicas):
    assert float(two_replicas.reduce("SUM", two_replicas.run(lambda: 2.0))) == 4.0


def test_variables_of_a_scope_are_told_from_others(two_replicas):
    with two_replicas.scope():
        inside = unison.Variable(1.0)
    assert two_replicas.extended.variable_created_in_scope(inside)
    assert not two_replicas.extended.variable_created_in_scope(unison.Variable(1.0))


# -- replica context -----------------------------------------------------------------------


def test_a_replica_program_is_in_replica_context(four_replicas):
    def fn():
        assert unison.get_strategy() is four_replicas
        assert unison.has_strategy()
        assert not unison.in_cross_replica_context()
        replica = get_replica_context()
        assert replica.num_replicas_in_sync == 4
        assert replica.strategy is four_replicas
        return replica.replica_id_in_sync_group

    assert [int(rank) for rank in four_replicas.run(fn).values] == [0, 1, 2, 3]
    assert not unison.has_strategy()


def test_the_context_is_restored_when_the_program_raises(two_replicas):
    def fails():
        raise KeyError

    with two_replicas.scope():
        with contextlib.suppress(KeyError):
            two_replicas.run(fails)
        assert unison.in_cross_replica_context()


def test_a_scope_inside_a_replica_is_an_error(two_replicas):
    def fn():
        with two_replicas.scope():
            pass

    with pytest.raises(RuntimeError, match=r"strategy.scope\(\) must be called in cross-replica"):
        two_replicas.run(fn)


def test_a_replica_knows_its_device(four_replicas):
    def fn():
        (name,) = get_replica_context().devices
        return int(name[-1])

    assert [int(index) for index in four_replicas.run(fn).values] == [0, 1, 2, 3]
    assert get_replica_context().devices == unison.get_strategy().extended.worker_devices


def test_a_replica_context_may_be_entered_by_hand(two_replicas):
    with unison.ReplicaContext(two_replicas, replica_id_in_sync_group=1) as replica:
        assert get_replica_context() is replica
        assert not unison.in_cross_replica_context()
        assert replica.replica_id_in_sync_group == 1
        assert replica.devices == two_replicas.extended.worker_devices[1:]
        with pytest.raises(RuntimeError, match=r"must be called in cross-replica context"):
            two_replicas.run(lambda: 1)
        with pytest.raises(RuntimeError, match=r"inside the functions that strategy.run"):
            replica.all_reduce("SUM", 1.0)
    assert not unison.has_strategy()


def test_another_thread_is_outside_the_replica(two_replicas):
    seen = []
    two_replicas.run(lambda: seen.append(in_a_thread(unison.has_strategy)))
    assert seen == [False]


# -- merge_call ----------------------------------------------------------------------------


def test_merge_call_leaves_the_replicas_and_comes_back(two_replicas):
    def merge(strategy, scale, *, offset):
        assert strategy is two_replicas
        assert unison.in_cross_replica_context()
        assert get_replica_context() is None
        del offset
        return scale

    def fn(x):
        merged = get_replica_context().merge_call(merge, args=(x,), kwargs={"offset": 1.0})
        assert not unison.in_cross_replica_context()
        return merged

    result = two_replicas.run(fn, args=(PerReplica([1.0, 2.0]),))
    assert [float(value) for value in result.values] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (lambda strategy, x: strategy.reduce("SUM", x), [4.0, 8.0]),
        (lambda strategy, x: strategy.reduce("MEAN", x, axis=0), 3.0),
        (lambda strategy, x: strategy.extended.reduce_to("MEAN", x), [2.0, 4.0]),
        (lambda strategy, x: strategy.gather(x, axis=0), [1.0, 2.0, 3.0, 6.0]),
        (lambda strategy, x: x.values[1], [3.0, 6.0]),
    ],
    ids=["reduce", "reduce along an axis", "reduce_to", "gather", "values"],
)
def test_the_values_of_all_replicas_meet_in_merge_call(two_replicas, merge, expected):
    def fn(x):
        return get_replica_context().merge_call(merge, args=(x,))

    x = PerReplica([jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0])])
    results = two_replicas.run(fn, args=(x,))
    assert [value.tolist() for value in results.values] == [expected] * 2


@pytest.mark.parametrize(("method", "expected"), [("assign", 3.0), ("assign_add", 13.0)])
@pytest.mark.parametrize("aggregation", [VariableAggregation.SUM, VariableAggregation.NONE])
def test_an_assignment_in_merge_call_is_one_assignment(two_replicas, aggregation, method, expected):
    with two_replicas.scope():
        variable = unison.Variable(10.0, aggregation=aggregation)

    def merge(strategy, variable, x):
        getattr(variable, method)(strategy.reduce("SUM", x))

    def fn(x):
        get_replica_context().merge_call(merge, args=(variable, x))

    two_replicas.run(fn, args=(PerReplica([1.0, 2.0]),))
    copies = two_replicas.experimental_local_results(variable)
    assert [float(copy) for copy in copies] == [expected] * 2


def test_what_is_the_same_on_all_replicas_arrives_as_it_is(two_replicas):
    def merge(strategy, number, name, nothing, x):
        assert (number, name, nothing) == (3, "a", None)
        return strategy.reduce("SUM", x) * number

    def fn(x):
        return get_replica_context().merge_call(merge, args=(3, "a", None, x))

    result = two_replicas.run(fn, args=(PerReplica([1.0, 2.0]),))
    assert [float(value) for value in result.values] == [9.0, 9.0]


def test_what_is_a_number_on_each_replica_arrives_as_the_numbers_of_all(two_replicas):
    rates = [0.5, 0.25]

    def fn():
        replica = get_replica_context()
        rate = rates[replica.replica_id_in_sync_group]
        return replica.merge_call(lambda strategy, rate: strategy.reduce("SUM", rate), (rate,))

    assert [float(value) for value in two_replicas.run(fn).values] == [0.75, 0.75]


def test_a_value_without_components_has_no_sum_in_merge_call_either(two_replicas):
    def merge(strategy, x):
        mean = strategy.reduce("MEAN", strategy.reduce("SUM", x))  # as outside of programs
        with pytest.raises(ValueError, match="is ambiguous"):
            strategy.reduce("SUM", mean)
        return mean

    result = two_replicas.run(
        lambda x: get_replica_context().merge_call(merge, args=(x,)),
        args=(PerReplica([1.0, 2.0]),),
    )
    assert float(result.values[0]) == 3.0


def test_one_replica_merges_its_values_as_they_are():
    def merge(strategy, x):
        return x + strategy.num_replicas_in_sync

    strategy = unison.OneDeviceStrategy("CPU:1")
    result = strategy.run(lambda x: get_replica_context().merge_call(merge, (x,)), args=(2.0,))
    assert float(result) == 3.0


def test_the_slices_of_all_replicas_meet_in_merge_call(two_replicas):
    def fn(x):
        slices = unison.IndexedSlices(x, jnp.array([1]))
        merged = get_replica_context().merge_call(
            lambda strategy, slices: strategy.reduce("MEAN", slices), args=(slices,)
        )
        return merged.values, merged.indices

    values, indices = two_replicas.run(fn, args=(PerReplica(jnp.array([[2.0], [4.0]])),))
    assert values.values[1].tolist() == [1.0, 2.0]
    assert indices.values[1].tolist() == [1, 1]


def test_merge_call_outside_all_programs_calls_the_function():
    def merge(strategy, x):
        assert unison.in_cross_replica_context()
        return x + strategy.num_replicas_in_sync

    assert get_replica_context().merge_call(merge, args=(1,)) == 2


def test_strategy_does_not_run_in_the_scope_of_another(two_replicas):
    other = unison.OneDeviceStrategy("CPU:0")
    with (
        other.scope(),
        pytest.raises(RuntimeError, match=r"strategy\.run.* inside the scope of another"),
    ):
        two_replicas.run(lambda: 1)
