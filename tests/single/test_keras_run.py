"""Keras' models, optimizers and metrics in a training loop of one's own."""

import jax
import keras
import numpy as np
import pytest

from keras_comparison import assert_close, regression_data
from unison import PerReplica

X, Y = regression_data(16)
GLOBAL_BATCH = 16


def layers():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )


def gradients(model, x, y):
    """The gradients of the sum of the squared errors by the global batch size."""

    def loss_of(variables):
        predicted, _ = model.stateless_call(variables, model.non_trainable_variables, x)
        return keras.ops.sum((predicted - y) ** 2) / GLOBAL_BATCH

    return jax.value_and_grad(loss_of)([v.value for v in model.trainable_variables])


def trained_alone(optimizer, steps=3):
    model = layers()
    for _ in range(steps):
        _, grads = gradients(model, X, Y)
        optimizer.apply(grads, model.trainable_variables)
    return model.get_weights()


def divided(array, sizes):
    return PerReplica(np.split(array, np.cumsum(sizes)[:-1]))


def even(strategy):
    return [GLOBAL_BATCH // strategy.num_replicas_in_sync] * strategy.num_replicas_in_sync


def trained_in_programs(strategy, make_optimizer, sizes, steps=3, build_first=True):
    with strategy.scope():
        model = layers()
        optimizer = make_optimizer()
        if build_first:
            optimizer.build(model.trainable_variables)
    batch = divided(X, sizes), divided(Y, sizes)

    def step(x, y):
        loss, grads = gradients(model, x, y)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    for _ in range(steps):
        strategy.run(step, args=batch)
    return model, optimizer


def adam():
    return keras.optimizers.Adam(0.05)


def test_optimizer_applies_the_sum_of_the_replicas_gradients(strategy):
    model, _ = trained_in_programs(strategy, adam, even(strategy))
    assert_close(model.get_weights(), trained_alone(adam()))


def test_replicas_with_different_numbers_of_examples_train_on_each_of_them(four_replicas):
    model, _ = trained_in_programs(four_replicas, adam, [5, 5, 5, 1])
    assert_close(model.get_weights(), trained_alone(adam()))


def test_replica_without_examples_trains_along(four_replicas):
    model, _ = trained_in_programs(four_replicas, adam, [6, 6, 4, 0])
    assert_close(model.get_weights(), trained_alone(adam()))


def test_optimizer_counts_a_program_as_one_iteration(four_replicas):
    _, optimizer = trained_in_programs(four_replicas, adam, [4] * 4)
    assert int(optimizer.iterations.numpy()) == 3


def test_optimizer_that_is_first_needed_in_a_program_is_built_there(four_replicas):
    model, _ = trained_in_programs(four_replicas, adam, [4] * 4, build_first=False)
    assert_close(model.get_weights(), trained_alone(adam()))


def test_clipping_sees_the_sum_of_the_replicas_gradients(four_replicas):
    def clipped():
        return keras.optimizers.SGD(0.5, global_clipnorm=0.1)

    model, _ = trained_in_programs(four_replicas, clipped, [4] * 4)
    assert_close(model.get_weights(), trained_alone(clipped()))


def test_loss_scale_divides_the_sum_of_the_replicas_gradients(four_replicas):
    def halving():
        # The loop does not multiply its loss by the scale, so the gradients are halved.
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0)

    model, _ = trained_in_programs(four_replicas, halving, [4] * 4)
    assert_close(model.get_weights(), trained_alone(keras.optimizers.SGD(0.05)))


def test_layer_that_first_sees_an_input_in_a_program_is_built_there(two_replicas):
    with two_replicas.scope():
        layer = keras.layers.Dense(3)
    outputs = two_replicas.run(layer, args=(PerReplica([X[:8], X[8:]]),))
    expected = X @ layer.kernel.numpy() + layer.bias.numpy()
    assert_close(np.concatenate([np.asarray(part) for part in outputs.values]), expected)


def test_dropout_in_a_program_draws_different_masks(two_replicas):
    with two_replicas.scope():
        layer = keras.layers.Dropout(0.5)
    ones = np.ones((100,), "float32")
    first, second = two_replicas.run(lambda x: layer(x, training=True), args=(ones,)).values
    assert np.mean(np.asarray(first) == np.asarray(second)) < 0.8


def test_batch_normalization_in_a_program_keeps_the_mean_of_the_statistics(two_replicas):
    with two_replicas.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 6))
    parts = PerReplica([X[:8], X[8:]])
    two_replicas.run(lambda x: layer(x, training=True), args=(parts,))
    assert_close(layer.moving_mean.numpy(), 0.5 * (X[:8].mean(0) + X[8:].mean(0)) / 2)


def test_assigning_a_variable_of_no_strategy_in_a_program_is_refused(two_replicas):
    mean = keras.metrics.Mean()
    with pytest.raises(ValueError, match=r"created in the strategy's scope.*with strategy\.scope"):
        two_replicas.run(mean.update_state, args=(1.0,))
