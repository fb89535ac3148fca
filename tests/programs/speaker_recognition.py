"""Speakers recognized by Fourier transforms of noisy speech, by residual convolutions."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "audio"
RATE = 64


def add_noise(audio, noises, scale=0.5):
    prop = tf.math.reduce_max(audio, axis=1) / tf.math.reduce_max(noises, axis=1)
    prop = tf.repeat(tf.expand_dims(prop, axis=1), tf.shape(audio)[1], axis=1)
    return audio + noises * prop * scale


def audio_to_fft(audio):
    audio = tf.squeeze(audio, axis=-1)
    fft = tf.signal.fft(tf.cast(tf.complex(real=audio, imag=tf.zeros_like(audio)), tf.complex64))
    fft = tf.expand_dims(fft, axis=-1)
    return tf.math.abs(fft[:, : (audio.shape[1] // 2), :])


def residual_block(x, filters, conv_num=2, activation="relu"):
    s = keras.layers.Conv1D(filters, 1, padding="same")(x)
    for _ in range(conv_num - 1):
        x = keras.layers.Conv1D(filters, 3, padding="same")(x)
        x = keras.layers.Activation(activation)(x)
    x = keras.layers.Conv1D(filters, 3, padding="same")(x)
    x = keras.layers.Add()([x, s])
    x = keras.layers.Activation(activation)(x)
    return keras.layers.MaxPool1D(pool_size=2, strides=2)(x)


def train(strategy, epochs=2):
    rng = np.random.default_rng(61)
    speakers = rng.integers(0, 3, 16)
    audios = np.sin(np.arange(RATE) * (0.3 + 0.4 * speakers[:, None]))[..., None]
    noises = rng.normal(size=audios.shape)
    dataset = tf.data.Dataset.from_tensor_slices(
        (audios.astype("float32"), noises.astype("float32"), speakers)
    ).batch(8)
    dataset = dataset.map(lambda x, noise, y: (add_noise(x, noise), y))
    dataset = dataset.map(lambda x, y: (audio_to_fft(x), y)).prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        inputs = keras.layers.Input(shape=(RATE // 2, 1), name="input")
        x = residual_block(inputs, 4, 2)
        x = residual_block(x, 6, 3)
        x = keras.layers.AveragePooling1D(pool_size=3, strides=3)(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dense(8, activation="relu")(x)
        outputs = keras.layers.Dense(3, activation="softmax", name="output")(x)
        model = start(keras.models.Model(inputs=inputs, outputs=outputs))
        model.compile(
            optimizer="Adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    history = model.fit(dataset, epochs=epochs, validation_data=dataset, verbose=0)
    spectra, _ = next(iter(dataset))
    return {"history": history.history, "spectrum": spectra[0, :6, 0]}
