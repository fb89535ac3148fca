"""Pairs of images compared by a siamese network with a contrastive loss."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"


def make_pairs(images, labels):
    same = [(a, b) for a in range(len(labels)) for b in range(a) if labels[a] == labels[b]]
    different = [(a, b) for a in range(len(labels)) for b in range(a) if labels[a] != labels[b]]
    pairs = [pair for both in zip(same, different) for pair in both][:32]
    truth = np.array([float(labels[a] != labels[b]) for a, b in pairs], "float32")
    return images[[a for a, _ in pairs]], images[[b for _, b in pairs]], truth


def euclidean_distance(vectors):
    x, y = vectors
    sum_square = tf.math.reduce_sum(tf.math.square(x - y), axis=1, keepdims=True)
    return tf.math.sqrt(tf.math.maximum(sum_square, tf.keras.backend.epsilon()))


def contrastive_loss_with_margin(margin=1.0):
    def contrastive_loss(y_true, y_pred):
        square_pred = tf.math.square(y_pred)
        margin_square = tf.math.square(tf.math.maximum(margin - y_pred, 0.0))
        return tf.math.reduce_mean((1 - y_true) * square_pred + y_true * margin_square)

    return contrastive_loss


def train(strategy, epochs=2):
    rng = np.random.default_rng(9)
    labels = rng.integers(0, 3, 16)
    images = rng.normal(size=(16, 8, 8, 1)).astype("float32") + labels[:, None, None, None]
    left, right, truth = make_pairs(images, labels)
    with strategy.scope():
        inputs = layers.Input((8, 8, 1))
        x = layers.Conv2D(4, (3, 3), activation="tanh")(inputs)
        x = layers.AveragePooling2D(pool_size=(2, 2))(x)
        embedding = keras.Model(inputs, layers.Dense(5, activation="tanh")(layers.Flatten()(x)))
        input_1, input_2 = layers.Input((8, 8, 1)), layers.Input((8, 8, 1))
        merged = layers.Lambda(euclidean_distance, output_shape=(1,))(
            [embedding(input_1), embedding(input_2)]
        )
        outputs = layers.Dense(1, activation="sigmoid")(merged)
        siamese = start(keras.Model(inputs=[input_1, input_2], outputs=outputs))
        siamese.compile(
            loss=contrastive_loss_with_margin(), optimizer="RMSprop", metrics=["accuracy"]
        )
    history = siamese.fit(
        [left, right], truth[:, None], batch_size=8, epochs=epochs, shuffle=False, verbose=0
    )
    return {"history": history.history, "pairs": siamese.predict([left[:4], right[:4]], verbose=0)}
