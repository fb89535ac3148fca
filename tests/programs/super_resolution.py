"""Super-resolution by sub-pixel convolution, with PSNR in a callback and SSIM of the result."""

import math

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
UPSCALE, SIZE = 2, 12


def process_input(image):
    yuv = tf.image.rgb_to_yuv(image)
    y, _, _ = tf.split(yuv, 3, axis=len(yuv.shape) - 1)
    return tf.image.resize(y, [SIZE // UPSCALE, SIZE // UPSCALE], method="area")


def process_target(image):
    y, _, _ = tf.split(tf.image.rgb_to_yuv(image), 3, axis=-1)
    return y


class DepthToSpace(layers.Layer):
    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def call(self, inputs):
        return tf.nn.depth_to_space(inputs, self.block_size)


class ESPCNCallback(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.psnr = []

    def on_train_batch_end(self, batch, logs=None):
        self.psnr.append(10 * math.log10(1 / logs["loss"]))


def train(strategy, epochs=2):
    images = np.random.default_rng(66).uniform(size=(16, SIZE, SIZE, 3)).astype("float32")
    images = np.cumsum(images, axis=1) / SIZE
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(8)
    dataset = dataset.map(lambda x: (process_input(x), process_target(x))).prefetch(4)
    callback = ESPCNCallback()
    with strategy.scope():
        inputs = keras.Input(shape=(None, None, 1))
        x = layers.Conv2D(6, 5, padding="same", activation="relu")(inputs)
        x = layers.Conv2D(UPSCALE**2, 3, padding="same")(x)
        model = start(keras.Model(inputs, DepthToSpace(UPSCALE)(x)))
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=0.01),
            loss=keras.losses.MeanSquaredError(),
        )
    history = model.fit(dataset, epochs=epochs, callbacks=[callback], verbose=0)
    low, high = next(iter(dataset))
    restored = tf.clip_by_value(model.predict(low[:2], verbose=0), 0.0, 1.0)
    return {
        "history": history.history,
        "psnr of batches": callback.psnr,
        "psnr": tf.image.psnr(restored, high[:2], max_val=1.0),
        "ssim": tf.image.ssim(restored, high[:2], max_val=1.0),
    }
