"""Quantiles by the pinball loss, one output each, with a loss that is a class of its own."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "structured data"
QUANTILES = (0.1, 0.5, 0.9)


class PinballLoss(tf.keras.losses.Loss):
    def __init__(self, quantile, name=None):
        super().__init__(name=name or f"pinball_{quantile}")
        self.quantile = quantile

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        pinball = tf.maximum(self.quantile * error, (self.quantile - 1) * error)
        return tf.reduce_mean(pinball, axis=-1)


def coverage(y_true, y_pred):
    return tf.reduce_mean(tf.cast(y_true <= y_pred, tf.float32))


def train(strategy, epochs=3):
    rng = np.random.default_rng(41)
    x = rng.uniform(0, 3, (32, 1)).astype("float32")
    y = (np.sin(x) + rng.normal(size=x.shape) * 0.1 * x).astype("float32")
    with strategy.scope():
        inputs = tf.keras.Input((1,))
        hidden = tf.keras.layers.Dense(8, activation="swish")(inputs)
        outputs = [tf.keras.layers.Dense(1, name=f"q{int(100 * q)}")(hidden) for q in QUANTILES]
        model = start(tf.keras.Model(inputs, outputs))
        schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.9, staircase=True)
        model.compile(
            optimizer=tf.keras.optimizers.Nadam(schedule),
            loss=[PinballLoss(q) for q in QUANTILES],
            metrics=[[coverage], [coverage], [coverage]],
        )
    history = model.fit(x, [y, y, y], batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    predicted = tf.concat(model.predict(x[:3], verbose=0), axis=-1)
    return {"history": history.history, "predicted": predicted}
