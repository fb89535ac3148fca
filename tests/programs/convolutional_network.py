"""Digits by a small convolutional network, with validation and a falling learning rate."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "vision"
CLASSES = 4


def digits(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    images = rng.uniform(0, 40, (count, 12, 12))
    for image, label in zip(images, labels):
        image[2 + 2 * label : 4 + 2 * label] += 200
    return images.astype("uint8"), labels


def prepare(images, labels):
    images = np.expand_dims(images.astype("float32") / 255, -1)
    return images, tf.keras.utils.to_categorical(labels, CLASSES)


def train(strategy, epochs=2):
    x_train, y_train = prepare(*digits(32, seed=1))
    x_test, y_test = prepare(*digits(16, seed=2))
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(12, 12, 1)),
                layers.Conv2D(6, kernel_size=(3, 3), activation="relu"),
                layers.MaxPooling2D(pool_size=(2, 2)),
                layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
                layers.Flatten(),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )
        start(model)
        model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    history = model.fit(
        x_train,
        y_train,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        validation_split=0.25,
        callbacks=[
            tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.02 / (epoch + 1))
        ],
        verbose=0,
    )
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return {"history": history.history, "test": [loss, accuracy]}
