"""Programs with NaN and infinity, where JAX is asked to look for them."""

import traceback

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf


@pytest.fixture(autouse=True)
def check_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.fixture(params=[1, 2])
def strategy(request):
    return unison.MirroredStrategy([f"CPU:{index}" for index in range(request.param)])


def error_of(call, *args):
    """The operation that the error names, and the line that its traceback ends with."""
    with pytest.raises(FloatingPointError, match="result of the operation") as raised:
        call(*args)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    return str(raised.value).split("'")[1], last.line


def test_run_names_the_operation_and_keeps_the_variables(strategy):
    with strategy.scope():
        total = unison.Variable(1.0, aggregation=unison.VariableAggregation.MEAN)

    def step(x):
        halved = x / 2
        total.assign(jnp.log(halved))  # of a negative number
        return total * 2

    assert error_of(strategy.run, step, (-1.0,)) == (
        "log",
        "total.assign(jnp.log(halved))  # of a negative number",
    )
    assert float(total.numpy()) == 1.0
    results = strategy.experimental_local_results(strategy.run(step, args=(2.0,)))
    assert [float(result) for result in results] == [0.0] * len(results)
    assert float(total.numpy()) == 0.0


def test_a_function_names_the_operation():
    @tf.function
    def divided(x):
        doubled = x * 2
        return tf.reduce_sum(1.0 / (doubled - doubled))

    assert error_of(divided, tf.constant([1.0, 2.0])) == (
        "div",
        "return tf.reduce_sum(1.0 / (doubled - doubled))",
    )


def test_fit_names_the_operation_and_keeps_the_weights(strategy):
    class Logarithm(keras.layers.Layer):
        def call(self, inputs):
            return jnp.log(inputs - 100.0)

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), Logarithm()])
        model.compile("sgd", "mse")
    before = model.get_weights()

    def fit():
        model.fit(np.ones((64, 2)), np.ones((64, 1)), batch_size=4, verbose=0)

    assert error_of(fit) == ("log", "return jnp.log(inputs - 100.0)")
    for own, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, other)


def test_infinity_that_no_result_shows_is_no_error(strategy):
    def masked(x):
        return jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf))

    result = strategy.experimental_local_results(strategy.run(masked, (jnp.array([0.0, 2.0]),)))
    np.testing.assert_array_equal(result[0], [0.0, 1.0])


def test_a_result_that_no_operation_computes_is_named(strategy):
    constant = np.full(2, np.nan, "float32")
    with pytest.raises(FloatingPointError, match="in a result"):
        strategy.run(lambda: constant)


def test_an_argument_that_is_no_number_is_named(strategy):
    with pytest.raises(FloatingPointError, match="in an argument, or in a variable"):
        strategy.run(lambda x: x + 1, (jax.device_put(np.float32(np.nan)),))


def test_functions_of_the_host_are_called_once():
    called = []

    def step(x):
        jax.debug.callback(called.append, x)
        return jnp.log(x)

    with pytest.raises(FloatingPointError, match="in a result"):
        unison.OneDeviceStrategy("CPU:0").run(step, (-1.0,))
    jax.effects_barrier()
    assert len(called) == 1


def test_only_what_is_asked_for_is_looked_for():
    jax.config.update("jax_debug_infs", False)
    strategy = unison.OneDeviceStrategy("CPU:0")
    assert np.isposinf(strategy.run(lambda x: 1 / x, (0.0,)))
    with pytest.raises(FloatingPointError, match=r"Found NaN in .* jax_debug_nans is set"):
        strategy.run(lambda x: x / x, (0.0,))
