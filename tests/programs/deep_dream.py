"""Gradient ascent on an image in a `tf.Module` whose function loops over tensors."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "generative"


def calc_loss(img, model):
    img_batch = tf.expand_dims(img, axis=0)
    layer_activations = model(img_batch)
    if len(layer_activations) == 1:
        layer_activations = [layer_activations]
    losses = []
    for act in layer_activations:
        losses.append(tf.math.reduce_mean(act))
    return tf.reduce_sum(losses)


class DeepDream(tf.Module):
    def __init__(self, model):
        self.model = model

    @tf.function(
        input_signature=(
            tf.TensorSpec(shape=[None, None, 3], dtype=tf.float32),
            tf.TensorSpec(shape=[], dtype=tf.int32),
            tf.TensorSpec(shape=[], dtype=tf.float32),
        )
    )
    def __call__(self, img, steps, step_size):
        loss = tf.constant(0.0)
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                tape.watch(img)
                loss = calc_loss(img, self.model)
            gradients = tape.gradient(loss, img)
            gradients /= tf.math.reduce_std(gradients) + 1e-8
            img = img + gradients * step_size
            img = tf.clip_by_value(img, -1, 1)
        return loss, img


def train(strategy, epochs=2):
    original = np.random.default_rng(22).uniform(-0.5, 0.5, (12, 12, 3)).astype("float32")
    with strategy.scope():
        base = tf.keras.Sequential([tf.keras.Input((None, None, 3))])
        for index in range(2):
            base.add(layers.Conv2D(4, 3, activation="relu", padding="same", name=f"mixed{index}"))
        start(base)
        names = ["mixed0", "mixed1"]
        dream_model = tf.keras.Model(base.inputs, [base.get_layer(name).output for name in names])
    deepdream = DeepDream(dream_model)
    img, losses = tf.convert_to_tensor(original), []
    step_size = tf.constant(0.01)
    for _ in range(epochs):
        loss, img = deepdream(img, tf.constant(3), step_size)
        losses.append(float(loss))
    base_shape = tf.cast(tf.shape(img)[:-1], tf.float32)
    new_shape = tf.cast(base_shape * 1.5, tf.int32)
    octave = tf.image.resize(img, new_shape)
    loss, octave = deepdream(octave, tf.constant(2), step_size)
    return {"losses": losses, "octave": [float(loss), list(octave.shape)], "image": img[5]}
