"""Speech to text by the CTC loss, decoded greedily into characters."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "audio"
CHARACTERS = list("abcde '")
LENGTH, FRAMES, BINS = 4, 14, 17
char_to_num = keras.layers.StringLookup(vocabulary=CHARACTERS, oov_token="")
num_to_char = keras.layers.StringLookup(
    vocabulary=char_to_num.get_vocabulary(), oov_token="", invert=True
)


def encode_single_sample(wave, text):
    spectrogram = tf.signal.stft(wave, frame_length=32, frame_step=16, fft_length=32)
    spectrogram = tf.math.pow(tf.abs(spectrogram), 0.5)
    means = tf.math.reduce_mean(spectrogram, 1, keepdims=True)
    stddevs = tf.math.reduce_std(spectrogram, 1, keepdims=True)
    spectrogram = (spectrogram - means) / (stddevs + 1e-10)
    label = tf.strings.unicode_split(tf.strings.lower(text), input_encoding="UTF-8")
    return spectrogram, char_to_num(label)


def ctc_loss(y_true, y_pred):
    batch_len = tf.cast(tf.shape(y_true)[0], dtype="int32")
    input_length = tf.cast(tf.shape(y_pred)[1], dtype="int32")
    label_length = tf.cast(tf.shape(y_true)[1], dtype="int32")
    return tf.nn.ctc_loss(
        labels=tf.cast(y_true, tf.int32),
        logits=y_pred,
        label_length=label_length * tf.ones(shape=(batch_len,), dtype="int32"),
        logit_length=input_length * tf.ones(shape=(batch_len,), dtype="int32"),
        logits_time_major=False,
        blank_index=-1,
    )


def decode_batch_predictions(pred):
    paths = tf.argmax(pred, axis=-1).numpy()
    texts = []
    for path in paths:
        kept = [n for before, n in zip([-1, *path[:-1]], path) if n != before]
        kept = [n for n in kept if n < len(char_to_num.get_vocabulary())]
        texts.append(tf.strings.reduce_join(num_to_char(kept)).numpy().decode("utf-8"))
    return texts


def train(strategy, epochs=2):
    rng = np.random.default_rng(63)
    waves = rng.normal(size=(16, 16 * (FRAMES + 1))).astype("float32")
    texts = ["".join(rng.choice(CHARACTERS[:5], LENGTH)) for _ in range(16)]
    dataset = tf.data.Dataset.from_tensor_slices((waves, texts))
    dataset = dataset.map(encode_single_sample, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.padded_batch(8)
    with strategy.scope():
        input_spectrogram = layers.Input((None, BINS), name="input")
        x = layers.Bidirectional(layers.GRU(6, return_sequences=True))(input_spectrogram)
        output = layers.Dense(units=len(char_to_num.get_vocabulary()) + 1)(x)
        model = start(keras.Model(input_spectrogram, output))
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.02), loss=ctc_loss)
    history = model.fit(dataset, epochs=epochs, verbose=0)
    for spectrograms, labels in dataset.take(1):
        predicted = model.predict(spectrograms, verbose=0)
        target = tf.strings.reduce_join(num_to_char(labels[0])).numpy().decode("utf-8")
    return {
        "history": history.history,
        "target": target,
        "logits": predicted[0, :2],
        "decoded": decode_batch_predictions(predicted[:2]),
    }
