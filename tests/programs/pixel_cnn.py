"""PixelCNN: convolutions with masked kernels, and pixels generated one after another."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "generative"
SIZE = 6


class PixelConvLayer(layers.Layer):
    def __init__(self, mask_type, **kwargs):
        super().__init__()
        self.mask_type = mask_type
        self.conv = layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        kernel_shape = self.conv.kernel.shape
        self.mask = np.zeros(shape=kernel_shape)
        self.mask[: kernel_shape[0] // 2, ...] = 1.0
        self.mask[kernel_shape[0] // 2, : kernel_shape[1] // 2, ...] = 1.0
        if self.mask_type == "B":
            self.mask[kernel_shape[0] // 2, kernel_shape[1] // 2, ...] = 1.0

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


class ResidualBlock(keras.layers.Layer):
    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")
        self.pixel_conv = PixelConvLayer(
            mask_type="B",
            filters=filters // 2,
            kernel_size=3,
            activation="relu",
            padding="same",
        )
        self.conv2 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")

    def call(self, inputs):
        return keras.layers.add([inputs, self.conv2(self.pixel_conv(self.conv1(inputs)))])


def train(strategy, epochs=2):
    data = np.random.default_rng(19).uniform(size=(16, SIZE, SIZE, 1))
    data = np.where(np.cumsum(data, axis=1) < 1.2, 0.0, 1.0).astype("float32")
    with strategy.scope():
        inputs = keras.Input(shape=(SIZE, SIZE, 1), batch_size=None)
        x = PixelConvLayer(
            mask_type="A", filters=6, kernel_size=5, activation="relu", padding="same"
        )(inputs)
        x = ResidualBlock(filters=6)(x)
        out = keras.layers.Conv2D(filters=1, kernel_size=1, activation="sigmoid")(x)
        pixel_cnn = start(keras.Model(inputs, out))
        pixel_cnn.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy")
    history = pixel_cnn.fit(
        x=data, y=data, batch_size=8, epochs=epochs, shuffle=False, verbose=0
    ).history
    pixels = np.zeros(shape=(2, SIZE, SIZE, 1), dtype="float32")
    for row in range(2):
        for col in range(SIZE):
            probs = pixel_cnn.predict(pixels, verbose=0)[:, row, col, :]
            pixels[:, row, col, :] = tf.math.ceil(probs - 0.5)
    return {"loss": history["loss"], "pixels": pixels[:, :2, :, 0]}
