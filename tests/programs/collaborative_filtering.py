"""Ratings by the dot product of embeddings, with biases and regularization."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "recommenders"
USERS, MOVIES = 8, 10


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        regularizer = keras.regularizers.l2(1e-3)
        self.user_embedding = layers.Embedding(
            num_users,
            embedding_size,
            embeddings_initializer="he_normal",
            embeddings_regularizer=regularizer,
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(
            num_movies, embedding_size, embeddings_regularizer=regularizer
        )
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        user_bias = self.user_bias(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        movie_bias = self.movie_bias(inputs[:, 1])
        dot_user_movie = tf.reduce_sum(user_vector * movie_vector, axis=-1, keepdims=True)
        x = dot_user_movie + user_bias + movie_bias
        return tf.nn.sigmoid(x)


def train(strategy, epochs=2):
    rng = np.random.default_rng(57)
    x = np.stack([rng.integers(0, USERS, 32), rng.integers(0, MOVIES, 32)], axis=-1)
    y = ((x.sum(axis=1) % 5) / 4).astype("float32")[:, None]
    with strategy.scope():
        model = RecommenderNet(USERS, MOVIES, 4)
        model(x[:2])
        start(model)
        model.compile(
            loss=keras.losses.BinaryCrossentropy(),
            optimizer=keras.optimizers.SGD(learning_rate=0.5, momentum=0.5),
        )
    history = model.fit(
        x[:24],
        y[:24],
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        validation_data=(x[24:], y[24:]),
        validation_batch_size=8,
        verbose=0,
    )
    ratings = tf.squeeze(model(x[:4]), axis=-1)
    return {"history": history.history, "ratings": ratings.numpy().argsort()[-2:]}
