"""WaveNet: causal dilated convolutions with gates, and mu-law samples as classes."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "time series"
LEVELS = 16


def mu_law_encode(audio, levels):
    mu = tf.cast(levels - 1, tf.float32)
    magnitude = tf.math.log1p(mu * tf.minimum(tf.abs(audio), 1.0)) / tf.math.log1p(mu)
    return tf.cast((tf.sign(audio) * magnitude + 1) / 2 * mu + 0.5, tf.int32)


def mu_law_decode(output, levels):
    mu = levels - 1
    signal = 2 * (tf.cast(output, tf.float32) / mu) - 1
    return tf.sign(signal) / mu * (tf.pow(1.0 + mu, tf.abs(signal)) - 1)


class GatedBlock(layers.Layer):
    def __init__(self, filters, dilation):
        super().__init__()
        self.filter_conv = layers.Conv1D(filters, 2, padding="causal", dilation_rate=dilation)
        self.gate_conv = layers.Conv1D(filters, 2, padding="causal", dilation_rate=dilation)
        self.projection = layers.Conv1D(filters, 1)

    def call(self, x):
        gated = tf.tanh(self.filter_conv(x)) * tf.sigmoid(self.gate_conv(x))
        skip = self.projection(gated)
        return x + skip, skip


def train(strategy, epochs=2):
    rng = np.random.default_rng(47)
    waves = np.sin(np.arange(17) * rng.uniform(0.3, 0.9, (16, 1))).astype("float32")
    encoded = mu_law_encode(tf.constant(waves), LEVELS)
    dataset = tf.data.Dataset.from_tensor_slices(encoded)
    dataset = dataset.map(lambda wave: (tf.one_hot(wave[:-1], LEVELS), wave[1:])).batch(8)
    with strategy.scope():
        inputs = tf.keras.Input((None, LEVELS))
        x, skips = layers.Conv1D(6, 1)(inputs), []
        for dilation in (1, 2, 4):
            x, skip = GatedBlock(6, dilation)(x)
            skips.append(skip)
        x = layers.Activation("relu")(layers.Add()(skips))
        model = start(tf.keras.Model(inputs, layers.Conv1D(LEVELS, 1)(x)))
        model.compile(
            tf.keras.optimizers.Adam(0.01),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    window = tf.one_hot(encoded[:1, :8], LEVELS)
    following = tf.argmax(model(window)[:, -1], axis=-1)
    return {
        "history": history.history,
        "encoded": encoded[0],
        "decoded": mu_law_decode(encoded[0, :4], LEVELS),
        "following": following,
    }
