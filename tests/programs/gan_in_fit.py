"""A GAN whose `train_step` draws noise and updates two networks in turn."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"
CHANCE = "noise is drawn in the step"


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        generated_images = self.generator(noise)
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))
        misleading_labels = tf.zeros((batch_size, 1))
        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


class GANMonitor(keras.callbacks.Callback):
    def __init__(self, num_img=3, latent_dim=4):
        self.num_img = num_img
        self.latent_dim = latent_dim
        self.shapes = []

    def on_epoch_end(self, epoch, logs=None):
        vectors = tf.random.normal(shape=(self.num_img, self.latent_dim))
        generated_images = self.model.generator(vectors)
        generated_images *= 255
        self.shapes.append(list(generated_images.numpy().shape))


def train(strategy, epochs=3):
    images = np.random.default_rng(15).normal(1.0, 0.1, (16, 8)).astype("float32")
    monitor = GANMonitor()
    with strategy.scope():
        discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)]
        )
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(8)])
        gan = GAN(start(discriminator), start(generator), latent_dim=4)
        gan.compile(
            d_optimizer=keras.optimizers.Adam(learning_rate=0.01),
            g_optimizer=keras.optimizers.Adam(learning_rate=0.01),
            loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = gan.fit(images, batch_size=8, epochs=epochs, callbacks=[monitor], verbose=0).history
    return {
        "d_loss falls": history["d_loss"][-1] < history["d_loss"][0],
        "finite": bool(np.isfinite(history["g_loss"]).all()),
        "shapes": monitor.shapes,
    }
