"""FNet: tokens mixed by Fourier transforms in the place of attention."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"


class FNetEncoder(layers.Layer):
    def __init__(self, embed_dim, dense_dim, **kwargs):
        super().__init__(**kwargs)
        self.dense_proj = keras.Sequential(
            [layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()

    def call(self, inputs):
        inp_complex = tf.cast(inputs, tf.complex64)
        fft = tf.math.real(tf.signal.fft2d(inp_complex))
        proj_input = self.layernorm_1(inputs + fft)
        return self.layernorm_2(proj_input + self.dense_proj(proj_input))


def train(strategy, epochs=2):
    rng = np.random.default_rng(32)
    tokens = rng.integers(0, 12, (16, 8))
    labels = tokens.max(axis=1) // 4
    with strategy.scope():
        inputs = keras.Input((8,), dtype="int32")
        x = layers.Embedding(12, 8)(inputs)
        for _ in range(2):
            x = FNetEncoder(8, 12)(x)
        x = layers.GlobalAveragePooling1D()(x)
        model = start(keras.Model(inputs, layers.Dense(3, activation="softmax")(x)))
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "sparse_categorical_crossentropy")
    history = model.fit(tokens, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "predicted": model.predict(tokens[:2], verbose=0)}
