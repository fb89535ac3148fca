"""A neural decision tree: soft routes to leaves, in a layer that loops over levels."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "structured data"


class NeuralDecisionTree(keras.Model):
    def __init__(self, depth, num_features, used_features, num_classes):
        super().__init__()
        self.depth = depth
        self.num_leaves = 2**depth
        self.num_classes = num_classes
        one_hot = np.eye(num_features)
        self.used_features_mask = one_hot[used_features].astype("float32")
        self.pi = self.add_weight(
            initializer="random_normal",
            shape=[self.num_leaves, self.num_classes],
            dtype="float32",
            trainable=True,
        )
        self.decision_fn = layers.Dense(self.num_leaves, activation="sigmoid", name="decision")

    def call(self, features):
        batch_size = tf.shape(features)[0]
        features = tf.matmul(features, self.used_features_mask, transpose_b=True)
        decisions = tf.expand_dims(self.decision_fn(features), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = tf.ones([batch_size, 1, 1])
        begin_idx, end_idx = 1, 2
        for level in range(self.depth):
            mu = tf.reshape(mu, [batch_size, -1, 1])
            mu = tf.tile(mu, (1, 1, 2))
            level_decisions = decisions[:, begin_idx:end_idx, :]
            mu = mu * level_decisions
            begin_idx = end_idx
            end_idx = begin_idx + 2 ** (level + 1)
        mu = tf.reshape(mu, [batch_size, self.num_leaves])
        probabilities = keras.activations.softmax(self.pi)
        return tf.matmul(mu, probabilities)


def train(strategy, epochs=2):
    rng = np.random.default_rng(44)
    x = rng.normal(size=(24, 5)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype("int64")
    with strategy.scope():
        trees = [NeuralDecisionTree(3, 5, used, 2) for used in ([0, 1, 2], [1, 0, 4])]
        inputs = keras.Input((5,))
        features = layers.BatchNormalization(trainable=False)(inputs)
        outputs = layers.Average()([tree(features) for tree in trees])
        model = start(keras.Model(inputs, outputs))
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "predicted": model.predict(x[:3], verbose=0)}
