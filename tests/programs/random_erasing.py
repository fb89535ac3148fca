"""Cutout from seeds: rectangles erased by stateless draws, in the pipeline."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "vision"
CHANCE = "stateless draws have their own generator's numbers"
SIZE, CUT = 10, 4


def cutout(image, label, seed):
    corner = tf.random.stateless_uniform([2], seed, 0, SIZE - CUT + 1, dtype=tf.int32)
    rows, columns = tf.range(SIZE), tf.range(SIZE)
    inside_rows = tf.logical_and(rows >= corner[0], rows < corner[0] + CUT)
    inside_columns = tf.logical_and(columns >= corner[1], columns < corner[1] + CUT)
    erased = tf.logical_and(inside_rows[:, tf.newaxis], inside_columns[tf.newaxis, :])
    image = tf.where(erased[..., tf.newaxis], tf.zeros_like(image), image)
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return tf.image.stateless_random_brightness(image, 0.1, seed), label


def train(strategy, epochs=3):
    rng = np.random.default_rng(69)
    labels = rng.integers(0, 2, 16)
    images = rng.uniform(0.5, 1, (16, SIZE, SIZE, 3)) * (0.3 + labels[:, None, None, None])
    counter = tf.data.Dataset.counter()
    dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32"), labels))
    dataset = tf.data.Dataset.zip((dataset, counter))
    dataset = dataset.map(lambda example, seed: cutout(*example, tf.stack([seed, 1]))).batch(8)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((SIZE, SIZE, 3)),
                tf.keras.layers.Conv2D(4, 3, activation="relu"),
                tf.keras.layers.GlobalAveragePooling2D(),
                tf.keras.layers.Dense(1),
            ]
        )
        start(model)
        model.compile(
            tf.keras.optimizers.Adam(0.03), tf.keras.losses.BinaryCrossentropy(from_logits=True)
        )
    history = model.fit(dataset, epochs=epochs, verbose=0).history
    first, again = (np.asarray(next(iter(dataset))[0]) for _ in range(2))
    return {
        "the same again": bool(np.array_equal(first, again)),
        "differ": bool((first[0] != first[1]).any()),
        "falls": history["loss"][-1] < history["loss"][0],
    }
