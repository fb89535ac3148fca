"""Molecules: message passing over the edges of a batch, a GRU update, pooling by partition."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "graphs"
ATOMS, WIDTH = 4, 5


class MessagePassing(layers.Layer):
    def __init__(self, units, steps=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.steps = steps

    def build(self, input_shape):
        bond_dim = input_shape[1][-1]
        self.kernel = self.add_weight(
            shape=(bond_dim, self.units * self.units), initializer="glorot_uniform", name="kernel"
        )
        self.bias = self.add_weight(
            shape=(self.units * self.units,), initializer="zeros", name="bias"
        )
        self.update_step = layers.GRUCell(self.units)
        self.update_step.build((None, self.units))
        self.built = True

    def call(self, inputs):
        atom_features, bond_features, pair_indices = inputs
        num_atoms = tf.shape(atom_features)[0]
        pad_length = self.units - atom_features.shape[-1]
        atoms = tf.pad(atom_features, [(0, 0), (0, pad_length)])
        for _ in range(self.steps):
            edge = tf.matmul(bond_features, self.kernel) + self.bias
            edge = tf.reshape(edge, (-1, self.units, self.units))
            neighbors = tf.gather(atoms, pair_indices[:, 1])
            transformed = tf.squeeze(tf.matmul(edge, tf.expand_dims(neighbors, axis=-1)), axis=-1)
            aggregated = tf.math.unsorted_segment_sum(transformed, pair_indices[:, 0], num_atoms)
            atoms, _ = self.update_step(aggregated, atoms)
        return atoms


class MoleculeModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.passing = MessagePassing(WIDTH)
        self.readout = layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        atoms, bonds, pairs = inputs["atoms"], inputs["bonds"], inputs["pairs"]
        batch = tf.shape(atoms)[0]
        increment = ATOMS * tf.range(batch, dtype=pairs.dtype)
        pairs = tf.reshape(pairs + increment[:, tf.newaxis, tf.newaxis], (-1, 2))
        atoms = tf.reshape(atoms, (-1, atoms.shape[-1]))
        x = self.passing([atoms, tf.reshape(bonds, (-1, bonds.shape[-1])), pairs])
        partition = tf.repeat(tf.range(batch), ATOMS)
        pooled = tf.math.unsorted_segment_mean(x, partition, num_segments=batch)
        return self.readout(pooled)


def train(strategy, epochs=2):
    rng = np.random.default_rng(50)
    molecules = {
        "atoms": rng.normal(size=(16, ATOMS, 3)).astype("float32"),
        "bonds": rng.normal(size=(16, 6, 2)).astype("float32"),
        "pairs": rng.integers(0, ATOMS, (16, 6, 2)),
    }
    permeability = (molecules["atoms"].sum(axis=(1, 2)) > 0).astype("float32")[:, None]
    with strategy.scope():
        model = MoleculeModel()
        model({name: values[:2] for name, values in molecules.items()})
        start(model)
        model.compile(
            loss=keras.losses.BinaryCrossentropy(),
            optimizer=keras.optimizers.Adam(learning_rate=5e-2),
            metrics=[keras.metrics.AUC(name="AUC")],
        )
    dataset = tf.data.Dataset.from_tensor_slices((molecules, permeability)).batch(8)
    return model.fit(dataset, epochs=epochs, class_weight={0: 2.0, 1: 0.5}, verbose=0).history
