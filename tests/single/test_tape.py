"""`tf.GradientTape` by itself. Numbers and error families are TensorFlow 2.21's."""

import gc
import logging
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison.tf as tf
from unison.runtime.private_jax import nothing_is_traced

Tape = tf.GradientTape


@pytest.fixture
def x():
    return tf.constant(3.0)


@pytest.fixture
def v():
    return tf.Variable(2.0)


def test_a_variable_is_watched_when_it_is_read_and_a_tensor_is_not(x, v):
    with Tape() as tape:
        y = x * v
    assert tape.watched_variables() == (v,)
    of_x, of_v = tape.gradient(y, [x, v])
    assert (of_x, float(of_v)) == (None, 3.0)


def test_the_gradient_of_a_convolution_of_no_examples_is_zeros():
    # A replica without examples sums it with those of the others.
    kernel = tf.Variable(tf.ones((2, 3, 4)))
    with Tape() as tape:
        y = tf.nn.conv1d(tf.zeros((0, 5, 3)), kernel, 1, "SAME")
    np.testing.assert_array_equal(tape.gradient(y, kernel), np.zeros((2, 3, 4)))


def test_values_in_the_block_are_ordinary_tensors(x):
    with Tape() as tape:
        tape.watch(x)
        y = x * x if x > 0 else -x
        assert isinstance(y, jax.Array)
        assert not isinstance(y, jax.core.Tracer)
        assert y.numpy() == 9.0
    assert float(y + 1) == 10.0
    assert float(tape.gradient(y, x)) == 6.0


def test_a_tape_gives_one_set_of_gradients(x, v):
    with Tape() as tape:
        y = x * v
    tape.gradient(y, v)
    with pytest.raises(RuntimeError, match="persistent=True"):
        tape.gradient(y, v)


def test_a_persistent_tape_gives_gradients_between_any_two_values(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
        z = y * y
    assert [float(tape.gradient(z, x)), float(tape.gradient(z, y))] == [108.0, 18.0]
    assert [float(g) for g in tape.gradient(z, [x, y])] == [108.0, 18.0]
    assert float(tape.gradient([y, z], x)) == 114.0
    assert tape.gradient(y, z) is None


def test_sources_may_be_any_nest(x, v):
    with Tape() as tape:
        tape.watch(x)
        y = x * v
    gradients = tape.gradient({"y": y}, {"b": (x,), "a": [v]})
    assert jax.tree.map(float, gradients) == {"a": [3.0], "b": (2.0,)}


def test_a_variable_that_is_not_trainable_is_a_constant(v):
    fixed = tf.Variable(2.0, trainable=False)
    with Tape() as tape:
        y = fixed * v
    of_fixed, of_v = tape.gradient(y, [fixed, v])
    assert (of_fixed, float(of_v)) == (None, 2.0)


def test_without_automatic_watching_only_what_is_watched_counts(v):
    other = tf.Variable(5.0)
    with Tape(watch_accessed_variables=False) as tape:
        tape.watch(v)
        y = v * other
    assert tape.watched_variables() == (v,)
    of_v, of_other = tape.gradient(y, [v, other])
    assert (float(of_v), of_other) == (5.0, None)


def test_all_reads_of_a_variable_count_also_between_assignments(x, v):
    with Tape() as tape:
        tape.watch(x)
        v.assign(3.0)
        y = v * x
        v.assign(5.0)
        y = y + v * x
    assert [float(g) for g in tape.gradient(y, [v, x])] == [6.0, 8.0]


def test_the_target_may_be_a_variable(v):
    with Tape() as tape:
        v * v
    assert float(tape.gradient(v, v)) == 1.0


def test_integers_have_no_gradient_and_a_warning_says_so(caplog):
    i = tf.constant(3)
    with caplog.at_level(logging.WARNING, "unison"), Tape() as tape:
        tape.watch(i)
        y = i * i
    assert tape.gradient(y, i) is None
    assert "floating-point" in caplog.text


def test_output_gradients_weigh_the_targets(x):
    with Tape() as tape:
        tape.watch(x)
        y = tf.stack([x * x, x * 3])
    assert float(tape.gradient(y, x, output_gradients=tf.constant([1.0, 10.0]))) == 36.0


@pytest.mark.parametrize(
    ("unconnected", "expected"),
    [("none", None), ("zero", 0.0), (tf.UnconnectedGradients.ZERO, 0.0)],
)
def test_unconnected_sources_get_none_or_zeros(x, unconnected, expected):
    with Tape() as tape:
        tape.watch(x)
        y = tf.constant(1.0)
    gradient = tape.gradient(y, x, unconnected_gradients=unconnected)
    assert (gradient if gradient is None else float(gradient)) == expected


def test_a_stopped_gradient_is_no_connection_and_a_zero_factor_is_one(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        stopped, nothing, half = tf.stop_gradient(x), 0.0 * x, tf.stop_gradient(x) * x
    assert tape.gradient(stopped, x) is None
    assert float(tape.gradient(nothing, x)) == 0.0
    assert float(tape.gradient(half, x)) == 3.0


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda tape, x: tape.watch(3.0), ValueError, "float"),
        (lambda tape, x: tape.gradient(None, x), TypeError, "None"),
        (lambda tape, x: tape.gradient(x, x, unconnected_gradients="foo"), ValueError, "foo"),
        (lambda tape, x: tape.__enter__(), ValueError, "twice"),
        (lambda tape, x: tape.batch_jacobian(tf.ones(3), tf.ones(2)), ValueError, "rank 2"),
    ],
)
def test_misuse_is_named(x, misuse, error, message):
    with Tape() as tape, pytest.raises(error, match=message):
        misuse(tape, x)


@pytest.mark.parametrize("call", [lambda t, x: t.watch(x), lambda t, x: t.gradient(x, x)])
def test_a_tape_that_was_never_entered_says_so(x, call):
    with pytest.raises(RuntimeError, match="block"):
        call(Tape(), x)


def test_what_is_computed_while_recording_is_stopped_is_a_constant(x):
    with Tape() as tape:
        tape.watch(x)
        y = x * x
        with tape.stop_recording():
            w = x * x * x
        z = y + w
    assert float(tape.gradient(z, x)) == 6.0


def test_reset_forgets_everything(x):
    with Tape() as tape:
        tape.watch(x)
        y = x * x
        tape.reset()
    assert tape.gradient(y, x) is None
    with Tape() as tape:
        tape.watch(x)
        tape.reset()
        tape.watch(x)
        y = x * x * x
    assert float(tape.gradient(y, x)) == 27.0


def test_a_tape_that_is_entered_again_goes_on(x):
    tape = Tape(persistent=True)
    with tape:
        tape.watch(x)
        y = x * x
    outside = y * x
    with tape:
        z = y * y
    assert float(tape.gradient(z, x)) == 108.0
    assert tape.gradient(outside, x) is None


def test_an_error_in_the_block_ends_the_recording(x):
    with pytest.raises(KeyError), Tape():
        raise KeyError
    with Tape() as tape:
        tape.watch(x)
        y = x * x
    assert float(tape.gradient(y, x)) == 6.0


def test_tapes_may_end_in_any_order(x):
    first, second = Tape(), Tape()
    first.__enter__()
    second.__enter__()
    first.watch(x)
    second.watch(x)
    y = x * x
    first.__exit__()
    z = y * x
    second.__exit__()
    assert first.gradient(z, x) is None
    assert float(second.gradient(z, x)) == 27.0


def test_one_of_two_tapes_may_stop(x):
    with Tape(persistent=True) as outer:
        outer.watch(x)
        with Tape() as inner:
            inner.watch(x)
            y = x * x * x
            with outer.stop_recording():
                z = y * x
        first = inner.gradient(z, x)
    assert [float(first), float(outer.gradient(first, x))] == [108.0, 108.0]
    with Tape() as outer:
        outer.watch(x)
        with Tape() as inner:
            inner.watch(x)
            y = x * x * x
            with inner.stop_recording():
                z = y * x
    assert inner.gradient(z, x) is None
    assert float(outer.gradient(z, x)) == 108.0


def test_a_tape_that_does_not_record_cannot_be_stopped_or_reset():
    for call in (lambda tape: tape.stop_recording().__enter__(), lambda tape: tape.reset()):
        with pytest.raises(ValueError, match="inside of the tape's block"):
            call(Tape())


def test_a_tape_ends_in_the_thread_in_which_it_began(x):
    failures = []

    def end():
        try:
            tape.stop_recording().__enter__()
        except RuntimeError as error:
            failures.append(str(error))

    with Tape() as tape:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join(60)
        tape.watch(x)
        y = x * x
    assert "thread in which it began" in failures[0]
    assert float(tape.gradient(y, x)) == 6.0


def test_a_tape_may_be_used_while_it_is_stopped(x):
    with Tape() as tape:
        tape.watch(x)
        y = x * x
        with tape.stop_recording():
            assert float(tape.gradient(y, x)) == 6.0
    assert nothing_is_traced()
    with Tape() as other:
        other.watch(x)
        y = x * x
    assert float(other.gradient(y, x)) == 6.0


def test_a_gradient_taken_in_the_block_ends_the_recording(x):
    with Tape() as tape:
        tape.watch(x)
        y = x * x
        assert float(tape.gradient(y, x)) == 6.0
        with pytest.raises(RuntimeError, match="persistent=True"):
            tape.gradient(x * x, x)


def test_a_target_is_its_own_source(x):
    with Tape(persistent=True) as tape:
        y = x * 3.0
    assert [float(tape.gradient(y, y)), float(tape.gradient(x, x))] == [1.0, 1.0]
    assert tape.gradient(y, x) is None


@pytest.mark.parametrize(
    ("function", "gradient"),
    [
        (lambda x: tf.cast(x, tf.int32), None),
        (lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32) * x, 3.0),
        (lambda x: tf.cast(x, tf.float64) * 2, 2.0),
        (lambda x: tf.complex(x, 2 * x) ** 2, -18.0),
        (lambda x: tf.sort(tf.stack([x, -x]))[0], -1.0),
        (lambda x: tf.argmax(tf.stack([x, -x])), None),
        (lambda x: tf.round(x), None),
        (lambda x: tf.floor(x), None),
    ],
)
def test_gradients_keep_the_dtype_of_the_source(x, function, gradient):
    with Tape() as tape:
        tape.watch(x)
        y = function(x)
    taken = tape.gradient(y, x)
    assert (taken if taken is None else (float(taken), taken.dtype)) == (
        None if gradient is None else (pytest.approx(gradient), jnp.float32)
    )


def test_there_may_be_no_sources_and_no_targets(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
    assert tape.gradient(y, []) == []
    assert tape.gradient([], [x]) == [None]
    assert [float(g) for g in tape.gradient([y, y], [x, x])] == [12.0, 12.0]


def test_output_gradients_are_given_for_all_targets_or_none(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y, z = x * x, x * 3
    weights = [tf.constant(1.0), tf.constant(10.0)]
    assert float(tape.gradient([y, z], x, output_gradients=weights)) == 36.0
    with pytest.raises(ValueError, match="each of 2 targets"):
        tape.gradient([y, z], x, output_gradients=weights[:1])


def test_a_value_that_is_assigned_keeps_its_own_gradient(x, v):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        doubled = x * 2.0
        v.assign(doubled)
        y = v * v
        z = doubled * y
    of_x, of_v, of_doubled = tape.gradient(z, [x, v, doubled])
    assert [float(of_x), float(of_v), float(of_doubled)] == [72.0, 72.0, 36.0]
    of_x, of_v, of_doubled = tape.gradient(y, [x, v, doubled])
    assert (of_x, float(of_v), of_doubled) == (None, 12.0, None)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_nested_tapes_give_higher_orders(x, order):
    def derivative(order, x):
        if order == 0:
            return tf.sin(x) * x**3
        with Tape() as tape:
            tape.watch(x)
            y = derivative(order - 1, x)
        return tape.gradient(y, x)

    expected = lambda x: jnp.sin(x) * x**3  # noqa: E731
    for _ in range(order):
        expected = jax.grad(expected)
    assert float(derivative(order, x)) == pytest.approx(float(expected(x)), rel=1e-5)


def test_a_gradient_taken_in_the_block_of_a_persistent_tape_can_be_differentiated(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = x**4
        first = tape.gradient(y, x)
        both = first + y
        second = tape.gradient(first, x)
    assert float(tape.gradient(first, x)) == float(second) == 108.0
    assert float(tape.gradient(both, x)) == 216.0
    with pytest.raises(RuntimeError, match="a tape for each order"):
        tape.gradient(second, x)


def test_jacobians():
    x = tf.constant([1.0, 2.0])
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = tf.stack([x[0] * x[1], x[0] ** 2, x[1] ** 3])
    assert tape.jacobian(y, x).tolist() == [[2.0, 1.0], [2.0, 0.0], [0.0, 12.0]]
    assert tape.jacobian(x, y) is None
    zeros = tape.jacobian(x, y, unconnected_gradients="zero")
    assert zeros.shape == (2, 3)


def test_batch_jacobians():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = x * x * tf.constant([1.0, 10.0])
    assert tape.batch_jacobian(y, x).tolist() == [[[2, 0], [0, 40]], [[6, 0], [0, 80]]]
    assert tape.jacobian(y, x).shape == (2, 2, 2, 2)
    assert tape.batch_jacobian(tf.ones((2, 2)), x).tolist() == np.zeros((2, 2, 2)).tolist()


def test_complex_gradients_are_conjugates_of_derivatives():
    c = tf.constant(1 + 2j, tf.complex64)
    with Tape(persistent=True) as tape:
        tape.watch(c)
        square, magnitude = c * c, tf.abs(c) ** 2
    assert complex(tape.gradient(square, c)) == 2 - 4j
    assert complex(tape.gradient(magnitude, c)) == pytest.approx(2 + 4j)


CLOSED_OVER = {
    "jit": lambda w: jax.jit(lambda a: jnp.sum(a * w))(jnp.ones(3)),
    "nested jit": lambda w: jax.jit(lambda a: jax.jit(lambda b: jnp.sum(b * w))(a))(jnp.ones(3)),
    "scan": lambda w: jax.lax.scan(lambda c, a: (c * w.sum() + a, c), 1.0, jnp.arange(3.0))[0],
    "scan in jit": lambda w: jax.jit(
        lambda xs: jax.lax.scan(lambda c, a: (c * w.sum() + a, c), 1.0, xs)[0]
    )(jnp.arange(3.0)),
    "cond": lambda w: jax.lax.cond(True, lambda c: (c * w).sum(), lambda c: c.sum(), jnp.ones(3)),
    "loop": lambda w: jax.lax.fori_loop(0, 3, lambda i, c: c * w.sum(), 1.0),
    "checkpoint": lambda w: jax.checkpoint(lambda c: (jnp.sin(c) * w).sum())(w),
    "vmap": lambda w: jax.vmap(lambda c: (jnp.sin(c) * w).sum())(jnp.ones((2, 3))).sum(),
    "custom_jvp": lambda w: jax.nn.relu(w - 0.5).sum() + jax.nn.logsumexp(w),
    "shard_map": lambda w: in_two_parts(lambda a: jnp.sum(a * w[1]))(jnp.arange(4.0)),
    "jit of shard_map": lambda w: jax.jit(in_two_parts(lambda a: jnp.sum(a * w[1])))(jnp.ones(4)),
    "jvp": lambda w: jax.jvp(lambda a: jnp.sum(jnp.sin(a * w)), (w,), (jnp.ones(3),))[1],
    "hessian": lambda w: jax.hessian(lambda a: jnp.sum(jnp.sin(a * w)))(jnp.ones(3)).sum(),
}


def in_two_parts(function):
    mesh = jax.make_mesh((2,), ("part",), axis_types=(jax.sharding.AxisType.Auto,))
    part, whole = jax.sharding.PartitionSpec("part"), jax.sharding.PartitionSpec()
    summed = lambda a: jax.lax.psum(function(a), "part")  # noqa: E731
    return jax.shard_map(summed, mesh=mesh, in_specs=part, out_specs=whole)


SOLE_SOURCES = {
    "jit": lambda a, b: jnp.sum(jax.jit(jnp.matmul)(a, b)),
    "scan": lambda a, b: jnp.sum(jax.lax.scan(lambda c, r: (c @ b + r, c), a[0], a)[0]),
    "cond": lambda a, b: jnp.sum(jax.lax.cond(a[0, 0] > 0, jnp.matmul, jnp.add, a, b)),
    "loop": lambda a, b: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ b), a)),
    "checkpoint": lambda a, b: jnp.sum(jax.checkpoint(lambda a, b: jnp.sin(a) @ b)(a, b)),
    "select": lambda a, b: jnp.sum(jnp.where(a > b, a * b, b)),
}


@pytest.mark.parametrize("name", SOLE_SOURCES)
@pytest.mark.parametrize("argument", [0, 1])
def test_one_source_of_several_gets_its_gradient(name, argument):
    function = SOLE_SOURCES[name]
    pair = jnp.asarray([[1.0, 2.0], [3.0, -1.0]]), jnp.asarray([[0.5, 1.0], [2.0, 0.1]])
    with Tape() as tape:
        tape.watch(pair)
        y = function(*pair)
    expected = jax.grad(function, argnums=argument)(*pair)
    np.testing.assert_allclose(tape.gradient(y, pair[argument]), expected, rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.grad])
def test_a_tape_may_be_inside_of_jax_transformations(transform):
    def derivative(x):
        with Tape() as tape:
            tape.watch(x)
            y = x**3
        return tape.gradient(y, x)

    argument = jnp.arange(3.0) if transform is jax.vmap else jnp.float32(2.0)
    expected = transform(jax.grad(lambda x: x**3))(argument)
    np.testing.assert_allclose(transform(derivative)(argument), expected)


def test_a_tape_may_be_in_the_body_of_a_loop():
    def descend(point, goal):
        with Tape() as tape:
            tape.watch(point)
            distance = (point - goal) ** 2
        return point - 0.1 * tape.gradient(distance, point), distance

    end, _ = jax.lax.scan(descend, jnp.float32(2.0), jnp.arange(3.0))
    assert float(end) == pytest.approx(1.584)


def test_a_constant_of_a_jitted_function_in_a_loop_is_refused():
    def loop(w):
        scaled = jax.jit(lambda a: a * w)
        return jax.lax.scan(lambda c, a: (scaled(c) + a, a), 1.0, jnp.arange(3.0))[0]

    w = jnp.float32(2.0)
    with Tape() as tape:
        tape.watch(w)
        with pytest.raises(NotImplementedError, match="as an argument"):
            loop(w)


def test_an_operation_without_a_derivative_matters_only_on_the_way(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        seen = jax.pure_callback(lambda a: np.float32(2 * a), jax.ShapeDtypeStruct((), "f4"), x)
        y = x * x
    assert float(seen) == 6.0
    assert float(tape.gradient(y, x)) == 6.0
    with pytest.raises(LookupError, match="callback"):
        tape.gradient(seen, x)


def test_errors_of_operations_are_their_own(x):
    with Tape() as tape:
        tape.watch(x)
        with pytest.raises(TypeError, match="incompatible shapes"):
            jnp.add(jnp.ones(2) * x, jnp.ones(3) * x)


@pytest.mark.parametrize("copy", [jnp.copy, jnp.array])
def test_a_copy_is_a_value_of_its_own(x, copy):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = copy(x)
        z = y * 2.0 + x
    assert [float(g) for g in tape.gradient(z, [x, y])] == [3.0, 2.0]


@pytest.mark.parametrize("same", [jnp.asarray, jax.lax.stage, tf.convert_to_tensor, tf.identity])
def test_what_leaves_a_value_as_it_is_gives_no_tracer(x, same):
    with Tape() as tape:
        tape.watch(x)
        y = same(x)
        assert not isinstance(y, jax.core.Tracer)
        z = y * 2.0 + x
    assert float(tape.gradient(z, x)) == 3.0


def test_a_tape_cannot_be_stopped_from_a_function_that_jax_traces(x):
    def stop(x):
        with tape.stop_recording():
            return x

    with Tape() as tape, pytest.raises(RuntimeError, match="functions that JAX"):
        jax.jit(stop)(x)


def test_python_loops_on_values_are_recorded(x):
    with Tape() as tape:
        tape.watch(x)
        y = tf.constant(1.0)
        while y < 20.0:
            y = y * x
    assert [float(y), float(tape.gradient(y, x))] == [27.0, 27.0]


@pytest.mark.parametrize("name", CLOSED_OVER)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_tape_sees_through_jax_transformations(name, is_compiled):
    function = CLOSED_OVER[name]

    def gradient(w):
        with Tape() as tape:
            tape.watch(w)
            y = function(w)
        return tape.gradient(y, w)

    w = jnp.arange(1.0, 4.0)
    taped = (jax.jit(gradient) if is_compiled else gradient)(w)
    np.testing.assert_allclose(taped, jax.grad(function)(w), rtol=1e-6)


def test_a_tape_opened_in_one_function_serves_in_another(x):
    tape = Tape()

    def forward():
        tape.watch(x)
        return x**3

    with tape:
        y = forward()
    assert float((lambda: tape.gradient(y, x))()) == 27.0


def test_a_custom_gradient_is_used(x):
    @tf.custom_gradient
    def square(x):
        return x * x, lambda upstream: upstream * 100.0

    with Tape() as tape:
        tape.watch(x)
        y = square(x)
    assert (float(y), float(tape.gradient(y, x))) == (9.0, 100.0)


def test_a_custom_gradient_may_leave_the_value_as_it_is(x):
    @tf.custom_gradient
    def reverse(x):
        return x, lambda upstream: -upstream

    with Tape() as tape:
        tape.watch(x)
        y = reverse(x)
    assert float(tape.gradient(y, x)) == -1.0


def test_a_custom_gradient_has_a_gradient(x):
    @tf.custom_gradient
    def cube(x):
        return x**3, lambda upstream: upstream * 3 * x**2

    with Tape() as outer:
        outer.watch(x)
        with Tape() as inner:
            inner.watch(x)
            y = cube(x)
        first = inner.gradient(y, x)
    assert float(outer.gradient(first, x)) == 18.0


def test_a_custom_gradient_covers_variables(x, v):
    @tf.custom_gradient
    def scaled(x):
        def gradient(upstream, variables=None):
            return upstream * 7.0, [upstream * 11.0 for _ in variables]

        return x * v, gradient

    with Tape() as tape:
        tape.watch(x)
        y = scaled(x)
    assert [float(g) for g in tape.gradient(y, [x, v])] == [7.0, 11.0]

    @tf.custom_gradient
    def forgetful(x):
        return x * v, lambda upstream: upstream

    with pytest.raises(TypeError, match="variables=None"):
        forgetful(x)


def test_a_custom_gradient_is_asked_once_for_each_gradient(x):
    calls = []

    @tf.custom_gradient
    def traced(x):
        calls.append("forward")

        def gradient(upstream):
            calls.append("backward")
            return upstream * 2.0

        return x * 1.0, gradient

    with Tape(persistent=True) as tape:
        tape.watch(x)
        y = traced(x)
        z = x * 3.0
    tape.gradient(z, x)
    tape.gradient(y, x)
    tape.gradient(y, x)
    assert calls == ["forward", "backward", "backward"]


def branching(x):
    def gradient(upstream):
        return upstream * 1000.0 if upstream > 1.0 else upstream

    return (x * 2.0 if x > 0 else x * 3.0), gradient


CUSTOM = {
    "python control flow": (branching, lambda f, x, w: f(x) * 3.0, [3000.0, None]),
    "keyword": (
        lambda x, scale=1.0: (x * scale, lambda upstream: upstream * scale * 10.0),
        lambda f, x, w: f(x, scale=2.0),
        [20.0, None],
    ),
    "two results": (
        lambda a, b: ((a * b, a + b), lambda one, two: (one * 100.0 + two, two * 1000.0)),
        lambda f, x, w: f(x, w),
        [101.0, 1000.0],
    ),
    "one of two results": (
        lambda a, b: ((a * b, a + b), lambda one, two: (one * 100.0 + two, two * 1000.0)),
        lambda f, x, w: f(x, w)[0],
        [100.0, 0.0],
    ),
    "no gradient": (
        lambda a, b: (a * b, lambda upstream: (None, upstream * 5.0)),
        lambda f, x, w: f(x, w),
        [None, 5.0],
    ),
    "nest": (
        lambda d: ({"s": d["a"] + d["b"]}, lambda up: {"a": up * 2.0, "b": up * 3.0}),
        lambda f, x, w: f({"a": x, "b": w})["s"],
        [2.0, 3.0],
    ),
    "other arguments": (
        lambda x, double, name: ((x * 2 if double else x), lambda up: (up * 7.0, None, None)),
        lambda f, x, w: f(x, True, "a name"),
        [7.0, None],
    ),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_gradients(x, name):
    function, call, expected = CUSTOM[name]
    w = tf.constant(2.0)
    with Tape() as tape:
        tape.watch([x, w])
        y = call(tf.custom_gradient(function), x, w)
    gradients = tape.gradient(y, [x, w])
    assert [None if gradient is None else float(gradient) for gradient in gradients] == expected


def test_a_custom_gradient_is_one_of_the_arguments(x):
    w = tf.constant(2.0)

    @tf.custom_gradient
    def scaled(x):
        return x * w, lambda upstream: upstream * w

    with Tape() as outer:
        outer.watch([x, w])
        with Tape(persistent=True) as inner:
            inner.watch([x, w])
            y = scaled(x)
        of_x, of_w = inner.gradient(y, [x, w])
    assert (float(of_x), of_w) == (2.0, None)
    of_x, of_w = outer.gradient(of_x, [x, w])
    assert (of_x, float(of_w)) == (None, 1.0)


def test_all_tapes_know_a_custom_gradient(x):
    @tf.custom_gradient
    def doubled(x):
        return x * 1.0, lambda upstream: upstream * 2.0

    with Tape(persistent=True) as outer:
        outer.watch(x)
        with Tape() as inner:
            inner.watch(x)
            y = doubled(x)
        first = inner.gradient(y, x)
        product = first * y
    assert [float(outer.gradient(y, x)), float(outer.gradient(product, x))] == [2.0, 4.0]


def test_a_custom_gradient_of_complex_numbers_follows_tensorflow():
    z = tf.constant(1 + 2j, tf.complex64)

    @tf.custom_gradient
    def turned(z):
        return z * (2 + 3j), lambda upstream: upstream * (5 + 7j)

    with Tape() as tape:
        tape.watch(z)
        y = turned(z)
    assert complex(tape.gradient(y, z, output_gradients=tf.constant(1 + 1j))) == -2 + 12j


def test_a_custom_gradient_returns_one_for_each_argument(x):
    @tf.custom_gradient
    def product(a, b):
        return a * b, lambda upstream: upstream

    with Tape() as tape:
        tape.watch(x)
        y = product(x, x)
    with pytest.raises(ValueError, match="each of 2 tensors"):
        tape.gradient(y, x)


@pytest.mark.parametrize("transformation", [jax.jit, jax.checkpoint])
def test_a_custom_gradient_works_under_jax(transformation):
    @tf.custom_gradient
    def square(x):
        twice = 2 * x
        return x * x, lambda upstream: upstream * twice * 10.0

    assert float(jax.grad(transformation(square))(3.0)) == 60.0


def test_recomputed_and_passed_through_gradients(x):
    with Tape(persistent=True) as tape:
        tape.watch(x)
        recomputed = tf.recompute_grad(lambda x: x**3)(x)
        passed = tf.grad_pass_through(lambda x: tf.round(x) * 5)(x)
    assert [float(tape.gradient(y, x)) for y in (recomputed, passed)] == [27.0, 1.0]
    assert float(passed) == 15.0


def test_symbolic_gradients_in_a_function(v):
    @tf.function
    def gradients():
        a = tf.constant(2.0)
        b = a * a * v
        return (
            tf.gradients(b, [a, v]),
            tf.gradients([b, a], a),
            tf.gradients(b, a, grad_ys=[tf.constant(10.0)]),
            tf.gradients(b, a, stop_gradients=[v]),
        )

    v.assign(5.0)
    assert jax.tree.map(float, gradients()) == ([20.0, 4.0], [21.0], [200.0], [20.0])


def test_partial_derivatives_by_stopped_gradients():
    @tf.function
    def partial():
        a = tf.constant(0.0)
        b = 2 * a
        return tf.gradients(a + b, [a, b]), tf.gradients(a + b, [a, b], stop_gradients=[a, b])

    assert jax.tree.map(float, partial()) == ([3.0, 1.0], [1.0, 1.0])


def test_symbolic_second_derivatives():
    @tf.function
    def second():
        a = tf.constant([1.0, 2.0])
        return tf.hessians(tf.reduce_sum(a**3), a)

    assert second()[0].tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_symbolic_gradients_outside_a_function_are_refused(x):
    with pytest.raises(RuntimeError, match=r"tf\.function"):
        tf.gradients(x * x, x)


def test_forward_accumulators(x, v):
    with tf.autodiff.ForwardAccumulator([x, v], [tf.constant(2.0), tf.constant(1.0)]) as forward:
        y = x * v
        constant = tf.constant(1.0)
    assert [float(t) for t in forward.jvp([y, x])] == [2 * 2 + 3 * 1, 2.0]
    assert forward.jvp(constant) is None
    assert float(forward.jvp(constant, unconnected_gradients="zero")) == 0.0


def test_forward_and_reverse_mode_nest(x):
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as forward:
        with Tape() as tape:
            tape.watch(x)
            y = x**3
        gradient = tape.gradient(y, x)
    assert [float(forward.jvp(value)) for value in (y, gradient)] == [27.0, 18.0]
    with Tape() as tape:
        tape.watch(x)
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as forward:
            y = x**3
        pushed = forward.jvp(y)
    assert float(tape.gradient(pushed, x)) == 18.0


def test_a_direction_has_the_shape_of_its_primal(x):
    with pytest.raises(ValueError, match="shape"):
        tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, 2.0]))


def test_what_is_recomputed_reads_variables_anew(x, v):
    recomputed = tf.recompute_grad(lambda x: x**3 * v)
    for value, expected in ((2.0, [54.0, 27.0]), (5.0, [135.0, 27.0])):
        v.assign(value)
        with Tape() as tape:
            tape.watch(x)
            y = recomputed(x)
        assert [float(gradient) for gradient in tape.gradient(y, [x, v])] == expected


def test_each_thread_has_its_own_tapes(x):
    results = {}

    def work(power):
        for _ in range(5):
            with Tape() as tape:
                tape.watch(x)
                y = x**power
            results[power] = float(tape.gradient(y, x))

    threads = [threading.Thread(target=work, args=(power,)) for power in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {2: 6.0, 3: 27.0, 4: 108.0}


def test_a_tape_keeps_what_gradients_need_and_no_more():
    def loss(weights):
        x = jnp.ones((64, 64))
        for w in weights:
            x = jax.nn.gelu(x @ w + 1.0)
        return jnp.sum(x)

    def megabytes_kept(differentiate):
        gc.collect()
        before = sum(array.nbytes for array in jax.live_arrays())
        kept = differentiate()
        gc.collect()
        return (sum(array.nbytes for array in jax.live_arrays()) - before) / 1e6, kept

    weights = [jnp.eye(64) for _ in range(8)]

    def record():
        with Tape() as tape:
            tape.watch(weights)
            return tape, loss(weights)

    by_tape, _ = megabytes_kept(record)
    by_jax, _ = megabytes_kept(lambda: jax.vjp(loss, weights))
    assert by_tape < 1.2 * by_jax


def test_a_used_tape_keeps_nothing_alive():
    x = jnp.ones(3)
    with Tape() as tape:
        tape.watch(x)
        y = x * 2
        reference = weakref.ref(y)
        z = tf.reduce_sum(y)
        del y
    tape.gradient(z, x)
    gc.collect()
    assert reference() is None
