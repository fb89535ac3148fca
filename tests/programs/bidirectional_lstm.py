"""Sequences of different lengths through masked bidirectional LSTMs."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"


def train(strategy, epochs=2):
    rng = np.random.default_rng(25)
    sequences = [rng.integers(1, 15, rng.integers(2, 9)) for _ in range(16)]
    labels = np.array([[float(sequence.sum() % 2)] for sequence in sequences])
    x = keras.preprocessing.sequence.pad_sequences(sequences, padding="post", maxlen=8)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(shape=(None,), dtype="int32"),
                layers.Embedding(15, 6, mask_zero=True),
                layers.Bidirectional(layers.LSTM(5, return_sequences=True)),
                layers.Bidirectional(layers.GRU(4), merge_mode="sum"),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        start(model)
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x, labels)).batch(8)
    history = model.fit(dataset, epochs=epochs, verbose=0)
    longer = np.pad(x[:3], [(0, 0), (0, 3)])
    return {"history": history.history, "of more padding": model.predict(longer, verbose=0)}
