"""Uncertainty from dropout that stays on when the model predicts."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "structured data"
CHANCE = "dropout draws its masks"


class MonteCarloDropout(keras.layers.Dropout):
    def call(self, inputs, training=None):
        return super().call(inputs, training=True)


def train(strategy, epochs=8):
    rng = np.random.default_rng(43)
    x = rng.uniform(-1, 1, (32, 2)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, activation="relu")])
        model.add(MonteCarloDropout(0.2))
        model.add(keras.layers.Dense(1))
        start(model)
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0)
    samples = tf.stack([model(x[:4]) for _ in range(12)])
    deviation = tf.math.reduce_std(samples, axis=0)
    return {
        "falls": history.history["loss"][-1] < 0.5 * history.history["loss"][0],
        "deviates": bool(tf.reduce_all(deviation > 0.0)),
        "shape": list(samples.shape),
    }
