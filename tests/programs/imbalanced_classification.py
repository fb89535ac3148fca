"""Fraud detection: class weights, an initial bias, and metrics of confusion."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "structured data"


def train(strategy, epochs=3):
    rng = np.random.default_rng(40)
    targets = (rng.uniform(size=(48, 1)) < 0.2).astype("uint8")
    features = (rng.normal(size=(48, 5)) + targets).astype("float32")
    mean, std = np.mean(features, axis=0), np.std(features, axis=0)
    features = (features - mean) / std
    counts = np.bincount(targets[:, 0])
    with strategy.scope():
        output_bias = keras.initializers.Constant(np.log(counts[1] / counts[0]))
        model = keras.Sequential(
            [
                keras.Input(shape=(5,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dense(1, activation="sigmoid", bias_initializer=output_bias),
            ]
        )
        start(model)
        metrics = [
            keras.metrics.FalseNegatives(name="fn"),
            keras.metrics.FalsePositives(name="fp"),
            keras.metrics.TrueNegatives(name="tn"),
            keras.metrics.TruePositives(name="tp"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.AUC(name="prc", curve="PR"),
        ]
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=metrics
        )
    history = model.fit(
        features,
        targets,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        validation_data=(features[:16], targets[:16]),
        class_weight={0: 1.0 / counts[0], 1: 1.0 / counts[1]},
        verbose=0,
    )
    bias = tf.convert_to_tensor(model.layers[-1].bias)
    return {"history": history.history, "bias": bias}
