"""Short sounds classified by their spectrograms, made in the pipeline; an exported module."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers, models

TASK = "audio"
LABELS = ["down", "no", "up"]


def get_spectrogram(waveform):
    spectrogram = tf.signal.stft(waveform, frame_length=64, frame_step=32)
    spectrogram = tf.abs(spectrogram)
    return spectrogram[..., tf.newaxis]


def make_spec_ds(ds):
    return ds.map(
        map_func=lambda audio, label: (get_spectrogram(audio), label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def squeeze(audio, labels):
    audio = tf.squeeze(audio, axis=-1)
    return audio, labels


class ExportModel(tf.Module):
    def __init__(self, model):
        self.model = model

    @tf.function
    def __call__(self, x):
        x = get_spectrogram(x)
        result = self.model(x, training=False)
        class_ids = tf.argmax(result, axis=-1)
        return {"predictions": result, "class_ids": class_ids}


def train(strategy, epochs=2):
    rng = np.random.default_rng(60)
    labels = rng.integers(0, 3, 16)
    times = np.arange(512) / 512
    waves = np.sin(2 * np.pi * times * (20 + 40 * labels[:, None])) + 0.1 * rng.normal(
        size=(16, 512)
    )
    dataset = tf.data.Dataset.from_tensor_slices((waves[..., None].astype("float32"), labels))
    dataset = make_spec_ds(dataset.batch(8).map(squeeze, tf.data.AUTOTUNE)).cache()
    example_spectrograms, _ = next(iter(dataset))
    norm_layer = layers.Normalization(axis=None)
    norm_layer.adapt(data=dataset.map(map_func=lambda spec, label: spec))
    with strategy.scope():
        model = models.Sequential(
            [
                layers.Input(shape=example_spectrograms.shape[1:]),
                layers.Resizing(12, 12),
                norm_layer,
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(len(LABELS)),
            ]
        )
        start(model)
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.01),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(dataset, validation_data=dataset, epochs=epochs, verbose=0)
    export = ExportModel(model)
    answer = export(tf.constant(waves[:2], tf.float32))
    return {
        "shape": list(example_spectrograms.shape),
        "history": history.history,
        "predictions": answer["predictions"],
        "words": [LABELS[index] for index in answer["class_ids"].numpy()],
    }
