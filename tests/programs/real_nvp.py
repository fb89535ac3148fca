"""A normalizing flow, RealNVP: coupling layers and the log-likelihood under a normal density."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers, regularizers

TASK = "generative"
REPLICAS = 2
BECAUSE = "the optimizer sums the gradients of means over each replica's examples"


def coupling(input_shape, width=8, reg=0.01):
    inputs = layers.Input(shape=input_shape)

    def dense(units, activation, x):
        layer = layers.Dense(units, activation=activation, kernel_regularizer=regularizers.L2(reg))
        return layer(x)

    t = dense(input_shape[0], "linear", dense(width, "relu", inputs))
    s = dense(input_shape[0], "tanh", dense(width, "relu", inputs))
    return keras.Model(inputs=inputs, outputs=[s, t])


class RealNVP(keras.Model):
    def __init__(self, num_coupling_layers):
        super().__init__()
        self.num_coupling_layers = num_coupling_layers
        self.masks = np.array([[0, 1], [1, 0]] * (num_coupling_layers // 2), dtype="float32")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.layers_list = [coupling((2,)) for i in range(num_coupling_layers)]

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x, training=True):
        log_det_inv = 0
        direction = -1 if training else 1
        for i in range(self.num_coupling_layers)[::direction]:
            x_masked = x * self.masks[i]
            reversed_mask = 1 - self.masks[i]
            s, t = self.layers_list[i](x_masked)
            s *= reversed_mask
            t *= reversed_mask
            gate = (direction - 1) / 2
            x = (
                reversed_mask * (x * tf.exp(direction * s) + direction * t * tf.exp(gate * s))
                + x_masked
            )
            log_det_inv += gate * tf.reduce_sum(s, [1])
        return x, log_det_inv

    def log_loss(self, x):
        y, logdet = self(x)
        log_prob = -0.5 * tf.reduce_sum(y**2, axis=-1) - np.log(2 * np.pi)
        return -tf.reduce_mean(log_prob + logdet)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self.log_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def train(strategy, epochs=2):
    angles = np.random.default_rng(18).uniform(0, np.pi, 32)
    moons = np.stack([np.cos(angles), np.sin(angles)], -1).astype("float32")
    with strategy.scope():
        model = RealNVP(num_coupling_layers=4)
        for index, layer in enumerate(model.layers_list):
            start(layer, index)
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01))
    history = model.fit(
        moons, batch_size=8, epochs=epochs, shuffle=False, validation_split=0.25, verbose=0
    )
    z, _ = model(moons)
    again, _ = model.predict(np.asarray(z), verbose=0)
    return {
        "history": history.history,
        "latent": z[:4],
        "inverted": model(z, training=False)[0][:4],
        "latent of the latent": again[:4],
    }
