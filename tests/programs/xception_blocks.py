"""Images classified by separable convolutions, batch normalization and residuals."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
REPLICAS = 2
TOLERANCE = 3e-3
BECAUSE = "each replica normalizes by its own examples; round-off is divided by small variances"


def make_model(input_shape):
    inputs = keras.Input(shape=input_shape)
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous_block_activation = x
    for size in [12, 16]:
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous_block_activation)
        x = layers.add([x, residual])
        previous_block_activation = x
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(1, activation=None)(x))


def train(strategy, epochs=2):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 16).astype("float32")
    images = rng.uniform(0, 255, (16, 16, 16, 3)) * (0.5 + 0.5 * labels[:, None, None, None])
    dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32"), labels))
    dataset = dataset.map(lambda image, label: (tf.image.flip_left_right(image), label))
    dataset = dataset.batch(8).prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        model = start(make_model((16, 16, 3)))
        model.compile(
            optimizer=keras.optimizers.SGD(0.05),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(name="acc", threshold=0.0)],
        )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    kernel = model.layers[-1].kernel
    return {"history": history.history, "kernel": kernel.numpy()}
