"""The gradients of a recurrent layer's weights are one product after the loop over its steps."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from unison.lowering import lower_for_cpu

STEPS, ROWS, INPUTS, UNITS = 6, 4, 3, 16


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def product(left, right):
    """Returns `left.T @ right` as JAX's gradients compute it, without a transposition."""
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())))


def products_in_loops(function, *args):
    """Returns how many products there are in the bodies of loops."""

    def count(jaxpr, is_in_loop):
        found = 0
        for equation in jaxpr.eqns:
            found += is_in_loop and equation.primitive.name == "dot_general"
            inside = is_in_loop or equation.primitive.name == "scan"
            found += sum(count(each, inside) for each in jaxprs_in_params(equation.params))
        return found

    return count(jax.make_jaxpr(function)(*args).jaxpr, False)


def check(function, *args, moved):
    """Checks the results of the lowered function, and how many products have left the loop."""
    lowered = lower_for_cpu(function)
    before, after = (products_in_loops(each, *args) for each in (function, lowered))
    assert before - after == moved
    expected, own = (jax.jit(each)(*args) for each in (function, lowered))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(own), strict=True):
        assert one.dtype == other.dtype
        # Sums of some hundred products of about 1, in another order.
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, 6])
def test_the_gradients_of_a_recurrent_layer_equal_those_of_the_loop(is_reverse, unroll):
    def loss(weights, inputs):
        def step(state, x):
            state = jnp.tanh(x @ weights["kernel"] + state @ weights["recurrent"])
            return state, state

        start = jnp.zeros((ROWS, UNITS))
        last, states = lax.scan(step, start, inputs, reverse=is_reverse, unroll=unroll)
        return last.sum() + (states**2).sum()

    weights = {"kernel": normal(INPUTS, UNITS), "recurrent": normal(UNITS, UNITS, seed=1)}
    check(jax.grad(loss, (0, 1)), weights, normal(STEPS, ROWS, INPUTS), moved=2)


@pytest.mark.parametrize(
    ("layer", "moved"),
    # Keras' GRU multiplies its inputs before the loop.
    [(keras.layers.LSTM, 2), (keras.layers.GRU, 1), (keras.layers.SimpleRNN, 2)],
)
def test_the_gradients_of_keras_layers(layer, moved):
    model = keras.Sequential([keras.Input((STEPS, INPUTS)), layer(UNITS)])
    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss(weights, inputs):
        result, _ = model.stateless_call(weights, fixed, inputs, training=True)
        return (result**2).sum()

    weights = [variable.value for variable in model.trainable_variables]
    check(jax.grad(loss), weights, normal(ROWS, STEPS, INPUTS), moved=moved)


def test_products_over_several_axes():
    def total(rows, columns):
        def step(total, parts):
            return total + jnp.einsum("abij,abk->kij", *parts), parts[1].sum()

        return lax.scan(step, jnp.ones((32, 5, 7)), (rows, columns))

    check(total, normal(STEPS, 2, 3, 5, 7), normal(STEPS, 2, 3, 32, seed=1), moved=1)


def test_a_loop_without_steps_leaves_the_sum_as_it_was():
    def total(rows):
        return lax.scan(lambda total, x: (total + product(x, x), None), jnp.ones((8, 8)), rows)[0]

    check(total, normal(0, 2, 8), moved=1)


def stays(step, start=None, rows=ROWS, dtype=jnp.float32):
    """Checks that a loop over rows is left alone."""
    start = jnp.zeros((UNITS, UNITS), dtype) if start is None else start
    stacked = normal(STEPS, rows, UNITS, dtype=dtype)
    check(lambda stacked: lax.scan(step, start, stacked), stacked, moved=0)


def test_a_sum_that_steps_use_stays():
    stays(lambda total, x: (total + product(x, x), total[0, 0]))
    stays(lambda total, x: ((added := total + product(x, x)), added[0]))
    stays(lambda total, x: (total + product(x @ total, x), None))
    stays(lambda total, x: (2 * total + product(x, x), None))


def test_other_products_stay():
    constant = normal(ROWS, UNITS, seed=3)
    stays(lambda total, x: (total + product(constant, x), None))
    stays(lambda total, x: (total + jnp.exp(product(x, x)), None))
    stays(lambda total, x: (total + product(x, x), None), dtype=jnp.bfloat16)
    batches = jnp.zeros((ROWS, UNITS, UNITS))
    stays(lambda total, x: (total + jnp.einsum("ai,aj->aij", x, x), None), start=batches)


def test_products_of_many_rows_or_of_other_axes_stay():
    stays(lambda total, x: (total + product(x, x), None), rows=8 * UNITS)
    stays(lambda total, x: (total + product(x, x[:, 0]), None), start=jnp.zeros(UNITS))
    stays(lambda total, x: (total + x @ x.T, None), rows=UNITS)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_gradients_of_the_parts_of_a_batch_take_little_memory(rows):
    """Activations are what a loop that accumulates gradients keeps out of memory."""
    parts, units, layers = 32, 128, 6

    def gradient(kernels, batch):
        def loss(kernels, part):
            for kernel in kernels:
                part = jnp.tanh(part @ kernel)
            return (part**2).sum()

        def step(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(kernels, part)), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, kernels), batch)[0]

    kernels = [normal(units, units, seed=seed) / units for seed in range(layers)]
    batch = normal(parts, rows, units)
    own, plain = (
        jax.jit(each).lower(kernels, batch).compile().memory_analysis().temp_size_in_bytes
        for each in (lower_for_cpu(gradient), gradient)
    )
    assert own - plain <= batch.nbytes


def test_what_stays_in_a_loop_gets_its_faster_form_too():
    def total(rows, narrow):
        def step(total, parts):
            x, y = parts
            return total + product(x[:4], x[4:8]), jnp.tanh(product(x, y))

        return lax.scan(step, jnp.zeros((512, 512)), (rows, narrow))

    arguments = normal(2, 512, 512), normal(2, 512, 10)
    check(total, *arguments, moved=1)
    assert "optimization_barrier" in str(jax.make_jaxpr(lower_for_cpu(total))(*arguments))
