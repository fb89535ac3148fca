"""Padding that a mask leaves out counts in no metric, of `fit` as of `evaluate`."""

import numpy as np
import pytest

import unison.tf as tf

WORDS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 1], [2, 2, 2, 0]])
TARGETS = np.arange(16, dtype=np.float32).reshape(4, 4, 1)
MEAN_OF_WORDS = TARGETS[WORDS > 0].mean()
MEAN_OF_ALL = TARGETS.mean()


def zeros_of_words(mask_zero=True):
    """A model that predicts 0 for every word, so that its error is the target."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input((4,), dtype="int32"),
            tf.keras.layers.Embedding(4, 2, mask_zero=mask_zero),
            tf.keras.layers.Dense(1, kernel_initializer="zeros"),
        ]
    )
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    return model


def error_in_fit(model):
    return model.fit(WORDS, TARGETS, batch_size=4, verbose=0).history["mae"][0]


def test_in_fit():
    assert error_in_fit(zeros_of_words()) == pytest.approx(MEAN_OF_WORDS)


def test_in_fit_on_two_replicas(two_replicas):
    with two_replicas.scope():
        model = zeros_of_words()
    assert error_in_fit(model) == pytest.approx(MEAN_OF_WORDS)


def test_in_evaluate(two_replicas):
    with two_replicas.scope():
        model = zeros_of_words()
    evaluated = model.evaluate(WORDS, TARGETS, verbose=0, return_dict=True)
    assert evaluated["mae"] == pytest.approx(MEAN_OF_WORDS)


def test_what_has_no_mask_counts(two_replicas):
    with two_replicas.scope():
        model = zeros_of_words(mask_zero=False)
    assert error_in_fit(model) == pytest.approx(MEAN_OF_ALL)


def test_in_a_step_that_calls_keras_own(two_replicas):
    class Calling(tf.keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with two_replicas.scope():
        model = Calling(zeros_of_words().layers)
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    assert error_in_fit(model) == pytest.approx(MEAN_OF_WORDS)


def test_a_step_on_jax_of_ones_own_gets_predictions_as_they_are():
    class Own(tf.keras.Sequential):
        def train_step(self, state, data):
            trainable, non_trainable, _, metrics = state
            x, y = data
            _, (_, predictions, *_) = self.compute_loss_and_updates(
                trainable, non_trainable, metrics, x, y, None
            )
            return {"shape": predictions.shape[1]}, state

    model = Own(zeros_of_words().layers)
    model.compile(tf.keras.optimizers.SGD(0.0), "mse")
    assert model.fit(WORDS, TARGETS, verbose=0).history["shape"] == [4]
