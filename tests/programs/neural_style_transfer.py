"""An image optimized to have the content of one and the style of another."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "generative"


def gram_matrix(input_tensor):
    result = tf.linalg.einsum("bijc,bijd->bcd", input_tensor, input_tensor)
    input_shape = tf.shape(input_tensor)
    num_locations = tf.cast(input_shape[1] * input_shape[2], tf.float32)
    return result / num_locations


class StyleContentModel(tf.keras.models.Model):
    def __init__(self, base, style_layers, content_layers):
        super().__init__()
        outputs = [base.get_layer(name).output for name in style_layers + content_layers]
        self.vgg = tf.keras.Model(base.inputs, outputs)
        self.style_layers = style_layers
        self.content_layers = content_layers
        self.num_style_layers = len(style_layers)
        self.vgg.trainable = False

    def call(self, inputs):
        outputs = self.vgg(inputs * 255.0 / 128 - 1.0)
        style_outputs = outputs[: self.num_style_layers]
        content_outputs = outputs[self.num_style_layers :]
        style_outputs = [gram_matrix(style_output) for style_output in style_outputs]
        return {
            "content": dict(zip(self.content_layers, content_outputs)),
            "style": dict(zip(self.style_layers, style_outputs)),
        }


def train(strategy, epochs=2):
    rng = np.random.default_rng(21)
    content_image, style_image = rng.uniform(size=(2, 1, 12, 12, 3)).astype("float32")
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        base = tf.keras.Sequential([tf.keras.Input((None, None, 3))])
        for index in range(3):
            base.add(layers.Conv2D(4, 3, activation="relu", padding="same", name=f"conv{index}"))
        extractor = StyleContentModel(start(base), ["conv0", "conv1"], ["conv2"])
        image = tf.Variable(content_image)
        opt = tf.keras.optimizers.Adam(learning_rate=0.02, beta_1=0.99, epsilon=1e-1)
        opt.build([image])
    style_targets = extractor(style_image)["style"]
    content_targets = extractor(content_image)["content"]

    def style_content_loss(outputs):
        style_loss = tf.add_n(
            [
                tf.reduce_mean((outputs["style"][name] - style_targets[name]) ** 2)
                for name in outputs["style"]
            ]
        )
        content_loss = tf.add_n(
            [
                tf.reduce_mean((outputs["content"][name] - content_targets[name]) ** 2)
                for name in outputs["content"]
            ]
        )
        return style_loss * 1e-1 + content_loss * 1e1

    def replica_step():
        with tf.GradientTape() as tape:
            loss = style_content_loss(extractor(image))
            loss += 1e-3 * tf.reduce_sum(tf.image.total_variation(image))
            scaled = loss / replicas
        grad = tape.gradient(scaled, image)
        opt.apply_gradients([(grad, image)])
        image.assign(tf.clip_by_value(image, clip_value_min=0.0, clip_value_max=1.0))
        return loss

    @tf.function()
    def train_step():
        return strategy.reduce("MEAN", strategy.run(replica_step), axis=None)

    losses = [float(train_step()) for _ in range(3 * epochs)]
    return {"losses": losses, "image": image.numpy()[0, 4:6, 4:6]}
