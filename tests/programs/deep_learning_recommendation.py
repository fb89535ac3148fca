"""DLRM: embeddings of many categories, their pairwise products, a bottom and a top network."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "recommenders"
SIZES, WIDTH, BATCH = (7, 5, 9), 4, 8


class DotInteraction(tf.keras.layers.Layer):
    def call(self, inputs):
        stacked = tf.stack(inputs, axis=1)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        ones = tf.ones_like(products)
        below = tf.linalg.band_part(ones, -1, 0) - tf.linalg.band_part(ones, 0, 0)
        count = len(inputs) * (len(inputs) - 1) // 2
        kept = tf.boolean_mask(products, tf.cast(below, tf.bool))
        return tf.reshape(kept, (-1, count))


class DLRM(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.tables = [tf.keras.layers.Embedding(size, WIDTH) for size in SIZES]
        self.bottom = tf.keras.Sequential(
            [tf.keras.layers.Dense(units, activation="relu") for units in (6, WIDTH)]
        )
        self.top = tf.keras.Sequential(
            [tf.keras.layers.Dense(6, activation="relu"), tf.keras.layers.Dense(1)]
        )
        self.interact = DotInteraction()

    def call(self, inputs):
        dense = self.bottom(inputs["dense"])
        embedded = [
            table(column)
            for table, column in zip(self.tables, tf.unstack(inputs["sparse"], axis=1))
        ]
        interactions = self.interact([dense, *embedded])
        return self.top(tf.concat([dense, interactions], axis=1))


def train(strategy, epochs=2):
    rng = np.random.default_rng(58)
    features = {
        "dense": rng.normal(size=(32, 5)).astype("float32"),
        "sparse": np.stack([rng.integers(0, size, 32) for size in SIZES], axis=-1),
    }
    clicks = (features["sparse"].sum(axis=1) > 8).astype("float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((features, clicks)).batch(BATCH)
    with strategy.scope():
        model = DLRM()
        model({name: values[:2] for name, values in features.items()})
        start(model)
        optimizer = tf.keras.optimizers.SGD(0.2)
        optimizer.build(model.trainable_variables)
        auc = tf.keras.metrics.AUC(from_logits=True)
        bce = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def train_step(inputs):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                loss = tf.reduce_sum(bce(labels, logits)) * (1.0 / BATCH)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(list(zip(grads, model.trainable_variables)))
            auc.update_state(labels, logits)
            return loss

        per_replica = strategy.run(step_fn, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    losses, aucs = [], []
    for _ in range(epochs):
        auc.reset_state()
        for inputs in strategy.experimental_distribute_dataset(dataset):
            losses.append(float(train_step(inputs)))
        aucs.append(float(auc.result()))
    return {"losses": losses, "auc": aucs}
