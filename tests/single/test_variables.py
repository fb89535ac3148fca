"""`Variable`: how the copies of a variable relate, inside and outside of replica programs."""

import copy
import logging
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import unison
from hlo import all_reduces, compiled_programs
from unison import (
    IndexedSlices,
    PerReplica,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from unison.runtime import placement

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
    (summed,) = [types for text in texts for types in all_reduces(text)]
    assert re.findall(r"f32\[([\d,]*)\]", summed) == ["3", "", "2,5", "1", "0", "4,4"]
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
        variable_of(two_replicas, True, dtype=dtype, aggregation=MEAN)


def test_one_copy_of_several_replicas_is_refused(two_replicas):
    with pytest.raises(ValueError, match="NONE keeps one copy that a single device owns"):
        variable_of(two_replicas, 1.0, synchronization=VariableSynchronization.NONE)
    alone = unison.OneDeviceStrategy("CPU:0")
    assert float(variable_of(alone, 1.0, synchronization=VariableSynchronization.NONE)) == 1.0


def test_an_initial_value_is_needed():
    with pytest.raises(ValueError, match="needs an initial_value"):
        unison.Variable(None)


@pytest.mark.parametrize("text", ["abc", b"abc", ["a"], object()])
def test_a_value_must_be_numbers(text):
    with pytest.raises(TypeError, match="must be an array or numbers"):
        unison.Variable(text)


def test_a_constraint_is_kept_for_the_optimizer():
    variable = unison.Variable(1.0, constraint=jnp.abs)
    variable.assign(-3.0)
    assert float(variable) == -3.0
    assert float(variable.constraint(variable.value())) == 3.0
    with pytest.raises(ValueError, match=r"constraint must be a function of the value"):
        unison.Variable(1.0, constraint=3)


def test_a_copy_has_a_value_of_its_own(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], synchronization=ON_READ, aggregation=SUM)
    variable.assign(PerReplica([np.ones(2), np.zeros(2)]))
    twin = copy.deepcopy({"v": variable})["v"]
    twin.assign_add(PerReplica([np.ones(2), np.ones(2)]))
    assert copies(two_replicas, variable) == [[1.0, 1.0], [0.0, 0.0]]
    assert copies(two_replicas, twin) == [[2.0, 2.0], [1.0, 1.0]]
    two_replicas.run(lambda: twin.assign(jnp.zeros(2)))
    assert float(np.sum(twin)) == 0.0


def test_the_device_is_that_of_the_first_copy():
    strategy = unison.MirroredStrategy(["CPU:1", "CPU:0"])
    name = "/job:localhost/replica:0/task:0/device:CPU:1"
    assert variable_of(strategy, 1.0).device == name


# -- shapes that change --------------------------------------------------------------------


def test_an_axis_without_size_may_grow(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], shape=[None], name="v")
    variable.assign([1.0, 2.0, 3.0]).assign_add([1.0, 1.0, 1.0])
    assert copies(two_replicas, variable) == [[2.0, 3.0, 4.0]] * 2
    assert variable.shape == (3,)
    assert variable.declared_shape == (None,)
    with pytest.raises(ValueError, match=r"'v' must have its shape \(None,\)"):
        variable.assign(1.0)
    with pytest.raises(ValueError, match=r"'v' must have its shape \(3,\)"):
        variable.assign_add([1.0])


def test_the_number_of_axes_may_change_too():
    variable = unison.Variable([1.0, 2.0], shape=...)
    variable.assign([[1.0, 2.0, 3.0]])
    assert variable.shape == (1, 3)


def test_programs_see_the_shape_of_their_time(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], shape=[None])
    first = two_replicas.run(lambda: variable * 2)
    variable.assign([1.0, 2.0, 3.0])
    second = two_replicas.run(lambda: variable * 3)
    assert first.values[1].tolist() == [2.0, 4.0]
    assert second.values[1].tolist() == [3.0, 6.0, 9.0]


def test_a_program_is_made_anew_for_another_shape(two_replicas):
    variable = variable_of(two_replicas, [1.0, 3.0], shape=[None])
    mean = lambda: jnp.mean(variable)  # noqa: E731
    assert float(two_replicas.run(mean).values[0]) == 2.0
    variable.assign([1.0, 3.0, 8.0])
    assert float(two_replicas.run(mean).values[0]) == 4.0


def test_a_program_does_not_change_a_shape(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], shape=[None])
    with pytest.raises(ValueError, match=r"keeps the shape \(2,\).*pad the value"):
        two_replicas.run(lambda: variable.assign(jnp.ones(3)))


def test_the_initial_value_must_fit_the_shape():
    with pytest.raises(ValueError, match=r"must fit shape=\(3,\). Received: shape \(2,\)"):
        unison.Variable([1.0, 2.0], shape=(3,))


# -- dtypes --------------------------------------------------------------------------------


class OnDevice(NamedTuple):
    """A JAX array, made when the test runs: the devices start with the first one."""

    value: Any
    dtype: str

    def made(self):
        return jnp.asarray(self.value, self.dtype)


def made(value):
    return value.made() if isinstance(value, OnDevice) else value


FITS = [
    ("float32", 1),
    ("float32", True),
    ("float32", [1, 2]),
    ("float32", np.float64(1)),
    ("float32", np.arange(3)),
    ("float32", OnDevice(1, "int32")),
    ("float32", OnDevice(1, "bfloat16")),
    ("bfloat16", 1.5),
    ("bfloat16", OnDevice(1, "int32")),
    ("int32", True),
    ("int32", np.int64(2)),
    ("int32", np.float32(1)),  # NumPy's numbers are converted as they come, as in TensorFlow
    ("int32", OnDevice(3, "uint8")),
    ("complex64", 1.5),
    ("bool", np.bool_(True)),
]
DOES_NOT_FIT = [
    ("int32", 1.5, TypeError),
    ("int32", 1.0, TypeError),
    ("int32", [1.0], TypeError),
    ("float32", 1j, TypeError),
    ("float32", np.complex64(1j), TypeError),
    ("float32", "a", TypeError),
    ("bool", 1, TypeError),
    ("int32", OnDevice(1, "float32"), ValueError),
    ("uint8", OnDevice(1, "int32"), ValueError),
    ("bfloat16", OnDevice(1, "float32"), ValueError),
    ("float32", OnDevice(1, "complex64"), ValueError),
    ("int32", 2**40, OverflowError),
]


@pytest.mark.parametrize(
    ("method", "dtype", "value"),
    [("assign", *fit) for fit in FITS] + [("assign_add", *fit) for fit in FITS if fit[0] != "bool"],
)
def test_what_fits_a_dtype(method, dtype, value):
    value = made(value)
    zeros = np.zeros(np.shape(value))
    variable = unison.Variable(zeros.astype(bool) if dtype == "bool" else zeros, dtype=dtype)
    getattr(variable, method)(value)
    assert variable.value().dtype == dtype
    np.testing.assert_array_equal(variable.numpy(), np.asarray(value).astype(variable.dtype))


@pytest.mark.parametrize(("dtype", "value", "error"), DOES_NOT_FIT)
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_what_does_not_fit_a_dtype(dtype, value, error, method):
    variable = unison.Variable(False if dtype == "bool" else 0, dtype=dtype, name="v")
    with pytest.raises(error):
        getattr(variable, method)(made(value))
    assert variable.numpy() == 0


def test_the_error_names_the_conversion(two_replicas):
    steps = variable_of(two_replicas, 0, name="steps", aggregation=SUM)
    message = r"dtype float32 does not fit variable 'steps' of dtype int32.*value.astype\('int32'\)"
    with pytest.raises(ValueError, match=message):
        two_replicas.run(lambda x: steps.assign_add(x), args=(jnp.float32(1),))


def test_a_number_among_the_arguments_is_no_statement_of_a_dtype(two_replicas):
    total = variable_of(two_replicas, 0.0, aggregation=SUM)
    two_replicas.run(lambda x: total.assign_add(x), args=(2,))
    assert float(total) == 4.0


def test_an_initial_value_may_be_narrowed_but_not_truncated():
    assert unison.Variable(jnp.ones(2), dtype="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype float32 does not fit"):
        unison.Variable(jnp.ones(2), dtype="int32")
    with pytest.raises(TypeError, match=r"1.5 does not fit"):
        unison.Variable(1.5, dtype="int32")


# -- slices --------------------------------------------------------------------------------

SCATTERED = {
    "add": [21, 2, 13, 4],
    "sub": [-19, 2, -7, 4],
    "mul": [20, 2, 30, 4],
    "div": [0.05, 2, 0.3, 4],
    "max": [20, 2, 10, 4],
    "min": [1, 2, 3, 4],
    "update": [20, 2, 10, 4],
}
SLICES = IndexedSlices(np.array([10.0, 20.0], "float32"), np.array([2, 0]))


@pytest.mark.parametrize("how", SCATTERED)
@pytest.mark.parametrize("compiled", [False, True])
def test_slices_update_rows(how, compiled):
    variable = unison.Variable([1.0, 2.0, 3.0, 4.0])
    update = lambda: getattr(variable, f"scatter_{how}")(SLICES)  # noqa: E731
    (unison.Function(update) if compiled else update)()
    np.testing.assert_allclose(variable.numpy(), SCATTERED[how], rtol=1e-6)


@pytest.mark.parametrize("how", ["add", "sub", "max", "min", "update"])
def test_updates_at_indices_of_several_axes(how):
    variable = unison.Variable([1.0, 2.0, 3.0, 4.0])
    getattr(variable, f"scatter_nd_{how}")([[2], [0]], [10.0, 20.0])
    np.testing.assert_allclose(variable.numpy(), SCATTERED[how])


@pytest.mark.parametrize(
    ("how", "expected"), [("add", 32.0), ("update", 20.0), ("mul", 400.0), ("max", 20.0)]
)
def test_repeated_slices_take_effect_one_after_the_other(how, expected):
    variable = unison.Variable([1.0, 2.0])
    slices = IndexedSlices(np.array([10.0, 20.0]), np.array([1, 1]))
    assert getattr(variable, f"scatter_{how}")(slices).numpy().tolist() == [1.0, expected]


def test_slices_may_be_rows_or_one_number_for_all():
    variable = unison.Variable(np.zeros((3, 2), "float32"))
    variable.scatter_add(IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [2, 0]))
    assert variable.numpy().tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    variable.scatter_update(IndexedSlices(5.0, 1))
    assert variable.numpy().tolist() == [[3.0, 4.0], [5.0, 5.0], [1.0, 2.0]]


def test_a_batch_of_rows_is_updated_each_at_its_own_indices():
    variable = unison.Variable(np.zeros((2, 3), "float32"))
    variable.batch_scatter_update(IndexedSlices([[1.0], [2.0]], [[0], [2]]))
    assert variable.numpy().tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]


@pytest.mark.parametrize("index", [4, -1])
def test_an_index_outside_the_variable_is_an_error(index):
    variable = unison.Variable([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match=rf"Index {index} is outside axis 0.*expected 0 to 3"):
        variable.scatter_add(IndexedSlices([1.0], [index]))


def test_an_index_known_only_at_run_time_touches_nothing_outside():
    variable = unison.Variable([1.0, 2.0])
    add = unison.Function(lambda index: variable.scatter_add(IndexedSlices(jnp.ones(3), index)))
    add(jnp.array([-1, 1, 7]))
    assert variable.numpy().tolist() == [1.0, 3.0]


def test_integers_stay_integers_where_slices_divide_them():
    variable = unison.Variable(np.array([1, 6, 1], "int32"))
    variable.scatter_div(IndexedSlices(np.array([2, 4], "int32"), np.array([0, 1])))
    assert variable.value().dtype == jnp.int32
    assert variable.numpy().tolist() == [0, 1, 1]
    variable.assign_add(np.array([1, 1, 1], "int32"))
    assert variable.numpy().tolist() == [1, 2, 2]


def test_integers_are_divided_by_repeated_slices_one_after_the_other():
    variable = unison.Variable(np.array([[-7, 2**31 - 1], [8, 9]], "int32"))
    divisors = np.array([[2, 2**16], [2, 2**16], [3, 3]], "int32")
    slices = IndexedSlices(divisors, np.array([0, 0, 1]))
    unison.Function(lambda: variable.scatter_div(slices))()
    assert variable.numpy().tolist() == [[-1, 0], [2, 3]]


def test_only_slices_can_be_scattered():
    with pytest.raises(TypeError, match=r"scatter_add takes IndexedSlices\(values, indices\)"):
        unison.Variable([1.0]).scatter_add(jnp.ones(1))


def test_slices_of_known_shape_are_an_array():
    variable = unison.Variable([1.0, 1.0, 1.0])
    slices = IndexedSlices(jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 2, 0]), dense_shape=(3,))
    assert variable.assign(slices).numpy().tolist() == [4.0, 0.0, 2.0]
    assert (-slices).dense().tolist() == [-4.0, 0.0, -2.0]
    with pytest.raises(ValueError, match="without a dense_shape cannot become an array"):
        variable.assign(SLICES)


def test_uneven_replicas_may_scatter_different_numbers_of_slices(two_replicas):
    table = variable_of(two_replicas, np.zeros(4, "float32"), aggregation=SUM)
    rows = PerReplica([np.array([0, 1, 0]), np.array([3])])
    two_replicas.run(
        lambda rows: table.scatter_add(IndexedSlices(jnp.ones(rows.shape), rows)), args=(rows,)
    )
    assert copies(two_replicas, table) == [[2.0, 1.0, 0.0, 1.0]] * 2


# -- other strategies ----------------------------------------------------------------------


def test_a_variable_of_another_strategy_is_refused(two_replicas, four_replicas):
    variable = variable_of(four_replicas, 1.0, name="other", aggregation=SUM)
    with pytest.raises(RuntimeError, match="'other' belongs to another strategy"):
        two_replicas.run(lambda: variable + 1)
    with pytest.raises(RuntimeError, match="'other' was not created in the scope of the strategy"):
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


FUNCTIONS = {
    "jnp.sum": (jnp.sum, -1.0),
    "jnp.add": (lambda v: jnp.add(v, 1), [2.0, -1.0]),
    "jnp.dot": (lambda v: jnp.dot(v, v), 5.0),
    "jnp.where": (lambda v: jnp.where(v > 0, v, 0), [1.0, 0.0]),
    "jnp.stack": (lambda v: jnp.stack([v, v]), [[1.0, -2.0]] * 2),
    "jax.nn.relu": (jax.nn.relu, [1.0, 0.0]),
    "lax.add": (lambda v: lax.add(v, v), [2.0, -4.0]),
    "jax.jit": (lambda v: jax.jit(lambda x: x * 2)(v), [2.0, -4.0]),
    "jax.vmap": (lambda v: jax.vmap(lambda x: x + 1)(v), [2.0, -1.0]),
    "jax.grad": (lambda v: jax.grad(lambda x: jnp.sum(x**2))(v), [2.0, -4.0]),
    "in jax.grad": (lambda v: jax.grad(lambda x: jnp.sum(jnp.multiply(v, x)))(v + 0), [1.0, -2.0]),
    "jax.checkpoint": (lambda v: jax.checkpoint(lambda x: jnp.sum(x))(v), -1.0),
    "lax.scan": (lambda v: lax.scan(lambda c, x: (c + x, None), 0.0, v)[0], -1.0),
    "lax.fori_loop": (lambda v: lax.fori_loop(0, 2, lambda _, c: c + jnp.sum(v), 0.0), -2.0),
    "keras.ops": (lambda v: keras.ops.add(v, 1), [2.0, -1.0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax_take_it_as_an_array(two_replicas, name):
    function, expected = FUNCTIONS[name]
    variable = variable_of(two_replicas, [1.0, -2.0])
    assert jnp.asarray(function(variable)).tolist() == expected
    inside = two_replicas.run(lambda: function(variable))
    assert inside.values[1].tolist() == expected


def test_functions_of_jax_see_what_was_assigned_before(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0], aggregation=SUM)

    def fn(x):
        before = jnp.sum(variable)
        variable.assign_add(x * jnp.ones(2))
        return before, jnp.sum(variable)

    before, after = two_replicas.run(fn, args=(PerReplica([1.0, 2.0]),))
    assert [float(before.values[0]), float(after.values[1])] == [3.0, 9.0]


def test_a_tree_of_variables_is_differentiated_as_one_of_arrays(two_replicas):
    weights = {"w": variable_of(two_replicas, [1.0, 2.0]), "b": variable_of(two_replicas, 3.0)}

    def step(x):
        def loss(weights):
            return jnp.sum(weights["w"] * x) + weights["b"] ** 2

        value, gradients = jax.value_and_grad(loss)(weights)
        jax.tree.map(lambda v, g: v.assign_sub(g), weights, gradients)
        return value

    assert float(two_replicas.run(step, args=(jnp.ones(2),)).values[0]) == 12.0
    assert weights["w"].numpy().tolist() == [0.0, 1.0]
    assert float(weights["b"]) == -3.0


def test_it_is_a_leaf_of_trees(two_replicas):
    variable = variable_of(two_replicas, [1.0, 2.0])
    (leaf,) = jax.tree.leaves({"v": [variable]})
    assert leaf is variable
    assert two_replicas.run(lambda v: v is variable, args=(variable,)).values[0]


def test_assigning_in_place_by_an_operator_is_refused():
    variable = unison.Variable(1.0)
    for statement in ("v += 1", "v -= 1", "v *= 2", "v /= 2", "v **= 2", "v //= 2"):
        with pytest.raises(RuntimeError, match=r"Use variable.assign\(...\)"):
            exec(statement, {"v": variable})
    assert float(variable) == 1.0


def test_a_scalar_is_formatted_as_a_number():
    variable = unison.Variable(1.2345, name="v")
    assert f"{variable:.2f}" == "1.23"
    assert f"{variable}" == str(variable)


def test_variables_are_told_apart_by_identity(two_replicas):
    first, second = variable_of(two_replicas, 1.0), variable_of(two_replicas, 1.0)
    assert {first: "first", second: "second"}[first] == "first"


def test_repr_of_copies_without_a_common_value_does_not_raise():
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = unison.Variable(
            1.0, synchronization=unison.VariableSynchronization.ON_READ, name="apart"
        )
    assert "none outside the replicas" in repr(variable)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", [3.0, 30.0]), ("MEAN", [1.5, 15.0]), ("ONLY_FIRST_REPLICA", [1.0, 10.0])],
)
def test_slices_that_replicas_assign_are_combined(two_replicas, aggregation, expected):
    with two_replicas.scope():
        v = unison.Variable([0.0, 7.0, 0.0], aggregation=unison.VariableAggregation[aggregation])
    values = unison.PerReplica([np.float32([1.0, 10.0]), np.float32([2.0, 20.0])])
    two_replicas.run(lambda x: v.assign_slice(slice(None, None, 2), x), args=(values,))
    assert v.numpy().tolist() == [expected[0], 7.0, expected[1]]
    v.assign_slice(1, 8.0)
    assert all(copy.tolist() == [expected[0], 8.0, expected[1]] for copy in v.cell.copies())


def test_slice_outside_of_a_variable_is_not_assigned():
    with pytest.raises(IndexError, match="out of bounds"):
        unison.Variable([1.0]).assign_slice(3, 1.0)


def test_parts_of_another_dtype_are_not_restored():
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        cell = unison.Variable(np.zeros(2, np.float32)).cell
    with pytest.raises(ValueError, match=r"Expected parts of dtype float32. Received: \['\|V4'\]"):
        cell.restore_parts(cell.stored_form, [np.zeros(2, "V4")])


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "uint8"])
def test_initial_values_that_differ_have_different_digests(dtype):
    value = np.arange(203).astype(dtype)
    others = [np.random.default_rng(0).permutation(value), value[::-1]]  # of equal sums
    for place in (0, 100, -1):  # the last bytes are not a whole word
        other = value.copy()
        other[place] = value[1]
        others.append(other)
    digests = [placement._digest(each).tolist() for each in (value, value.copy(), *others)]
    assert digests[0] == digests[1]
    assert len({*map(tuple, digests)}) == len(digests) - 1
