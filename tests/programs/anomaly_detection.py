"""Anomalies of a series found by the error of a convolutional autoencoder."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "time series"
STEPS = 12


def create_sequences(values, time_steps=STEPS):
    return np.stack([values[i : i + time_steps] for i in range(len(values) - time_steps + 1)])


def train(strategy, epochs=3):
    series = np.sin(np.arange(43) / 3)[:, None].astype("float32")
    x_train = create_sequences((series - series.mean()) / series.std())
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input(shape=(STEPS, 1)),
                layers.Conv1D(8, kernel_size=5, padding="same", strides=2, activation="relu"),
                layers.Dropout(rate=0.0),
                layers.Conv1D(4, kernel_size=5, padding="same", strides=2, activation="relu"),
                layers.Conv1DTranspose(4, 5, padding="same", strides=2, activation="relu"),
                layers.Conv1DTranspose(8, 5, padding="same", strides=2, activation="relu"),
                layers.Conv1DTranspose(filters=1, kernel_size=5, padding="same"),
            ]
        )
        start(model)
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    history = model.fit(x_train, x_train, epochs=epochs, batch_size=8, shuffle=False, verbose=0)

    def errors_of(x):
        return tf.reduce_mean(tf.abs(model.predict(x, verbose=0) - x), axis=[1, 2]).numpy()

    # By the same operations: the largest of the usual errors is not above itself by round-off.
    threshold = errors_of(x_train).max()
    strange = x_train.copy()
    strange[4, 5] += 5
    anomalies = tf.where(errors_of(strange) > threshold)[:, 0]
    return {"history": history.history, "threshold": threshold, "anomalies": anomalies}
