"""Weights that replicas divide (`zero=3`) are gathered where they are used, and let go of."""

from __future__ import annotations

import functools

import jax
import jax.extend
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import assert_same_outcome, run_training, run_training_under
from unison.lowering.gathering import gathered_where_used
from unison.planning import plan_fit, target
from unison.runtime.placement import REPLICA_AXIS

WIDTH, LAYERS, REPLICAS = 128, 12, 4
KERNEL = WIDTH * WIDTH * 4
rng = np.random.default_rng(0)
X = rng.normal(size=(32, WIDTH)).astype("float32")


def build(policy="float32", layers=5):
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(WIDTH, "tanh", dtype=policy))
    model.compile(keras.optimizers.Adam(0.001), "mse")
    return model


def train(model):
    return model.fit(X, X, batch_size=16, epochs=2, shuffle=False, verbose=0).history


def strategy_of(zero, mesh=None, rules=None):
    return unison.ModelParallelStrategy(mesh=mesh or {"batch": REPLICAS}, rules=rules, zero=zero)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_deep_model_trains_as_on_one_device(policy):
    together = run_training_under(strategy_of(3), functools.partial(build, policy), train)
    alone = run_training(functools.partial(build, policy), train)
    if policy == "float32":
        assert_same_outcome(together, alone)
    else:
        np.testing.assert_allclose(together.result["loss"], alone.result["loss"], rtol=0.02)


build_deep = functools.partial(build, layers=LAYERS)


def memory_of_step(mesh, zero, build_it=build_deep):
    """What is kept, and what a step takes on each device, as XLA counts it."""
    with target("h100:4"):
        strategy = strategy_of(zero, mesh, {"kernel": (None, "model")} if len(mesh) > 1 else None)
        with strategy.scope():
            model = build_it()
        examples = jax.ShapeDtypeStruct((16, WIDTH), "float32")
        memory = plan_fit(model, examples, examples).memory
    return sum(memory.state.values()), memory.temporaries


@pytest.mark.parametrize("mesh", [{"batch": 4}, {"batch": 2, "model": 2}], ids=str)
def test_a_device_has_few_whole_weights_at_a_time(mesh):
    kept, temporaries = memory_of_step(mesh, zero=3)
    kept_whole, temporaries_whole = memory_of_step(mesh, zero=0)
    all_weights = LAYERS * KERNEL * mesh["batch"] / REPLICAS  # of a device's part of the model
    assert kept < 1.1 * kept_whole / mesh["batch"]
    assert temporaries < 0.6 * all_weights
    assert temporaries < temporaries_whole


def gatherings(jaxpr):
    """The equations that gather, in order, those of loops included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_gather":
            found.append(equation)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += gatherings(inner)
    return found


def traced(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    run = gathered_where_used(function)
    return jax.make_jaxpr(run, axis_env=[(REPLICA_AXIS, 2)])(*arguments)


def whole(part):
    return jax.lax.all_gather(part, REPLICA_AXIS, tiled=True)


def layers_of(count):
    """A step of so many layers, and the shapes of its arguments."""

    def step(x, *parts):
        kernels = [whole(part) for part in parts]

        def loss(kernels):
            hidden = x
            for kernel in kernels:
                hidden = jnp.tanh(hidden @ kernel)
            return hidden.sum()

        return jax.grad(loss)(kernels)

    return step, [(4, 8)] * (count + 1)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 3), (6, 6 + 3)])
def test_what_is_used_again_at_once_is_not_gathered_again(count, expected):
    step, shapes = layers_of(count)
    # The gradient needs all kernels but the first; the last two are still there.
    assert len(gatherings(traced(step, *shapes).jaxpr)) == expected


def test_each_step_of_a_loop_gathers_where_it_uses():
    step, shapes = layers_of(6)

    def program(count, x, *parts):
        def run(_, parts):
            gradients = step(x, *parts)
            return [part - whole[:4] for part, whole in zip(parts, gradients, strict=True)]

        return jax.lax.fori_loop(0, count[0].astype(int), run, list(parts))

    assert len(gatherings(traced(program, (1,), *shapes).jaxpr)) == 6 + 3


def test_a_weight_that_nobody_uses_is_not_gathered():
    jaxpr = traced(lambda part: (whole(part), part.sum())[1], (4, 8)).jaxpr
    assert gatherings(jaxpr) == []


def test_a_form_of_a_weight_is_let_go_of_like_the_weight():
    def step(x, *parts):
        kernels = [whole(part).astype(jnp.bfloat16).T for part in parts]
        first, second, third = (jnp.tanh(x @ kernel) for kernel in kernels)
        return first + second + third, x @ kernels[0]

    jaxpr = traced(step, (4, 8), *[(4, 8)] * 3).jaxpr
    assert len(gatherings(jaxpr)) == 4


def test_what_a_program_returns_whole_is_whole():
    strategy = strategy_of(3)
    tree = {"kernel": rng.normal(size=(WIDTH, WIDTH)).astype("float32")}
    kernel = strategy.create_variables(tree)["kernel"]
    for value in strategy.run(lambda: kernel.value()).values:
        np.testing.assert_array_equal(value, tree["kernel"])


def test_values_that_are_no_numbers_pass_unchanged_where_the_next_weight_waits_for_them():
    strategy = strategy_of(3)
    names = ["a", "b", "c"]
    tree = {name: np.full((WIDTH, WIDTH), np.nan, "float32") for name in names}
    tree["c"][:] = 2
    variables = strategy.create_variables(tree)

    def step(x):
        for name in names:
            x = x @ variables[name].value()
        return x, (jnp.zeros((1, WIDTH)) @ variables["c"].value()).sum()

    of_nan, of_zeros = strategy.run(step, (jnp.zeros((1, WIDTH)),))
    assert all(np.isnan(value).all() for value in of_nan.values)
    assert [float(value) for value in of_zeros.values] == [0] * REPLICAS


def test_cores_and_replicas_divide_and_gather_a_deep_model():
    rules = {"kernel": (None, "model")}
    strategy = strategy_of(3, {"batch": 2, "model": 2}, rules)
    assert_same_outcome(run_training_under(strategy, build, train), run_training(build, train))


# -- loops over stacked layers -------------------------------------------------------------


class Stacked(keras.layers.Layer):
    """Layers whose weights are stacked, and which a loop goes through."""

    def __init__(self, rematerializes=False, **kwargs):
        super().__init__(**kwargs)
        self.rematerializes = rematerializes

    def build(self, shape):
        small = keras.initializers.RandomNormal(stddev=0.1)
        self.kernels = self.add_weight((LAYERS, shape[-1], shape[-1]), small, name="kernels")
        self.biases = self.add_weight((LAYERS, shape[-1]), "zeros", name="biases")

    def call(self, inputs):
        def layer(hidden, weights):
            kernel, bias = weights
            return jnp.tanh(hidden @ kernel + bias), None

        if self.rematerializes:
            layer = jax.checkpoint(layer)
        stacks = tuple(map(keras.ops.convert_to_tensor, (self.kernels, self.biases)))
        return jax.lax.scan(layer, inputs, stacks)[0]


def build_stacked(policy="float32", **options):
    model = keras.Sequential([keras.Input((WIDTH,)), Stacked(dtype=policy, **options)])
    model.compile(keras.optimizers.Adam(0.001), "mse")
    return model


@pytest.mark.parametrize(
    ("mesh", "rules", "rematerializes"),
    [
        ({"batch": 4}, None, False),
        ({"batch": 4}, None, True),
        ({"batch": 2, "model": 2}, {"kernels": (None, None, "model")}, False),
    ],
    ids=["replicas", "rematerialized", "cores"],
)
def test_stacked_layers_train_as_on_one_device(mesh, rules, rematerializes):
    build_it = functools.partial(build_stacked, rematerializes=rematerializes)
    together = run_training_under(strategy_of(3, mesh, rules), build_it, train)
    assert_same_outcome(together, run_training(build_it, train))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_device_has_few_whole_layers_of_a_stack_at_a_time(policy):
    stacked = functools.partial(build_stacked, policy)
    kept, temporaries = memory_of_step({"batch": REPLICAS}, 3, stacked)
    kept_whole, _ = memory_of_step({"batch": REPLICAS}, 0, stacked)
    assert kept < 1.1 * kept_whole / REPLICAS
    # What each replica keeps of the gradient, and some layers.
    assert temporaries < LAYERS * KERNEL / REPLICAS + 4 * KERNEL


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_over_layers_gathers_and_scatters_in_each_step(dtype):
    def step(x, parts):
        kernels = jax.lax.all_gather(parts, REPLICA_AXIS, axis=1, tiled=True)

        def loss(kernels):
            def layer(hidden, kernel):
                return jnp.tanh(hidden @ kernel.astype(dtype)).astype("float32"), None

            return jax.lax.scan(layer, x, kernels)[0].sum()

        gradient = 0.5 * jax.grad(loss)(kernels)
        return jax.lax.psum_scatter(gradient, REPLICA_AXIS, scatter_dimension=1, tiled=True)

    jaxpr = traced(step, (4, 8), (6, 4, 8)).jaxpr
    assert len(gatherings(jaxpr)) == 2  # forward, and for the gradient
    outside = [equation.primitive.name for equation in jaxpr.eqns]
    assert outside.count("scan") == 2
    assert not {"all_gather", "reduce_scatter"}.intersection(outside)
    whole = 6 * 8 * 8
    assert all(out.aval.size < whole for equation in jaxpr.eqns for out in equation.outvars)


def test_a_stack_that_is_divided_along_its_layers_is_gathered_before_the_loop():
    def program(x, parts):
        kernels = jax.lax.all_gather(parts, REPLICA_AXIS, axis=0, tiled=True)
        return jax.lax.scan(lambda hidden, kernel: (hidden @ kernel, None), x, kernels)[0]

    names = [each.primitive.name for each in traced(program, (4, 8), (3, 8, 8)).jaxpr.eqns]
    assert names == ["all_gather", "scan"]


def test_a_loop_that_returns_its_layers_weights_returns_them_whole():
    strategy = strategy_of(3)
    tree = {"kernels": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype("float32")}
    kernels = strategy.create_variables(tree)["kernels"]
    assert kernels.cell.array.addressable_shards[0].data.shape[0] == LAYERS

    def step(x):
        def layer(hidden, kernel):
            return hidden @ kernel, kernel.T

        return jax.lax.scan(layer, x, kernels.value())

    hidden, turned = strategy.run(step, (X,))
    expected = X
    for kernel in tree["kernels"]:
        expected = expected @ kernel
    for own, matrices in zip(hidden.values, turned.values, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        np.testing.assert_array_equal(matrices, tree["kernels"].transpose(0, 2, 1))
