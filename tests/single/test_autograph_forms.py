"""Control flow over tensors in functions of all forms, beside what Python does on the values."""

import functools

import numpy as np
import pytest

import unison.tf as tf
from unison.program.control_flow import ControlFlowError

INPUTS = [[1.0, 2.0], [-1.0, -2.0], [3.0, -3.0], [0.5, 3.5]]


def absolute(x):
    if x > 0:
        y = x
    else:
        y = -x
    return y


def doubling(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2.0 * function(*args, **kwargs)

    return wrapper


def scaling(by):
    def decorate(function):
        def wrapper(*args, **kwargs):
            return by * function(*args, **kwargs)

        return wrapper

    return decorate


@doubling
@scaling(3.0)
def decorated(x):
    if tf.reduce_sum(x) > 0:
        return x
    return -x


def branching_decorator(function):
    def wrapper(x):
        if tf.reduce_sum(x) > 0:
            return function(x)
        return -function(x)

    return wrapper


@branching_decorator
def decorated_by_a_branch(x):
    return x * 2.0


def _keyword_only(x, *, scale=2.0, shift):
    if tf.reduce_sum(x) > 0:
        x = x * scale
    return x + shift


def keyword_only_arguments(x):
    return _keyword_only(x, shift=1.0) + _keyword_only(x, shift=0.0, scale=x[0])


def _positional_only(x, /, *rest, **named):
    if x[0] > x[1]:
        return x * rest[0]
    return x * named["other"]


def positional_only_and_variadic_arguments(x):
    return _positional_only(x, 2.0, other=3.0)


def match_on_python_values(x):
    total = tf.constant(0.0)
    for kind in ("add", "subtract", "other"):
        match kind:
            case "add":
                if x[0] > 0:
                    total = total + x[0]
            case "subtract" | "minus":
                total = total - x[1]
            case _:
                total = total * 2.0
    return total


def match_with_patterns(x):
    match (x[0], {"scale": 3.0}):
        case (first, {"scale": scale}) if scale > 2.0:
            if first > 0:
                return first * scale
            return first
        case _:
            return x[1]


def while_true(x):
    total = x[0]
    while True:
        total = total * 3.0
        if total > 10.0 or total < -10.0:
            return total


def while_true_in_a_branch(x):
    if x[0] > x[1]:
        n = x[0]
        while True:
            n = n - 1.0
            if n < 0:
                break
        return n
    return x[1]


def in_map_fn(x):
    return tf.map_fn(absolute, x)


def in_vectorized_map(x):
    return tf.vectorized_map(absolute, x)


def in_scan(x):
    def step(total, value):
        if value > total:
            return value
        return total - value

    return tf.scan(step, x)


def in_foldl(x):
    def step(total, value):
        while total < value:
            total = total + 1.0
        return total

    return tf.foldl(step, x, 0.0)


def in_foldr(x):
    return tf.foldr(lambda total, value: total + (value if value > 0 else -value), x, 0.0)


def in_cond(x):
    def then():
        if x[1] > 0:
            return x[1]
        return x[1] * 5.0

    return tf.cond(x[0] > 0, then, lambda: absolute(x[0]))


def in_while_loop(x):
    def body(i, total):
        if i % 2 == 0:
            total = total + x[0]
        else:
            total = total * 2.0
        return i + 1, total

    return tf.while_loop(lambda i, total: i < 5, body, (0, x[1]))[1]


def in_switch_case(x):
    branches = [lambda: absolute(x[0]), lambda: absolute(x[1])]
    return tf.switch_case(tf.cast(x[0] > 0, tf.int32), branches)


def for_over_a_dataset_with_break(x):
    total = tf.constant(0.0)
    for element in tf.data.Dataset.range(10):
        total = total + x[0] * tf.cast(element, tf.float32)
        if element >= 3:
            break
    return total


def last_axis_at_a_computed_index(x):
    table = tf.reshape(tf.range(6.0), [2, 3])
    i = tf.cast(tf.abs(x[0]), tf.int32) % 3
    if x[0] > 0:
        return table[..., i]
    return table[..., i] * -1.0


@tf.custom_gradient
def own_gradient(x):
    if tf.reduce_sum(x) > 0:
        y = x * 2.0
    else:
        y = x * 3.0

    def grad(upstream):
        if tf.reduce_sum(upstream) > 0:
            return upstream * 7.0
        return upstream * 11.0

    return y, grad


def with_a_gradient_of_its_own(x):
    return own_gradient(x)


def gradient_of_its_own(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = own_gradient(x) * x[0]
    return tape.gradient(y, x)


@tf.recompute_grad
def recomputed(x):
    if tf.reduce_sum(x) > 0:
        return x * x
    return x


def recomputed_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = recomputed(x)
    return tape.gradient(y, x)


@tf.grad_pass_through
def passed_through(x):
    if x[0] > 0:
        return tf.round(x)
    return tf.floor(x)


def gradient_that_is_passed_through(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = passed_through(x)
    return tape.gradient(y, x) + y


def generated(x):
    def parts():
        if x[0] > 0:
            yield x[0]
        yield x[1]

    return sum(parts())


def _parts(x):
    if x[0] > 0:
        yield x[0]
    yield x[1]


def generator(x):
    return sum(list(_parts(x)))


PROGRAMS = [
    decorated,
    decorated_by_a_branch,
    keyword_only_arguments,
    positional_only_and_variadic_arguments,
    while_true,
    while_true_in_a_branch,
    in_map_fn,
    in_vectorized_map,
    in_scan,
    in_foldl,
    in_foldr,
    in_cond,
    in_while_loop,
    in_switch_case,
    last_axis_at_a_computed_index,
    with_a_gradient_of_its_own,
    gradient_of_its_own,
    recomputed_gradient,
    gradient_that_is_passed_through,
]

#: They give the same, and Python has no value to decide by: the function is called for all slices.
VECTORIZED = {in_vectorized_map: in_map_fn}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_function_gives_what_python_gives(program):
    compiled = tf.function(program, autograph=True)
    for given in INPUTS:
        x = tf.constant(given)
        expected = VECTORIZED.get(program, program)(x)
        np.testing.assert_allclose(compiled(x), expected, rtol=1e-6)
    assert compiled.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_strategy_gives_what_python_gives(program, one_replica):
    for given in INPUTS:
        x = tf.constant(given)
        expected = VECTORIZED.get(program, program)(x)
        np.testing.assert_allclose(one_replica.run(program, (x,)), expected, rtol=1e-6)


@pytest.fixture
def one_replica():
    return tf.distribute.MirroredStrategy(["CPU:0"])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (generated, r"if x\[0\] > 0.*cannot stop at a `yield`.*Return a list"),
        (generator, r"if x\[0\] > 0.*cannot stop at a `yield`.*Return a list"),
        (match_on_python_values, r"line \d+ of it has a `match` statement: use `if` and `elif`"),
        (match_with_patterns, r"line \d+ of it has a `match` statement: use `if` and `elif`"),
    ],
    ids=["closure", "generator", "values", "patterns"],
)
def test_a_form_that_is_not_converted_says_why_and_what_to_use(program, reason, one_replica):
    with pytest.raises(ControlFlowError, match=reason):
        one_replica.run(lambda x: sum([program(x)], 0.0), (tf.constant([1.0, 2.0]),))


@pytest.mark.parametrize("program", [match_on_python_values, match_with_patterns, generated])
def test_a_form_that_is_not_converted_runs_step_by_step_in_a_function(program):
    for given in INPUTS:
        x = tf.constant(given)
        np.testing.assert_allclose(tf.function(program, autograph=True)(x), program(x))


def test_a_loop_over_a_dataset_in_a_function_ends_at_a_break():
    compiled = tf.function(for_over_a_dataset_with_break, autograph=True)
    for given in INPUTS:
        assert compiled(tf.constant(given)) == 6.0 * given[0]


def test_a_range_of_a_computed_length_names_the_remedy(one_replica):
    with pytest.raises(
        ControlFlowError, match=r"line \d+, in .*no fixed size.*tf\.range\(largest\)"
    ):
        one_replica.run(lambda n: tf.reduce_sum(tf.range(n)), (tf.constant(3),))
