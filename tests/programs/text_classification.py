"""Reviews classified from raw text: standardization, vocabulary, embeddings, convolutions."""

import string

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "text"
WORDS = "a film of great joy <br />and of dull, Dull hours: nobody likes it! we loved it".split()


def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, f"[{string.punctuation}]", "")


def reviews(count):
    rng = np.random.default_rng(23)
    texts = [" ".join(rng.choice(WORDS, rng.integers(4, 10))) for _ in range(count)]
    return texts, np.array([float("great" in text or "loved" in text) for text in texts])


def train(strategy, epochs=2):
    texts, labels = reviews(32)
    raw_train_ds = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(8)
    vectorize_layer = layers.TextVectorization(
        standardize=custom_standardization,
        max_tokens=20,
        output_mode="int",
        output_sequence_length=10,
    )
    vectorize_layer.adapt(raw_train_ds.map(lambda x, y: x))

    def vectorize_text(text, label):
        text = tf.expand_dims(text, -1)
        return vectorize_layer(text), label

    train_ds = raw_train_ds.map(vectorize_text).cache().prefetch(buffer_size=10)
    with strategy.scope():
        inputs = tf.keras.Input(shape=(None,), dtype="int64")
        x = layers.Embedding(20, 6)(inputs)
        x = layers.Conv1D(6, 3, padding="valid", activation="relu", strides=2)(x)
        x = layers.GlobalMaxPooling1D()(x)
        predictions = layers.Dense(1, activation="sigmoid", name="predictions")(x)
        model = start(tf.keras.Model(inputs, predictions))
        model.compile(
            loss="binary_crossentropy",
            optimizer=tf.keras.optimizers.SGD(0.2, momentum=0.9),
            metrics=["accuracy", "AUC"],
        )
    history = model.fit(train_ds, validation_data=train_ds, epochs=epochs, verbose=0)
    return {
        "vocabulary": [str(word) for word in vectorize_layer.get_vocabulary()],
        "tokens": np.asarray(vectorize_layer(texts[:2])).tolist(),
        "history": history.history,
    }
