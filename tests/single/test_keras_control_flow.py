"""Python's control flow over tensors in layers, models and steps, trained by Keras' loops."""

import contextlib

import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.tf import keras


class Bounded(keras.layers.Layer):
    """Doubles large outputs, and lowers them step by step."""

    def __init__(self, converts=True):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.converts = converts

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        if self.converts:
            if tf.reduce_mean(y) > 0.0:
                y = y * 2.0
            for _ in tf.range(3):
                if tf.reduce_sum(y) < -5.0:
                    break
                y = y - 0.1
            return y
        y = tf.where(tf.reduce_mean(y) > 0.0, y * 2.0, y)
        for _ in range(3):
            y = tf.where(tf.reduce_sum(y) < -5.0, y, y - 0.1)
        return y


class Careful(keras.Model):
    """Trains by a step of its own, which leaves out batches with a small loss."""

    def __init__(self, converts=True):
        super().__init__()
        self.inner = Bounded(converts)
        self.out = keras.layers.Dense(1)
        self.converts = converts

    def build(self, shape):
        self.inner.build(shape)
        self.out.build((None, 3))
        self.built = True

    def call(self, x):
        return self.out(self.inner(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.converts:
            scale = 1.0
            if loss < 0.5:
                scale = 0.0
        else:
            scale = tf.where(loss < 0.5, 0.0, 1.0)
        self.optimizer.apply_gradients(
            zip([scale * each for each in gradients], self.trainable_variables, strict=True)
        )
        return {"mean": tf.reduce_mean(self(x))}


def functional(converts):
    return keras.Sequential([keras.Input((4,)), Bounded(converts), keras.layers.Dense(1)])


DATA = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
LABELS = DATA[:, :1] * 2.0 + 1.0


@pytest.mark.parametrize("replicas", [None, 1, 2])
@pytest.mark.parametrize("make", [functional, Careful], ids=["layer", "step"])
def test_it_trains_evaluates_and_predicts_like_the_model_without_it(make, replicas):
    results = []
    for converts in (True, False):
        devices = [f"CPU:{index}" for index in range(replicas or 1)]
        scope = unison.MirroredStrategy(devices).scope() if replicas else contextlib.nullcontext()
        keras.utils.set_random_seed(1)
        with scope:
            model = make(converts)
            model.compile("sgd", "mse")
        history = model.fit(DATA, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append(
            (
                *(value for values in history.values() for value in values),
                *np.ravel(model.evaluate(DATA, LABELS, batch_size=8, verbose=0)),
                *np.ravel(model.predict(DATA, batch_size=8, verbose=0)),
                *(number for weight in model.get_weights() for number in weight.ravel()),
            )
        )
    np.testing.assert_allclose(*results, rtol=1e-5)  # XLA fuses the two programs differently


def test_a_model_is_converted_inside_a_loop_of_ones_own():
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = functional(True)
    results = strategy.run(lambda x: model(x), (DATA[:4],))
    reference = functional(False)
    reference.set_weights(model.get_weights())
    np.testing.assert_allclose(results.values[0], reference(DATA[:4]), rtol=1e-5)


def test_a_layer_may_have_a_loop_of_a_number_of_rounds_that_it_computes():
    class Halved(keras.layers.Layer):
        def call(self, x):
            rounds = 0
            while tf.reduce_max(x) > 1.0:
                tf.autograph.experimental.set_loop_options(maximum_iterations=8)
                x = x / 2.0
                rounds += 1
            return x * tf.cast(rounds, x.dtype)

    strategy = unison.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        dense = keras.layers.Dense(2, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((4,)), dense, Halved()])
        model.compile("sgd", "mse")
    given = np.full((2, 4), 3.0, np.float32)
    assert model.predict(given, verbose=0).tolist() == [[0.75 * 4] * 2] * 2  # 12 is halved 4 times
    model.fit(given, given[:, :2], verbose=0)


def test_the_objects_are_as_they_were_afterwards():
    strategy = unison.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = functional(True)
        model.compile("sgd", "mse")
    model.fit(DATA, LABELS, batch_size=8, verbose=0)
    for layer in model._flatten_layers():
        assert "call" not in vars(layer)


def test_an_error_in_a_layer_names_the_line():
    class Lists(keras.layers.Layer):
        def call(self, x):
            return x * [1.0, 2.0][tf.argmax(x[0])]

    strategy = unison.MirroredStrategy(["CPU:0"])
    with strategy.scope(), pytest.raises(TypeError, match=f"{__file__}:.*Python needs the value"):
        keras.Sequential([keras.Input((2,)), Lists()])
