"""WGAN-GP: a penalty on the norm of the critic's gradient, by a tape in a tape."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"
BATCH = 8


def mean(values):
    """The part of a replica in the mean over the global batch."""
    return tf.reduce_sum(values) / BATCH


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, discriminator_extra_steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = discriminator_extra_steps
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def call(self, images):
        return self.discriminator(images)

    def gradient_penalty(self, alpha, real_images, fake_images):
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real_images, noise, alpha = data
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(alpha, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(d_gradient, self.discriminator.trainable_variables)
            )
        with tf.GradientTape() as tape:
            generated_images = self.generator(noise, training=True)
            gen_img_logits = self.discriminator(generated_images, training=True)
            g_loss = self.g_loss_fn(gen_img_logits)
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def train(strategy, epochs=2):
    rng = np.random.default_rng(16)
    images = rng.normal(0.5, 0.2, (16, 6, 6, 1)).astype("float32")
    noise = rng.normal(size=(16, 4)).astype("float32")
    alpha = rng.uniform(size=(16, 1, 1, 1)).astype("float32")
    with strategy.scope():
        discriminator = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.ZeroPadding2D((1, 1)),
                layers.Conv2D(4, 3, strides=2),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3 * 3 * 4, use_bias=False),
                layers.Reshape((3, 3, 4)),
                layers.UpSampling2D((2, 2)),
                layers.Conv2D(1, 3, padding="same", activation="tanh"),
                layers.Cropping2D((0, 0)),
            ]
        )
        wgan = WGAN(start(discriminator), start(generator))
        wgan.compile(
            d_optimizer=keras.optimizers.Adam(learning_rate=0.002, beta_1=0.5, beta_2=0.9),
            g_optimizer=keras.optimizers.Adam(learning_rate=0.002, beta_1=0.5, beta_2=0.9),
            g_loss_fn=lambda fake_img: -mean(fake_img),
            d_loss_fn=lambda real_img, fake_img: mean(fake_img) - mean(real_img),
        )
    dataset = tf.data.Dataset.from_tensor_slices((images, noise, alpha)).batch(BATCH)
    wgan.fit(dataset, epochs=epochs, verbose=0)
    return {"critic": discriminator.predict(images[:4], verbose=0), "noise": wgan.generator(noise)}
