"""Denoising diffusion: sinusoidal embeddings, an averaged copy of the network, DDIM sampling."""

import math

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"
SIZE, BATCH, EMA = 8, 8, 0.9


@keras.utils.register_keras_serializable()
def sinusoidal_embedding(x):
    embedding_min_frequency, embedding_dims = 1.0, 8
    frequencies = tf.exp(
        tf.linspace(tf.math.log(embedding_min_frequency), tf.math.log(100.0), embedding_dims // 2)
    )
    angular_speeds = 2.0 * math.pi * frequencies
    return tf.concat([tf.sin(angular_speeds * x), tf.cos(angular_speeds * x)], axis=3)


def get_network():
    noisy_images = keras.Input(shape=(SIZE, SIZE, 1))
    noise_variances = keras.Input(shape=(1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 8))(noise_variances)
    e = layers.UpSampling2D(size=SIZE, interpolation="nearest")(e)
    x = layers.Conv2D(4, kernel_size=1)(noisy_images)
    x = layers.Concatenate()([x, e])
    residual = layers.Conv2D(8, kernel_size=1)(x)
    x = layers.Conv2D(8, kernel_size=3, padding="same", activation=keras.activations.swish)(x)
    x = layers.Add()([layers.Conv2D(8, kernel_size=3, padding="same")(x), residual])
    return keras.Model([noisy_images, noise_variances], layers.Conv2D(1, 1)(x))


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = start(get_network())
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def diffusion_schedule(self, diffusion_times):
        start_angle, end_angle = tf.acos(0.95), tf.acos(0.02)
        diffusion_angles = start_angle + diffusion_times * (end_angle - start_angle)
        return tf.sin(diffusion_angles), tf.cos(diffusion_angles)

    def denoise(self, noisy_images, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        pred_noises = network([noisy_images, noise_rates**2], training=training)
        pred_images = (noisy_images - noise_rates * pred_noises) / signal_rates
        return pred_noises, pred_images

    def train_step(self, data):
        images, noises, diffusion_times = data
        images = self.normalizer(images, training=True)
        noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
        noisy_images = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            pred_noises, _ = self.denoise(noisy_images, noise_rates, signal_rates, training=True)
            noise_loss = self.compute_loss(y=noises, y_pred=pred_noises)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(tf.reduce_mean(tf.square(noises - pred_noises)))
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(EMA * ema_weight + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}

    def reverse_diffusion(self, initial_noise, diffusion_steps):
        step_size = 1.0 / diffusion_steps
        next_noisy_images = initial_noise
        for step in range(diffusion_steps):
            diffusion_times = tf.ones((len(initial_noise), 1, 1, 1)) - step * step_size
            noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
            pred_noises, pred_images = self.denoise(
                next_noisy_images, noise_rates, signal_rates, training=False
            )
            next_noise_rates, next_signal_rates = self.diffusion_schedule(
                diffusion_times - step_size
            )
            next_noisy_images = next_signal_rates * pred_images + next_noise_rates * pred_noises
        return self.normalizer.mean + pred_images * self.normalizer.variance**0.5


def train(strategy, epochs=2):
    rng = np.random.default_rng(17)
    images = rng.uniform(size=(16, SIZE, SIZE, 1)).astype("float32")
    noises = rng.normal(size=images.shape).astype("float32")
    times = rng.uniform(size=(16, 1, 1, 1)).astype("float32")
    with strategy.scope():
        model = DiffusionModel()
        model.normalizer.adapt(images)
        model.compile(
            optimizer=keras.optimizers.AdamW(learning_rate=1e-2, weight_decay=1e-4),
            loss=keras.losses.MeanSquaredError(),
        )
    dataset = tf.data.Dataset.from_tensor_slices((images, noises, times)).batch(BATCH)
    history = model.fit(dataset, epochs=epochs, verbose=0).history
    generated = model.reverse_diffusion(tf.constant(noises[:2]), 3)
    return {"history": history, "generated": tf.clip_by_value(generated, 0.0, 1.0)}
