"""Every optimizer trains on several replicas as it does on one device."""

import keras
import pytest

from keras_comparison import (
    assert_same_outcome,
    on_four_replicas,
    regression_data,
    run_training,
    run_training_under,
)

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.02),
    "EMA": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7),
    "EMA overwriting": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    ),
    "weight decay": lambda: keras.optimizers.SGD(0.05, weight_decay=0.1),
    "gradient accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}

# Batches of 16, 16 and 3 examples: with 4 replicas the last one leaves one of them idle.
X, Y = regression_data(35)


def build(name):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(OPTIMIZERS[name](), "mse")
    return model


def fit(model):
    return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)


@on_four_replicas
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_trains_on_four_replicas_as_on_one_device(name, assert_trains_as_alone):
    assert_trains_as_alone(lambda: build(name), fit)


@pytest.mark.parametrize("name", ["SGD", "Adam", "global_clipnorm"])
def test_optimizer_trains_on_two_replicas_as_on_one_device(name, two_replicas):
    together = run_training_under(two_replicas, lambda: build(name), fit)
    assert_same_outcome(together, run_training(lambda: build(name), fit))
