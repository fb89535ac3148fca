"""`unison.functions`: a function is one compiled program, or runs step by step where it must."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison.functions import Function


@pytest.fixture
def total():
    return unison.Variable(0.0)


def test_a_function_is_traced_once_a_signature(total):
    calls = []

    @Function
    def add(x, factor):
        calls.append(factor)
        return total.assign_add(x * factor)

    results = [float(add(jnp.float32(2), 3)) for _ in range(3)]
    assert (results, calls, add.trace_count) == ([6.0, 12.0, 18.0], [3], 1)
    add(jnp.float32(2), 4)
    assert (calls, add.trace_count) == ([3, 4], 2)


def test_what_is_compiled_is_one_program(total):
    @Function
    def step(x):
        y = x
        for _ in range(50):
            y = jnp.sin(y) + total.value()
        assert isinstance(y, jax.core.Tracer)
        return y

    assert step(jnp.float32(1)).shape == ()


def test_variables_are_read_anew_in_every_call(total):
    read = Function(lambda: total.value() + 1)
    values = []
    for value in (1.0, 5.0):
        total.assign(value)
        values.append(float(read()))
    assert values == [2.0, 6.0]


def test_a_write_is_seen_by_the_next_read_in_the_function(total):
    @Function
    def twice():
        total.assign_add(1.0)
        seen = total.value()
        total.assign_add(1.0)
        return seen, total

    seen, after = twice()
    assert (float(seen), float(after), float(total)) == (1.0, 2.0, 2.0)


def test_a_failing_function_leaves_the_variables_as_they_were(total):
    @Function
    def fail():
        total.assign(7.0)
        raise KeyError("no")

    with pytest.raises(KeyError):
        fail()
    assert float(total) == 0.0


def test_an_if_and_a_while_on_an_array_may_be_in_the_program(caplog):
    def halvings(x):
        if x < 0:
            x = -x
        count = 0
        while x > 1:
            x = x / 2
            count += 1
        return count

    compiled = Function(halvings, converts=True)
    assert [int(compiled(jnp.float32(x))) for x in (100, -100)] == [7, 7]
    assert not caplog.records


def test_an_if_on_an_array_runs_step_by_step_and_says_where(total, caplog):
    @Function
    def absolute(x):
        if x > 0:
            return x
        return -x

    with caplog.at_level(logging.WARNING, "unison"):
        assert [float(absolute(jnp.float32(x))) for x in (3, -3)] == [3.0, 3.0]
    assert "if x > 0:" in caplog.text
    assert "test_functions.py" in caplog.text
    assert len(caplog.records) == 1


def test_a_loop_until_an_array_says_so_runs_step_by_step():
    @Function
    def halvings(x):
        count = 0
        while x > 1:
            x = x / 2
            count += 1
        return count

    assert halvings(jnp.float32(100)) == 7


def test_only_the_signature_that_needs_python_loses_its_program():
    @Function
    def choose(x, checks):
        if checks and x > 0:
            return x
        return -x

    assert float(choose(jnp.float32(2), True)) == 2.0
    traced = []
    choose.python_function, original = (
        lambda x, checks: traced.append(isinstance(x, jax.core.Tracer)) or original(x, checks),
        choose.python_function,
    )
    choose(jnp.float32(2), False)
    choose(jnp.float32(2), True)
    assert traced == [True, False]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_function_that_runs_a_strategy_runs_step_by_step(replicas):
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        count = unison.Variable(0, aggregation=unison.VariableAggregation.SUM)

    @Function
    def steps(number):
        for _ in range(number):
            strategy.run(lambda: count.assign_add(1))
        return count.value()

    assert [int(steps(3)), int(steps(3))] == [3 * replicas, 6 * replicas]
    assert strategy.trace_count == 1


def test_a_function_may_assign_a_mirrored_variable(two_replicas):
    with two_replicas.scope():
        mirrored = unison.Variable(1.0)
    assign = Function(lambda x: mirrored.assign_add(x))
    assign(2.0)
    assert [float(copy) for copy in two_replicas.experimental_local_results(mirrored)] == [3, 3]


def test_inside_a_replica_program_a_function_is_a_part_of_it(two_replicas):
    with two_replicas.scope():
        mirrored = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
    add = Function(lambda x: mirrored.assign_add(x))
    two_replicas.run(add, args=(1.0,))
    assert float(mirrored) == 2.0


def test_inside_jax_transformations_a_function_is_a_part_of_them():
    square = Function(lambda x: x * x)
    assert float(jax.grad(square)(3.0)) == 6.0
    assert float(jax.jit(square)(3.0)) == 9.0


def test_a_per_replica_argument_is_handed_through(two_replicas):
    value = unison.PerReplica([jnp.float32(1), jnp.float32(2)])
    total = Function(lambda x: two_replicas.reduce("SUM", x, axis=None))
    assert float(total(value)) == 3.0


def test_numpy_arrays_are_arrays_and_python_numbers_part_of_the_program():
    seen = []

    @Function
    def look(array, number):
        seen.append((isinstance(array, jax.core.Tracer), type(number)))
        return array

    look(np.ones(2, np.float32), 2)
    look(np.zeros(2, np.float32), 2)
    assert seen == [(True, int)]


def test_a_method_is_compiled_for_its_instance():
    class Scale:
        def __init__(self, factor):
            self.factor = unison.Variable(factor)

        @Function
        def __call__(self, x):
            return self.factor * x

    two, three = Scale(2.0), Scale(3.0)
    assert [float(two(jnp.float32(1))), float(three(jnp.float32(1)))] == [2.0, 3.0]


def test_a_bound_method_is_one_program_of_a_strategy(two_replicas):
    class Step:
        @Function
        def run(self, x):
            return x + 1

    step = Step()
    before = two_replicas.trace_count
    for _ in range(3):
        two_replicas.run(step.run, args=(jnp.float32(1),))
    assert two_replicas.trace_count == before + 1


def test_a_variable_is_created_in_the_first_call_only():
    class Scale:
        factor = None

        @Function
        def __call__(self, x):
            if self.factor is None:
                self.factor = unison.Variable(2.0)
            return self.factor * x

    scale = Scale()
    assert [float(scale(jnp.float32(x))) for x in (1, 2)] == [2.0, 4.0]


def test_a_function_that_creates_a_variable_in_every_trace_is_refused():
    with pytest.raises(ValueError, match="every time"):
        Function(lambda: unison.Variable(1.0).value())()


def test_shapes_of_the_result_are_known_without_running(total):
    add = Function(lambda x: total.assign_add(jnp.sum(x)))
    (shape,) = [add.shapes_of_result(jax.ShapeDtypeStruct((3,), jnp.float32))]
    assert (shape.shape, shape.dtype, float(total)) == ((), jnp.float32, 0.0)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="function"):
        Function(3)
