"""Losses, their weights and their reductions are those of the global batch."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_comparison import class_data, on_four_replicas, regression_data

pytestmark = on_four_replicas

GENERATOR = np.random.default_rng(7)
# Batches of 16, 16 and 3.
X, Y = regression_data(35)
WEIGHTS = GENERATOR.uniform(0.1, 3.0, size=35).astype("float32")
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def dense_model(**layer_arguments):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", **layer_arguments),
            keras.layers.Dense(1),
        ]
    )


REDUCTIONS = ["sum", "sum_over_batch_size", "mean_with_sample_weight"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weighted_loss_is_reduced_over_the_global_batch(reduction, assert_trains_as_alone):
    def build():
        model = dense_model()
        loss = keras.losses.Huber(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.01), loss, weighted_metrics=["mae"], metrics=["mse"])
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, Y, sample_weight=WEIGHTS, **FIT))


def test_replica_whose_examples_all_weigh_nothing_trains_as_on_one_device(assert_trains_as_alone):
    weights = WEIGHTS.copy()
    weights[:8] = weights[33:] = 0.0

    def build():
        model = dense_model()
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile("sgd", loss)
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, Y, sample_weight=weights, **FIT))


def test_class_weights_weigh_as_on_one_device(assert_trains_as_alone):
    x, labels = class_data(35)

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(x, labels, class_weight={0: 1.0, 1: 0.2, 2: 5.0}, **FIT)
    )


def test_ignored_class_is_left_out_of_the_global_mean(assert_trains_as_alone):
    x, labels = class_data(35)
    labels = np.where(np.arange(35) % 5 < 2, -1, labels)

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))
        return model

    assert_trains_as_alone(build, lambda model: model.fit(x, labels, **FIT))


def test_loss_function_of_the_user_is_averaged_over_the_global_batch(assert_trains_as_alone):
    def build():
        model = dense_model()
        model.compile("adam", lambda y, predicted: ops.mean((y - predicted) ** 4, axis=-1))
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, Y, **FIT))


@pytest.mark.parametrize(
    "regularized",
    ["kernel_regularizer", "bias_regularizer", "activity_regularizer"],
)
def test_regularizer_counts_once(regularized, assert_trains_as_alone):
    def build():
        model = dense_model(**{regularized: keras.regularizers.L1L2(0.02, 0.05)})
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, Y, **FIT))


class PenalizedDense(keras.layers.Dense):
    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(0.1 * ops.mean(outputs**2))
        return outputs


def test_mean_given_to_add_loss_is_the_mean_of_the_global_batch(assert_trains_as_alone):
    def build():
        model = keras.Sequential([keras.Input((6,)), PenalizedDense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, Y, **FIT))


def test_loss_made_of_add_loss_only_trains_as_on_one_device(assert_trains_as_alone):
    def build():
        model = keras.Sequential([keras.Input((6,)), PenalizedDense(8)])
        model.compile("adam")
        return model

    assert_trains_as_alone(build, lambda model: model.fit(X, **FIT))


# -- several inputs and outputs ------------------------------------------------------------


def two_towers():
    """A model of inputs `wide` and `deep`, with outputs `value` and `label`."""
    wide = keras.Input((6,), name="wide")
    deep = keras.Input((4,), name="deep")
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()([wide, deep]))
    value = keras.layers.Dense(1, name="value")(hidden)
    label = keras.layers.Dense(3, activation="softmax", name="label")(hidden)
    return [wide, deep], [value, label]


DEEP = GENERATOR.normal(size=(35, 4)).astype("float32")
LABELS = class_data(35)[1]


def test_dictionaries_of_inputs_and_outputs_train_as_on_one_device(assert_trains_as_alone):
    def build():
        inputs, (value, label) = two_towers()
        model = keras.Model(
            {"wide": inputs[0], "deep": inputs[1]}, {"value": value, "label": label}
        )
        model.compile(
            "adam",
            loss={"value": "mse", "label": "sparse_categorical_crossentropy"},
            loss_weights={"value": 0.3, "label": 2.0},
            metrics={"value": "mae", "label": "accuracy"},
        )
        return model

    assert_trains_as_alone(
        build,
        lambda model: model.fit({"wide": X, "deep": DEEP}, {"value": Y, "label": LABELS}, **FIT),
    )


def test_lists_of_inputs_and_outputs_with_weights_each_train_as_on_one_device(
    assert_trains_as_alone,
):
    def build():
        model = keras.Model(*two_towers())
        model.compile(
            "adam",
            loss=[
                keras.losses.MeanSquaredError(reduction="sum"),
                keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
            ],
            loss_weights=[0.01, 2.0],
            weighted_metrics=[["mae"], ["accuracy"]],
        )
        return model

    assert_trains_as_alone(
        build,
        lambda model: model.fit(
            [X, DEEP], [Y, LABELS], sample_weight=[WEIGHTS, WEIGHTS[::-1].copy()], **FIT
        ),
    )


# -- masks ---------------------------------------------------------------------------------

# Sequences of very different lengths: a mean of the replicas' means would be far off.
LENGTHS = np.minimum(GENERATOR.integers(1, 9, size=35), np.arange(35) // 4 + 1)
TOKENS = np.where(np.arange(8) < LENGTHS[:, None], GENERATOR.integers(1, 20, size=(35, 8)), 0)
NEXT_TOKENS = np.roll(TOKENS, -1, axis=1)


def tagger(loss, *recurrent):
    """A model that predicts a token for each step of a sequence padded with zeros."""
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            keras.layers.Embedding(20, 5, mask_zero=True),
            *recurrent,
            keras.layers.Dense(20, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1 if loss.reduction != "sum" else 0.002),
        loss,
        weighted_metrics=["accuracy"],
    )
    return model


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_steps_are_left_out_of_the_global_loss(reduction, assert_trains_as_alone):
    assert_trains_as_alone(
        lambda: tagger(keras.losses.SparseCategoricalCrossentropy(reduction=reduction)),
        lambda model: model.fit(TOKENS, NEXT_TOKENS, **FIT),
    )


def test_weights_of_masked_steps_are_left_out_of_the_global_loss(assert_trains_as_alone):
    weights = GENERATOR.uniform(0.1, 3.0, size=(35, 8)).astype("float32")
    loss_of = keras.losses.SparseCategoricalCrossentropy
    assert_trains_as_alone(
        lambda: tagger(loss_of(reduction="mean_with_sample_weight")),
        lambda model: model.fit(TOKENS, NEXT_TOKENS, sample_weight=weights, **FIT),
    )


def test_masked_lstm_trains_as_on_one_device(assert_trains_as_alone):
    loss = keras.losses.SparseCategoricalCrossentropy()
    assert_trains_as_alone(
        lambda: tagger(loss, keras.layers.LSTM(6, return_sequences=True)),
        lambda model: model.fit(TOKENS, NEXT_TOKENS, **FIT),
    )


def test_masking_layer_trains_as_on_one_device(assert_trains_as_alone):
    sequences = GENERATOR.normal(size=(35, 8, 3)).astype("float32")
    sequences[np.arange(8) >= LENGTHS[:, None]] = 0.0
    targets = sequences.sum(axis=2, keepdims=True)

    def build():
        model = keras.Sequential(
            [
                keras.Input((8, 3)),
                keras.layers.Masking(),
                keras.layers.TimeDistributed(keras.layers.Dense(1)),
            ]
        )
        model.compile("adam", "mse")
        return model

    assert_trains_as_alone(build, lambda model: model.fit(sequences, targets, **FIT))
