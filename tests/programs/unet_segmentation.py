"""Pixels classified by a U-Net, from a dataset, with the classes weighted by the pixel."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "vision"
CLASSES = 3


def load_example(image, mask):
    image = tf.image.convert_image_dtype(image, tf.float32)
    return image, tf.cast(mask, tf.int32)


def add_sample_weights(image, mask):
    class_weights = tf.constant([2.0, 2.0, 1.0])
    class_weights = class_weights / tf.reduce_sum(class_weights)
    return image, mask, tf.gather(class_weights, indices=tf.squeeze(mask, -1))


def double_conv(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)


def build_unet():
    inputs = layers.Input(shape=(16, 16, 3))
    skips, x = [], inputs
    for filters in (4, 8):
        skip = double_conv(x, filters)
        skips.append(skip)
        x = layers.MaxPool2D(2)(skip)
    x = double_conv(x, 12)
    for filters, skip in zip((8, 4), reversed(skips)):
        x = layers.Conv2DTranspose(filters, 3, 2, padding="same")(x)
        x = layers.concatenate([x, skip])
        x = double_conv(x, filters)
    outputs = layers.Conv2D(CLASSES, 1, padding="same", activation="softmax")(x)
    return tf.keras.Model(inputs, outputs, name="U-Net")


def train(strategy, epochs=2):
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (16, 16, 16, 3)).astype("uint8")
    masks = (images.mean(-1, keepdims=True) // 86).astype("uint8")
    dataset = tf.data.Dataset.from_tensor_slices((images, masks))
    dataset = dataset.map(load_example, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.cache().batch(8).map(add_sample_weights)
    with strategy.scope():
        model = start(build_unet())
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.01),
            loss="sparse_categorical_crossentropy",
            weighted_metrics=["accuracy"],
            metrics=[tf.keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)],
        )
    history = model.fit(dataset, epochs=epochs, verbose=0).history
    predicted = tf.argmax(model.predict(images[:2] / np.float32(255), verbose=0), axis=-1)
    return {"losses": history["loss"], "shape": list(predicted.shape)} | {
        "metrics": sorted(name.rpartition("_")[0] or name for name in history)
    }
