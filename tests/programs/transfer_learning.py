"""Transfer learning: a frozen base, a new head, then fine-tuning of the last layers."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "vision"
REPLICAS = 2
BECAUSE = "layers that are fine-tuned normalize by the examples of each replica"


def base_network():
    inputs = tf.keras.Input((16, 16, 3))
    x = inputs
    for index, filters in enumerate((4, 8, 8)):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", name=f"conv_{index}")(x)
        x = layers.BatchNormalization(name=f"norm_{index}")(x)
        x = layers.ReLU(max_value=6.0)(x)
    return tf.keras.Model(inputs, x, name="base")


def train(strategy, epochs=2):
    rng = np.random.default_rng(11)
    labels = rng.integers(0, 2, (16, 1)).astype("float32")
    images = rng.uniform(0, 255, (16, 16, 16, 3)).astype("float32") * (1 + labels[:, None, None])
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8).cache()
    with strategy.scope():
        base_model = start(base_network())
        base_model.trainable = False
        inputs = tf.keras.Input(shape=(16, 16, 3))
        x = layers.Rescaling(1.0 / 127.5, offset=-1)(inputs)
        x = base_model(x, training=False)
        x = layers.GlobalAveragePooling2D()(x)
        model = tf.keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
        start(model.layers[-1], 3)

        def compile_model(rate):
            model.compile(
                optimizer=tf.keras.optimizers.Adam(learning_rate=rate),
                loss=tf.keras.losses.BinaryCrossentropy(),
                metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.5, name="accuracy")],
            )

        compile_model(0.05)
    before = model.evaluate(dataset, verbose=0)
    history = model.fit(dataset, epochs=epochs, validation_data=dataset, verbose=0)
    with strategy.scope():
        base_model.trainable = True
        for layer in base_model.layers[:4]:
            layer.trainable = False
        compile_model(0.005)
    fine = model.fit(
        dataset, epochs=2 * epochs, initial_epoch=history.epoch[-1] + 1, shuffle=False, verbose=0
    )
    return {
        "trainable": len(model.trainable_variables),
        "before": before,
        "history": history.history,
        "fine-tuned": fine.history,
        "frozen": base_model.layers[1].get_weights()[0][0, 0, 0],
    }
