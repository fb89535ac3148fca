"""Models that go their own ways are still trained exactly, or refused."""

from __future__ import annotations

import logging

import jax
import keras
import numpy as np
import pytest
from keras import ops

from keras_comparison import assert_close, on_four_replicas, run_training, run_training_under

rng = np.random.default_rng(0)
X = rng.normal(size=(27, 8)).astype("float32")
Y = X[:, :1] * 2.0


def fit(model, epochs=2):
    return model.fit(X, Y, batch_size=9, epochs=epochs, shuffle=False, verbose=0).history


class DescendsByItself(keras.Sequential):
    """Updates its weights without its optimizer."""

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights):
            y_pred, _ = self.stateless_call(weights, others, x, training=True)
            return ops.mean(ops.square(y_pred - y))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return {"mse": loss}, (weights, others, slots, metrics)


def descending():
    model = DescendsByItself([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd")
    return model


def test_weights_that_a_step_updates_itself_equal_those_of_one_device(assert_trains_as_alone):
    assert_trains_as_alone(descending, fit)


def test_weights_that_a_step_updates_itself_stay_equal_and_are_warned_about(two_replicas, caplog):
    with two_replicas.scope():
        model = descending()
    with caplog.at_level(logging.WARNING, logger="unison"):
        fit(model)
    assert "without its optimizer" in caplog.text
    kernel = model.trainable_variables[0].cell.array
    first, second = (np.asarray(shard.data) for shard in kernel.addressable_shards)
    np.testing.assert_array_equal(first, second)


def test_dynamic_loss_scale_goes_the_way_of_one_device(two_replicas):
    def build():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, dtype="mixed_float16"),
                keras.layers.Dense(1, dtype="mixed_float16"),
            ]
        )
        # The default scale of 2**15 overflows at first, and is halved until it does not.
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
        return model

    def scale_and_steps(model):
        path = []
        for _ in range(6):
            model.train_on_batch(X[:10], Y[:10])
            scale = float(model.optimizer.dynamic_scale.numpy())
            path.append((scale, int(model.optimizer.inner_optimizer.iterations.numpy())))
        return path

    alone = run_training(build, scale_and_steps).result
    assert run_training_under(two_replicas, build, scale_and_steps).result == alone


class TracksLossBy(keras.Sequential):
    """The loss tracker of Keras' guide, made by somebody else."""

    tracker = None

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights):
            y_pred, _ = self.stateless_call(weights, others, x, training=True)
            return ops.mean(ops.square(y_pred - y))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.tracker.stateless_result(metrics)}
        return logs, (weights, others, slots, metrics)


class OwnMean(keras.metrics.Mean):
    pass


@on_four_replicas
@pytest.mark.parametrize("kind", [keras.metrics.Mean, OwnMean])
def test_tracker_that_was_made_outside_the_scope_is_exact(strategy, kind):
    def history(tracker, scope=None):
        keras.utils.set_random_seed(0)
        if scope is None:
            model = TracksLossBy([keras.Input((8,)), keras.layers.Dense(1)])
        else:
            with scope:
                model = TracksLossBy([keras.Input((8,)), keras.layers.Dense(1)])
        model.tracker = tracker
        model.compile("sgd")
        return fit(model)

    together = history(kind("loss"), strategy.scope())
    assert_close(together, history(kind("loss")))


@on_four_replicas
def test_prediction_may_have_several_rows_for_an_example(strategy):
    def build():
        return keras.Sequential(
            [keras.Input((8,)), keras.layers.Lambda(lambda t: ops.reshape(t, (-1, 4)))]
        )

    with strategy.scope():
        model = build()
    for examples in (8, 9, 3):
        expected = X[:examples].reshape(-1, 4)
        np.testing.assert_array_equal(model.predict(X[:examples], verbose=0), expected)


def test_layers_of_a_strategy_in_a_model_outside_its_scope_are_refused(two_replicas):
    with two_replicas.scope():
        base = keras.layers.Dense(4)
        base.build((None, 8))
    model = keras.Sequential([keras.Input((8,)), base, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="built outside the strategy's scope"):
        fit(model)


def test_step_that_is_compiled_for_every_batch_is_warned_about(two_replicas, caplog):
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, logger="unison"):
        for examples in range(2, 20, 2):
            model.train_on_batch(X[:examples], Y[:examples])
    assert caplog.text.count("has been compiled 8 times") == 1
