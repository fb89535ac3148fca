"""What layers do replica by replica: random masks, and batch normalization."""

import itertools

import keras
import numpy as np
import pytest

import unison.keras
from keras_comparison import (
    ROUND_OFF,
    assert_close,
    regression_data,
    run_training_under,
)

X, Y = regression_data(32)
UNEVEN = regression_data(35)


# -- dropout -------------------------------------------------------------------------------


class MaskReader(keras.Model):
    """A model whose training outputs are a dropout layer's mask, kept in a metric of sums."""

    def __init__(self, rate):
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)

    def call(self, inputs, training=False):
        return self.dropout(keras.ops.ones_like(inputs), training=training)

    def predict_step(self, state, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.stateless_call(*state, x, training=True)


def masks(strategy, seed, calls=1):
    """Returns the masks of 8 examples with 500 features, which the replicas divide."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = MaskReader(0.25)
    inputs = np.ones((8, 500), "float32")
    return [model.predict(inputs, batch_size=8, verbose=0) > 0 for _ in range(calls)]


def test_replicas_draw_different_masks(four_replicas):
    (mask,) = masks(four_replicas, seed=1)
    of_replica = mask.reshape(4, -1)
    agreement = [np.mean(a == b) for a, b in itertools.pairwise(of_replica)]
    # Two independent masks agree at 0.75^2 + 0.25^2 = 0.625 of the places.
    assert np.max(agreement) < 0.7


def test_masks_keep_the_rate(four_replicas):
    (mask,) = masks(four_replicas, seed=1)
    np.testing.assert_allclose(mask.reshape(4, -1).mean(axis=1), 0.75, atol=0.05)


def test_masks_change_from_step_to_step(two_replicas):
    first, second = masks(two_replicas, seed=1, calls=2)
    assert np.mean(first == second) < 0.7


def test_masks_follow_from_the_seed(two_replicas):
    np.testing.assert_array_equal(masks(two_replicas, seed=1), masks(two_replicas, seed=1))


def noisy_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


def fit_uneven(model):
    return model.fit(*UNEVEN, batch_size=16, epochs=2, verbose=0)


def test_training_with_dropout_can_be_repeated_bit_for_bit(four_replicas):
    first, second = (run_training_under(four_replicas, noisy_model, fit_uneven) for _ in range(2))
    assert first.result == second.result
    np.testing.assert_equal(first.weights, second.weights)


def test_idle_replica_keeps_its_random_stream_in_step(four_replicas):
    model = built_under(four_replicas, noisy_model)
    counter = model.layers[1].seed_generator.state
    before = counter.numpy()
    fit_uneven(model)
    # Six steps, the last of each epoch with an idle replica; each draws once.
    np.testing.assert_array_equal(counter.numpy() - before, [0, 6])


# -- batch normalization -------------------------------------------------------------------


def normalizing(**arguments):
    """A linear model behind a normalization with moving statistics of momentum 0.8."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.BatchNormalization(momentum=0.8, **arguments),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


def built_under(strategy, build):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return build()


def test_replica_normalizes_by_its_own_examples(strategy):
    model = built_under(strategy, normalizing())
    kernel, bias = model.layers[-1].get_weights()
    shares = np.split(X, strategy.num_replicas_in_sync)
    normalized = [(part - part.mean(0)) / np.sqrt(part.var(0) + 1e-3) for part in shares]
    expected = np.mean((np.concatenate(normalized) @ kernel + bias - Y) ** 2)
    assert_close(model.train_on_batch(X, Y), expected)


def test_moving_statistics_are_the_means_over_the_replicas(strategy):
    model = built_under(strategy, normalizing())
    model.train_on_batch(X, Y)
    shares = np.split(X, strategy.num_replicas_in_sync)
    layer = model.layers[0]
    assert_close(layer.moving_mean.numpy(), 0.2 * np.mean([part.mean(0) for part in shares], 0))
    assert_close(
        layer.moving_variance.numpy(), 0.8 + 0.2 * np.mean([part.var(0) for part in shares], 0)
    )


def test_idle_replica_leaves_its_moving_statistics_alone(four_replicas):
    model = built_under(four_replicas, normalizing())
    model.train_on_batch(X[:3], Y[:3])
    # Replicas 0, 1 and 2 saw one example each, replica 3 none.
    assert_close(model.layers[0].moving_mean.numpy(), 0.2 * X[:3].sum(0) / 4)


def test_prediction_normalizes_by_the_statistics_that_are_read(four_replicas):
    model = built_under(four_replicas, normalizing())
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert_close(model.predict(X, verbose=0), np.asarray(model(X)))


def test_evaluation_normalizes_by_the_statistics_that_are_read(four_replicas):
    model = built_under(four_replicas, normalizing())
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    expected = np.mean((np.asarray(model(X)) - Y) ** 2)
    assert_close(model.evaluate(X, Y, batch_size=16, verbose=0), expected)


def test_validation_between_epochs_leaves_the_training_alone(four_replicas):
    arguments = {"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False}
    plain, validated = (built_under(four_replicas, normalizing()) for _ in range(2))
    plain.fit(X, Y, **arguments)
    validated.fit(X, Y, validation_data=UNEVEN, **arguments)
    np.testing.assert_equal(validated.get_weights(), plain.get_weights())


def test_model_can_be_evaluated_before_and_after_its_statistics_diverge(two_replicas):
    model = built_under(two_replicas, normalizing())
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.fit(X, Y, batch_size=16, verbose=0)
    expected = np.mean((np.asarray(model(X)) - Y) ** 2)
    assert_close(model.evaluate(X, Y, verbose=0), expected)
    assert_close(model.predict(X, verbose=0), np.asarray(model(X)))


# -- synchronized batch normalization ------------------------------------------------------


@pytest.mark.parametrize("examples", [32, 35, 33], ids=["even", "last of 3", "last of 1"])
def test_synchronized_layer_trains_as_on_one_device(examples, strategy):
    x, y = regression_data(examples)

    def build(**arguments):
        # A kernel before the layer is moved by gradients through the moments of all replicas.
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(momentum=0.8, **arguments),
                keras.layers.Dense(1, activation="tanh"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.3), "mse")
        return model

    keras.utils.set_random_seed(0)
    alone = build()
    together = built_under(strategy, lambda: build(synchronized=True))
    for model in (alone, together):
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert_close(together.get_weights(), alone.get_weights())


def test_a_replica_without_examples_whose_loss_is_nan_changes_nothing(four_replicas):
    """Its loss is a mean over no examples."""
    x, y = regression_data(3)

    def build(**arguments):
        inputs = keras.Input((6,))
        hidden = keras.layers.BatchNormalization(**arguments)(keras.layers.Dense(4)(inputs))
        norm = keras.layers.Lambda(lambda x: keras.ops.sum(x * x, axis=1, keepdims=True))(inputs)
        divided = keras.layers.Lambda(lambda pair: pair[0] / pair[1])([hidden, norm])
        model = keras.Model(inputs, keras.layers.Dense(1)(divided))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    keras.utils.set_random_seed(0)
    alone = build()
    together = built_under(four_replicas, lambda: build(synchronized=True))
    for model in (alone, together):
        model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    assert_close(together.get_weights(), alone.get_weights())


def test_synchronized_layer_alone_in_a_batch_of_images_trains_as_on_one_device(four_replicas):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(11, 4, 4, 2)).astype("float32") * [1.0, 3.0] + [5.0, 0.0]
    y = generator.normal(size=(11, 1)).astype("float32")

    def build(**arguments):
        model = keras.Sequential(
            [
                keras.Input((4, 4, 2)),
                keras.layers.Conv2D(3, 2),
                unison.keras.BatchNormalization(**arguments),
                keras.layers.Activation("relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    keras.utils.set_random_seed(0)
    alone = build()
    together = built_under(four_replicas, lambda: build(synchronized=True))
    for model in (alone, together):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_close(together.get_weights(), alone.get_weights())


def test_synchronized_layer_counts_unmasked_positions_of_all_replicas(four_replicas):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(8, 5, 3)).astype("float32")
    x[np.arange(5) >= generator.integers(1, 6, size=(8, 1))] = 0.0
    y = x.sum(axis=2, keepdims=True)

    def build(**arguments):
        model = keras.Sequential(
            [
                keras.Input((5, 3)),
                keras.layers.Masking(),
                keras.layers.BatchNormalization(**arguments),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    keras.utils.set_random_seed(0)
    alone = build()
    together = built_under(four_replicas, lambda: build(synchronized=True))
    losses = [model.fit(x, y, epochs=3, verbose=0).history for model in (together, alone)]
    assert_close(*losses)
    assert_close(together.get_weights(), alone.get_weights())


def test_synchronized_layer_can_be_saved_and_loaded(two_replicas, tmp_path):
    model = built_under(two_replicas, normalizing(synchronized=True))
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].synchronized
    np.testing.assert_allclose(loaded(X), model(X), **ROUND_OFF)


def test_synchronized_layer_of_an_own_class_names_the_class_to_derive_it_from(two_replicas):
    class Own(keras.layers.BatchNormalization):
        pass

    with two_replicas.scope(), pytest.raises(ValueError, match="derive it from Unison"):
        Own(synchronized=True)


def test_synchronized_layer_without_a_strategy_normalizes_by_its_batch():
    layer = unison.keras.BatchNormalization(synchronized=True)
    plain = keras.layers.BatchNormalization()
    assert_close(np.asarray(layer(X, training=True)), np.asarray(plain(X, training=True)))
    assert_close(layer.get_weights(), plain.get_weights())


def test_synchronized_layer_in_a_replica_program_normalizes_over_all_replicas(two_replicas):
    with two_replicas.scope():
        layer = unison.keras.BatchNormalization(synchronized=True)
        layer.build((None, 6))
    parts = unison.PerReplica([X[:5], X[5:16]])  # of different sizes
    normalized = two_replicas.run(lambda part: layer(part, training=True), args=(parts,))
    plain = keras.layers.BatchNormalization()
    expected = np.asarray(plain(X[:16], training=True))
    assert_close(np.concatenate([np.asarray(part) for part in normalized.values]), expected)
    assert_close(layer.get_weights(), plain.get_weights())
