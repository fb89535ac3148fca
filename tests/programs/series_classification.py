"""Series classified by a convolutional network, with checkpoints of the best weights."""

import os
import tempfile

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "time series"
REPLICAS = 2
TOLERANCE = 5e-3
BECAUSE = "each replica normalizes by its own examples; round-off is divided by small variances"


def make_model(input_shape):
    input_layer = keras.layers.Input(input_shape)
    x = input_layer
    for _ in range(2):
        x = keras.layers.Conv1D(filters=6, kernel_size=3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
    gap = keras.layers.GlobalAveragePooling1D()(x)
    return keras.models.Model(input_layer, keras.layers.Dense(2, activation="softmax")(gap))


def train(strategy, epochs=2):
    rng = np.random.default_rng(46)
    y = rng.integers(0, 2, 24)
    x = np.sin(np.arange(20) * (0.3 + 0.3 * y[:, None])) + 0.1 * rng.normal(size=(24, 20))
    x = x.reshape((24, 20, 1)).astype("float32")
    with strategy.scope():
        model = start(make_model((20, 1)))
        model.compile(
            optimizer=keras.optimizers.SGD(0.1),
            loss="sparse_categorical_crossentropy",
            metrics=["sparse_categorical_accuracy"],
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "best_model.keras")
        callbacks = [
            keras.callbacks.ModelCheckpoint(path, save_best_only=True, monitor="loss"),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=20),
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
        ]
        history = model.fit(
            x, y, batch_size=8, epochs=epochs, shuffle=False, callbacks=callbacks, verbose=0
        )
        with open(os.path.join(folder, "log.csv")) as log:
            columns = log.readline().strip().split(",")
        best = keras.models.load_model(path)
    kernels = [variable.numpy() for variable in best.trainable_variables[-2:]]
    equal = tf.reduce_all(kernels[0] == model.trainable_variables[-2])
    return {
        "history": history.history,
        "columns": sorted(columns),
        "kernels": kernels,
        "is the last": bool(equal),
    }
