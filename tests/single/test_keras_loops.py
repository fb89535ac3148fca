"""`fit`, `evaluate`, `predict`, their `_on_batch` forms and callbacks, as without a strategy."""

import csv
import logging

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax.trainer import JAXTrainer

import unison
from keras_comparison import assert_close, mirrored, regression_data

X, Y = regression_data(35)
FIT = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}


def build(**compile_arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"], **compile_arguments)
    return model


@pytest.fixture(scope="module")
def alone():
    """A model without a strategy; no test changes it."""
    return build()


@pytest.fixture(scope="module")
def together():
    """The same on 4 replicas; no test changes it."""
    with mirrored(4).scope():
        return build()


def built_under(strategy, **compile_arguments):
    with strategy.scope():
        return build(**compile_arguments)


# -- prediction and evaluation -------------------------------------------------------------


@pytest.mark.parametrize("examples", [32, 35, 17, 3, 1])
def test_prediction_keeps_order_and_length(examples, alone, together):
    expected = alone.predict(X[:examples], batch_size=16, verbose=0)
    assert_close(together.predict(X[:examples], batch_size=16, verbose=0), expected)


def test_prediction_is_the_models_call(together):
    assert_close(together.predict(X, verbose=0), np.asarray(together(X)))


def test_several_outputs_of_uneven_batches_keep_their_structure(four_replicas):
    with four_replicas.scope():
        inputs = keras.Input((6,))
        outputs = {"twice": 2 * inputs, "pair": (inputs, keras.ops.sum(inputs, axis=1))}
        model = keras.Model(inputs, outputs)
    predicted = model.predict(X, batch_size=10, verbose=0)
    assert_close(predicted, {"twice": 2 * X, "pair": (X, X.sum(axis=1))})


def test_predict_on_batch_keeps_order_and_length(alone, together):
    assert_close(together.predict_on_batch(X[:5]), alone.predict_on_batch(X[:5]))


def test_prediction_of_a_model_that_never_saw_an_input(two_replicas):
    with two_replicas.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
    predicted = model.predict(X[:5], verbose=0)
    assert_close(predicted, np.asarray(model(X[:5])))


def test_prediction_takes_several_steps_a_call(two_replicas):
    model = built_under(two_replicas, steps_per_execution=3)
    assert_close(model.predict(X, batch_size=8, verbose=0), np.asarray(model(X)))


def test_evaluation_returns_a_list_in_the_order_of_one_device(alone, together):
    expected = alone.evaluate(X, Y, batch_size=16, verbose=0)
    assert_close(together.evaluate(X, Y, batch_size=16, verbose=0), expected)


def test_evaluation_returns_a_dictionary(alone, together):
    expected = alone.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    assert_close(together.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True), expected)


def test_test_on_batch_returns_what_one_device_does(alone, together):
    assert_close(together.test_on_batch(X[:7], Y[:7]), alone.test_on_batch(X[:7], Y[:7]))


def test_train_on_batch_trains_as_on_one_device(four_replicas):
    models = build(), built_under(four_replicas)
    expected, received = (
        [model.train_on_batch(X[:size], Y[:size], return_dict=True) for size in (8, 3, 8)]
        for model in models
    )
    assert_close(received, expected)
    assert_close(models[1].get_weights(), models[0].get_weights())


# -- weights -------------------------------------------------------------------------------


def test_weights_can_be_set_before_training(two_replicas):
    model = built_under(two_replicas)
    weights = [weight + 1.0 for weight in model.get_weights()]
    model.set_weights(weights)
    np.testing.assert_equal(model.get_weights(), weights)


def test_weights_set_between_two_fits_are_trained_on(two_replicas):
    model = built_under(two_replicas)
    weights = model.get_weights()
    model.fit(X, Y, **FIT)
    fresh = built_under(two_replicas)
    model.set_weights(weights)
    for variable, start in zip(model.optimizer.variables, fresh.optimizer.variables, strict=False):
        variable.assign(start)
    for variable in model.optimizer.variables[2:]:
        variable.assign(np.zeros(variable.shape))
    np.testing.assert_equal(model.fit(X, Y, **FIT).history, fresh.fit(X, Y, **FIT).history)


# -- callbacks -----------------------------------------------------------------------------


def compared(strategy, make_callbacks, **fit_arguments):
    """Returns the models and histories of two fits with callbacks, without a strategy first."""
    models = build(), built_under(strategy)
    return models, [
        model.fit(X, Y, callbacks=make_callbacks(), **{**FIT, **fit_arguments}).history
        for model in models
    ]


def test_early_stopping_stops_and_restores_the_best_weights(two_replicas):
    def callbacks():
        return [
            keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
        ]

    models, (expected, received) = compared(two_replicas, callbacks, epochs=6)
    assert len(received["loss"]) == 2
    assert_close(received, expected)
    assert_close(models[1].get_weights(), models[0].get_weights())


def test_learning_rate_callbacks_act_on_all_replicas(two_replicas):
    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
            keras.callbacks.ReduceLROnPlateau("loss", mode="max", patience=1, factor=0.3),
        ]

    models, (expected, received) = compared(two_replicas, callbacks, epochs=4)
    assert_close(received, expected)
    assert_close(models[1].get_weights(), models[0].get_weights())


def test_checkpoint_holds_the_weights_of_its_epoch(two_replicas, tmp_path):
    path = str(tmp_path / "{epoch}.weights.h5")
    model = built_under(two_replicas)
    at_epoch_end = []
    model.fit(
        X,
        Y,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: at_epoch_end.append(model.get_weights())
            ),
        ],
        **FIT,
    )
    loaded = build()
    for epoch, weights in enumerate(at_epoch_end, start=1):
        loaded.load_weights(path.format(epoch=epoch))
        np.testing.assert_equal(loaded.get_weights(), weights)


class WeightsAfterEachStep(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((dict(logs), self.model.get_weights()))


def test_callback_sees_logs_and_weights_after_each_step(two_replicas):
    seen = []

    def callbacks():
        recorder = WeightsAfterEachStep()
        seen.append(recorder.seen)
        return [recorder]

    compared(two_replicas, callbacks)
    assert_close(seen[1], seen[0])


def test_lambda_that_closes_over_the_model_sees_the_weights_after_each_step(two_replicas):
    model = built_under(two_replicas)
    recorder = WeightsAfterEachStep()
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.get_weights())
    )
    model.fit(X, Y, callbacks=[record, recorder], **FIT)
    np.testing.assert_equal(seen, [weights for _, weights in recorder.seen])


def test_callback_that_changes_weights_between_steps_is_obeyed(two_replicas):
    model = built_under(two_replicas)

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.set_weights([np.zeros_like(w) for w in self.model.get_weights()])

    model.fit(X, Y, callbacks=[Reset()], **FIT)
    assert all(not weight.any() for weight in model.get_weights())


def test_callback_that_stops_within_an_epoch_is_obeyed(two_replicas):
    class StopAfterTwo(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.stop_training = True

    model = built_under(two_replicas)
    model.fit(X, Y, callbacks=[StopAfterTwo()], **FIT)
    assert int(model.optimizer.iterations.numpy()) == 2


def test_csv_logger_writes_the_history(two_replicas, tmp_path):
    path = tmp_path / "log.csv"
    model = built_under(two_replicas)
    history = model.fit(X, Y, callbacks=[keras.callbacks.CSVLogger(str(path))], **FIT).history
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert_close([float(row["loss"]) for row in rows], history["loss"])


def test_history_holds_python_numbers(two_replicas):
    history = built_under(two_replicas).fit(X, Y, **FIT).history
    assert {type(value) for values in history.values() for value in values} == {float}


def test_terminate_on_nan_stops_the_training(two_replicas):
    x = X.copy()
    x[20] = np.nan
    model = built_under(two_replicas)
    callback = keras.callbacks.TerminateOnNaN()
    history = model.fit(x, Y, callbacks=[callback], **FIT).history
    assert len(history["loss"]) == 1
    assert np.isnan(history["loss"][0])


def test_progress_bar_shows_the_metrics(two_replicas, capsys):
    built_under(two_replicas).fit(X, Y, **{**FIT, "verbose": 2})
    assert "mae" in capsys.readouterr().out


# -- run_eagerly ---------------------------------------------------------------------------


def test_run_eagerly_compiles_all_the_same_and_says_so_once(two_replicas, caplog):
    model = built_under(two_replicas, run_eagerly=True)
    with caplog.at_level(logging.WARNING, logger="unison"):
        history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
    assert ["run_eagerly" in record.message for record in caplog.records] == [True]
    plain = built_under(two_replicas).fit(X, Y, validation_data=(X, Y), **FIT).history
    assert history == plain


def test_run_eagerly_is_eager_on_one_replica():
    seen = []

    class Looking(keras.Sequential):
        def train_step(self, state, data):
            seen.append(isinstance(data[0], jax.core.Tracer))
            return super().train_step(state, data)

    with unison.OneDeviceStrategy("CPU:1").scope():
        model = Looking([keras.Input((3,)), keras.layers.BatchNormalization()])
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    x = np.ones((8, 3), "float32")
    model.fit(x, x, batch_size=4, verbose=0)
    assert seen == [False, False]
    assert model.predict(x, verbose=0).shape == (8, 3)


def test_batch_logs_are_those_of_the_metrics_compiled_last(two_replicas):
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")
    for metric in ("mae", "mse"):
        with two_replicas.scope():
            model.compile("sgd", "mse", metrics=[metric])
        assert set(model.train_on_batch(x, y, return_dict=True)) == {"loss", metric}


class TrainedLayer(JAXTrainer, keras.layers.Layer):
    """A layer that has Keras' trainer as a base, which is no model."""

    def __init__(self):
        keras.layers.Layer.__init__(self)
        JAXTrainer.__init__(self)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)


def test_a_layer_with_keras_trainer_trains_as_alone():
    def trained():
        layer = TrainedLayer()
        layer.compile("sgd", "mse", metrics=["mae"])
        history = layer.fit(X, Y, **FIT).history
        return [*history["loss"], *history["mae"], *layer.evaluate(X, Y, verbose=0)], layer

    expected, _ = trained()
    with mirrored(2).scope():
        found, layer = trained()
    assert_close(found, expected)
    assert layer.predict(X, verbose=0).shape == (35, 1)
