"""A variational autoencoder: a sampling layer and a train step with two losses."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"
CHANCE = "the latent vectors are sampled in the model"
LATENT = 2


class Sampling(layers.Layer):
    """Samples z from its mean and the logarithm of its variance."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        batch = tf.shape(z_mean)[0]
        dim = tf.shape(z_mean)[1]
        epsilon = tf.random.normal(shape=(batch, dim))
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = tf.reduce_mean(
                tf.reduce_sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
            )
            kl_loss = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
            kl_loss = tf.reduce_mean(tf.reduce_sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def train(strategy, epochs=6):
    rng = np.random.default_rng(13)
    images = np.zeros((32, 8, 8, 1), "float32")
    for image in images:
        image[rng.integers(0, 4) :, :4] = 1.0
    with strategy.scope():
        encoder_inputs = keras.Input(shape=(8, 8, 1))
        x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        z_mean = layers.Dense(LATENT, name="z_mean")(x)
        z_log_var = layers.Dense(LATENT, name="z_log_var")(x)
        z = Sampling()([z_mean, z_log_var])
        encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, z], name="encoder")
        latent_inputs = keras.Input(shape=(LATENT,))
        x = layers.Dense(4 * 4 * 8, activation="relu")(latent_inputs)
        x = layers.Reshape((4, 4, 8))(x)
        outputs = layers.Conv2DTranspose(1, 3, activation="sigmoid", strides=2, padding="same")(x)
        decoder = keras.Model(latent_inputs, outputs, name="decoder")
        vae = VAE(start(encoder), start(decoder))
        vae.compile(optimizer=keras.optimizers.Adam(0.01))
    losses = vae.fit(images, epochs=epochs, batch_size=16, verbose=0).history
    grid = vae.decoder.predict(np.array([[0.0, 1.0], [1.0, 0.0]]), verbose=0)
    return {
        "falls": losses["loss"][-1] < losses["loss"][0],
        "finite": bool(np.isfinite(losses["kl_loss"]).all()),
        "names": sorted(losses),
        "grid": list(grid.shape),
    }
