"""`BackupAndRestore` and `ModelCheckpoint` under strategies: what was stopped goes on as it was."""

import contextlib
import logging
import os
import random
from typing import NamedTuple

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from keras_comparison import mirrored, regression_data
from keras_features.callbacks import failing_once
from unison.data import Dataset
from unison.train import latest_checkpoint, list_variables

X, Y = regression_data(44)


class StoppedError(Exception):
    """What ends a training."""


class Run(NamedTuple):
    """What the batches were trained to, by epoch and batch, and where the last part began."""

    losses: dict
    weights: list
    first: tuple | None


class StopAt(keras.callbacks.Callback):
    """Ends the training behind a batch of an epoch, and notes the losses of the batches."""

    def __init__(self, epoch=None, batch=None):
        super().__init__()
        self.place = epoch, batch
        self.losses = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append((self.epoch, batch, logs["loss"], logs["mae"]))
        if (self.epoch, batch) == self.place:
            raise StoppedError


_models = {}


def build(strategy, **compiled):
    """A model with everything that has a state: dropout, statistics, slots, metrics.

    It is compiled once, and begins each time with its first values.
    """
    key = id(strategy), tuple(compiled)
    if key not in _models:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, activation="tanh"),
                    keras.layers.BatchNormalization(momentum=0.5),
                    keras.layers.Dropout(0.4),
                    keras.layers.Dense(1),
                ]
            )
            optimizer = keras.optimizers.Adam(0.05, **compiled)
            model.compile(optimizer, "mse", metrics=["mae"])
        model.fit(X, Y, batch_size=8, verbose=0)  # which takes another batch, to build it
        state = model.variables + optimizer.variables
        _models[key] = model, [(variable, variable.numpy()) for variable in state]
    model, first = _models[key]
    for variable, value in first:
        variable.assign(value)
    if model.steps_per_execution != 1:
        model.steps_per_execution = 1
        model.train_function = None
    return model


def arrays(model, **kwargs):
    return model.fit(X, Y, batch_size=8, epochs=3, verbose=0, **kwargs)


def in_executions(model, **kwargs):
    model.steps_per_execution = 2
    model.train_function = None
    return arrays(model, **kwargs)


def shuffled_in_batches(model, **kwargs):
    return model.fit(X, Y, batch_size=8, epochs=3, shuffle="batch", verbose=0, **kwargs)


def datasets(model, **kwargs):
    dataset = Dataset.from_tensor_slices((X, Y)).shuffle(20).batch(8)  # a seed of its own
    return model.fit(dataset, epochs=3, verbose=0, **kwargs)


def epochs_within_a_pass(model, **kwargs):
    dataset = Dataset.from_tensor_slices((X, Y)).shuffle(20).batch(8).repeat()
    return model.fit(dataset, epochs=3, steps_per_epoch=5, verbose=0, **kwargs)


def without_a_length(model, **kwargs):
    def batches():
        order = np.random.permutation(len(X))
        for start in range(0, len(X), 8):
            yield X[order[start : start + 8]], Y[order[start : start + 8]]

    spec = tf.TensorSpec((None, 6), np.float32), tf.TensorSpec((None, 1), np.float32)
    dataset = Dataset.from_generator(batches, output_signature=spec)
    return model.fit(dataset, epochs=3, verbose=0, **kwargs)


def run(strategy, fit, folder, stops=((None, None),), save_freq=2, strategies=(), **compiled):
    """What each batch was trained to, in a run that is stopped and begun anew."""
    losses = {}
    for number, stop in enumerate(stops):
        model = build(strategies[number] if strategies else strategy, **compiled)
        np.random.seed(number)  # which the backup knows better
        random.seed(number)
        if not number:
            keras.utils.set_random_seed(7)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=save_freq)
        watcher = StopAt(*stop)
        with contextlib.suppress(StoppedError):
            fit(model, callbacks=[watcher, backup])  # the batch of the stop is not in the backup
        for epoch, batch, *values in watcher.losses:
            losses[epoch, batch] = values
        first = watcher.losses[0][:2] if number else None
    return Run(losses, model.get_weights(), first)


def assert_same(resumed, whole):
    """Two runs are equal to round-off: copies that differ are saved combined."""
    assert resumed.losses.keys() == whole.losses.keys()
    for place, values in whole.losses.items():
        np.testing.assert_allclose(resumed.losses[place], values, rtol=1e-5, err_msg=str(place))
    for of_resumed, of_whole in zip(resumed.weights, whole.weights, strict=True):
        np.testing.assert_allclose(of_resumed, of_whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "fit",
    [arrays, shuffled_in_batches, in_executions, datasets, epochs_within_a_pass, without_a_length],
    ids=lambda fit: fit.__name__,
)
def test_training_resumed_in_an_epoch_is_that_which_was_never_stopped(fit, tmp_path, two_replicas):
    whole = run(two_replicas, fit, tmp_path / "whole")
    # The batch of the stop is done again, from the backup before.
    stop = (1, 3) if fit is in_executions else (1, 2)
    resumed = run(two_replicas, fit, tmp_path / "stopped", stops=(stop, (None, None)))
    assert resumed.first[0] == 1
    assert resumed.first[1] > 0
    assert_same(resumed, whole)


def test_training_resumed_behind_an_epoch_is_that_which_was_never_stopped(tmp_path, two_replicas):
    whole = run(two_replicas, arrays, tmp_path / "whole", save_freq="epoch")
    stops = ((1, 3), (2, 0), (None, None))
    resumed = run(two_replicas, arrays, tmp_path / "stopped", stops, save_freq="epoch")
    assert resumed.first == (2, 0)
    assert_same(resumed, whole)


def test_gradients_that_are_being_accumulated_are_kept(tmp_path, two_replicas):
    kind = {"gradient_accumulation_steps": 4}
    whole = run(two_replicas, arrays, tmp_path / "whole", save_freq=1, **kind)
    resumed = run(
        two_replicas, arrays, tmp_path / "stopped", ((0, 2), (None, None)), save_freq=1, **kind
    )
    assert resumed.first == (0, 2)  # in the middle of four
    assert_same(resumed, whole)


@pytest.mark.parametrize("fit", [arrays, epochs_within_a_pass], ids=lambda fit: fit.__name__)
def test_training_goes_on_under_other_strategies(tmp_path, fit):
    """With the same batches, losses and metrics, in the middle of an accumulation of gradients."""

    def plain(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=3)
            model.compile(optimizer, "mse", metrics=["mae"])
        return model

    def trained(stops, strategies, folder):
        losses = {}
        for stop, strategy in zip(stops, strategies, strict=True):
            model = plain(strategy)
            watcher = StopAt(*stop)
            keras.utils.set_random_seed(3)
            with contextlib.suppress(StoppedError):
                fit(model, callbacks=[keras.callbacks.BackupAndRestore(folder, 1), watcher])
            losses |= {place[:2]: place[2:] for place in watcher.losses}
        return losses

    alone = unison.OneDeviceStrategy("CPU:0")
    whole = trained([(None, None)], [alone], tmp_path / "whole")
    resumed = trained(
        [(0, 1), (1, 3), (None, None)], [alone, mirrored(2), mirrored(4)], tmp_path / "stopped"
    )
    assert resumed.keys() == whole.keys()
    for place, values in whole.items():
        np.testing.assert_allclose(resumed[place], values, rtol=1e-4)


def test_backup_is_deleted_when_the_training_is_done(tmp_path, two_replicas):
    run(two_replicas, arrays, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_backup_is_one_file_that_has_everything(tmp_path, two_replicas):
    run(two_replicas, arrays, tmp_path, stops=((0, 3),))
    names = [name for name, _ in list_variables(latest_checkpoint(tmp_path))]
    for part in ("iterations", "seed_generator", "moving_mean", "metrics", "place", "velocities"):
        assert any(part in name for name in names), (part, names)


def test_damaged_backup_is_passed_over_for_the_one_before(tmp_path, two_replicas, caplog):
    whole = run(two_replicas, arrays, tmp_path / "whole")

    def stop_and_damage(model, callbacks):
        try:
            arrays(model, callbacks=callbacks)
        except StoppedError:
            with open(f"{latest_checkpoint(tmp_path / 'stopped')}.index", "r+b") as file:
                file.truncate(900)
            raise

    fits = iter([stop_and_damage, arrays])
    with caplog.at_level(logging.WARNING):
        resumed = run(
            two_replicas,
            lambda model, callbacks: next(fits)(model, callbacks=callbacks),
            tmp_path / "stopped",
            stops=((1, 4), (None, None)),
        )
    assert "Skipping checkpoint" in caplog.text
    assert resumed.first[0] == 1
    assert_same(resumed, whole)


def test_callback_outside_strategies_is_keras_own(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    with pytest.raises(StoppedError):
        arrays(model, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), StopAt(1, 0)])
    assert sorted(os.listdir(tmp_path)) == ["latest.weights.h5", "training_metadata.json"]


def model_with_others(strategy, what):
    """A model whose step assigns a variable, and may use an optimizer, that it does not hold."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        steps = unison.Variable(0.0, aggregation=unison.VariableAggregation.MEAN)
        another = keras.optimizers.Adam(0.05)

        class Model(keras.Sequential):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                gradients = tape.gradient(loss, self.trainable_variables)
                optimizer = another if what == "an-optimizer" else self.optimizer
                optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
                steps.assign_add(1.0)
                return {"loss": loss, "mae": loss}

        model = Model([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, steps


@pytest.mark.parametrize("what", ["a-variable", "an-optimizer"])
def test_what_a_step_assigns_outside_of_the_model_is_kept(tmp_path, two_replicas, what):
    def trained(folder, stops):
        for stop in stops:
            model, steps = model_with_others(two_replicas, what)
            backup = keras.callbacks.BackupAndRestore(folder, save_freq=1)
            with contextlib.suppress(StoppedError):
                arrays(model, shuffle=False, callbacks=[backup, StopAt(*stop)])
        return float(steps), model.get_weights()

    count, weights = trained(tmp_path / "whole", [(None, None)])
    resumed_count, resumed = trained(tmp_path / "stopped", [(1, 2), (None, None)])
    assert resumed_count == count > 0
    for of_resumed, of_whole in zip(resumed, weights, strict=True):
        np.testing.assert_allclose(of_resumed, of_whole, rtol=1e-5)


# -- what other callbacks remember ---------------------------------------------------------------


def scripted(*names):
    """A metric of a model whose values the test gives, one an epoch."""

    class Scripted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = names[epoch]

    return Scripted()


class Counting(keras.callbacks.Callback):
    """A callback of the user, which says what it remembers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)

    def get_state(self):
        return {"seen": self.seen}

    def set_state(self, state):
        self.seen = state["seen"]


SCORES = [5.0, 3.0, 4.0, 3.5, 6.0, 7.0, 1.0, 0.5]


def fit_with_callbacks(strategy, folder, stop=(None, None), backup_first=True):
    """Trains with all callbacks that remember something; returns what became of it."""
    model = build(strategy)
    keras.utils.set_random_seed(7)
    model.optimizer.learning_rate = 0.05
    # Two of a class, which have to be told apart.
    early = keras.callbacks.EarlyStopping("score", patience=4, mode="min")
    early.restore_best_weights = True
    never = keras.callbacks.EarlyStopping("score", patience=9, mode="min")
    plateau = keras.callbacks.ReduceLROnPlateau(
        "score", factor=0.5, patience=2, cooldown=1, mode="min"
    )
    best = keras.callbacks.ModelCheckpoint(
        f"{folder}-best-{{epoch}}.keras", "score", save_best_only=True, mode="min"
    )
    counting = Counting()
    backup = keras.callbacks.BackupAndRestore(folder, save_freq="epoch")
    others = [scripted(*SCORES), early, never, plateau, best, counting, StopAt(*stop)]
    with contextlib.suppress(StoppedError):
        model.fit(
            X,
            Y,
            batch_size=16,
            epochs=len(SCORES),
            verbose=0,
            callbacks=[backup, *others] if backup_first else [*others, backup],
        )
    return {
        "history": model.history.history,
        "epochs": model.history.epoch,
        "rate": float(model.optimizer.learning_rate),
        "waits": [early.wait, never.wait, plateau.wait, plateau.cooldown_counter],
        "bests": [float(each.best) for each in (early, never, plateau, best)],
        "best epoch": early.best_epoch,
        "stopped": early.stopped_epoch,
        "seen": counting.seen,
        "saved": sorted(name for name in os.listdir(os.path.dirname(folder)) if "best" in name),
        "weights": model.get_weights(),
    }


@pytest.mark.parametrize("backup_first", [True, False])
@pytest.mark.parametrize("stop", [(1, 1), (3, 0), (5, 1)])
def test_resumed_callbacks_act_as_those_that_were_never_stopped(
    tmp_path, two_replicas, stop, backup_first
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = fit_with_callbacks(two_replicas, str(tmp_path / "a" / "run"))
    assert whole["stopped"] == 5  # the scores are made for it, and for a smaller rate
    assert whole["rate"] < 0.05
    resumed_folder = str(tmp_path / "b" / "run")
    fit_with_callbacks(two_replicas, resumed_folder, stop, backup_first)
    resumed = fit_with_callbacks(two_replicas, resumed_folder, backup_first=backup_first)
    for of_whole, of_resumed in zip(whole.pop("weights"), resumed.pop("weights"), strict=True):
        np.testing.assert_allclose(of_resumed, of_whole, rtol=1e-4, atol=1e-6)
    losses = whole.pop("history"), resumed.pop("history")
    assert losses[0].keys() == losses[1].keys()
    epochs = resumed.pop("epochs")  # those that were run, as in Keras
    assert epochs == whole.pop("epochs")[-len(epochs) :]
    for name in losses[0]:
        np.testing.assert_allclose(losses[1][name], losses[0][name][-len(epochs) :], rtol=1e-4)
    assert resumed == whole


def test_training_that_a_callback_had_ended_is_not_taken_up_again(tmp_path, two_replicas):
    folder = str(tmp_path / "run")

    class Die(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise StoppedError

    def fit(callbacks):
        model = build(two_replicas)
        seen = Counting()
        backup = keras.callbacks.BackupAndRestore(folder)
        early = keras.callbacks.EarlyStopping("score", patience=1, mode="min")
        with contextlib.suppress(StoppedError):
            model.fit(
                X, Y, batch_size=16, epochs=8, verbose=0,
                callbacks=[backup, scripted(*range(8)), early, seen, *callbacks],
            )  # fmt: skip
        return seen.seen

    assert fit([Die()]) == [0, 1]
    assert fit([]) == [0, 1]
    assert not os.path.exists(folder)


@pytest.mark.parametrize(("is_before", "epochs"), [(True, [0, 1]), (False, [0, 0, 1])])
def test_epoch_is_not_repeated_where_a_callback_behind_the_backup_raises(
    tmp_path, two_replicas, is_before, epochs
):
    """As Keras' own order has it: the backup that stands before the callback is saved."""
    model = build(two_replicas)
    failing = failing_once(keras.callbacks)
    for _ in range(2):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        callbacks = [backup, failing] if is_before else [failing, backup]
        with contextlib.suppress(InterruptedError):
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert failing.begun == epochs


def test_callback_that_the_backup_does_not_know_begins_anew(tmp_path, two_replicas, caplog):
    model = build(two_replicas)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(StoppedError):
        arrays(model, callbacks=[backup, StopAt(1, 1)])
    counting = Counting()
    with caplog.at_level(logging.WARNING):
        arrays(build(two_replicas), callbacks=[backup, counting])
    assert counting.seen == [1, 2]
    assert "no state of callback Counting" in caplog.text
