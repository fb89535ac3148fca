"""Columns of a table: numbers normalized, words and integers looked up, in the pipeline."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "structured data"
NUMERIC = ("age", "chol")


def table(count):
    rng = np.random.default_rng(36)
    features = {
        "age": rng.integers(20, 80, count),
        "chol": rng.normal(200, 40, count).astype("float32"),
        "sex": rng.integers(0, 2, count),
        "thal": rng.choice(["fixed", "normal", "reversible"], count).astype(object),
    }
    return features, (features["age"] > 50).astype("int64")


def dataframe_to_dataset(features, labels):
    features = {name: np.asarray(column).astype(column.dtype) for name, column in features.items()}
    features["thal"] = features["thal"].astype(str)
    return tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(1, seed=1)


def encode_numerical_feature(feature, name, dataset):
    normalizer = layers.Normalization()
    feature_ds = dataset.map(lambda x, y: x[name])
    normalizer.adapt(feature_ds.map(lambda x: tf.expand_dims(tf.cast(x, tf.float32), -1)))
    return normalizer(feature)


def category_encoding(name, dataset, is_string):
    lookup_class = layers.StringLookup if is_string else layers.IntegerLookup
    lookup = lookup_class(output_mode="int")
    lookup.adapt(dataset.map(lambda x, y: tf.expand_dims(x[name], -1)))
    encoder = layers.CategoryEncoding(num_tokens=lookup.vocabulary_size(), output_mode="one_hot")
    return lambda feature: encoder(lookup(feature)), lookup


def train(strategy, epochs=2):
    features, labels = table(32)
    dataset = dataframe_to_dataset(features, labels).batch(8)
    sexes, sex_lookup = category_encoding("sex", dataset, is_string=False)
    thals, thal_lookup = category_encoding("thal", dataset, is_string=True)

    def preprocess(x, y):
        encoded = {name: tf.expand_dims(tf.cast(x[name], tf.float32), -1) for name in NUMERIC}
        encoded["sex"] = sexes(tf.expand_dims(x["sex"], -1))
        encoded["thal"] = thals(tf.expand_dims(x["thal"], -1))
        return encoded, y

    prepared = dataset.map(preprocess)
    with strategy.scope():
        inputs = {name: tf.keras.Input((1,), name=name) for name in NUMERIC}
        encoded = [
            encode_numerical_feature(inputs[name], name, dataset.unbatch().batch(8))
            for name in NUMERIC
        ]
        for name, lookup in (("sex", sex_lookup), ("thal", thal_lookup)):
            inputs[name] = tf.keras.Input((lookup.vocabulary_size(),), name=name)
            encoded.append(inputs[name])
        x = layers.concatenate(encoded)
        x = layers.Dense(8, activation="relu")(x)
        model = start(tf.keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)))
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(prepared, epochs=epochs, verbose=0)
    return {
        "history": history.history,
        "vocabularies": [
            [str(word) for word in lookup.get_vocabulary()] for lookup in (sex_lookup, thal_lookup)
        ],
    }
