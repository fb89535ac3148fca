"""Python's control flow over tensors in compiled functions, beside Python's on the values."""

import functools
import importlib
import logging

import jax
import numpy as np
import pytest

import unison.tf as tf
from unison import conversion
from unison.lockstep import LockstepError
from unison.program.control_flow import ControlFlowError
from unison.values import DistributedValues

# -- programs, which Python runs on values, and a compiled function converts ----------------------


def if_else(x):
    if tf.reduce_sum(x) > 0:
        y = x * 2.0
    else:
        y = -x
    return y


def if_without_else(x):
    y = x
    if tf.reduce_sum(x) > 0:
        y = y * 2.0
    return y


def elif_chain(x):
    s = tf.reduce_sum(x)
    if s > 3.0:
        return x
    elif s > 0.0:
        return x * 10.0
    elif s == 0.0:
        x = x + 1.0
    else:
        return -x
    return x * 100.0


def early_returns(x):
    if x[0] > 2.0:
        return x[0]
    if x[1] > 2.0:
        return x[1]
    return tf.reduce_sum(x)


def conditional_expression(x):
    return x[0] if x[0] > x[1] else x[1] + 0.5


def nested_branches(x):
    y = 0.0
    if x[0] > 0:
        if x[1] > 0:
            y = 1.0
        else:
            y = x[0]
    return y + x[1]


def logic(x):
    a, b, c = x[0] > 0, x[1] > 1, x[0] + x[1] > 5
    return tf.cast(a and b or not c, tf.int32) + 2 * tf.cast(not a and (b or c), tf.int32)


def chained_comparison(x):
    return 1.0 if -1.0 < x[0] <= x[1] < 4.0 else 0.0


def one_number_in_both_branches(x):
    if x[0] > 0:
        size, y = 2, x
    else:
        size, y = 2, -x
    return tf.reshape(y, [1, size])


def while_loop(x):
    rounds = 0
    while tf.reduce_sum(x) < 50.0 and rounds < 8:
        x = x * 2.0 + 1.0
        rounds += 1
    return x, rounds


def while_with_break_and_continue(x):
    i, total = 0, x[0] * 0.0
    while i < 20 and x[0] > -100.0:
        i += 1
        if x[0] * tf.cast(i, tf.float32) > 8.0:
            break
        if i % 3 == 0:
            continue
        total = total + x[1]
    return total, i


def while_that_python_begins(x):
    is_done = False
    while not is_done:
        x = x + 1.0
        is_done = tf.reduce_sum(x) > 10.0
    return x


def for_over_tensor(x):
    total = 0.0
    for value in x:
        if value > 0.0:
            total += value
    return total


def for_over_range(x):
    for i in tf.range(5):
        if i % 2 == 0:
            x = x + tf.cast(i, x.dtype)
    return x


def for_over_computed_range(x):
    total = 0
    for i in tf.range(tf.cast(x[1] + 4.0, tf.int32)):
        total += i
    for j in range(tf.cast(x[1] + 6.0, tf.int32), 1, -2):
        total += 10 * j
    return total


def return_in_loop(x):
    for i in tf.range(10):
        if x[0] + tf.cast(i, tf.float32) > 4.0:
            return i
    return -1


def break_in_python_loop(x):
    for i in range(6):
        if tf.reduce_sum(x) > 6.0:
            break
        x = x + i
    return x


def nested_loops(x):
    total = 0.0
    for row in tf.stack([x, x + 1.0, x * 2.0]):
        for value in row:
            if value > 4.0:
                break
            total += value
        total += 100.0
    return total


def enumerate_and_zip(x):
    total = 0.0
    for i, (a, b) in enumerate(zip(x, x[::-1], strict=True)):
        if a > b:
            total += a * (i + 1)
    for i, a in enumerate(tf.range(tf.cast(x[1] + 4.0, tf.int32)), 2):
        total += tf.cast(i * a, tf.float32)
    return total


def appended_in_branches_and_loops(x):
    seen = []
    for value in x:
        if value > 0.0:
            seen.append(value)
        else:
            seen.append(-value)
    return tf.stack(seen)


def changed_containers(x):
    values, by_name = [x[0], x[1]], {"total": x[0] * 0.0}
    for value in x:
        if value > 0.0:
            values[0] = values[0] + value
            by_name["total"] = by_name["total"] + 1.0
    return values, by_name


def python_lists_that_are_read(x):
    sizes = [1, 2]
    if x[0] > 0.0:
        x = x * 2.0
    return tf.reshape(x, [sizes[0], sizes[1]])


def tensor_array(x):
    array = tf.TensorArray(tf.float32, size=4)
    for i in tf.range(4):
        if x[0] > 0.0:
            array = array.write(i, x * tf.cast(i, tf.float32))
        else:
            array = array.write(i, x)
    return array.stack()


def dtype_that_a_loop_widens(x):
    total = 0
    for value in x:
        if value > -10.0:
            total += value
    return total


def built_in_functions(x):
    a, b = x[0], x[1]
    return max(a, b, 0.0), min(a, b), int(a), float(b > 0), any([a > 1, b > 1]), all([a > 1, b > 1])


def functions_methods_and_lambdas(x):
    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, y, bias=1.0):
            if y[0] > 0.0:
                return y * self.factor + bias
            return y

    def recursive(y, depth):
        if depth == 0:
            return y
        if y[0] > 3.0:
            y = y - 1.0
        return recursive(y, depth - 1)

    half = functools.partial(lambda y, by: y / by if y[1] > 0.0 else y, by=2.0)
    return Scaled(3.0)(x, bias=2.0), recursive(x, 3), half(x)


class Base:
    def scaled(self, x):
        if x[0] > 0.0:
            return x * 2.0
        return x


class Derived(Base):
    def scaled(self, x):
        y = super().scaled(x)
        if y[1] > 3.0:
            y = y + 1.0
        return y


def inherited_method(x):
    return Derived().scaled(x)


def try_and_with(x):
    try:
        with tf.name_scope("inside"):
            if x[0] > 0.0:
                x = x + 1.0
    finally:
        x = x * 2.0
    return x


def walrus_and_tuples(x):
    (a, b), c = (x[0], x[1]), 0.0
    if (d := a + b) > 1.0:
        a, b = b, a
        c = d
    return a, b, c


def none_before_a_loop(x):
    last = None
    for value in x:
        if last is not None and value > last:
            value = value + 10.0
        last = value
    return last


PROGRAMS = [
    if_else,
    if_without_else,
    elif_chain,
    early_returns,
    conditional_expression,
    nested_branches,
    logic,
    chained_comparison,
    one_number_in_both_branches,
    while_loop,
    while_with_break_and_continue,
    while_that_python_begins,
    for_over_tensor,
    for_over_range,
    for_over_computed_range,
    return_in_loop,
    break_in_python_loop,
    nested_loops,
    enumerate_and_zip,
    appended_in_branches_and_loops,
    changed_containers,
    python_lists_that_are_read,
    tensor_array,
    dtype_that_a_loop_widens,
    built_in_functions,
    functions_methods_and_lambdas,
    inherited_method,
    try_and_with,
    walrus_and_tuples,
    none_before_a_loop,
]

INPUTS = [[1.0, 2.0], [-1.0, -2.0], [3.0, -3.0], [0.5, 3.5]]


def values_of(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_function_gives_what_python_gives(program, caplog):
    compiled = tf.function(program, autograph=True)
    with caplog.at_level(logging.WARNING, "unison"):
        for given in INPUTS:
            x = tf.constant(given)
            got, expected = values_of(compiled(x)), values_of(program(x))
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)  # XLA may fuse x * 2 + 1
    assert not caplog.records  # it is one program, and does not run step by step
    assert compiled.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_replicas_take_their_own_ways(program):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(INPUTS[context.replica_id_in_sync_group])
    )
    result = strategy.run(program, (given,))
    for replica in range(2):
        own = jax.tree.map(
            lambda leaf: leaf.values[replica],  # noqa: B023
            result,
            is_leaf=lambda leaf: isinstance(leaf, DistributedValues),
        )
        expected = values_of(program(tf.constant(INPUTS[replica])))
        for one, other in zip(values_of(own), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


# -- variables, gradients, effects ----------------------------------------------------------------


def test_branches_assign_variables_as_their_aggregation_says():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        own = tf.Variable(
            0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def step(x):
        if x > 2.0:
            total.assign_add(x)
        for i in tf.range(4):
            if tf.cast(i, tf.float32) < x:
                own.assign_add(1)

    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([2.0, 3.0][context.replica_id_in_sync_group])
    )
    strategy.run(step, (given,))
    assert (float(total), int(own)) == (3.0, 2 + 3)


def test_effects_of_branches_that_leave_different_dtypes_happen_once():
    count = tf.Variable(0)

    @tf.function(autograph=True)
    def counted(x):
        if x > 0.0:
            count.assign_add(1)
            y = 1
        else:
            y = 2.5
        return y

    assert [float(counted(tf.constant(x))) for x in (1.0, -1.0, 2.0)] == [1.0, 2.5, 1.0]
    assert int(count) == 2


@pytest.mark.parametrize("start", [1.0, 5.0])
def test_gradients_go_through_branches_and_loops(start):
    def power(x):
        y = x
        for _ in tf.range(3):
            if y < 4.0:
                y = y * x
            else:
                y = y + 2.0 * x
        while y < 100.0:
            tf.autograph.experimental.set_loop_options(maximum_iterations=8)
            y = y * 3.0
        return y

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = power(x)
        return tape.gradient(y, x)

    x = tf.constant(start)
    assert float(tf.function(gradient, autograph=True)(x)) == float(gradient(x))


def test_a_loop_without_a_bound_says_how_it_can_be_differentiated():
    @tf.function(autograph=True)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            while y < 100.0:
                y = y * 3.0
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match="maximum_iterations"):
        gradient(tf.constant(2.0))


def test_assertions_are_checked_when_the_program_runs():
    @tf.function(autograph=True)
    def checked(x):
        assert tf.reduce_sum(x) > 0.0, "not positive"
        return x

    assert checked(tf.constant([1.0])).tolist() == [1.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        checked(tf.constant([-1.0]))


def test_second_operands_only_have_effects_where_python_evaluates_them():
    calls = tf.Variable(0)

    def counts():
        calls.assign_add(1)
        return True

    @tf.function(autograph=True)
    def both(x):
        return x > 0.0 and counts()

    assert [bool(both(tf.constant(x))) for x in (1.0, -1.0)] == [True, False]
    assert int(calls) == 1


# -- what is not converted ------------------------------------------------------------------------


def test_a_program_without_such_control_flow_is_traced_as_it_is(monkeypatch):
    monkeypatch.setattr(conversion, "_call_converted", [])
    traced = []

    @tf.function
    def plain(x, flag):
        traced.append(flag)
        return x * 2.0 if flag else x

    assert plain(tf.constant(1.0), True) == 2.0
    assert traced == [True]


def test_a_function_may_ask_not_to_be_converted():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    @tf.autograph.experimental.do_not_convert
    def as_written(x):
        return 1.0 if x > 0.0 else 2.0

    for function in (as_written, tf.function(lambda x: 1.0 if x > 0 else 2.0, autograph=False)):
        with pytest.raises(ControlFlowError, match="Python needs the value"):
            strategy.run(function, (tf.constant(1.0),))


def test_a_function_without_source_says_so():
    namespace = {}
    exec("def f(x):\n  return 1.0 if x > 0 else 2.0", namespace)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with pytest.raises(ControlFlowError, match="f has not been converted: Unable to locate the so"):
        strategy.run(namespace["f"], (tf.constant(1.0),))


def test_a_function_whose_file_has_changed_says_so(tmp_path, monkeypatch):
    file = tmp_path / "changed_module.py"
    file.write_text("def f(x):\n    return x * 2.0 if x > 0 else x\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("changed_module").f
    file.write_text("def f(x):\n    return x * 3.0 if x > 0 else x\n")
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with pytest.raises(ControlFlowError, match=r"changed_module\.py, has been changed"):
        strategy.run(function, (tf.constant(1.0),))


# -- effects on Python's objects: as in Python, or an error ---------------------------------------


class Counter:
    def __init__(self):
        self.count, self.total, self.is_first = 0, 0.0, True

    def add(self, by=1):
        self.count += by

    def add_to_total(self, value):
        self.total = self.total + value

    def first(self, value):
        if self.is_first:
            self.is_first = False
            return value * 10.0
        return value


LOG = []


def attributes_that_methods_set(x):
    counter = Counter()
    if x > 0.0:
        counter.add()
    else:
        counter.add(2)
    for value in tf.stack([x, x + 1.0]):
        counter.add()
        if value > 100.0:
            x = x + 1.0
    return counter.count * x


def tensors_that_methods_keep(x):
    counter = Counter()
    for value in tf.stack([x, x + 1.0]):
        if value > 0.0:
            counter.add_to_total(value)
    return counter.total


def first_time_flags(x):
    counter, total = Counter(), 0.0
    while x > 0.0:
        total = total + counter.first(x)
        x = x - 1.0
    return total


def nonlocal_counters(x):
    count = 0

    def add():
        nonlocal count
        count += 1

    if x > 0.0:
        add()
    else:
        add()
        add()
    return count * x


def global_lists(x):
    LOG.clear()
    if x > 0.0:
        LOG.append(1.0)
    else:
        LOG.append(2.0)
    return LOG[-1] * len(LOG) * x


def lists_of_functions(x):
    found = []

    def add(value):
        found.append(value)

    if x > 0.0:
        add(1.0)
    else:
        add(2.0)
    return found[-1] * len(found) * x


def sets(x):
    found = set()
    if x > 0.0:
        found.add(1)
    else:
        found.update((2, 3))
    return len(found) * x


def arrays_of_numpy(x):
    found = np.zeros(2)

    def put(index):
        found[index] = index + 1.0

    if x > 0.0:
        put(0)
    else:
        put(1)
    return float(found.sum()) * x


def deeply_nested_lists(x):
    found = [[[[]]]]
    if x > 0.0:
        found[0][0][0].append(5)
    return len(found[0][0][0]) * x


def errors_that_are_caught(x):
    try:
        if x > 0.0:
            raise ValueError
        y = x + 1.0
    except ValueError:
        y = x * 100.0
    return y


def any_error_is_caught(x):
    try:
        if x > 0.0:
            x = x * 2.0
    except Exception:
        x = x * 0.0
    return x


def an_integer_in_a_try(x):
    try:
        n = int(x)
    except (TypeError, ValueError):
        n = 99
    return x * n


def assertions_that_are_caught(x):
    try:
        assert x > 0.0
    except AssertionError:
        return x * 100.0
    return x


def effects_in_the_condition(x):
    counter, rounds = tf.Variable(0.0), 0
    while counter.assign_add(1.0).value() < x and rounds < 9:
        rounds = rounds + 1
    return rounds + counter.value()


def extremes_of_iterators(x):
    values = tf.stack([x * 9.0, x, x + 1.0])
    return max(value for value in values), min(value + 1.0 for value in values)


def assigned_in_operands(x):
    y = x * 0.0
    if x > 0.0 and (y := x + 1.0) > 2.0:
        return y
    return y - 1.0


def operands_as_values(x):
    return (x or 5.0) + (x and x + 10.0)


def lists_by_other_names(x):
    a, b = [x, x], [x * 2.0, x]
    if x > 0.0:
        c = a
    else:
        c = b
    c[0] = x * 100.0
    return a[0] + b[0]


def narrow_ranges(x):
    total = x
    for _ in range(tf.cast(x * 0.0, tf.int8) - 100, tf.cast(x * 0.0, tf.int8) + 100):
        total = total + 1.0
    return total


def long_loops_that_end(x):
    for _ in range(1000):
        x = x / 2.0
        if x < 1.0:
            break
    return x


def named_as_the_converter_would(x):
    retval_ = x
    if x > 0.0:
        retval_ = x * 2.0
    return retval_ + 1.0


def iterators(x):
    numbers = iter([1.0, 2.0, 3.0])
    total = 0.0
    for value in tf.stack([x, x + 1.0]):
        if value > -10.0:
            total = total + value * next(numbers)
    return total


EFFECTS = [
    attributes_that_methods_set,
    tensors_that_methods_keep,
    first_time_flags,
    nonlocal_counters,
    global_lists,
    lists_of_functions,
    sets,
    arrays_of_numpy,
    deeply_nested_lists,
    errors_that_are_caught,
    any_error_is_caught,
    an_integer_in_a_try,
    assertions_that_are_caught,
    effects_in_the_condition,
    extremes_of_iterators,
    assigned_in_operands,
    operands_as_values,
    lists_by_other_names,
    narrow_ranges,
    long_loops_that_end,
    named_as_the_converter_would,
    iterators,
]


@pytest.mark.parametrize("program", EFFECTS, ids=lambda program: program.__name__)
def test_effects_are_those_of_python_or_an_error(program):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    for given in (3.0, -3.0, 0.5):
        x = tf.constant(given)
        try:
            got = values_of(strategy.run(program, (x,)))
        except (TypeError, ValueError, RuntimeError, tf.errors.InvalidArgumentError):
            continue
        for one, other in zip(got, values_of(program(x)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


# -- what cannot be -------------------------------------------------------------------------------


def undefined_in_a_branch(x):
    if x[0] > 0.0:
        y = x
    return y


def undefined_after_a_loop(x):
    while x[0] < 3.0:
        y = x
        x = x + 1.0
    return y


def shape_that_grows(x):
    while tf.reduce_sum(x) < 10.0:
        x = tf.concat([x, x], 0)
    return x


def dtype_of_a_branch(x):
    y = tf.constant(1)
    if x[0] > 0.0:
        y = x[0]
    return y


def none_in_a_branch(x):
    if x[0] > 0.0:
        return x
    return None


def text_in_a_branch(x):
    name = "small"
    if x[0] > 0.0:
        name = "large"
    return x if name == "large" else -x


def list_that_grows(x):
    found = []
    while x[0] < 3.0:
        found.append(x)
        x = x + 1.0
    return found


IMPOSSIBLE = {
    undefined_in_a_branch: "leaves 'y' undefined in its `else` branch",
    undefined_after_a_loop: "may not run, and 'y' is used afterwards",
    shape_that_grows: r"'x': it is float32\[2\] before the loop, and float32\[4\] after a round",
    dtype_of_a_branch: r"'y': it is float32\[\] in the `if` branch, and int32\[\] in the `else`",
    none_in_a_branch: "the returned value another structure",
    text_in_a_branch: "'name', which is 'large' in the `if` branch, and 'small'",
    list_that_grows: "'found' another structure",
}


@pytest.mark.parametrize("program", IMPOSSIBLE, ids=lambda program: program.__name__)
def test_what_no_program_can_do_is_an_error_that_names_the_line(program):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match=IMPOSSIBLE[program]) as got:
        strategy.run(program, (tf.constant([1.0, 2.0]),))
    assert f"{__file__}, line" in str(got.value)


@pytest.mark.parametrize("program", IMPOSSIBLE, ids=lambda program: program.__name__)
def test_outside_strategies_it_runs_step_by_step(program, caplog):
    x = tf.constant([1.0, 2.0])
    got = tf.function(program, autograph=True)(x)
    assert jax.tree.map(np.array_equal, got, program(x))
    assert "runs step by step" in caplog.text


def test_errors_show_the_lines_of_the_user():
    def fails(x):
        if x > 0.0:
            raise KeyError("here")
        return x

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with pytest.raises(KeyError) as got:
        strategy.run(fails, (tf.constant(1.0),))
    line = got.traceback[-1]
    assert str(line.path) == __file__
    assert str(line.statement).strip() == 'raise KeyError("here")'


# -- collectives ----------------------------------------------------------------------------------


def update_where(condition):
    """Runs a step on two replicas that sums in a branch and in a loop, where `condition` holds."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        y = x
        if condition(context, x):
            y = context.all_reduce(tf.distribute.ReduceOp.SUM, x)
        while condition(context, y) and y < 100.0:
            y = context.all_reduce(tf.distribute.ReduceOp.SUM, y)
        return y

    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([2.0, 3.0][context.replica_id_in_sync_group])
    )
    return [
        float(value) for value in strategy.experimental_local_results(strategy.run(step, (given,)))
    ]


def test_replicas_that_agree_communicate_in_branches_and_loops():
    assert update_where(
        lambda context, x: context.all_reduce(tf.distribute.ReduceOp.SUM, x) > 4.0
    ) == [160.0, 160.0]


def test_replicas_that_do_not_agree_on_a_collective_are_an_error_that_names_the_line():
    with pytest.raises(LockstepError, match=f"{__file__}.*some replicas take this branch"):
        update_where(lambda context, x: x > 2.5)


def array_that_grows(x):
    array = tf.TensorArray(tf.float32, size=0, dynamic_size=True).write(0, x[0])
    for i in tf.range(3):
        array = array.write(i + 1, x[i] * 10.0)
    return array.stack()


def test_an_array_that_grows_in_a_loop_runs_step_by_step():
    x = tf.constant([1.0, 2.0, 3.0])
    for autograph in (None, True):
        got = tf.function(array_that_grows, autograph=autograph)(x)
        assert got.numpy().tolist() == [1.0, 10.0, 20.0, 30.0]
    assert next(iter(tf.data.Dataset.from_tensors(x).map(array_that_grows))).shape == (4,)


def test_replicas_say_that_an_array_cannot_grow():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    x = tf.constant([1.0, 2.0, 3.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf\.TensorArray\(dtype, size=n\)"):
        strategy.run(array_that_grows, (x,))

    def from_nothing(x):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in tf.range(3):
            array = array.write(i, x[i])
        return array.stack()

    with pytest.raises(TypeError, match=r"line \d+, in from_nothing: .* of 0 elements grow"):
        strategy.run(from_nothing, (x,))


@pytest.mark.parametrize("program", [any_error_is_caught, an_integer_in_a_try])
def test_the_function_of_map_does_not_catch_the_errors_of_its_trace(program):
    numbers = tf.data.Dataset.from_tensor_slices([3.0, -2.0])
    assert [float(y) for y in numbers.map(program)] == [float(program(x)) for x in (3.0, -2.0)]
