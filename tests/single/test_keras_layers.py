"""Layers whose programs differ from Keras' own on the CPU, and low precision."""

import keras
import numpy as np
import pytest

import unison.tf as tf
from keras_comparison import (
    assert_close,
    class_data,
    on_four_replicas,
    regression_data,
    run_training,
    run_training_under,
)

pytestmark = on_four_replicas

GENERATOR = np.random.default_rng(3)
# Batches of 8, 8 and 3.
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


@pytest.mark.parametrize(
    "hidden",
    [
        lambda: [
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(5, 3, padding="same", strides=2),
        ],
        lambda: [
            keras.layers.DepthwiseConv2D(3, padding="same"),
            keras.layers.Conv2D(4, 3, dilation_rate=2, groups=2),
            keras.layers.AveragePooling2D(3, strides=2, padding="same"),
        ],
        lambda: [
            keras.layers.SeparableConv2D(4, 3),
            keras.layers.Conv2DTranspose(2, 3, strides=2),
            keras.layers.MaxPooling2D(3, strides=2, padding="same"),
        ],
    ],
    ids=["plain", "depthwise and dilated", "separable and transposed"],
)
def test_convolutions_train_as_on_one_device(hidden, assert_trains_as_alone):
    x = GENERATOR.normal(size=(19, 10, 10, 2)).astype("float32")
    labels = class_data(19)[1]

    def build():
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((10, 10, 2)), *hidden(), *head])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_trains_as_alone(build, lambda model: model.fit(x, labels, **FIT))


def test_transformer_block_trains_as_on_one_device(assert_trains_as_alone):
    tokens = GENERATOR.integers(0, 12, size=(19, 6))
    y = GENERATOR.normal(size=(19, 1)).astype("float32")

    def build():
        inputs = keras.Input((6,), dtype="int32")
        embedded = keras.layers.Embedding(12, 8)(inputs)
        attended = keras.layers.MultiHeadAttention(2, 4)(embedded, embedded)
        normalized = keras.layers.LayerNormalization()(embedded + attended)
        pooled = keras.layers.GlobalAveragePooling1D()(normalized)
        model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(build, lambda model: model.fit(tokens, y, **FIT))


# -- low precision -------------------------------------------------------------------------


def low_precision(policy, optimizer=None):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.05), "mse")
        return model

    return build


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_as_on_one_device_to_its_own_round_off(policy, strategy):
    x, y = regression_data(19)
    optimizer = None
    if policy == "mixed_float16":
        # A scale that float16 holds, where Keras' own (32768) would take steps to find one.
        def optimizer():
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), 128.0)

    build = low_precision(policy, optimizer)
    keras.utils.set_random_seed(0)
    alone = build()
    expected = alone.fit(x, y, **FIT).history
    together = run_training_under(strategy, build, lambda model: model.fit(x, y, **FIT))
    # bfloat16 has 8 bits: its unit in the last place is 0.4 %.
    np.testing.assert_allclose(together.result["loss"], expected["loss"], rtol=1e-2)
    for received, weight in zip(together.weights, alone.get_weights(), strict=True):
        np.testing.assert_allclose(received, weight, rtol=1e-2, atol=1e-2)


def overflowing_model():
    """A float16 model whose gradient overflows where an input is large."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="mixed_float16")])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=1024.0, dynamic_growth_steps=2
    )
    model.compile(optimizer, "mse")
    return model


def test_overflow_on_one_replica_skips_the_step_on_all(strategy):
    with strategy.scope():
        model = overflowing_model()
    x, y = regression_data(8)
    model.train_on_batch(x, y)
    before = model.get_weights()
    x[-1] = 6e4  # the last replica's
    model.train_on_batch(x, y)
    np.testing.assert_equal(model.get_weights(), before)


class Scales(keras.callbacks.Callback):
    """Notes the loss scale and the number of updates after each step."""

    def on_train_begin(self, logs=None):
        self.path = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        iterations = optimizer.inner_optimizer.iterations
        self.path.append((float(optimizer.dynamic_scale.numpy()), int(iterations.numpy())))


class Taped(tf.keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [keras.Model, Taped], ids=["keras-step", "own-step"])
def test_steps_are_skipped_where_those_of_one_device_are(strategy, kind):
    """A gradient may overflow although each replica's part of it fits; the scale is Keras' own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32) * 10
    y = x.sum(axis=1, keepdims=True) * 10

    def build():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(16, activation="relu", dtype="mixed_float16")(inputs)
        model = kind(inputs, keras.layers.Dense(1, dtype="mixed_float16")(hidden))
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-5)), "mse")
        return model

    def path(model):
        scales = Scales()
        model.fit(x, y, 16, 5, shuffle=False, verbose=0, callbacks=[scales])
        return scales.path

    alone = run_training(build, path).result
    assert alone[-1][1] > 3
    assert run_training_under(strategy, build, path).result == alone


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_under_a_global_policy_keras_scales_as_on_one_device(strategy, optimizer):
    """Keras wraps an optimizer that is given by its name."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = 5 * x.sum(axis=1, keepdims=True)

    def build():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(16, activation="relu")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer, "mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        return model

    def path(model):
        scales = Scales()
        history = model.fit(x, y, 16, 4, shuffle=False, verbose=0, callbacks=[scales]).history
        return scales.path, history["loss"]

    keras.config.set_dtype_policy("mixed_float16")
    try:
        steps, losses = run_training(build, path).result
        found, found_losses = run_training_under(strategy, build, path).result
    finally:
        keras.config.set_dtype_policy("float32")
    assert steps[0][1] == 0  # the first step is skipped
    assert steps[-1][1] > 8
    assert found == steps
    np.testing.assert_allclose(found_losses, losses, rtol=5e-3)  # of float16


def test_overflow_halves_the_scale_once_and_finite_steps_double_it(strategy):
    with strategy.scope():
        model = overflowing_model()
    x, y = regression_data(8)
    scales = []
    for inputs in (np.full_like(x, 6e4), x, x[:3], x[:3]):
        model.train_on_batch(inputs, y[: len(inputs)])
        scales.append(float(model.optimizer.dynamic_scale.numpy()))
    assert_close(scales, [512.0, 512.0, 1024.0, 1024.0])
