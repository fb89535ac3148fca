"""An end-to-end memory network answers questions about stories."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
WORDS, STORY, QUERY = 12, 7, 3


def train(strategy, epochs=2):
    rng = np.random.default_rng(33)
    stories = rng.integers(1, WORDS, (16, STORY))
    queries = rng.integers(1, WORDS, (16, QUERY))
    answers = stories[:, 2]
    with strategy.scope():
        input_sequence = keras.Input((STORY,))
        question = keras.Input((QUERY,))
        input_encoder_m = keras.Sequential([layers.Embedding(WORDS, 6), layers.Dropout(0.0)])
        input_encoder_c = keras.Sequential([layers.Embedding(WORDS, QUERY)])
        question_encoder = keras.Sequential([layers.Embedding(WORDS, 6)])
        input_encoded_m = input_encoder_m(input_sequence)
        input_encoded_c = input_encoder_c(input_sequence)
        question_encoded = question_encoder(question)
        match = layers.Dot(axes=(2, 2))([input_encoded_m, question_encoded])
        match = layers.Activation("softmax")(match)
        response = layers.Permute((2, 1))(layers.add([match, input_encoded_c]))
        answer = layers.concatenate([response, question_encoded])
        answer = layers.LSTM(8)(answer)
        answer = layers.Activation("softmax")(layers.Dense(WORDS)(answer))
        model = start(keras.Model([input_sequence, question], answer))
        model.compile(
            optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    dataset = tf.data.Dataset.from_tensor_slices(((stories, queries), answers)).batch(8)
    return model.fit(dataset, epochs=epochs, validation_data=dataset.take(1), verbose=0).history
