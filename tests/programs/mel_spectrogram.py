"""Sounds classified by log mel spectrograms, computed by a layer in the model."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "audio"
REPLICAS = 2
TOLERANCE = 2e-3
BECAUSE = "each replica normalizes by its own examples; round-off is divided by small variances"


class LogMelSpectrogram(layers.Layer):
    def __init__(self, sample_rate=800, fft_size=64, hop_size=32, n_mels=8, **kwargs):
        super().__init__(**kwargs)
        self.fft_size = fft_size
        self.hop_size = hop_size
        self.mel_filterbank = tf.signal.linear_to_mel_weight_matrix(
            num_mel_bins=n_mels,
            num_spectrogram_bins=fft_size // 2 + 1,
            sample_rate=sample_rate,
            lower_edge_hertz=20.0,
            upper_edge_hertz=sample_rate / 2,
        )

    def call(self, waveforms):
        def _tf_log10(x):
            numerator = tf.math.log(x)
            denominator = tf.math.log(tf.constant(10, dtype=numerator.dtype))
            return numerator / denominator

        def power_to_db(magnitude, amin=1e-6, top_db=80.0):
            ref_value = tf.reduce_max(magnitude)
            log_spec = 10.0 * _tf_log10(tf.maximum(amin, magnitude))
            log_spec -= 10.0 * _tf_log10(tf.maximum(amin, ref_value))
            return tf.maximum(log_spec, tf.reduce_max(log_spec) - top_db)

        spectrograms = tf.signal.stft(
            waveforms,
            frame_length=self.fft_size,
            frame_step=self.hop_size,
            window_fn=tf.signal.hamming_window,
            pad_end=True,
        )
        magnitude_spectrograms = tf.abs(spectrograms)
        mel_spectrograms = tf.matmul(tf.square(magnitude_spectrograms), self.mel_filterbank)
        return tf.expand_dims(power_to_db(mel_spectrograms), 3)


def train(strategy, epochs=2):
    rng = np.random.default_rng(62)
    labels = rng.integers(0, 2, 16)
    times = np.arange(400) / 800
    waves = np.sin(2 * np.pi * times * (60 + 120 * labels[:, None])).astype("float32")
    waves += rng.normal(0, 0.05, waves.shape).astype("float32")
    with strategy.scope():
        inputs = keras.Input((400,))
        x = LogMelSpectrogram()(inputs)
        x = layers.BatchNormalization(axis=2)(x)
        x = layers.Conv2D(4, 3, padding="same", activation="elu")(x)
        x = layers.MaxPool2D(2, padding="same")(x)
        x = layers.Dense(2)(layers.Flatten()(x))
        model = start(keras.Model(inputs, layers.Softmax()(x)))
        model.compile(keras.optimizers.SGD(0.02), "sparse_categorical_crossentropy")
    history = model.fit(waves, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    mels = keras.Model(model.inputs, model.layers[1].output)
    return {"history": history.history, "mels": mels(waves[:1])[0, 3, :, 0]}
