"""`strategy.extended`: what libraries use, around the replicas and in `merge_call` inside them."""

import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison import Mirrored, PerReplica, VariableAggregation, get_replica_context

PAIR = PerReplica([np.array([1.0, 2.0], "float32"), np.array([3.0, 6.0], "float32")])


def variable_of(strategy, *args, **annotations):
    with strategy.scope():
        return unison.Variable(*args, **annotations)


def copies(strategy, variable):
    return [copy.tolist() for copy in strategy.experimental_local_results(variable)]


def merged(strategy, merge, *args):
    """What `merge` gives each replica, called by `merge_call`."""
    result = strategy.run(
        lambda *args: get_replica_context().merge_call(merge, args=args), args=args
    )
    return [np.asarray(component).tolist() for component in result.values]


# -- devices -------------------------------------------------------------------------------


def test_devices_have_tensorflows_names(two_replicas):
    extended = two_replicas.extended
    names = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in (0, 1))
    assert extended.worker_devices == extended.parameter_devices == names
    assert extended.non_slot_devices([variable_of(two_replicas, 1.0)]) == names


def test_a_single_worker_does_everything(two_replicas):
    extended = two_replicas.extended
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert extended.experimental_should_init
    assert not extended.experimental_between_graph
    assert not extended.experimental_require_static_shapes


# -- reduce_to, batch_reduce_to, broadcast_to ----------------------------------------------


def test_reduce_to_combines_for_any_destination(two_replicas):
    extended = two_replicas.extended
    variable = variable_of(two_replicas, [0.0, 0.0])
    for destination in ("CPU:0", ["CPU:0", "CPU:1"], extended.worker_devices, variable, PAIR, None):
        assert np.asarray(extended.reduce_to("SUM", PAIR, destination)).tolist() == [4.0, 8.0]
    (mean,) = extended.reduce_to("MEAN", [PAIR], variable)
    assert [component.tolist() for component in mean.values] == [[2.0, 4.0]] * 2


def test_batch_reduce_to_combines_several_values(two_replicas):
    pairs = [(PAIR, "CPU:0"), (PerReplica([1, 2]), "CPU:1")]
    first, second = two_replicas.extended.batch_reduce_to(unison.ReduceOp.SUM, pairs)
    assert first.tolist() == [4.0, 8.0]
    assert int(second) == 3
    assert two_replicas.extended.batch_reduce_to("SUM", []) == []


def test_a_destination_that_is_not_there_is_an_error(two_replicas):
    with pytest.raises(ValueError, match="Received: 'CPU:99'"):
        two_replicas.extended.reduce_to("SUM", PAIR, "CPU:99")


def test_reduce_to_in_merge_call(two_replicas):
    def merge(strategy, x):
        pairs = [(x, "CPU:0"), (x, x)]
        return sum(strategy.extended.batch_reduce_to("SUM", pairs)) + strategy.extended.reduce_to(
            "MEAN", x, x
        )

    assert merged(two_replicas, merge, PAIR) == [[10.0, 20.0]] * 2


def test_a_value_is_broadcast_to_the_devices_of_a_variable(two_replicas):
    variable = variable_of(two_replicas, 0.0)
    value = two_replicas.extended.broadcast_to(jnp.float32(3), variable)
    assert isinstance(value, Mirrored)
    assert [float(component) for component in value.values] == [3.0, 3.0]
    variable.assign(value)
    assert copies(two_replicas, variable) == [3.0, 3.0]
    alone = two_replicas.extended.broadcast_to(jnp.float32(3), "CPU:1")
    assert float(alone) == 3.0


def test_broadcast_to_in_merge_call(two_replicas):
    def merge(strategy, x):
        total = strategy.reduce("SUM", x)
        return strategy.extended.broadcast_to(total, strategy.extended.worker_devices)

    assert merged(two_replicas, merge, PAIR) == [[4.0, 8.0]] * 2


# -- update --------------------------------------------------------------------------------


def test_update_changes_every_copy(two_replicas):
    variable = variable_of(two_replicas, [10.0, 10.0])
    result = two_replicas.extended.update(
        variable, lambda v, x, scale: v.assign_add(x * scale), (jnp.arange(2.0),), {"scale": 2.0}
    )
    assert copies(two_replicas, variable) == [[10.0, 12.0]] * 2
    assert [component.tolist() for component in result.values] == [[10.0, 12.0]] * 2


@pytest.mark.parametrize("aggregation", list(VariableAggregation))
def test_each_copy_is_updated_with_its_component(two_replicas, aggregation):
    variable = variable_of(two_replicas, [10.0, 10.0], aggregation=aggregation)
    two_replicas.extended.update(variable, lambda v, x: v.assign_sub(x[0]), args=([PAIR],))
    assert copies(two_replicas, variable) == [[9.0, 8.0], [7.0, 4.0]]
    assert variable.numpy().tolist() == [9.0, 8.0]


def test_copies_that_were_updated_apart_are_still_combined_by_the_replicas(two_replicas):
    variable = variable_of(two_replicas, 0.0, aggregation=VariableAggregation.SUM)
    two_replicas.extended.update(variable, lambda v, x: v.assign(x), args=(PerReplica([1.0, 2.0]),))
    two_replicas.run(lambda: variable.assign_add(5.0))
    assert copies(two_replicas, variable) == [11.0, 12.0]
    two_replicas.run(lambda: variable.assign(5.0))
    assert copies(two_replicas, variable) == [10.0, 10.0]


def test_equal_updates_leave_the_copies_equal(two_replicas, caplog):
    variable = variable_of(two_replicas, 1.0)
    for _ in range(2):
        two_replicas.extended.update(variable, lambda v: v.assign_add(1.0))
    assert caplog.records == []
    assert variable.cell.array.sharding == two_replicas.placement.mirrored


def test_what_is_read_of_copies_that_differ_makes_copies_differ(two_replicas):
    apart = variable_of(two_replicas, 0.0, synchronization="on_read", aggregation="sum")
    apart.assign(PerReplica([1.0, 2.0]))
    variable = variable_of(two_replicas, 0.0, aggregation="mean")
    two_replicas.extended.update(variable, lambda v: v.assign(apart.value()))
    assert copies(two_replicas, variable) == [1.0, 2.0]


def test_ungrouped_results_are_tuples_of_components(two_replicas):
    variable = variable_of(two_replicas, 10.0)
    result = two_replicas.extended.update(
        variable, lambda v, x: {"sum": v + x, "x": x}, args=(PerReplica([1.0, 2.0]),), group=False
    )
    assert result == {"sum": (11.0, 12.0), "x": (1.0, 2.0)}


def test_update_is_outside_the_replicas(two_replicas):
    def look(variable):
        assert unison.in_cross_replica_context()
        assert get_replica_context() is None
        assert unison.get_strategy() is two_replicas

    two_replicas.extended.update(variable_of(two_replicas, 1.0), look)


def test_the_same_function_is_compiled_once(two_replicas):
    variable = variable_of(two_replicas, 1.0)
    before = two_replicas.trace_count
    for value in range(3):
        two_replicas.extended.update(variable, lambda v, x: v.assign(x), args=(float(value),))
    assert two_replicas.trace_count == before + 1
    assert float(variable) == 2.0


def test_a_variable_of_nobody_is_refused(two_replicas):
    with pytest.raises(ValueError, match=r"update\(\) takes a variable of MirroredStrategy"):
        two_replicas.extended.update(unison.Variable(1.0), lambda v: v.assign(2.0))
    with pytest.raises(ValueError, match=r"update\(\) takes a variable of MirroredStrategy"):
        two_replicas.extended.update(jnp.ones(2), lambda v: v)


def test_an_optimizer_reduces_and_updates_in_merge_call(two_replicas):
    variable = variable_of(two_replicas, [10.0, 10.0], aggregation=VariableAggregation.MEAN)

    def apply(strategy, gradient, variable):
        total = strategy.extended.reduce_to("SUM", gradient, variable)
        strategy.extended.update(variable, lambda v, g: v.assign_sub(0.5 * g), args=(total,))

    two_replicas.run(
        lambda x: get_replica_context().merge_call(apply, args=(x, variable)), args=(PAIR,)
    )
    assert copies(two_replicas, variable) == [[8.0, 6.0]] * 2


def test_update_in_merge_call_gives_each_copy_its_component(two_replicas):
    variable = variable_of(two_replicas, [0.0, 0.0], aggregation=VariableAggregation.SUM)

    def merge(strategy, x, variable):
        doubled = strategy.extended.update(variable, lambda v, x: v.assign(x) * 2, args=(x,))
        apart = strategy.extended.update(variable, lambda v: v + 0, group=False)
        return strategy.reduce("SUM", doubled) + apart[0]

    assert merged(two_replicas, merge, PAIR, variable) == [[9.0, 18.0]] * 2
    assert copies(two_replicas, variable) == [[1.0, 2.0], [3.0, 6.0]]


@pytest.mark.parametrize(
    "update",
    [
        lambda strategy, *args: strategy.extended.update(*args),
        lambda _, *args: get_replica_context().update(*args),
    ],
    ids=["extended", "replica context"],
)
def test_update_may_be_called_by_the_replicas(two_replicas, update):
    variable = variable_of(two_replicas, [0.0, 0.0])

    def fn(x):
        return update(two_replicas, variable, lambda v, x: v.assign_add(x), (x,))

    result = two_replicas.run(fn, args=(PAIR,))
    assert copies(two_replicas, variable) == [[1.0, 2.0], [3.0, 6.0]]
    assert [component.tolist() for component in result.values] == [[1.0, 2.0], [3.0, 6.0]]


def test_state_that_belongs_to_no_variable_is_updated_on_each_device(two_replicas):
    extended = two_replicas.extended
    devices = extended.non_slot_devices([])
    result = extended.update_non_slot(devices, lambda x: x * 2, (PerReplica([1, 2]),), group=False)
    assert result == (2, 4)
    counter = variable_of(two_replicas, 0)
    extended.update_non_slot([counter], lambda: counter.assign_add(1))
    assert copies(two_replicas, counter) == [1, 1]


def test_one_replica_updates_as_several(two_replicas):
    for strategy in (unison.OneDeviceStrategy("CPU:1"), unison.get_strategy()):
        variable = variable_of(strategy, 1.0)
        update = strategy.extended.update
        assert float(update(variable, lambda v, x: v.assign_add(x), (1.0,))) == 2.0
        assert update(variable, lambda v, x: v.assign_add(x), (1.0,), group=False) == (3.0,)
        assert float(strategy.extended.reduce_to("SUM", 1.0, variable)) == 1.0
        assert float(strategy.extended.broadcast_to(1.0, variable)) == 1.0


# -- the rest ------------------------------------------------------------------------------


def test_call_for_each_replica_is_run(two_replicas):
    result = two_replicas.extended.call_for_each_replica(lambda x: x * 2, (PerReplica([1, 2]),))
    assert [int(component) for component in result.values] == [2, 4]


def test_variables_are_made_where_another_one_lies(two_replicas, four_replicas):
    variable = variable_of(two_replicas, 1.0)
    with two_replicas.extended.colocate_vars_with(variable):
        beside = unison.Variable(2.0)
    assert two_replicas.extended.variable_created_in_scope(beside)
    with (
        pytest.raises(ValueError, match=r"takes a variable of MirroredStrategy"),
        four_replicas.extended.colocate_vars_with(variable),
    ):
        pass


def test_a_variable_outside_of_scopes_is_nowhere_to_lie_beside(two_replicas):
    plain = unison.Variable(1.0)
    with (
        pytest.raises(ValueError, match=r"colocate_vars_with\(\) takes a variable of Mirrored"),
        two_replicas.extended.colocate_vars_with(plain),
    ):
        pass
    default = unison.get_strategy()
    with default.extended.colocate_vars_with(plain):
        assert default.extended.variable_created_in_scope(unison.Variable(2.0))


def test_a_variable_is_its_own_container(two_replicas):
    variable = variable_of(two_replicas, 1.0)
    assert two_replicas.extended.value_container(variable) is variable
    assert float(two_replicas.extended.read_var(variable)) == 1.0


def test_only_variables_of_the_strategy_are_created_in_its_scope(two_replicas):
    extended = two_replicas.extended
    assert extended.variable_created_in_scope(variable_of(two_replicas, 1.0))
    assert not extended.variable_created_in_scope(unison.Variable(1.0))
    assert not extended.variable_created_in_scope(1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda extended: extended.reduce_to("SUM", 1.0, "CPU:0"),
        lambda extended: extended.batch_reduce_to("SUM", [(1.0, "CPU:0")]),
        lambda extended: extended.broadcast_to(1.0, "CPU:0"),
        lambda extended: extended.update_non_slot("CPU:0", lambda: 1),
        lambda extended: extended.call_for_each_replica(lambda: 1),
    ],
    ids=["reduce_to", "batch_reduce_to", "broadcast_to", "update_non_slot", "call_for_each"],
)
def test_they_are_for_cross_replica_context(two_replicas, call):
    with pytest.raises(RuntimeError, match=r"cross-replica context|inside a function"):
        two_replicas.run(lambda: call(two_replicas.extended))
