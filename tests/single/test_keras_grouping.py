"""Small steps run together as one program, and nobody can tell."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from unison.keras import grouping, step

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def build(strategy, **compile_options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"], **compile_options)
    return model


@pytest.fixture
def executions(monkeypatch):
    """Counts the programs that are started."""
    started = []
    execute = step.CompiledStep._execute

    def counting(self, program, *args):
        started.append(program.group_size)
        execute(self, program, *args)

    monkeypatch.setattr(step.CompiledStep, "_execute", counting)
    return started


def fit(model, **options):
    return model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **options).history


def test_small_steps_share_a_program(two_replicas, executions):
    fit(build(two_replicas))
    assert executions == [16, 16]  # 25 steps


def test_groups_of_any_size_give_the_same_bits(two_replicas, monkeypatch):
    outcomes = []
    for size in (16, 7):
        monkeypatch.setattr(grouping, "_MOST_GROUPED_STEPS", size)
        model = build(two_replicas)
        history = fit(model, epochs=2, validation_split=0.2)
        outcomes.append((history, model.get_weights()))
    assert outcomes[0][0] == outcomes[1][0]
    for some, others in zip(outcomes[0][1], outcomes[1][1], strict=True):
        np.testing.assert_array_equal(some, others)


def test_groups_train_as_single_steps_do(two_replicas, monkeypatch):
    grouped = build(two_replicas)
    fit(grouped)
    monkeypatch.setattr(grouping, "_MOST_GROUPED_STEPS", 1)
    single = build(two_replicas)
    fit(single)
    # Two programs of the same step: XLA may fuse, and so round, differently.
    for some, others in zip(grouped.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-4, atol=1e-6)


def test_a_callback_that_looks_at_batches_sees_every_step(two_replicas, executions):
    losses = []

    class Looking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

    fit(build(two_replicas), callbacks=[Looking()])
    assert executions == [1] * 25
    assert len(set(losses)) == 25


def test_what_waits_runs_when_an_epoch_is_interrupted(two_replicas):
    def batches():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise RuntimeError("no more")

    model = build(two_replicas)
    with pytest.raises(RuntimeError, match="no more"):
        model.fit(batches(), steps_per_epoch=5, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2


def test_large_steps_run_alone(two_replicas, executions, monkeypatch):
    monkeypatch.setitem(grouping._WORTH_STARTING, "cpu", 1)
    fit(build(two_replicas))
    assert executions == [1] * 25
