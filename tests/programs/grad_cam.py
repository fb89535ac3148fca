"""What a network looks at: gradients with respect to its last convolution, after `fit`."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"


def make_gradcam_heatmap(image, model, last_conv_layer_name, pred_index=None):
    grad_model = keras.models.Model(
        model.inputs, [model.get_layer(last_conv_layer_name).output, model.output]
    )
    with tf.GradientTape() as tape:
        last_conv_layer_output, preds = grad_model(image)
        if pred_index is None:
            pred_index = tf.argmax(preds[0])
        class_channel = preds[:, pred_index]
    grads = tape.gradient(class_channel, last_conv_layer_output)
    pooled_grads = tf.reduce_mean(grads, axis=(0, 1, 2))
    last_conv_layer_output = last_conv_layer_output[0]
    heatmap = last_conv_layer_output @ pooled_grads[..., tf.newaxis]
    heatmap = tf.squeeze(heatmap)
    return (tf.maximum(heatmap, 0) / tf.math.reduce_max(heatmap)).numpy()


def train(strategy, epochs=2):
    rng = np.random.default_rng(12)
    labels = rng.integers(0, 3, 16)
    images = rng.normal(size=(16, 10, 10, 3)).astype("float32")
    for image, label in zip(images, labels):
        image[3 * label : 3 * label + 3, :, label] += 2
    with strategy.scope():
        inputs = keras.Input((10, 10, 3))
        x = layers.Conv2D(4, 3, activation="relu")(inputs)
        x = layers.Conv2D(6, 3, activation="relu", name="last_conv")(x)
        x = layers.GlobalMaxPooling2D()(x)
        model = start(keras.Model(inputs, layers.Dense(3)(x)))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(images, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    heatmap = make_gradcam_heatmap(images[:1], model, "last_conv")
    given = make_gradcam_heatmap(images[1:2], model, "last_conv", pred_index=2)
    return {"heatmap": heatmap, "of a class": given}
