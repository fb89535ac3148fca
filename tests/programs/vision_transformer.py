"""A vision transformer: patches, a class token, position embeddings, attention."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
SIZE, PATCH, WIDTH = 12, 4, 8


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        batch_size = tf.shape(images)[0]
        patches = tf.image.extract_patches(
            images=images,
            sizes=[1, self.patch_size, self.patch_size, 1],
            strides=[1, self.patch_size, self.patch_size, 1],
            rates=[1, 1, 1, 1],
            padding="VALID",
        )
        return tf.reshape(patches, [batch_size, -1, patches.shape[-1]])


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches + 1, projection_dim)
        self.num_patches = num_patches
        self.class_token = self.add_weight(
            shape=(1, 1, projection_dim), initializer="zeros", name="class_token"
        )

    def call(self, patch):
        batch_size = tf.shape(patch)[0]
        token = tf.broadcast_to(
            tf.cast(self.class_token, patch.dtype), [batch_size, 1, self.class_token.shape[-1]]
        )
        encoded = tf.concat([token, self.projection(patch)], axis=1)
        positions = tf.range(start=0, limit=self.num_patches + 1, delta=1)
        return encoded + self.position_embedding(positions)


def create_vit():
    inputs = keras.Input(shape=(SIZE, SIZE, 3))
    encoded = PatchEncoder((SIZE // PATCH) ** 2, WIDTH)(Patches(PATCH)(inputs))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        attention = layers.MultiHeadAttention(num_heads=2, key_dim=WIDTH)(x1, x1)
        x2 = layers.Add()([attention, encoded])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        x3 = layers.Dense(2 * WIDTH, activation=tf.nn.gelu)(x3)
        encoded = layers.Add()([layers.Dense(WIDTH)(x3), x2])
    representation = layers.LayerNormalization(epsilon=1e-6)(encoded)
    representation = layers.Lambda(lambda tokens: tokens[:, 0])(representation)
    return keras.Model(inputs=inputs, outputs=layers.Dense(3)(representation))


def train(strategy, epochs=2):
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, (16, 1))
    images = rng.normal(size=(16, SIZE, SIZE, 3)).astype("float32") + labels[:, :, None, None]
    with strategy.scope():
        model = start(create_vit())
        model.compile(
            optimizer=keras.optimizers.AdamW(learning_rate=0.01, weight_decay=1e-4),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
            ],
        )
    history = model.fit(images, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "logits": model.predict(images[:2], verbose=0)}
