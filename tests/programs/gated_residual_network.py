"""Variables selected by gated residual networks, trained from CSV text."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "structured data"
NAMES, WIDTH = ("age", "income", "weeks", "label"), 6


class GatedLinearUnit(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.linear = layers.Dense(units)
        self.sigmoid = layers.Dense(units, activation="sigmoid")

    def call(self, inputs):
        return self.linear(inputs) * self.sigmoid(inputs)


class GatedResidualNetwork(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units
        self.elu_dense = layers.Dense(units, activation="elu")
        self.linear_dense = layers.Dense(units)
        self.gated_linear_unit = GatedLinearUnit(units)
        self.layer_norm = layers.LayerNormalization()
        self.project = layers.Dense(units)

    def call(self, inputs):
        x = self.linear_dense(self.elu_dense(inputs))
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        return self.layer_norm(inputs + self.gated_linear_unit(x))


class VariableSelection(layers.Layer):
    def __init__(self, num_features, units):
        super().__init__()
        self.grns = [GatedResidualNetwork(units) for _ in range(num_features)]
        self.grn_concat = GatedResidualNetwork(units)
        self.softmax = layers.Dense(units=num_features, activation="softmax")

    def call(self, inputs):
        v = self.softmax(self.grn_concat(layers.concatenate(inputs)))
        v = tf.expand_dims(v, axis=-1)
        x = [self.grns[idx](feature) for idx, feature in enumerate(inputs)]
        x = tf.stack(x, axis=1)
        return tf.squeeze(tf.matmul(v, x, transpose_a=True), axis=1)


def process(line):
    columns = tf.io.decode_csv(line, record_defaults=[[0.0]] * 3 + [[0]])
    features = dict(zip(NAMES, columns))
    target = features.pop("label")
    weight = features["weeks"] / 52.0
    return {name: tf.expand_dims(value, -1) for name, value in features.items()}, target, weight


def train(strategy, epochs=2):
    rng = np.random.default_rng(39)
    values = rng.uniform(0.1, 2, (16, 3))
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{int(a > b)}" for a, b, c in values]
    dataset = tf.data.Dataset.from_tensor_slices(lines).map(process).batch(8)
    with strategy.scope():
        inputs = {name: keras.Input((1,), name=name) for name in NAMES[:3]}
        encoded = [layers.Dense(WIDTH)(feature) for feature in inputs.values()]
        features = VariableSelection(3, WIDTH)(encoded)
        model = start(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(features)))
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss="binary_crossentropy",
            weighted_metrics=["accuracy"],
        )
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=2, restore_best_weights=True)
    return model.fit(dataset, epochs=epochs, callbacks=[early], verbose=0).history
