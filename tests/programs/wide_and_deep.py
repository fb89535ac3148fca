"""Wide, deep and cross networks over embedded and one-hot categories."""

import numpy as np

from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "structured data"


def train(strategy, epochs=2):
    rng = np.random.default_rng(37)
    numbers = rng.normal(size=(32, 3)).astype("float32")
    soil, area = rng.integers(0, 5, (2, 32, 1))
    labels = ((soil[:, 0] + area[:, 0]) % 3).astype("int64")
    with strategy.scope():
        inputs = {
            "numbers": keras.Input((3,), name="numbers"),
            "soil": keras.Input((1,), name="soil", dtype="int64"),
            "area": keras.Input((1,), name="area", dtype="int64"),
        }
        one_hot = layers.CategoryEncoding(num_tokens=5, output_mode="one_hot")
        wide = layers.concatenate([one_hot(inputs["soil"]), one_hot(inputs["area"])])
        embedded = [layers.Flatten()(layers.Embedding(5, 3)(inputs[name])) for name in inputs][1:]
        x0 = layers.concatenate([inputs["numbers"], *embedded])
        cross = x0
        for _ in range(2):
            units = cross.shape[-1]
            x = layers.Dense(units)(cross)
            cross = x0 * x + cross
        deep = x0
        for units in (8, 6):
            deep = layers.Dense(units)(deep)
            deep = layers.ReLU()(deep)
        merged = layers.concatenate([wide, layers.LayerNormalization()(cross), deep])
        model = start(keras.Model(inputs, layers.Dense(3, activation="softmax")(merged)))
        model.compile(
            optimizer=keras.optimizers.Ftrl(learning_rate=0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
    features = {"numbers": numbers, "soil": soil, "area": area}
    history = model.fit(features, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(features, labels, verbose=0)
    return {"history": history.history, "evaluated": [loss, accuracy]}
