"""An aggregation method for the optimizers of Keras and Optax."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import unison
import unison.train
from hlo import all_reduces, compiled_programs
from unison.cells import Layout

METHODS = ["ADD_N", "DEFAULT", "TREE", "ACCUMULATE_N"]

X = np.random.default_rng(0).normal(size=(14, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def fitted(strategy, method, optimizer=lambda: keras.optimizers.Adam(0.01), units=8):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
        )
        chosen = optimizer()
        if method is not None:
            assert unison.train.with_aggregation(chosen, method) is chosen
        model.compile(chosen, "mse")
    # Batches of 8 and 6 examples: with 4 replicas, the last one gets none.
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@functools.cache
def plain_weights(strategy):
    return fitted(strategy, None).get_weights()


@pytest.mark.parametrize("method", METHODS)
def test_a_keras_optimizer_fits_alike_by_every_method(method, four_replicas):
    weights = fitted(four_replicas, method).get_weights()
    for expected, weight in zip(plain_weights(four_replicas), weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
    ids=["plain", "loss scale"],
)
def test_a_keras_optimizer_uses_its_method_in_a_loop_of_ones_own(
    optimizer, two_replicas, monkeypatch
):
    with two_replicas.scope():
        weights = [keras.Variable(np.ones(4, "float32")), keras.Variable(np.ones(3, "float32"))]
        chosen = optimizer()
        chosen.build(weights)
    inner = getattr(chosen, "inner_optimizer", chosen)
    unison.train.with_aggregation(inner, "TREE")
    gradients = [np.ones(4, "float32"), np.ones(3, "float32")]
    texts = compiled_programs(monkeypatch)
    two_replicas.run(lambda: chosen.apply(gradients, weights))
    assert [(all_reduces(text), text.count(" collective-permute(")) for text in texts] == [([], 1)]


def test_a_keras_optimizer_with_a_method_updates_whole_weights_in_fit(two_replicas):
    def layouts(method):
        model = fitted(two_replicas, method, units=2**15)
        return {variable.cell.layout for variable in model.optimizer.variables}

    assert Layout.SHARDED in layouts(None) | layouts("DEFAULT")
    assert layouts("ADD_N") == {Layout.MIRRORED}


def test_only_keras_optimizers_are_given_a_method():
    with pytest.raises(TypeError, match="Expected a Keras optimizer"):
        unison.train.with_aggregation(optax.sgd(0.1), "TREE")
    with pytest.raises(ValueError, match="Expected an AggregationMethod"):
        unison.train.with_aggregation(keras.optimizers.SGD(), "BEST")


def optax_step(transformation, combine=lambda gradients: gradients):
    """One step of a linear regression by one replica's examples."""
    weights = {"w": jnp.ones((6, 1)), "b": jnp.zeros(1)}

    def step(x, y):
        def squares(weights):
            return jnp.sum((x @ weights["w"] + weights["b"] - y) ** 2)

        gradients = combine(jax.grad(squares)(weights))
        updates, _ = transformation.update(gradients, transformation.init(weights), weights)
        return optax.apply_updates(weights, updates)

    return step


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_an_optax_transformation_steps_alike_by_every_method(method, op, two_replicas):
    def batches():
        return unison.PerReplica([X[:7], X[7:]]), unison.PerReplica([Y[:7], Y[7:]])

    plain = optax_step(optax.adamw(0.1), lambda gradients: unison.all_reduce(op, gradients))
    given = optax_step(unison.train.aggregated(optax.adamw(0.1), method, op))
    expected, stepped = two_replicas.run(plain, batches()), two_replicas.run(given, batches())
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_an_optax_transformation_combines_nothing_outside_a_replica_program():
    stepped = optax_step(unison.train.aggregated(optax.sgd(0.1), "TREE"))(X, Y)
    expected = optax_step(optax.sgd(0.1))(X, Y)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, stepped, expected))


def test_an_optax_transformation_passes_extra_arguments_on():
    seen = {}

    def update(updates, state, params=None, *, value):
        seen["value"] = value
        return updates, state

    transformation = optax.GradientTransformationExtraArgs(lambda _: (), update)
    unison.train.aggregated(transformation).update(1.0, (), value=3.0)
    assert seen == {"value": 3.0}


def test_an_optax_transformation_is_given_sums_or_means_only():
    with pytest.raises(ValueError, match="SUM or MEAN"):
        unison.train.aggregated(optax.sgd(0.1), "TREE", op="MAX")
