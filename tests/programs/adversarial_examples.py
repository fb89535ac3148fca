"""Images changed by the fast gradient sign method, against a network just trained."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "vision"


def train(strategy, epochs=3):
    rng = np.random.default_rng(65)
    labels = rng.integers(0, 3, 24)
    images = rng.normal(size=(24, 8, 8, 1)).astype("float32")
    for image, label in zip(images, labels):
        image[:, 2 * label : 2 * label + 2] += 1.5
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                tf.keras.layers.DepthwiseConv2D(3, depth_multiplier=4, activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(3, activation="softmax"),
            ]
        )
        start(model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    loss_object = tf.keras.losses.CategoricalCrossentropy()

    def create_adversarial_pattern(input_image, input_label):
        input_image = tf.convert_to_tensor(input_image)
        with tf.GradientTape() as tape:
            tape.watch(input_image)
            prediction = model(input_image)
            loss = loss_object(input_label, prediction)
        gradient = tape.gradient(loss, input_image)
        return gradient, tf.sign(gradient)

    label = tf.reshape(tf.one_hot(labels[0], 3), (1, 3))
    gradient, perturbations = create_adversarial_pattern(images[:1], label)
    confidences = []
    for epsilon in [0, 0.01, 0.1]:
        adversarial = tf.clip_by_value(images[:1] + epsilon * perturbations, -1, 1)
        confidences.append(float(model.predict(adversarial, verbose=0)[0, labels[0]]))
    return {"confidences": confidences, "largest": tf.reduce_max(tf.abs(gradient))}
