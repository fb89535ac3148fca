"""`Variable`: how the copies of a variable relate, inside and outside of replica programs."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unison
from hlo import all_reduces, compiled_programs
from unison import PerReplica, VariableAggregation, VariableSynchronization, get_replica_context

SUM, MEAN, FIRST, NONE = (
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
    VariableAggregation.NONE,
)
ON_READ = VariableSynchronization.ON_READ


def variable_of(strategy, *args, **annotations) -> unison.Variable:
    with strategy.scope():
        return unison.Variable(*args, **annotations)


def rank():
    return get_replica_context().replica_id_in_sync_group


def copies(strategy, variable) -> list:
    return [copy.tolist() for copy in strategy.experimental_local_results(variable)]


# -- ON_WRITE ------------------------------------------------------------------------------

# On 4 replicas that write 1, 2, 3 and 4 to a variable of value 10.
ON_WRITE = [
    (SUM, "assign", 10.0),
    (SUM, "assign_add", 20.0),
    (SUM, "assign_sub", 0.0),
    (MEAN, "assign", 2.5),
    (MEAN, "assign_add", 12.5),
    (MEAN, "assign_sub", 7.5),
    (FIRST, "assign", 1.0),
    (FIRST, "assign_add", 11.0),
    (FIRST, "assign_sub", 9.0),
]


@pytest.mark.parametrize(("aggregation", "method", "expected"), ON_WRITE)
def test_the_updates_of_the_replicas_are_combined(four_replicas, aggregation, method, expected):
    variable = variable_of(four_replicas, 10.0, aggregation=aggregation)
    four_replicas.run(
        lambda x: getattr(variable, method)(x), args=(PerReplica([1.0, 2.0, 3.0, 4.0]),)
    )
    assert copies(four_replicas, variable) == [expected] * 4
    assert float(variable) == expected


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 6.0), (MEAN, 3.0), (FIRST, 3.0)])
def test_a_plain_number_is_the_value_of_each_replica(two_replicas, aggregation, expected):
    variable = variable_of(two_replicas, 0.0, aggregation=aggregation)
    two_replicas.run(lambda: variable.assign_add(3.0))
    assert float(variable) == expected


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_a_read_after_a_write_sees_the_combined_value(two_replicas, aggregation):
    variable = variable_of(two_replicas, 1.0, aggregation=aggregation)

    def fn(x):
        variable.assign_add(x)
        return variable.value()

    seen = two_replicas.run(fn, args=(PerReplica([1.0, 3.0]),))
    assert [float(value) for value in seen.values] == [float(variable)] * 2


def test_updates_one_after_the_other_add_up(two_replicas):
    variable = variable_of(two_replicas, 1.0, aggregation=SUM)

    def fn(x):
        variable.assign_add(x)
        variable.assign_sub(2 * x)
        variable.assign_add(variable)

    two_replicas.run(fn, args=(PerReplica([1.0, 3.0]),))
    assert float(variable) == (1 - 4) + 2 * (1 - 4)


def test_the_last_of_two_assignments_counts(two_replicas):
    variable = variable_of(two_replicas, 1.0, aggregation=SUM)

    def fn(x):
        variable.assign(x)
        variable.assign(10 * x)
        variable.assign_add(1.0)

    two_replicas.run(fn, args=(PerReplica([1.0, 3.0]),))
    assert float(variable) == 42.0


@pytest.mark.parametrize(("aggregation", "value"), [(SUM, True), (FIRST, True)])
def test_truth_values_stay_truth_values(two_replicas, aggregation, value):
    variable = variable_of(two_replicas, False, aggregation=aggregation)
    two_replicas.run(lambda: variable.assign(value))
    assert variable.value().dtype == jnp.bool_
    assert bool(variable) is True


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bfloat16", "float16", "complex64"])
def test_an_update_keeps_the_dtype(two_replicas, dtype):
    variable = variable_of(two_replicas, 1, dtype=dtype, aggregation=SUM)
    two_replicas.run(lambda: variable.assign_add(1))
    assert variable.value().dtype == dtype
    assert variable.numpy() == 3


def test_without_aggregation_each_replica_updates_its_own_copy(two_replicas, caplog):
    variable = variable_of(two_replicas, 1.0, name="own")
    with caplog.at_level(logging.WARNING, logger="unison"):
        for _ in range(2):
            two_replicas.run(lambda x: variable.assign_add(x), args=(PerReplica([1.0, 2.0]),))
    assert copies(two_replicas, variable) == [3.0, 5.0]
    assert float(variable) == 3.0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'own' has no aggregation and is written by 2 replicas" in message
    assert "aggregation=SUM, MEAN or ONLY_FIRST_REPLICA" in message


def test_one_replica_needs_no_aggregation(caplog):
    strategy = unison.OneDeviceStrategy("CPU:0")
    variable = variable_of(strategy, 1.0)
    with caplog.at_level(logging.WARNING, logger="unison"):
        strategy.run(lambda: variable.assign_add(1.0))
    assert float(variable) == 2.0
    assert caplog.records == []


def test_a_program_compiled_before_the_copies_differed_sees_that_they_do(two_replicas):
    variable = variable_of(two_replicas, 1.0)

    def read():
        return variable * 2

    two_replicas.run(read)
    two_replicas.run(lambda: variable.assign(rank() + 5.0))
    assert [float(value) for value in two_replicas.run(read).values] == [10.0, 12.0]


def test_many_updates_travel_in_one_all_reduce(two_replicas, monkeypatch):
    shapes = [(3,), (), (2, 5), (1,), (0,), (4, 4)]
    variables = [variable_of(two_replicas, np.zeros(shape), aggregation=MEAN) for shape in shapes]
    texts = compiled_programs(monkeypatch)

    def update(x):
        for position, variable in enumerate(variables):
            variable.assign_add(jnp.full(variable.shape, x * position))

    two_replicas.run(update, args=(PerReplica([1.0, 3.0]),))
    elements = sum(int(np.prod(shape)) for shape in shapes)
    assert [all_reduces(text) for text in texts] == [[f"f32[{elements}]{{0}}"]]
    for position, variable in enumerate(variables):
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, 2.0 * position))


# -- ON_READ -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "initial", "combined"), [(SUM, 4.0, 18.0), (MEAN, 1.0, 4.5), (FIRST, 1.0, 2.0)]
)
def test_on_read_copies_are_combined_when_read(four_replicas, aggregation, initial, combined):
    variable = variable_of(four_replicas, 1.0, synchronization=ON_READ, aggregation=aggregation)
    assert float(variable) == initial
    local = four_replicas.run(
        lambda x: variable.assign_add(x), args=(PerReplica([1.0, 2.0, 3.0, 8.0]),)
    )
    assert [float(value) for value in local.values] == [2.0, 3.0, 4.0, 9.0]
    assert float(variable) == combined


def test_writing_on_read_copies_takes_no_communication(two_replicas, monkeypatch):
    variable = variable_of(two_replicas, 1.0, synchronization=ON_READ, aggregation=SUM)
    texts = compiled_programs(monkeypatch)
    two_replicas.run(lambda: variable.assign_add(1.0))
    assert [all_reduces(text) for text in texts] == [[]]


def test_assigning_an_on_read_sum_divides_it_between_the_copies(four_replicas):
    variable = variable_of(four_replicas, 0.0, synchronization=ON_READ, aggregation=SUM)
    variable.assign(8.0)
    assert copies(four_replicas, variable) == [2.0] * 4
    assert float(variable) == 8.0


def test_an_integer_on_read_sum_is_divided_without_remainder(two_replicas):
    variable = variable_of(two_replicas, 0, synchronization=ON_READ, aggregation=SUM)
    variable.assign(7)
    assert copies(two_replicas, variable) == [3, 3]
    assert int(variable) == 6


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_adding_to_an_on_read_sum_outside_the_replicas_is_refused(two_replicas, method):
    variable = variable_of(two_replicas, 0.0, synchronization=ON_READ, aggregation=SUM)
    with pytest.raises(ValueError, match=r"has no one meaning. Assign the sum that you want"):
        getattr(variable, method)(1.0)


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_the_other_on_read_variables_are_not_divided(two_replicas, aggregation):
    variable = variable_of(two_replicas, 0.0, synchronization=ON_READ, aggregation=aggregation)
    variable.assign(8.0)
    variable.assign_add(1.0)
    variable.assign_sub(3.0)
    assert copies(two_replicas, variable) == [6.0, 6.0]
    assert float(variable) == 6.0


@pytest.mark.parametrize("read", [unison.Variable.value, float, unison.Variable.numpy])
def test_on_read_copies_without_aggregation_have_no_common_value(two_replicas, read):
    variable = variable_of(two_replicas, 0.0, synchronization=ON_READ)
    with pytest.raises(ValueError, match=r"no common value.*strategy.reduce\(op, variable\)"):
        read(variable)


def test_the_mean_of_half_copies_is_computed_in_a_wider_dtype(two_replicas):
    variable = variable_of(
        two_replicas, 0.0, dtype="float16", synchronization=ON_READ, aggregation=MEAN
    )
    variable.assign(60000.0)  # the sum of two is too large for the dtype
    assert float(variable) == 60000.0 - 60000.0 % 32


# -- creation ------------------------------------------------------------------------------


def test_the_initial_value_may_be_a_function(two_replicas):
    assert variable_of(two_replicas, lambda: jnp.ones(3)).numpy().tolist() == [1.0, 1.0, 1.0]


def test_the_initial_value_may_be_a_variable(two_replicas):
    first = variable_of(two_replicas, 2.0)
    second = variable_of(two_replicas, first)
    first.assign(3.0)
    assert float(second) == 2.0


def test_a_dtype_converts_the_initial_value(two_replicas):
    assert variable_of(two_replicas, 1, dtype="bfloat16").dtype == jnp.bfloat16


def test_shape_and_rank_are_known(two_replicas):
    variable = variable_of(two_replicas, np.zeros((2, 3)))
    assert (variable.shape, variable.ndim, variable.size, len(variable)) == ((2, 3), 2, 6, 2)


def test_names_tell_variables_apart(two_replicas):
    first, second = variable_of(two_replicas, 0.0), variable_of(two_replicas, 0.0)
    assert first.name != second.name
    assert variable_of(two_replicas, 0.0, name="kernel").name == "kernel"


def test_on_read_variables_are_not_trainable_by_default(two_replicas):
    assert variable_of(two_replicas, 0.0).trainable
    assert not variable_of(two_replicas, 0.0, synchronization=ON_READ).trainable
    assert variable_of(two_replicas, 0.0, True, synchronization=ON_READ).trainable


def test_annotations_may_be_named(two_replicas):
    variable = variable_of(two_replicas, 0.0, synchronization="on_read", aggregation="sum")
    assert (variable.synchronization, variable.aggregation) == (ON_READ, SUM)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_the_mean_of_integers_is_refused(two_replicas, dtype):
    with pytest.raises(ValueError, match=f"needs a floating dtype.*dtype={dtype}"):
        variable_of(two_replicas, 1, dtype=dtype, aggregation=MEAN)


def test_one_copy_of_several_replicas_is_refused(two_replicas):
    with pytest.raises(ValueError, match="NONE keeps one copy that a single device owns"):
        variable_of(two_replicas, 1.0, synchronization=VariableSynchronization.NONE)
    alone = unison.OneDeviceStrategy("CPU:0")
    assert float(variable_of(alone, 1.0, synchronization=VariableSynchronization.NONE)) == 1.0


def test_a_variable_cannot_be_created_in_a_replica_program(two_replicas):
    with pytest.raises(ValueError, match="cannot be created while a replica program is traced"):
        two_replicas.run(lambda: unison.Variable(1.0))


# -- other strategies ----------------------------------------------------------------------


def test_a_variable_of_another_strategy_is_refused(two_replicas, four_replicas):
    variable = variable_of(four_replicas, 1.0, name="other", aggregation=SUM)
    with pytest.raises(ValueError, match="'other' belongs to another strategy"):
        two_replicas.run(lambda: variable + 1)
    with pytest.raises(ValueError, match="'other' was not created in the scope of the strategy"):
        two_replicas.run(lambda: variable.assign(1.0))


def test_a_variable_outside_all_scopes_can_be_read_and_not_written(two_replicas):
    variable = unison.Variable(3.0)
    assert [float(value) for value in two_replicas.run(lambda: variable + 1).values] == [4.0, 4.0]
    with pytest.raises(ValueError, match=r"Create it inside `with strategy.scope"):
        two_replicas.run(lambda: variable.assign(1.0))


def test_strategies_of_the_same_devices_share_variables(two_replicas):
    again = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    variable = variable_of(again, 1.0, aggregation=SUM)
    two_replicas.run(lambda: variable.assign_add(1.0))
    assert float(variable) == 3.0


# -- assigning -----------------------------------------------------------------------------


def test_assignments_can_be_chained(two_replicas):
    variable = variable_of(two_replicas, 0.0, aggregation=SUM)
    assert variable.assign(1.0).assign_add(2.0).assign_sub(0.5) is variable
    assert copies(two_replicas, variable) == [2.5, 2.5]


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_another_shape_is_refused_outside_and_inside(two_replicas, method):
    variable = variable_of(two_replicas, np.zeros(3), name="w", aggregation=SUM)
    message = r"'w' must have its shape \(3,\). Received: shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        getattr(variable, method)(np.zeros(2))
    with pytest.raises(ValueError, match=message):
        two_replicas.run(lambda: getattr(variable, method)(jnp.zeros(2)))


def test_assigning_while_jax_traces_something_else_is_refused(two_replicas):
    variable = variable_of(two_replicas, 1.0, aggregation=SUM)
    with pytest.raises(RuntimeError, match=r"outside strategy.run"):
        jax.jit(lambda x: variable.assign(x).value())(2.0)
    assert float(variable) == 1.0


def in_a_scan(update):
    lax.scan(lambda carry, x: (carry, update(x)), 0.0, jnp.arange(3.0))


@pytest.mark.parametrize(
    "transformed",
    [in_a_scan, lambda update: jax.jit(update)(1.0), lambda update: jax.grad(update)(1.0)],
    ids=["scan", "jit", "grad"],
)
@pytest.mark.parametrize("aggregation", [SUM, NONE])
def test_a_write_inside_a_transformation_of_jax_is_an_error(two_replicas, transformed, aggregation):
    variable = variable_of(two_replicas, 0.0, name="total", aggregation=aggregation)

    def update(x):
        variable.assign(x * 2)
        return x

    with pytest.raises(RuntimeError, match=r"assign it outside. The program .* variables: 'total'"):
        two_replicas.run(lambda: transformed(update))
    assert float(variable) == 0.0


def test_a_read_inside_a_loop_of_jax_sees_the_writes_before_it(two_replicas):
    variable = variable_of(two_replicas, 0.0, aggregation=SUM)

    def fn():
        variable.assign_add(1.0)
        return lax.scan(lambda carry, x: (carry, variable + x), 0.0, jnp.arange(2.0))[1]

    assert two_replicas.run(fn).values[1].tolist() == [2.0, 3.0]
    assert float(variable) == 2.0


def test_variables_are_read_and_written_around_a_gradient(two_replicas):
    weight = variable_of(two_replicas, 3.0, aggregation=MEAN)
    steps = variable_of(two_replicas, 0, aggregation=FIRST)

    def step(x):
        def loss(w):
            steps.assign_add(1)
            return w * w * x

        gradient = jax.grad(loss)(weight.value())
        weight.assign_sub(0.1 * gradient)
        return gradient

    gradients = two_replicas.run(step, args=(PerReplica([1.0, 2.0]),))
    assert [float(g) for g in gradients.values] == [6.0, 12.0]
    np.testing.assert_allclose(float(weight), 3.0 - 0.9, rtol=1e-6)
    assert int(steps) == 1


# -- reading -------------------------------------------------------------------------------


def test_a_value_that_was_read_does_not_change_with_later_steps(two_replicas):
    variable = variable_of(two_replicas, np.zeros(4), aggregation=SUM)
    read, views, expected = [], [], []
    for step in range(3):
        read.append(variable.value())
        views.append(np.asarray(variable.value()))
        expected.append([2.0 * step] * 4)
        two_replicas.run(lambda: variable.assign_add(jnp.ones(4)))
    assert [value.tolist() for value in read] == expected
    assert [view.tolist() for view in views] == expected


def test_what_was_assigned_is_not_taken_over(two_replicas):
    given = jnp.zeros(4)
    host = np.zeros(4, "float32")
    first = variable_of(two_replicas, given, aggregation=SUM)
    second = variable_of(two_replicas, 1.0 + given, aggregation=SUM)
    second.assign(given)
    third = variable_of(two_replicas, host, aggregation=SUM)
    for variable in (first, second, third):
        two_replicas.run(lambda variable=variable: variable.assign_add(jnp.ones(4)))
    assert given.tolist() == host.tolist() == [0.0] * 4


def test_numpy_returns_a_copy_of_the_callers_own(two_replicas):
    variable = variable_of(two_replicas, np.zeros(2), aggregation=SUM)
    array = variable.numpy()
    array[0] = 5.0
    assert variable.numpy().tolist() == [0.0, 0.0]


def test_reading_as_a_number_costs_the_next_step_no_copy(two_replicas):
    variable = variable_of(two_replicas, 1.0, aggregation=SUM)
    before = variable.cell.array
    float(variable), bool(variable), variable.numpy(), np.asarray(variable), repr(variable)
    assert variable.cell.take() is before


def test_it_is_shown_with_its_value(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], name="w")
    assert repr(variable) == "<unison.Variable 'w' shape=(2,) dtype=float32 value=[1. 2.]>"


def test_it_computes_like_an_array(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0])
    array = np.array([3.0, 4.0], "float32")
    assert (variable + array).tolist() == (array + variable).tolist() == [4.0, 6.0]
    assert (variable - 1).tolist() == [0.0, 1.0]
    assert (1 - variable).tolist() == [0.0, -1.0]
    assert (2**variable).tolist() == [2.0, 4.0]
    assert (variable / variable).tolist() == [1.0, 1.0]
    assert float(variable @ variable) == 5.0
    assert (-variable).tolist() == [-1.0, -2.0]
    assert (variable < 2).tolist() == (variable != 2).tolist() == [True, False]
    assert (jnp.ones(2) * variable).tolist() == jnp.sqrt(variable.value() ** 2).tolist() == [1, 2]
    assert float(variable[1]) == 2.0
    assert [float(x) for x in variable] == [1.0, 2.0]
    assert float(np.sum(variable)) == float(jnp.sum(variable.value())) == 3.0


def test_a_scalar_is_a_number(two_replicas):
    variable = variable_of(two_replicas, 3)
    assert (int(variable), float(variable), bool(variable)) == (3, 3.0, True)
    assert list(range(5))[variable] == 3


def test_variables_are_told_apart_by_identity(two_replicas):
    first, second = variable_of(two_replicas, 1.0), variable_of(two_replicas, 1.0)
    assert {first: "first", second: "second"}[first] == "first"


def test_repr_of_copies_without_a_common_value_does_not_raise():
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = unison.Variable(
            1.0, synchronization=unison.VariableSynchronization.ON_READ, name="apart"
        )
    assert "none outside the replicas" in repr(variable)
