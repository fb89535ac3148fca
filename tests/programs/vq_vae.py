"""A vector-quantized autoencoder: a straight-through estimator and losses of a layer."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"


class VectorQuantizer(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.beta = beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings),
            initializer="random_uniform",
            trainable=True,
            name="embeddings_vqvae",
        )

    def call(self, x):
        input_shape = tf.shape(x)
        flattened = tf.reshape(x, [-1, self.embedding_dim])
        encoding_indices = self.get_code_indices(flattened)
        encodings = tf.one_hot(encoding_indices, self.num_embeddings)
        quantized = tf.matmul(encodings, self.embeddings, transpose_b=True)
        quantized = tf.reshape(quantized, input_shape)
        commitment_loss = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook_loss = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + tf.stop_gradient(quantized - x)

    def get_code_indices(self, flattened_inputs):
        similarity = tf.matmul(flattened_inputs, self.embeddings)
        distances = (
            tf.reduce_sum(flattened_inputs**2, axis=1, keepdims=True)
            + tf.reduce_sum(self.embeddings**2, axis=0)
            - 2 * similarity
        )
        return tf.argmin(distances, axis=1)


def train(strategy, epochs=2):
    images = np.random.default_rng(20).uniform(size=(16, 8, 8, 1)).astype("float32")
    with strategy.scope():
        inputs = keras.Input(shape=(8, 8, 1))
        x = layers.Conv2D(6, 3, activation="relu", strides=2, padding="same")(inputs)
        encoded = layers.Conv2D(3, 1, padding="same")(x)
        quantizer = VectorQuantizer(5, 3, name="vector_quantizer")
        quantized = quantizer(encoded)
        x = layers.Conv2DTranspose(6, 3, activation="relu", strides=2, padding="same")(quantized)
        outputs = layers.Conv2DTranspose(1, 3, padding="same")(x)
        model = start(keras.Model(inputs, outputs, name="vq_vae"))
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    history = model.fit(images, images, epochs=epochs, batch_size=8, shuffle=False, verbose=0)
    encoder = keras.Model(inputs, encoded)
    codes = quantizer.get_code_indices(tf.reshape(encoder(images[:2]), [-1, 3]))
    model(images[:2])
    return {"history": history.history, "codes": codes, "losses": model.losses}
