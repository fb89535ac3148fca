"""SimCLR: two augmented views, a projection head, and a linear probe of the encoder."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
CHANCE = "both views of an image are augmented at random"


class RandomColorAffine(layers.Layer):
    def __init__(self, brightness=0.0, jitter=0.0, **kwargs):
        super().__init__(**kwargs)
        self.brightness = brightness
        self.jitter = jitter

    def call(self, images, training=True):
        if training:
            batch_size = tf.shape(images)[0]
            brightness_scales = 1 + tf.random.uniform(
                (batch_size, 1, 1, 1), minval=-self.brightness, maxval=self.brightness
            )
            jitter_matrices = tf.random.uniform(
                (batch_size, 1, 3, 3), minval=-self.jitter, maxval=self.jitter
            )
            color_transforms = (
                tf.eye(3, batch_shape=[batch_size, 1]) * brightness_scales + jitter_matrices
            )
            images = tf.clip_by_value(tf.matmul(images, color_transforms), 0, 1)
        return images


class ContrastiveModel(keras.Model):
    def __init__(self, encoder):
        super().__init__()
        self.temperature = 0.1
        self.augmenter = keras.Sequential(
            [
                layers.Rescaling(1 / 255),
                layers.RandomFlip("horizontal"),
                layers.RandomTranslation(0.1, 0.1),
                RandomColorAffine(0.4, 0.1),
            ]
        )
        self.encoder = encoder
        self.projection_head = keras.Sequential(
            [keras.Input((6,)), layers.Dense(6, activation="relu"), layers.Dense(6)]
        )
        self.linear_probe = keras.Sequential([keras.Input((6,)), layers.Dense(2)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.probe_accuracy]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = tf.math.l2_normalize(projections_1, axis=1)
        projections_2 = tf.math.l2_normalize(projections_2, axis=1)
        similarities = tf.matmul(projections_1, projections_2, transpose_b=True) / self.temperature
        contrastive_labels = tf.range(tf.shape(projections_1)[0])
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, similarities, from_logits=True
        )
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, tf.transpose(similarities), from_logits=True
        )
        return (loss_1_2 + loss_2_1) / 2

    def train_step(self, data):
        images, labels = data
        augmented_1 = self.augmenter(images, training=True)
        augmented_2 = self.augmenter(images, training=True)
        with tf.GradientTape() as tape:
            features_1 = self.encoder(augmented_1, training=True)
            features_2 = self.encoder(augmented_2, training=True)
            loss = self.contrastive_loss(
                self.projection_head(features_1), self.projection_head(features_2)
            )
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.contrastive_loss_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            features = self.encoder(images / 255.0, training=False)
            class_logits = self.linear_probe(features, training=True)
            probe_loss = self.probe_loss(labels, class_logits)
        weights = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights))
        self.probe_accuracy.update_state(labels, class_logits)
        return {m.name: m.result() for m in self.metrics}


def train(strategy, epochs=8):
    rng = np.random.default_rng(67)
    labels = rng.integers(0, 2, 16)
    images = rng.uniform(0, 120, (16, 8, 8, 3)) + 120 * labels[:, None, None, None]
    with strategy.scope():
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)
        encoder = start(keras.Model(inputs, layers.GlobalAveragePooling2D()(x)))
        model = ContrastiveModel(encoder)
        start([model.projection_head, model.linear_probe], 2)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.1))
    history = model.fit(images.astype("float32"), labels, batch_size=8, epochs=epochs, verbose=0)
    return {
        "falls": history.history["c_loss"][-1] < history.history["c_loss"][0],
        "probe": history.history["p_acc"][-1] > 0.6,
        "finite": bool(np.isfinite(history.history["c_loss"]).all()),
    }
