"""Mixup: two datasets zipped, images and labels blended by a sampled beta."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
CHANCE = "images are shuffled, and blended by sampled weights"


def sample_beta_distribution(size, concentration_0=0.2, concentration_1=0.2):
    gamma_1_sample = tf.random.gamma(shape=[size], alpha=concentration_1)
    gamma_2_sample = tf.random.gamma(shape=[size], alpha=concentration_0)
    return gamma_1_sample / (gamma_1_sample + gamma_2_sample)


def mix_up(ds_one, ds_two, alpha=0.2):
    images_one, labels_one = ds_one
    images_two, labels_two = ds_two
    batch_size = tf.shape(images_one)[0]
    sampled = sample_beta_distribution(batch_size, alpha, alpha)
    x_l = tf.reshape(sampled, (batch_size, 1, 1, 1))
    y_l = tf.reshape(sampled, (batch_size, 1))
    images = images_one * x_l + images_two * (1 - x_l)
    labels = labels_one * y_l + labels_two * (1 - y_l)
    return (images, labels)


def train(strategy, epochs=4):
    rng = np.random.default_rng(68)
    classes = rng.integers(0, 3, 32)
    images = rng.normal(size=(32, 6, 6, 1)) + 2 * classes[:, None, None, None]
    images = images.astype("float32")
    labels = tf.one_hot(classes, 3)
    ds_one = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(80).batch(8)
    ds_two = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(80).batch(8)
    train_ds_mu = tf.data.Dataset.zip((ds_one, ds_two)).map(
        lambda one, two: mix_up(one, two, alpha=0.2), num_parallel_calls=tf.data.AUTOTUNE
    )
    _, mixed = next(iter(train_ds_mu))
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Flatten(), layers.Dense(8, "relu")]
        )
        model.add(layers.Dense(3, activation="softmax"))
        start(model)
        model.compile(
            optimizer=keras.optimizers.Adam(0.02),
            loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.05),
            metrics=["accuracy"],
        )
    history = model.fit(train_ds_mu, epochs=epochs, verbose=0)
    return {
        "sums": np.round(tf.reduce_sum(mixed, axis=1).numpy(), 3),
        "falls": history.history["loss"][-1] < history.history["loss"][0],
    }
