"""TabTransformer: contextual embeddings of categories beside normalized numbers."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "structured data"
VOCABULARIES = {"work": ["private", "public", "self"], "education": ["school", "college"]}


def train(strategy, epochs=2):
    rng = np.random.default_rng(38)
    columns = {name: rng.choice(words, 24) for name, words in VOCABULARIES.items()}
    columns["age"] = rng.normal(40, 10, 24).astype("float32")
    target = np.where(columns["education"] == "college", " >50K", " <=50K")
    weights = rng.uniform(0.5, 1.5, 24).astype("float32")
    target_label_lookup = layers.StringLookup(
        vocabulary=[" <=50K", " >50K"], mask_token=None, num_oov_indices=0
    )
    lookups = {
        name: layers.StringLookup(vocabulary=words, mask_token=None, num_oov_indices=0)
        for name, words in VOCABULARIES.items()
    }

    def prepare_example(features, target, weight):
        features = dict(features)
        for name, lookup in lookups.items():
            features[name] = lookup(features[name])
        return features, target_label_lookup(target), weight

    dataset = tf.data.Dataset.from_tensor_slices((columns, target, weights))
    dataset = dataset.map(prepare_example, num_parallel_calls=tf.data.AUTOTUNE).batch(8)
    with strategy.scope():
        inputs = {name: layers.Input(name=name, shape=(), dtype="int32") for name in VOCABULARIES}
        inputs["age"] = layers.Input(name="age", shape=(), dtype="float32")
        encoded = [
            layers.Embedding(len(words), 6)(inputs[name]) for name, words in VOCABULARIES.items()
        ]
        encoded = tf.keras.ops.stack(encoded, axis=1)
        # Called on an array, not on an input: what it returns is a constant of the model.
        columns_embedding = layers.Embedding(2, 6, embeddings_initializer="identity")
        encoded = encoded + columns_embedding(tf.range(start=0, limit=2, delta=1))
        attention = layers.MultiHeadAttention(num_heads=2, key_dim=6)(encoded, encoded)
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([attention, encoded]))
        age = layers.Reshape((1,))(inputs["age"])
        age = layers.Normalization(mean=40.0, variance=100.0)(age)
        features = layers.concatenate([layers.Flatten()(x), age])
        model = start(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(features)))
        model.compile(
            optimizer=keras.optimizers.SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.001),
            loss=keras.losses.BinaryCrossentropy(),
            metrics=[keras.metrics.BinaryAccuracy(name="accuracy")],
        )
    return model.fit(dataset, epochs=epochs, validation_data=dataset, verbose=0).history
