"""Models that override parts of Keras' step train as they do on one device."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import unison
from keras_comparison import on_four_replicas, regression_data

pytestmark = on_four_replicas

# Batches of 16, 16 and 3: the last one leaves one of 4 replicas idle.
X, Y = regression_data(35)
HELD_OUT = regression_data(13, seed=1)


def fit(model):
    return model.fit(
        X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_data=HELD_OUT
    )


def instance_of(model_class):
    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = model_class(inputs, keras.layers.Dense(1)(hidden))
        model.compile("adam", "mse", metrics=["mae"])
        return model

    return build


class GuideModel(keras.Model):
    """The model of Keras' guide "Customizing what happens in fit() with JAX"."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def compute_loss_and_updates(
        self, trainable_variables, non_trainable_variables, x, y, training=False
    ):
        y_pred, non_trainable_variables = self.stateless_call(
            trainable_variables, non_trainable_variables, x, training=training
        )
        return self.loss_fn(y, y_pred), (y_pred, non_trainable_variables)

    def train_step(self, state, data):
        trainable_variables, non_trainable_variables, optimizer_variables, metrics = state
        x, y = data
        grad_fn = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable_variables)), grads = grad_fn(
            trainable_variables, non_trainable_variables, x, y, training=True
        )
        trainable_variables, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        logs, metrics = self.updated_metrics(metrics, loss, y, y_pred)
        return logs, (trainable_variables, non_trainable_variables, optimizer_variables, metrics)

    def test_step(self, state, data):
        trainable_variables, non_trainable_variables, metrics = state
        x, y = data
        loss, (y_pred, non_trainable_variables) = self.compute_loss_and_updates(
            trainable_variables, non_trainable_variables, x, y
        )
        logs, metrics = self.updated_metrics(metrics, loss, y, y_pred)
        return logs, (trainable_variables, non_trainable_variables, metrics)

    def updated_metrics(self, variables, loss, y, y_pred):
        count = len(self.loss_tracker.variables)
        of_loss = self.loss_tracker.stateless_update_state(variables[:count], loss)
        of_mae = self.mae_metric.stateless_update_state(variables[count:], y, y_pred)
        logs = {
            "loss": self.loss_tracker.stateless_result(of_loss),
            "mae": self.mae_metric.stateless_result(of_mae),
        }
        return logs, of_loss + of_mae


def test_step_of_the_keras_guide_trains_as_on_one_device(assert_trains_as_alone):
    assert_trains_as_alone(instance_of(GuideModel), fit)


class RawLogs(keras.Model):
    """A step whose logs are no metrics: the last batch's loss, and the norm of a weight."""

    def train_step(self, state, data):
        trainable_variables, non_trainable_variables, optimizer_variables, metrics = state
        x, y = data

        def loss_of(variables):
            outputs, others = self.stateless_call(variables, non_trainable_variables, x)
            return ops.mean((outputs - y) ** 2), others

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable_variables)
        trainable_variables, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        logs = {"loss": loss, "norm": ops.norm(trainable_variables[0])}
        return logs, (trainable_variables, others, optimizer_variables, metrics)


def test_logs_that_are_no_metrics_are_means_over_the_examples(assert_trains_as_alone):
    def train(model):
        return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)

    assert_trains_as_alone(instance_of(RawLogs), train)


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + 0.1 * ops.mean(ops.square(y_pred))


def test_overridden_compute_loss_trains_as_on_one_device(assert_trains_as_alone):
    assert_trains_as_alone(instance_of(OwnLoss), fit)


class OwnMetrics(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spread = keras.metrics.RootMeanSquaredError(name="spread")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.spread.update_state(y_pred, ops.zeros_like(y_pred))
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "spread": self.spread.result()}


def test_overridden_compute_metrics_counts_every_example(assert_trains_as_alone):
    assert_trains_as_alone(instance_of(OwnMetrics), fit)


class CountsExamples(keras.layers.Layer):
    """Passes its input on, and keeps its mean in a variable that says how to combine it."""

    def build(self, input_shape):
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(ops.mean(inputs))
        return inputs


def test_variable_with_an_aggregation_is_combined_at_each_step(assert_trains_as_alone):
    x, y = regression_data(32)  # even: the mean of the replicas' means is the mean

    def build():
        model = keras.Sequential([keras.Input((6,)), CountsExamples(), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    )


class Centers(keras.layers.Layer):
    """Subtracts the mean over the examples of all replicas, which it sums by hand."""

    def call(self, inputs):
        total, count = ops.sum(inputs, axis=0), ops.sum(ops.ones_like(inputs[:, 0]))
        replica = unison.get_replica_context()
        if replica is not None:  # else Keras builds the model
            total, count = replica.all_reduce("SUM", (total, count))
        return inputs - total / count


class LogsItsExamples(RawLogs):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        count = unison.get_replica_context().all_reduce("SUM", float(len(data[0])))
        return {**logs, "examples": count}, state


# Of 10 examples 4 replicas get 3, 3, 3 and 1; of 5, one is idle.
@pytest.mark.parametrize("model_class", [keras.Model, LogsItsExamples])
def test_layer_that_sums_over_the_replicas_by_hand_trains_as_on_one_device(
    assert_trains_as_alone, model_class
):
    def build():
        inputs = keras.Input((6,))
        hidden = Centers()(keras.layers.Dense(8, activation="tanh")(inputs))
        model = model_class(inputs, keras.layers.Dense(1)(hidden))
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    )


TOKENS = np.random.default_rng(4).integers(0, 9, (len(X), 5))


def test_sums_behind_an_embedding_count_an_idle_replica_as_nothing(assert_trains_as_alone):
    def build():
        tokens = keras.Input((5,), dtype="int32")
        rows = keras.layers.Embedding(9, 4)(tokens)
        hidden = keras.layers.GlobalAveragePooling1D()(Centers()(rows))
        model = LogsItsExamples(tokens, keras.layers.Dense(1)(hidden))
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(TOKENS, Y, batch_size=10, shuffle=False, verbose=0)
    )


@pytest.mark.parametrize("model_class", [keras.Model, LogsItsExamples])
def test_sums_by_hand_behind_which_no_examples_have_no_gradient(
    assert_trains_as_alone, model_class
):
    def of_columns(y_true, y_pred):
        return ops.mean((y_pred[:, np.array([0, 2])] - y_true) ** 2, axis=-1)

    def build():
        inputs = keras.Input((6,))
        hidden = Centers()(keras.layers.Dense(8, activation="tanh")(inputs))
        model = model_class(inputs, keras.layers.Dense(3)(Centers()(hidden)))
        model.compile("adam", of_columns)
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    )


def test_even_batches_with_a_sum_in_a_loop_are_traced_once(strategy):
    traced = []

    class Looping(keras.layers.Layer):
        def call(self, inputs):
            traced.append(len(inputs.shape))
            replica = unison.get_replica_context()
            if replica is None:
                return inputs
            return jax.lax.fori_loop(
                0, 2, lambda _, x: x + replica.all_reduce("SUM", ops.mean(inputs)), inputs
            )

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Looping(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    traced.clear()
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    assert len(traced) == 2  # by Keras, to see that the model is built, and as a step


class Peak(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="peak")
        self.peak = self.add_variable((), "zeros", name="peak")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.peak.assign(ops.maximum(self.peak, ops.max(y_pred)))

    def result(self):
        return self.peak + 0.0


def test_sum_by_hand_where_a_step_needs_examples_is_an_error_on_an_idle_replica(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Centers(), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=[Peak()])
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    with pytest.raises(RuntimeError, match="A replica has no examples of a batch"):
        model.fit(X[:3], Y[:3], batch_size=3, verbose=0)
