"""A transformer over what a user has seen rates the next item, beside features of the user."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "recommenders"
MOVIES, LENGTH, WIDTH = 9, 4, 4
CSV_HEADER = ["user_id", "sequence_movie_ids", "sequence_ratings", "sex"]


def process(features):
    movie_ids = tf.strings.to_number(
        tf.strings.split(features["sequence_movie_ids"], ","), tf.int32
    )
    ratings = tf.strings.to_number(tf.strings.split(features["sequence_ratings"], ","))
    target = ratings[LENGTH - 1]
    return {
        "sequence": tf.ensure_shape(movie_ids[:-1], [LENGTH - 1]),
        "target": movie_ids[-1],
        "ratings": tf.ensure_shape(ratings[:-1], [LENGTH - 1]),
        "sex": features["sex"],
    }, target


def train(strategy, epochs=2):
    rng = np.random.default_rng(59)
    ids, ratings = rng.integers(0, MOVIES, (24, LENGTH)), rng.integers(1, 6, (24, LENGTH))
    columns = {
        "sequence_movie_ids": [",".join(map(str, row)) for row in ids],
        "sequence_ratings": [",".join(map(str, row)) for row in ratings],
        "sex": rng.integers(0, 2, 24),
    }
    dataset = tf.data.Dataset.from_tensor_slices(columns).map(process).batch(8)
    with strategy.scope():
        inputs = {
            "sequence": layers.Input((LENGTH - 1,), dtype="int32", name="sequence"),
            "target": layers.Input((), dtype="int32", name="target"),
            "ratings": layers.Input((LENGTH - 1,), name="ratings"),
            "sex": layers.Input((), dtype="int32", name="sex"),
        }
        movie_embedding = layers.Embedding(MOVIES, WIDTH)
        # Called on an array, not on an input: what it returns is a constant of the model.
        position_embedding = layers.Embedding(LENGTH, WIDTH, embeddings_initializer="identity")
        positions = position_embedding(tf.range(start=0, limit=LENGTH - 1, delta=1))
        rated = layers.Reshape((LENGTH - 1, 1))(inputs["ratings"])
        sequence = layers.Multiply()([movie_embedding(inputs["sequence"]) + positions, rated])
        target = layers.Reshape((1, WIDTH))(movie_embedding(inputs["target"]))
        transformer = layers.Concatenate(axis=1)([sequence, target])
        attention = layers.MultiHeadAttention(2, WIDTH)(transformer, transformer)
        x = layers.LayerNormalization()(layers.Add()([transformer, attention]))
        sex = layers.CategoryEncoding(2, output_mode="one_hot")
        sex = sex(layers.Reshape((1,))(inputs["sex"]))
        features = layers.concatenate([layers.Flatten()(x), sex])
        features = layers.Dense(8)(features)
        features = layers.LeakyReLU()(features)
        model = start(keras.Model(inputs, layers.Dense(1)(features)))
        model.compile(
            optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
            loss=keras.losses.MeanSquaredError(),
            metrics=[keras.metrics.MeanAbsoluteError()],
        )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    _, rmse = model.evaluate(dataset, verbose=0)
    return {"history": history.history, "evaluated": rmse}
