"""Embeddings learned by similarity: anchors beside positives, in a step of its own."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
REPLICAS = 2
BECAUSE = "each replica compares its own anchors with its own positives"
CLASSES = 4


class AnchorPositivePairs(keras.utils.Sequence):
    def __init__(self, num_batches):
        super().__init__()
        self.batches = num_batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        x = rng.normal(size=(2, CLASSES, 8, 8, 3)) + np.arange(CLASSES)[None, :, None, None, None]
        return tuple(x.astype("float32"))


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        anchors, positives = data
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = tf.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
            similarities /= 0.2
            sparse_labels = tf.range(tf.shape(similarities)[0])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(sparse_labels, similarities)
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.accuracy.update_state(sparse_labels, similarities)
        return {"loss": loss, "accuracy": self.accuracy.result()}


def train(strategy, epochs=2):
    with strategy.scope():
        inputs = layers.Input(shape=(8, 8, 3))
        x = layers.Conv2D(filters=6, kernel_size=3, strides=2, activation="relu")(inputs)
        x = layers.GlobalAveragePooling2D()(x)
        x = layers.Dense(units=5, activation=None)(x)
        model = EmbeddingModel(inputs, layers.UnitNormalization()(x))
        start(model)
        model.accuracy = keras.metrics.SparseCategoricalAccuracy()
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2))
    model.fit(AnchorPositivePairs(num_batches=4), epochs=epochs, shuffle=False, verbose=0)
    embeddings = model.predict(AnchorPositivePairs(1)[0][0], verbose=0)
    return {"near": np.einsum("ae,be->ab", embeddings, embeddings)}
