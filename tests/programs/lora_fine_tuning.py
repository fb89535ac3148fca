"""Fine-tuning with low-rank adapters beside frozen kernels, as a layer of one's own."""

import math

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"


class LoraLayer(layers.Layer):
    def __init__(self, original_layer, rank=2, alpha=4, trainable=False, **kwargs):
        super().__init__(name=f"lora_{original_layer.name}", trainable=trainable, **kwargs)
        self.rank = rank
        self._scale = alpha / rank
        self.original_layer = original_layer
        self.original_layer.trainable = False
        self.A = layers.Dense(
            units=rank,
            use_bias=False,
            kernel_initializer=keras.initializers.VarianceScaling(
                scale=math.sqrt(5), mode="fan_in", distribution="uniform"
            ),
            name="lora_A",
        )
        self.B = layers.Dense(
            units=original_layer.units, use_bias=False, kernel_initializer="zeros", name="lora_B"
        )

    def call(self, inputs):
        original_output = self.original_layer(inputs)
        return original_output + self.B(self.A(inputs)) * self._scale


def train(strategy, epochs=2):
    rng = np.random.default_rng(35)
    tokens = rng.integers(0, 12, (16, 6))
    labels = (tokens.sum(axis=1) > 33).astype("float32")[:, None]
    with strategy.scope():
        embedding, dense = layers.Embedding(12, 6), layers.Dense(8, name="dense")
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Flatten()(embedding(inputs))
        start(keras.Model(inputs, dense(x)))
        embedding.trainable = False
        lora = LoraLayer(dense, trainable=True)
        head = layers.Dense(1)
        model = keras.Model(inputs, head(layers.ReLU()(lora(x))))
        start([lora, head], 1)
        model.compile(
            optimizer=keras.optimizers.AdamW(learning_rate=0.02, weight_decay=0.01, clipnorm=1.0),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
        )
    frozen = dense.kernel.numpy().copy()
    history = model.fit(tokens, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    with strategy.scope():
        update = tf.matmul(lora.A.kernel, lora.B.kernel) * 2.0
        dense.kernel.assign_add(update)
    return {
        "trainable": sorted(variable.name for variable in model.trainable_variables),
        "frozen until merged": not np.array_equal(frozen, dense.kernel.numpy()),
        "history": history.history,
        "update": update[:2],
    }
