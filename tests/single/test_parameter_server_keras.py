"""Keras models whose variables are on parameter servers."""

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.data import Dataset
from unison.keras.step import CompiledStep
from unison.parameter_server import FixedShardsPartitioner


def examples(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32"))


def compiled(optimizer="sgd", **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", metrics=["mae"], **options)
    return model


def test_fit_with_one_worker_equals_fit_on_one_device(started):
    x, y = examples()
    dataset = Dataset.from_tensor_slices((x, y)).batch(16).repeat()
    with unison.OneDeviceStrategy("CPU:0").scope():
        model = compiled("adam")
    expected = model.fit(dataset, epochs=3, steps_per_epoch=4, verbose=0).history
    strategy, _ = started(servers=2)
    with strategy.scope():
        model_on_servers = compiled("adam")
    history = model_on_servers.fit(dataset, epochs=3, steps_per_epoch=4, verbose=0).history
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for own, other in zip(model_on_servers.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        model_on_servers.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        model_on_servers.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_fit_is_traced_once(started):
    x, y = examples()
    strategy, coordinator = started(workers=1)
    with strategy.scope():
        model = compiled()
    for _ in range(3):
        model.fit(x, y, batch_size=16, verbose=0)
    assert int(model.optimizer.iterations) == 12
    assert coordinator.trace_count == 1


@pytest.mark.soak  # workers that are threads of one process wait long for each other on few cores
def test_several_workers_train_with_callbacks_and_validation(started, tmp_path):
    x, y = examples()
    strategy, coordinator = started(workers=2, partitioner=FixedShardsPartitioner(2), servers=2)
    with strategy.scope():
        model = compiled(keras.optimizers.SGD(0.05), steps_per_execution=5)
    before, _ = model.evaluate(x, y, verbose=0)
    epochs = []
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=4,
        steps_per_epoch=20,
        validation_data=(x, y),
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(logs)),
        ],
    ).history
    assert [set(logs) for logs in epochs] == [{"loss", "mae", "val_loss", "val_mae"}] * 4
    assert history["val_loss"][-1] < 0.2 * before
    assert int(model.optimizer.iterations) == 80
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5
    )
    assert coordinator.trace_count == 1


def test_a_dataset_creator_trains_and_evaluates_on_the_workers(started):
    x, y = examples()
    strategy, _ = started(workers=2)

    def make(context):
        batch_size = context.get_per_replica_batch_size(16)
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch_size)

    creator = tf.keras.utils.experimental.DatasetCreator(make)
    with strategy.scope():
        model = compiled()
    history = model.fit(creator, epochs=2, steps_per_epoch=10, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    on_workers = model.evaluate(creator, steps=8, return_dict=True, verbose=0)
    assert on_workers.keys() == {"loss", "mae"}
    with pytest.raises(ValueError, match="needs steps"):
        model.evaluate(creator)


def test_a_step_that_assigns_runs_on_the_workers(started):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = examples()
    strategy, _ = started()
    with strategy.scope():
        model = Model()
        model.compile("sgd", loss="mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()
    before = model.evaluate(x, y, verbose=0)
    model.fit(dataset, epochs=1, steps_per_epoch=30, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before


def test_fit_without_a_number_of_steps_is_refused(started):
    x, y = examples()
    strategy, _ = started()
    with strategy.scope():
        model = compiled()
    dataset = Dataset.from_tensor_slices((x, y)).batch(16)
    with pytest.raises(ValueError, match="needs steps_per_epoch"):
        model.fit(dataset)
    with pytest.raises(ValueError, match="validation_split divides arrays"):
        model.fit(dataset, steps_per_epoch=1, validation_split=0.5)
    weighted = Dataset.from_tensor_slices((x, y, y[:, 0])).batch(16).repeat()
    with pytest.raises(ValueError, match="with sample weights"):
        model.fit(weighted, steps_per_epoch=1, class_weight={0: 2.0})


@pytest.mark.parametrize("as_dataset", [False, True])
def test_classes_have_weights(started, as_dataset):
    x, _ = examples(16)
    y = (x[:, :1] > 0).astype("int32")
    weights = {0: 0.5, 1: 3.0}
    arguments = {"x": x, "y": y, "batch_size": 16, "shuffle": False}
    if as_dataset:
        arguments = {"x": Dataset.from_tensor_slices((x, y)).batch(16).repeat()}
    histories = []
    strategy, _ = started()
    for each in (unison.OneDeviceStrategy("CPU:0"), strategy):
        with each.scope():
            model = compiled()
        history = model.fit(
            **arguments, steps_per_epoch=1, epochs=2, class_weight=weights, verbose=0
        ).history
        histories.append(history)
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-5)


def test_the_last_arrays_validate(started):
    x, y = examples(16)
    strategy, _ = started()
    with strategy.scope():
        model = compiled(keras.optimizers.SGD(0.0))
    history = model.fit(x, y, validation_split=0.25, batch_size=4, verbose=0).history
    expected = model.evaluate(x[12:], y[12:], verbose=0)
    assert history["val_loss"] == pytest.approx([expected[0]], rel=1e-5)


def test_what_workers_train_during_an_evaluation_is_kept(started, monkeypatch):
    x, y = examples()
    strategy, coordinator = started()
    with strategy.scope():
        model = compiled()
        count = unison.Variable(0)
    model.fit(x, y, verbose=0)
    before = model.layers[0].kernel.numpy()

    def step():
        model.layers[0].kernel.assign_add(np.ones((4, 8), np.float32))
        count.assign_add(1)

    def train_and_evaluate(*args):
        coordinator.schedule(step)
        coordinator.join()
        return evaluate(*args)

    evaluate = CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", train_and_evaluate)
    model.evaluate(x, y, batch_size=16, verbose=0)
    assert int(count) == 4
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), before + 4, rtol=1e-6)


def test_averages_replace_the_weights_at_the_end_of_fit(started):
    x, y = examples()
    strategy, _ = started()
    weights = []
    for each in (unison.OneDeviceStrategy("CPU:0"), strategy):
        with each.scope():
            model = compiled(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for own, other in zip(*weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_layers_list_the_shards_of_their_weights(started):
    strategy, _ = started(servers=2, partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        layer = tf.keras.layers.Embedding(7, 3)
        layer.build()
    assert [tuple(weight.shape) for weight in layer.weights] == [(4, 3), (3, 3)]
    layer.set_weights([np.ones((4, 3)), np.zeros((3, 3))])
    np.testing.assert_array_equal(layer.embeddings.numpy().sum(axis=1), [3, 3, 3, 3, 0, 0, 0])


def test_a_variable_in_a_layer_has_its_value_at_each_step(started):
    class Times(keras.layers.Layer):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def call(self, x):
            return x * self.factor

    x = np.ones((8, 3), "float32")
    strategy, _ = started(workers=1)
    with strategy.scope():
        factor = tf.Variable(1.0)
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), Times(factor), dense])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    for value in (1.0, 2.0, 3.0):
        factor.assign(value)
        assert model.fit(x, 0 * x[:, :1], verbose=0).history["loss"] == [9 * value**2]
        assert model.evaluate(x, 0 * x[:, :1], verbose=0) == 9 * value**2
        assert model.predict(x, verbose=0)[0] == 3 * value
