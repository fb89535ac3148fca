"""What a function raises that a program calls on the host, and how a user sees it."""

import contextlib
import logging
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from subprocess_program import run_program
from unison.jaxprs import host_callbacks
from unison.program.host_errors import HostCalls
from unison.runtime.private_jax import CALLBACK_LOGGERS
from unison.tracebacks import user_frames


class OwnError(Exception):
    """An error of the user's, with a signature of its own."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


ERROR = OwnError("this", "that")


def fails(*_):
    raise ERROR


def by_a_pure_callback(x):
    return jax.pure_callback(fails, jax.ShapeDtypeStruct((), "float32"), x)


def by_an_io_callback(x):
    return jax.experimental.io_callback(fails, jax.ShapeDtypeStruct((), "float32"), x)


def by_a_debug_callback(x):
    jax.debug.callback(fails, x)
    return x


CALLBACKS = [by_a_pure_callback, by_an_io_callback, by_a_debug_callback]


def raised(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args)
    return caught.value


@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_error_itself_comes_out_of_run(callback, strategy):
    assert raised(strategy.run, callback, (jnp.ones(()),)) is ERROR


@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_error_itself_comes_out_of_a_compiled_function(callback):
    assert raised(unison.Function(callback), jnp.ones(())) is ERROR


def test_the_traceback_ends_in_the_function_of_the_host(strategy):
    error = raised(strategy.run, by_a_pure_callback, (jnp.ones(()),))
    assert user_frames(error)[-1].name == "fails"


def test_the_error_keeps_what_it_was_raised_from(strategy):
    def chained(x):
        raise ValueError("mine") from KeyError("also mine")

    def step(x):
        jax.debug.callback(chained, x)

    error = raised(strategy.run, step, (jnp.ones(()),))
    assert isinstance(error.__cause__, KeyError)
    assert not isinstance(error.__context__, jax.errors.JaxRuntimeError)


def test_jax_logs_nothing_of_an_error_that_is_raised(strategy, caplog):
    raised(strategy.run, by_a_debug_callback, (jnp.ones(()),))
    assert caplog.records == []


def test_what_fails_in_another_thread_meanwhile_is_no_failure_of_the_program(strategy, caplog):
    failed = threading.Event()

    def slow(x):
        assert failed.wait(60)
        return np.asarray(x)

    def fail():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(by_a_pure_callback)(jnp.ones(())).block_until_ready()
        failed.set()

    other = threading.Thread(target=fail)
    other.start()
    result = jax.ShapeDtypeStruct((), "float32")
    value = strategy.run(lambda x: jax.pure_callback(slow, result, x), (jnp.ones(()),))
    other.join()
    assert float(jax.tree.leaves(value)[0]) == 1.0
    assert len(caplog.records) == 1  # JAX's of the other thread


def test_what_is_not_raised_is_logged_at_the_end(caplog):
    jaxpr = jax.make_jaxpr(by_a_pure_callback)(1.0)
    (callback,) = host_callbacks(jaxpr.jaxpr)

    def program():
        try:
            callback(jnp.ones(()))
        except OwnError:
            CALLBACK_LOGGERS[0].exception("not raised")
        assert caplog.records == []

    HostCalls([jaxpr.jaxpr], jax.devices()).run(program)
    assert [record.message for record in caplog.records] == ["not raised"]


def test_the_loggers_of_jax_are_as_they_were(strategy):
    before = [list(logger.filters) for logger in CALLBACK_LOGGERS]
    raised(strategy.run, by_a_debug_callback, (jnp.ones(()),))
    assert [list(logger.filters) for logger in CALLBACK_LOGGERS] == before
    assert all(isinstance(logger, logging.Logger) for logger in CALLBACK_LOGGERS)


def test_variables_are_as_before_the_step_that_failed(strategy):
    with strategy.scope():
        variable = unison.Variable(1.0)

    def step(x):
        variable.assign(2.0)
        by_a_debug_callback(x)

    raised(strategy.run, step, (jnp.ones(()),))
    assert float(variable) == 1.0


def fails_above_two(x):
    if np.max(x) > 2:
        raise ERROR
    return np.asarray(x)


def checked(x):
    return jax.pure_callback(fails_above_two, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_do_not_wait_for_the_one_that_fails(replicas):
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        total = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
    good = unison.PerReplica([np.float32(1)] * replicas)
    bad = unison.PerReplica([np.float32(1)] * (replicas - 1) + [np.float32(5)])
    step = lambda x: total.assign_add(checked(x))  # noqa: E731
    for number in range(1, 4):  # the program runs again
        strategy.run(step, args=(good,))
        assert raised(strategy.run, step, (bad,)) is ERROR
        assert float(total) == number * replicas


def test_replicas_do_not_wait_in_fit_for_the_one_that_fails():
    class Checking(keras.layers.Layer):
        def call(self, x):
            return keras.ops.stop_gradient(checked(keras.ops.stop_gradient(x)))

    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), Checking(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    x[12:] = 5  # the second replica's part of the second batch
    for steps in (3, 4):
        with pytest.raises(OwnError):
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == steps


def test_the_error_itself_comes_out_of_fit(strategy):
    class Network(keras.Sequential):
        def call(self, x, training=False):
            if training:
                jax.debug.callback(fails, x)
            return super().call(x)

    with strategy.scope():
        model = Network([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with pytest.raises(OwnError) as caught:
        model.fit(x, y, verbose=0)
    assert caught.value is ERROR


def test_an_assertion_names_the_line_that_makes_it(strategy):
    def step(x):
        tf.debugging.assert_less(x, 1.0)

    error = raised(strategy.run, step, (jnp.full((), 2.0),))
    assert isinstance(error, tf.errors.InvalidArgumentError)
    line = step.__code__.co_firstlineno + 1
    assert error.__notes__[0] == f"Asserted at {__file__}, line {line}, in step."


PROGRAM = """
import jax, jax.numpy as jnp, unison
strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
def fails(x):
    raise LookupError("mine")
def step(x):
    jax.debug.callback(fails, x)
strategy.run(step, args=(jnp.ones(()),))
"""


def test_a_program_that_ends_by_it_prints_one_traceback():
    done = run_program(PROGRAM, env={"UNISON_CPU_DEVICES": "2"}, imported=("jax", "unison"))
    assert done.stderr.count("Traceback") == 1, done.stderr
    lines = done.stderr.splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    assert frames[-1].endswith("in fails")
    assert lines[-1] == "LookupError: mine"
