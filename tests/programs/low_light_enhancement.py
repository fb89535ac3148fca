"""Zero-DCE: an image enhanced by curves, learned without references by four losses."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
REPLICAS = 2
BECAUSE = "the optimizer sums the gradients of means over each replica's examples"
ITERATIONS = 2


def color_constancy_loss(x):
    mean_rgb = tf.reduce_mean(x, axis=(1, 2), keepdims=True)
    r, g, b = mean_rgb[:, :, :, 0], mean_rgb[:, :, :, 1], mean_rgb[:, :, :, 2]
    return tf.sqrt(tf.square(r - g) + tf.square(r - b) + tf.square(b - g))


def exposure_loss(x, mean_val=0.6):
    x = tf.reduce_mean(x, axis=3, keepdims=True)
    mean = tf.nn.avg_pool2d(x, ksize=4, strides=4, padding="VALID")
    return tf.reduce_mean(tf.square(mean - mean_val))


def illumination_smoothness_loss(x):
    batch_size, h_x, w_x = tf.shape(x)[0], tf.shape(x)[1], tf.shape(x)[2]
    count_h = (tf.shape(x)[2] - 1) * tf.shape(x)[3]
    count_w = tf.shape(x)[2] * (tf.shape(x)[3] - 1)
    h_tv = tf.reduce_sum(tf.square(x[:, 1:, :, :] - x[:, : h_x - 1, :, :]))
    w_tv = tf.reduce_sum(tf.square(x[:, :, 1:, :] - x[:, :, : w_x - 1, :]))
    batch_size = tf.cast(batch_size, dtype=tf.float32)
    count_h, count_w = tf.cast(count_h, tf.float32), tf.cast(count_w, tf.float32)
    return 2 * (h_tv / count_h + w_tv / count_w) / batch_size


class SpatialConsistencyLoss(keras.losses.Loss):
    def __init__(self, **kwargs):
        super().__init__(reduction="none")
        self.left_kernel = tf.constant([[[[0, 0, 0]], [[-1, 1, 0]], [[0, 0, 0]]]], dtype=tf.float32)

    def call(self, y_true, y_pred):
        original_mean = tf.reduce_mean(y_true, 3, keepdims=True)
        enhanced_mean = tf.reduce_mean(y_pred, 3, keepdims=True)
        kernel = tf.transpose(self.left_kernel[0], (0, 2, 1))[..., tf.newaxis]
        differences = [
            tf.nn.conv2d(tf.nn.avg_pool2d(mean, 2, 2, "VALID"), kernel, 1, padding="SAME")
            for mean in (original_mean, enhanced_mean)
        ]
        return tf.square(differences[0] - differences[1])


class ZeroDCE(keras.Model):
    def __init__(self, dce_model, **kwargs):
        super().__init__(**kwargs)
        self.dce_model = dce_model
        self.spatial_constancy_loss = SpatialConsistencyLoss()
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]

    def enhanced(self, data, output):
        x = data
        for i in range(ITERATIONS):
            r = output[:, :, :, 3 * i : 3 * (i + 1)]
            x = x + r * (tf.square(x) - x)
        return x

    def call(self, data):
        return self.enhanced(data, self.dce_model(data))

    def total_loss(self, data):
        output = self.dce_model(data)
        enhanced_image = self.enhanced(data, output)
        return (
            20.0 * illumination_smoothness_loss(output)
            + tf.reduce_mean(self.spatial_constancy_loss(enhanced_image, data))
            + 5 * tf.reduce_mean(color_constancy_loss(enhanced_image))
            + 10 * exposure_loss(enhanced_image)
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.total_loss(data)
        gradients = tape.gradient(loss, self.dce_model.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.dce_model.trainable_weights))
        self.total_loss_tracker.update_state(loss)
        return {"total_loss": self.total_loss_tracker.result()}

    def test_step(self, data):
        self.total_loss_tracker.update_state(self.total_loss(data))
        return {"total_loss": self.total_loss_tracker.result()}


def train(strategy, epochs=2):
    images = np.random.default_rng(71).uniform(0, 0.3, (16, 8, 8, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(8, drop_remainder=True)
    with strategy.scope():
        inputs = keras.Input(shape=[None, None, 3])
        conv1 = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(inputs)
        conv2 = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(conv1)
        merged = layers.Concatenate(axis=-1)([conv1, conv2])
        x_r = layers.Conv2D(3 * ITERATIONS, 3, activation="tanh", padding="same")(merged)
        model = ZeroDCE(start(keras.Model(inputs=inputs, outputs=x_r)))
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.002))
    history = model.fit(dataset, validation_data=dataset, epochs=epochs, verbose=0)
    return {"history": history.history, "image": model(images[:1])[0, 3, 3]}
