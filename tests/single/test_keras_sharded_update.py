"""The optimizer's update of large weights is divided between the replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import unison
from keras_comparison import ROUND_OFF, assert_close
from unison.cells import Layout

FEATURES, UNITS = 320, 256  # 81,920 weights in the first layer: enough to be divided
rng = np.random.default_rng(0)
X = rng.normal(size=(70, FEATURES)).astype("float32")
Y = rng.integers(0, 10, 70)


def build(optimizer, **dense):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(UNITS, activation="relu", **dense),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def train(model, epochs=2):
    # 70 examples by 32: the last batch of 6 leaves 4 replicas with 2, 2, 2, 0.
    return model.fit(X, Y, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history


def layouts(optimizer):
    return {v.cell.layout for v in optimizer.variables if v.shape == (FEATURES, UNITS)}


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def clipped_each():
    return keras.optimizers.Adam(clipnorm=0.1)


def clipped_together():
    return keras.optimizers.Adam(global_clipnorm=0.1)


@pytest.mark.parametrize(
    "make_optimizer", [keras.optimizers.Adam, momentum, clipped_each, clipped_together]
)
def test_divided_update_gives_the_weights_and_slots_of_one_device(
    assert_trains_as_alone, make_optimizer
):
    assert_trains_as_alone(lambda: build(make_optimizer()), train)


def test_slots_of_large_weights_are_divided(two_replicas):
    with two_replicas.scope():
        model = build("adam")
    train(model)
    assert layouts(model.optimizer) == {Layout.SHARDED}
    slot = next(v for v in model.optimizer.variables if v.shape == (FEATURES, UNITS))
    shards = slot.cell.array.addressable_shards
    assert {shard.data.shape for shard in shards} == {(FEATURES // 2, UNITS)}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(use_ema=True),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        keras.optimizers.Adafactor,
    ],
    ids=["ema", "accumulation", "adafactor"],
)
def test_optimizers_that_look_at_whole_weights_update_everywhere(two_replicas, optimizer):
    with two_replicas.scope():
        model = build(optimizer())
    train(model, epochs=1)
    assert Layout.SHARDED not in {v.cell.layout for v in model.optimizer.variables}


def test_constrained_weights_are_updated_everywhere(two_replicas):
    with two_replicas.scope():
        model = build("adam", kernel_constraint=keras.constraints.MaxNorm(1.0))
    train(model, epochs=1)
    assert layouts(model.optimizer) == {Layout.MIRRORED}


def test_divided_slots_are_read_saved_and_loaded_whole(two_replicas, tmp_path):
    with two_replicas.scope():
        model = build("adam")
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for saved, original in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), original.numpy())
    # And training goes on alike.
    np.testing.assert_allclose(train(loaded)["loss"], train(model)["loss"], **ROUND_OFF)


def test_step_of_ones_own_sees_whole_slots(two_replicas):
    class Watching(keras.Sequential):
        def train_step(self, state, data):
            logs, new = super().train_step(state, data)
            slots = [value for value in state[2] if value.shape == (FEATURES, UNITS)]
            return {**logs, "slots": sum(abs(slot).sum() for slot in slots)}, new

    def trained(scope):
        with scope:
            keras.utils.set_random_seed(0)
            model = Watching([keras.Input((FEATURES,)), keras.layers.Dense(UNITS)])
            model.compile("adam", "mse")
        targets = X[:, :UNITS]
        return model.fit(X, targets, batch_size=70, epochs=3, shuffle=False, verbose=0).history

    assert_close(trained(two_replicas.scope()), trained(unison.get_strategy().scope()))


def test_optimizer_with_divided_slots_works_in_a_program_of_ones_own(two_replicas):
    with two_replicas.scope():
        model = build("adam")
    train(model)
    before = [weight.numpy() for weight in model.trainable_variables]
    ones = [np.ones(weight.shape, "float32") for weight in before]

    two_replicas.run(lambda: model.optimizer.apply(ones, model.trainable_variables))

    after = [weight.numpy() for weight in model.trainable_variables]
    assert all(np.all(b > a) for b, a in zip(before, after, strict=True))
    assert layouts(model.optimizer) == {Layout.SHARDED}
