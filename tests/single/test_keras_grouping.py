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
    monkeypatch.setattr(grouping, "_WORTH_STARTING", 1)
    fit(build(two_replicas))
    assert executions == [1] * 25


def test_steps_with_large_batches_run_alone(two_replicas, executions):
    """A copy of the batches would take longer than the launches, and memory."""
    images = rng.random((48, 64, 64, 3), np.float32)
    with two_replicas.scope():
        layers = [keras.layers.Cropping2D(28), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((64, 64, 3)), *layers])
        model.compile("sgd", "mse")
    # A replica's batch has 4 x 48 KiB, or 96 x 48 KiB.
    model.fit(images, np.ones((48, 1)), batch_size=8, verbose=0)
    assert executions == [16]
    executions.clear()
    many = np.repeat(images, 4, axis=0)
    model.fit(many, np.ones((192, 1)), batch_size=192, epochs=3, verbose=0)
    assert executions == [1] * 3


# -- accelerators, for which the tests' devices pass -------------------------------------------


@pytest.fixture
def accelerators(two_replicas):
    two_replicas.placement.is_host = False
    return two_replicas


@pytest.fixture
def takes(monkeypatch):
    """Sets the seconds of launches and of computing, by the number of steps of a program."""

    def set_seconds(launch, compute):
        timed = step.CompiledStep._execute_timed

        def measured(self, trial, program, *args):
            note = trial.note
            trial.note = lambda *_: note(launch, compute(program.group_size))
            timed(self, trial, program, *args)
            trial.note = note

        monkeypatch.setattr(step.CompiledStep, "_execute_timed", measured)

    return set_seconds


def test_steps_that_are_launched_faster_than_computed_run_alone(accelerators, takes, executions):
    takes(launch=1.0, compute=lambda steps: 1.5 * steps)
    fit(build(accelerators), epochs=2)
    assert executions == [1] * 50


def test_steps_that_are_computed_faster_than_launched_run_together(accelerators, takes, executions):
    takes(launch=1.0, compute=lambda steps: 0.1 * steps)
    fit(build(accelerators), epochs=3)
    # The first four steps are timed. Ten steps compute for as long as a launch takes.
    assert executions[:4] == [1] * 4
    assert set(executions[4:]) == {10}


def test_groups_that_are_not_faster_are_given_up(accelerators, takes, executions):
    takes(launch=1.0, compute=lambda steps: 0.1 if steps == 1 else 2.0 * steps)
    fit(build(accelerators), epochs=6)
    assert executions.count(10) == 5  # four full ones, and the last one of an epoch
    assert executions[-105:] == [1] * 105  # of 150 steps


def test_groups_on_accelerators_train_as_single_steps_do(accelerators, takes, monkeypatch):
    takes(launch=1.0, compute=lambda steps: 0.1 * steps)
    together = build(accelerators)
    fit(together, epochs=2)
    monkeypatch.setattr(grouping, "_MOST_GROUPED_STEPS", 1)
    alone = build(accelerators)
    fit(alone, epochs=2)
    for some, others in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-4, atol=1e-6)


def test_nothing_is_measured_where_runs_must_not_differ(accelerators, executions, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert not grouping.is_measured(accelerators.placement)
    fit(build(accelerators))
    assert executions == [1] * 25


def test_a_trial_leaves_out_the_execution_that_compiles():
    trial = grouping.Trial()
    for launch in (60.0, 0.4, 0.2, 0.3):
        trial.note(launch, 0.05)
    assert trial.is_over
    assert (trial.launch, trial.group_size()) == (0.2, 4)
