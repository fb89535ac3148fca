"""Every cell of the table of synchronizations and aggregations, with TensorFlow's own answers.

The literals are what TensorFlow 2.21 answered on two replicas (`MirroredStrategy` on two logical
CPUs). Variables start at 10; the replicas write 1 and 2; outside the replicas 7 is written.
`Instead` marks where Unison answers otherwise on purpose, and holds TensorFlow's answer as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison import PerReplica, VariableAggregation, VariableSynchronization, get_replica_context

AUTO, NO_SYNCHRONIZATION, ON_WRITE, ON_READ = (
    VariableSynchronization.AUTO,
    VariableSynchronization.NONE,
    VariableSynchronization.ON_WRITE,
    VariableSynchronization.ON_READ,
)
NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
METHODS = ("assign", "assign_add", "assign_sub")


@dataclasses.dataclass(frozen=True)
class Instead:
    """An answer of Unison that is not TensorFlow's.

    Attributes:
        unison: Unison's answer.
        tensorflow: TensorFlow's.
        because: Why.
    """

    unison: Any
    tensorflow: Any
    because: str


PLAIN_NUMBER = "each replica contributes the number, as the articles say"
NO_GUESS = "the same refusal, as an error that says what to do"
WRITES = "TensorFlow (and tf.Variable) writes, and raises because it reads the result to return it"
COPIES = "the copies differ, and all of them count"


@dataclasses.dataclass(frozen=True)
class Row:
    """The answers for variables of one synchronization and aggregation.

    The values for `assign`, `assign_add` and `assign_sub` are the copies afterwards.

    Attributes:
        initial: What is read outside the replicas before anybody writes.
        written: After the replicas wrote 1 and 2.
        written_numbers: After every replica wrote a plain Python 3.
        assigned: After 7 was written outside the replicas.
        assigned_apart: After the replicas assigned 1 and 2, and 7 was written outside.
        read: What is read outside, after the replicas assigned 1 and 2.
        reduced: What `strategy.reduce` makes of the variable then, by SUM and MEAN.
        saved: What a checkpoint then holds.
        restored: The copies, once a 14 was restored.
    """

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    initial: Any
    written: tuple
    written_numbers: tuple
    assigned: tuple
    assigned_apart: tuple
    read: Any
    reduced: tuple
    saved: Any
    restored: Any


TABLE = [
    Row(
        ON_WRITE,
        NONE,
        initial=10,
        written=([1, 2], [11, 12], [9, 8]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [8, 9], [-6, -5]),
        read=1,
        reduced=(Instead(3, AssertionError, COPIES), Instead(1.5, 1, COPIES)),
        saved=1,
        restored=[14, 14],
    ),
    Row(
        ON_WRITE,
        SUM,
        initial=10,
        written=([3, 3], [13, 13], [7, 7]),
        written_numbers=(
            Instead([6, 6], ValueError, PLAIN_NUMBER),
            Instead([16, 16], ValueError, PLAIN_NUMBER),
            Instead([4, 4], ValueError, PLAIN_NUMBER),
        ),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [10, 10], [-4, -4]),
        read=3,
        reduced=(Instead(ValueError, AssertionError, NO_GUESS), 3),
        saved=3,
        restored=[14, 14],
    ),
    Row(
        ON_WRITE,
        MEAN,
        initial=10,
        written=([1.5, 1.5], [11.5, 11.5], [8.5, 8.5]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [8.5, 8.5], [-5.5, -5.5]),
        read=1.5,
        reduced=(Instead(ValueError, AssertionError, NO_GUESS), 1.5),
        saved=1.5,
        restored=[14, 14],
    ),
    Row(
        ON_WRITE,
        FIRST,
        initial=10,
        written=([1, 1], [11, 11], [9, 9]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [8, 8], [-6, -6]),
        read=1,
        reduced=(Instead(ValueError, AssertionError, NO_GUESS), 1),
        saved=1,
        restored=[14, 14],
    ),
    Row(
        ON_READ,
        NONE,
        initial=ValueError,
        written=([1, 2], [11, 12], [9, 8]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=(
            Instead([7, 7], ValueError, WRITES),
            Instead([17, 17], ValueError, WRITES),
            Instead([3, 3], ValueError, WRITES),
        ),
        assigned_apart=(
            Instead([7, 7], ValueError, WRITES),
            Instead([8, 9], ValueError, WRITES),
            Instead([-6, -5], ValueError, WRITES),
        ),
        read=ValueError,
        reduced=(3, 1.5),
        saved=ValueError,
        restored=[14, 14],
    ),
    Row(
        ON_READ,
        SUM,
        initial=20,
        written=([1, 2], [11, 12], [9, 8]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([3.5, 3.5], ValueError, ValueError),
        assigned_apart=([3.5, 3.5], ValueError, ValueError),
        read=3,
        reduced=(3, 1.5),
        saved=3,
        restored=[7, 7],
    ),
    Row(
        ON_READ,
        MEAN,
        initial=10,
        written=([1, 2], [11, 12], [9, 8]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [8, 9], [-6, -5]),
        read=1.5,
        reduced=(3, 1.5),
        saved=1.5,
        restored=[14, 14],
    ),
    Row(
        ON_READ,
        FIRST,
        initial=10,
        written=([1, 2], [11, 12], [9, 8]),
        written_numbers=([3, 3], [13, 13], [7, 7]),
        assigned=([7, 7], [17, 17], [3, 3]),
        assigned_apart=([7, 7], [8, 9], [-6, -5]),
        read=1,
        reduced=(3, 1.5),
        saved=1,
        restored=[14, 14],
    ),
]
in_every_row = pytest.mark.parametrize(
    "row", TABLE, ids=lambda row: f"{row.synchronization.name}-{row.aggregation.name}"
)
by_every_method = pytest.mark.parametrize("place", range(3), ids=METHODS)


def variable_of(strategy, row, value=10.0, **keywords) -> unison.Variable:
    with strategy.scope():
        return unison.Variable(
            value, synchronization=row.synchronization, aggregation=row.aggregation, **keywords
        )


def copies(strategy, variable) -> list:
    return [copy.tolist() for copy in strategy.experimental_local_results(variable)]


def answer(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, or the kind of error that it raises."""
    try:
        return ask()
    except ValueError:
        return ValueError


def expected(cell: Any) -> Any:
    return cell.unison if isinstance(cell, Instead) else cell


def own_number(dtype="float32"):
    return (get_replica_context().replica_id_in_sync_group + 1).astype(dtype)


class AllRows:
    """Asks the variables of all rows one question in one program, for one test a row.

    Args:
        question: Is given the strategy, the variables and whether the replicas are to write 1 and
            2 to each before; returns the answers.
    """

    def __init__(self, question: Callable[..., list]):
        self._question = question
        self._answers: dict[Any, list] = {}

    def __call__(self, strategy, row, *key, apart=False) -> Any:
        if (*key, apart) not in self._answers:
            variables = [variable_of(strategy, row) for row in TABLE]
            if apart:
                strategy.run(lambda: [v.assign(own_number()) for v in variables])
            self._answers[*key, apart] = self._question(strategy, variables, *key)
        return self._answers[*key, apart][TABLE.index(row)]


# How a function reaches the replicas; each maps a strategy and a function to what runs it.
IN_REPLICAS = {
    "run": lambda strategy, fn: strategy.run(fn),
    "run of a Function": lambda strategy, fn: strategy.run(unison.Function(fn)),
    "Function that runs": lambda strategy, fn: unison.Function(lambda: strategy.run(fn))(),
}


@AllRows
def written(strategy, variables, way, method, number=None):
    def write():
        for variable in variables:
            getattr(variable, method)(own_number() if number is None else number)

    IN_REPLICAS[way](strategy, write)
    return [copies(strategy, variable) for variable in variables]


@pytest.mark.parametrize("way", IN_REPLICAS)
@by_every_method
@in_every_row
def test_written_by_the_replicas(two_replicas, row, place, way):
    assert written(two_replicas, row, way, METHODS[place]) == expected(row.written[place])


@by_every_method
@in_every_row
def test_written_by_the_replicas_as_plain_numbers(two_replicas, row, place):
    answers = written(two_replicas, row, "run", METHODS[place], 3)
    assert answers == expected(row.written_numbers[place])


def outside(strategy, variables, ask):
    return [answer(lambda v=variable: ask(v)) for variable in variables]


def in_the_scope(strategy, variables, ask):
    with strategy.scope():
        return outside(strategy, variables, ask)


def in_merge_call(strategy, variables, ask):
    raised = []

    def merge(merged_strategy, variables):
        answers = outside(merged_strategy, variables, ask)
        raised[:] = [one is ValueError for one in answers]
        return [jnp.zeros(()) if one in (None, ValueError) else one for one in answers]

    results = strategy.run(lambda: get_replica_context().merge_call(merge, args=(variables,)))
    return [
        ValueError if is_raised else float(result.values[1])
        for is_raised, result in zip(raised, results, strict=True)
    ]


OUTSIDE = {"outside": outside, "in the scope": in_the_scope, "in merge_call": in_merge_call}
in_every_way_outside = pytest.mark.parametrize("way", OUTSIDE)


def assigned_by(strategy, variables, way, method):
    def assign(variable):
        getattr(variable, method)(7.0)

    answers = OUTSIDE[way](strategy, variables, assign)
    return [
        ValueError if one is ValueError else copies(strategy, variable)
        for one, variable in zip(answers, variables, strict=True)
    ]


assigned = AllRows(assigned_by)


@in_every_way_outside
@by_every_method
@in_every_row
def test_written_outside_the_replicas(two_replicas, row, place, way):
    assert assigned(two_replicas, row, way, METHODS[place]) == expected(row.assigned[place])


@in_every_way_outside
@by_every_method
@in_every_row
def test_written_outside_the_replicas_after_they_wrote(two_replicas, row, place, way):
    answers = assigned(two_replicas, row, way, METHODS[place], apart=True)
    assert answers == expected(row.assigned_apart[place])


@in_every_row
def test_the_initial_value(two_replicas, row):
    variable = variable_of(two_replicas, row)
    assert answer(lambda: float(variable)) == expected(row.initial)
    assert copies(two_replicas, variable) == [10, 10]


READS = {
    "value": lambda variable: variable.value(),
    "read_value": lambda variable: variable.read_value(),
    "operator": lambda variable: variable + 0,
    "jax.numpy": jnp.sum,
}


@AllRows
def read_by(strategy, variables, way, how):
    answers = OUTSIDE[way](strategy, variables, READS[how])
    return [one if one is ValueError else float(one) for one in answers]


@in_every_way_outside
@pytest.mark.parametrize("how", READS)
@in_every_row
def test_read_outside_the_replicas(two_replicas, row, how, way):
    assert read_by(two_replicas, row, way, how, apart=True) == expected(row.read)


@AllRows
def seen_by_the_replicas(strategy, variables):
    seen = strategy.run(lambda: [variable.value() for variable in variables])
    copied = [copies(strategy, variable) for variable in variables]
    return [
        ([float(value) for value in values.values], own)
        for values, own in zip(seen, copied, strict=True)
    ]


@in_every_row
def test_the_replicas_read_their_own_copies(two_replicas, row):
    seen, own = seen_by_the_replicas(two_replicas, row, apart=True)
    assert seen == own == expected(row.written[0])


@AllRows
def reduced_by(strategy, variables, way, op):
    answers = OUTSIDE[way](strategy, variables, lambda variable: strategy.reduce(op, variable))
    return [one if one is ValueError else float(one) for one in answers]


@in_every_way_outside
@pytest.mark.parametrize("place", [0, 1], ids=["SUM", "MEAN"])
@in_every_row
def test_reduced(two_replicas, row, place, way):
    op = ("SUM", "MEAN")[place]
    assert reduced_by(two_replicas, row, way, op, apart=True) == expected(row.reduced[place])


@AllRows
def saved_and_restored(strategy, variables):
    saved = [answer(lambda v=variable: v.numpy().tolist()) for variable in variables]
    for variable in variables:
        variable.assign(14.0)
    return list(zip(saved, [copies(strategy, variable) for variable in variables], strict=True))


@in_every_row
def test_saved_and_restored(two_replicas, row):
    saved, restored = saved_and_restored(two_replicas, row, apart=True)
    assert saved == expected(row.saved)
    assert restored == expected(row.restored)


@in_every_row
def test_each_copy_updated_for_itself(two_replicas, row):
    variable = variable_of(two_replicas, row)
    extended = two_replicas.extended
    extended.update(variable, lambda v, x: v.assign_add(x), args=(2.0,))
    assert copies(two_replicas, variable) == [12, 12]
    extended.update(variable, lambda v, x: v.assign_add(x), args=(PerReplica([1.0, 2.0]),))
    assert copies(two_replicas, variable) == [13, 14]


@in_every_row
def test_components_assigned_to_the_copies(two_replicas, row):
    variable = variable_of(two_replicas, row)
    variable.assign_add(PerReplica([1.0, 2.0]))
    assert copies(two_replicas, variable) == [11, 12]
    variable.assign(PerReplica([1.0, 2.0]))
    assert copies(two_replicas, variable) == [1, 2]


# -- integers ------------------------------------------------------------------------------

INTEGERS = [row for row in TABLE if row.aggregation is not MEAN]


@pytest.mark.parametrize("place", range(3), ids=METHODS)
def test_integers_follow_the_same_table(two_replicas, place):
    variables = [variable_of(two_replicas, row, 10) for row in INTEGERS]
    two_replicas.run(lambda: [getattr(v, METHODS[place])(own_number("int32")) for v in variables])
    for row, variable in zip(INTEGERS, variables, strict=True):
        assert copies(two_replicas, variable) == expected(row.written[place])


def test_integers_are_read_and_reduced_by_the_same_table(two_replicas):
    variables = [variable_of(two_replicas, row, 10) for row in INTEGERS]
    two_replicas.run(lambda: [v.assign(own_number("int32")) for v in variables])
    for row, variable in zip(INTEGERS, variables, strict=True):
        assert answer(lambda v=variable: int(v)) == expected(row.read)
        total = answer(lambda v=variable: int(two_replicas.reduce("SUM", v)))
        assert total == expected(row.reduced[0])


@pytest.mark.parametrize(
    ("dtype", "assigned", "share", "read"),
    [("int32", 7, 3, 6), ("int32", -7, -3, -6), ("float32", 7, 3.5, 7), ("float16", 7, 3.5, 7)],
)
def test_an_on_read_sum_is_divided_between_the_copies(two_replicas, dtype, assigned, share, read):
    row = TABLE[5]
    variable = variable_of(two_replicas, row, 0, dtype=dtype)
    variable.assign(assigned)
    assert copies(two_replicas, variable) == [share, share]
    assert variable.numpy() == read
    assert variable.value().dtype == dtype


@pytest.mark.parametrize("synchronization", [AUTO, ON_WRITE, ON_READ])
def test_integers_have_no_mean(two_replicas, synchronization):
    with two_replicas.scope(), pytest.raises(ValueError, match="needs a floating dtype"):
        unison.Variable(1, synchronization=synchronization, aggregation=MEAN)


# -- creation ------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_one_unsynchronized_copy_is_refused(two_replicas, aggregation):
    with two_replicas.scope(), pytest.raises(ValueError, match="NONE keeps one copy"):
        unison.Variable(1.0, synchronization=NO_SYNCHRONIZATION, aggregation=aggregation)


@in_every_row
def test_what_a_variable_says_of_itself(two_replicas, row):
    variable = variable_of(two_replicas, row)
    assert variable.synchronization is row.synchronization
    assert variable.aggregation is row.aggregation
    assert variable.trainable is (row.synchronization is not ON_READ)


def test_on_several_replicas_automatic_synchronization_is_on_write(two_replicas):
    with two_replicas.scope():
        assert unison.Variable(1.0, synchronization=AUTO).synchronization is ON_WRITE


def test_the_first_replica_was_once_the_first_tower():
    assert VariableAggregation.ONLY_FIRST_TOWER is FIRST


# -- checkpoints between different numbers of replicas -------------------------------------


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "saved", "on_four"),
    [
        (ON_READ, SUM, 14.0, 3.5),
        (ON_READ, MEAN, 7.0, 7.0),
        (ON_READ, FIRST, 2.0, 2.0),
        (ON_WRITE, NONE, 2.0, 2.0),
        (ON_WRITE, SUM, 14.0, 14.0),
    ],
)
def test_a_saved_value_is_restored_on_more_and_on_fewer_replicas(
    two_replicas, four_replicas, synchronization, aggregation, saved, on_four
):
    annotations = {"synchronization": synchronization, "aggregation": aggregation}
    with two_replicas.scope():
        variable = unison.Variable(0.0, **annotations)
    two_replicas.run(lambda x: variable.assign(x), args=(PerReplica([2.0, 12.0]),))
    assert variable.numpy() == saved
    for strategy, copy in ((four_replicas, on_four), (unison.OneDeviceStrategy("CPU:0"), saved)):
        with strategy.scope():
            again = unison.Variable(0.0, **annotations)
        again.assign(variable.numpy())
        assert copies(strategy, again) == [copy] * strategy.num_replicas_in_sync
        assert again.numpy() == saved


# -- one replica ---------------------------------------------------------------------------

ANNOTATIONS = [
    {"synchronization": synchronization, "aggregation": aggregation}
    for synchronization in VariableSynchronization
    for aggregation in (NONE, SUM, MEAN, FIRST)
]
STRATEGIES_OF_ONE = {
    "OneDeviceStrategy": lambda: unison.OneDeviceStrategy("CPU:1"),
    "default": unison.get_strategy,
    # Here TensorFlow raises as on several replicas; but the annotations relate copies to others.
    "MirroredStrategy": lambda: unison.MirroredStrategy(["CPU:1"]),
}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", STRATEGIES_OF_ONE)
def test_annotations_mean_nothing_to_a_single_copy(name, dtype):
    strategy = STRATEGIES_OF_ONE[name]()
    with strategy.scope():
        variables = [unison.Variable(10, dtype=dtype, **both) for both in ANNOTATIONS]

    def write():
        seen = []
        for method, value in zip(METHODS, (7, 3, 1), strict=True):
            for variable in variables:
                getattr(variable, method)(value)
            seen.append([variable.value() for variable in variables])
        return seen

    for result in (write(), strategy.run(write)):
        assert [[int(value) for value in row] for row in result] == [[7] * 16, [10] * 16, [9] * 16]
    for variable in variables:
        assert variable.numpy() == int(strategy.reduce("SUM", variable)) == 9
    strategy.extended.update(variables[0], lambda v: v.assign_sub(9))
    assert int(variables[0]) == 0
    trainable = [variable.trainable for variable in variables]
    assert trainable == [both["synchronization"] is not ON_READ for both in ANNOTATIONS]


# -- slices --------------------------------------------------------------------------------

#: [1, 2, 3, 4] updated at [2, 0] by [10, 20] on both replicas, and (apart) on replica r at [r] by
#: [r + 1]; by method and aggregation.
SCATTERED = {
    ("add", NONE): ([[21, 2, 13, 4]] * 2, [[2, 2, 3, 4], [1, 4, 3, 4]]),
    ("add", SUM): ([[41, 2, 23, 4]] * 2, [[2, 4, 3, 4]] * 2),
    ("add", MEAN): ([[21, 2, 13, 4]] * 2, [[1.5, 3, 3, 4]] * 2),
    ("add", FIRST): ([[21, 2, 13, 4]] * 2, [[2, 2, 3, 4]] * 2),
    ("sub", NONE): ([[-19, 2, -7, 4]] * 2, [[0, 2, 3, 4], [1, 0, 3, 4]]),
    ("sub", SUM): ([[-39, 2, -17, 4]] * 2, [[0, 0, 3, 4]] * 2),
    ("sub", MEAN): ([[-19, 2, -7, 4]] * 2, [[0.5, 1, 3, 4]] * 2),
    ("sub", FIRST): ([[-19, 2, -7, 4]] * 2, [[0, 2, 3, 4]] * 2),
    ("mul", NONE): ([[20, 2, 30, 4]] * 2, [[1, 2, 3, 4], [1, 4, 3, 4]]),
    ("mul", SUM): ([[400, 2, 300, 4]] * 2, [[1, 4, 3, 4]] * 2),
    ("mul", MEAN): ([[100, 2, 75, 4]] * 2, [[0.5, 2, 3, 4]] * 2),
    ("mul", FIRST): ([[20, 2, 30, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("div", NONE): ([[0.05, 2, 0.3, 4]] * 2, [[1, 2, 3, 4], [1, 1, 3, 4]]),
    ("div", SUM): ([[0.0025, 2, 0.03, 4]] * 2, [[1, 1, 3, 4]] * 2),
    ("div", MEAN): ([[0.01, 2, 0.12, 4]] * 2, [[2, 2, 3, 4]] * 2),
    ("div", FIRST): ([[0.05, 2, 0.3, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("max", NONE): ([[20, 2, 10, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("max", FIRST): ([[20, 2, 10, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("min", NONE): ([[1, 2, 3, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("min", FIRST): ([[1, 2, 3, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("update", NONE): ([[20, 2, 10, 4]] * 2, [[1, 2, 3, 4]] * 2),
    ("update", FIRST): ([[20, 2, 10, 4]] * 2, [[1, 2, 3, 4]] * 2),
}


@functools.cache
def scattered(strategy, slices) -> dict:
    """The copies after all cells of `SCATTERED`, in one program."""
    with strategy.scope():
        variables = {
            (how, aggregation): unison.Variable([1.0, 2.0, 3.0, 4.0], aggregation=aggregation)
            for how, aggregation in SCATTERED
        }
    strategy.run(
        lambda: [getattr(v, f"scatter_{how}")(slices()) for (how, _), v in variables.items()]
    )
    return {cell: copies(strategy, variable) for cell, variable in variables.items()}


def equal_slices():
    return unison.IndexedSlices(jnp.array([10.0, 20.0]), jnp.array([2, 0]))


def own_slice():
    rank = get_replica_context().replica_id_in_sync_group
    return unison.IndexedSlices(jnp.array([rank + 1.0]), jnp.array([rank]))


@pytest.mark.parametrize("cell", SCATTERED, ids=lambda cell: f"{cell[0]}-{cell[1].name}")
def test_the_slices_of_the_replicas_take_effect_by_the_aggregation(two_replicas, cell):
    together, apart = SCATTERED[cell]
    np.testing.assert_allclose(scattered(two_replicas, equal_slices)[cell], together)
    np.testing.assert_allclose(scattered(two_replicas, own_slice)[cell], apart)


@pytest.mark.parametrize("aggregation", [SUM, MEAN])
@pytest.mark.parametrize("how", ["max", "min", "update"])
def test_replacements_cannot_be_added(two_replicas, how, aggregation):
    with two_replicas.scope():
        variable = unison.Variable([1.0, 2.0, 3.0, 4.0], aggregation=aggregation)
    with pytest.raises(NotImplementedError, match="replaces elements"):
        two_replicas.run(lambda: getattr(variable, f"scatter_{how}")(equal_slices()))
    with pytest.raises(NotImplementedError, match="replaces elements"):
        getattr(variable, f"scatter_{how}")(equal_slices())


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("how", ["add", "sub", "mul", "div", "max", "min", "update"])
def test_on_read_variables_take_no_slices(two_replicas, how, aggregation):
    with two_replicas.scope():
        variable = unison.Variable(
            [1.0, 2.0, 3.0], synchronization=ON_READ, aggregation=aggregation
        )
    with pytest.raises(NotImplementedError, match="not defined for the ON_READ variable"):
        getattr(variable, f"scatter_{how}")(equal_slices())
    with pytest.raises(NotImplementedError, match="not defined for the ON_READ variable"):
        two_replicas.run(lambda: getattr(variable, f"scatter_{how}")(equal_slices()))


@pytest.mark.parametrize("how", ["add", "sub", "mul", "div"])
def test_slices_outside_the_replicas_take_effect_once(two_replicas, how):
    with two_replicas.scope():
        variable = unison.Variable([1.0, 2.0, 3.0, 4.0], aggregation=SUM)
    getattr(variable, f"scatter_{how}")(equal_slices())
    np.testing.assert_allclose(copies(two_replicas, variable), SCATTERED[how, NONE][0])


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("batch_scatter_update", (unison.IndexedSlices([1.0], [0]),)),
        ("scatter_nd_add", ([[0]], [1.0])),
        ("scatter_nd_sub", ([[0]], [1.0])),
        ("scatter_nd_update", ([[0]], [1.0])),
        # TensorFlow lets the last two act on each replica's copy by accident.
        ("scatter_nd_max", ([[0]], [1.0])),
        ("scatter_nd_min", ([[0]], [1.0])),
    ],
)
def test_some_updates_are_for_one_replica_only(two_replicas, method, args):
    with two_replicas.scope():
        variable = unison.Variable([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(NotImplementedError, match=f"{method} is not defined for variables of"):
        getattr(variable, method)(*args)
