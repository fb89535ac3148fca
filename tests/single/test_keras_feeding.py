"""Batches that a thread puts on accelerators before the steps of `fit` need them.

The tests' devices are CPUs, whose placement is told that they are not the host's.
"""

from __future__ import annotations

import threading

import jax
import keras
import numpy as np
import pytest

from keras_comparison import assert_same_outcome, mirrored, regression_data, run_training_under
from unison.data import Dataset, Shares
from unison.keras import step

X, Y = regression_data(64)


def on_accelerators(strategy):
    """Returns the strategy, whose devices pass for accelerators."""
    strategy.placement.is_host = False
    return strategy


@pytest.fixture
def accelerators():
    return on_accelerators(mirrored(2))


def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def built_in(strategy):
    with strategy.scope():
        return build()


@pytest.fixture
def given(monkeypatch):
    """The batches that steps get."""
    batches = []
    call = step.CompiledStep.__call__

    def recording(self, state, batch, may_wait=False):
        batches.append(batch)
        return call(self, state, batch, may_wait)

    monkeypatch.setattr(step.CompiledStep, "__call__", recording)
    return batches


class EpochStoppedError(Exception):
    """Raised in the middle of an epoch."""


class Reading:
    """Counts the elements that a dataset has computed, and in which threads."""

    def __init__(self):
        self.count = 0
        self.threads = set()

    def __call__(self, *element):
        self.count += 1
        self.threads.add(threading.current_thread())
        return element

    def dataset(self, batches=8, size=8):
        x, y = regression_data(batches * size)
        return Dataset.from_tensor_slices((x, y)).batch(size).map(self)


def are_on(placement, batch):
    return all(
        isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(placement.per_replica, 2)
        for leaf in jax.tree.leaves(batch)
    )


def test_fit_evaluate_and_predict_get_batches_that_are_on_the_devices(accelerators, given):
    model = built_in(accelerators)
    model.fit(X, Y, batch_size=16, verbose=0)
    model.evaluate(X, Y, batch_size=16, verbose=0)
    model.predict(X, batch_size=16, verbose=0)
    assert len(given) == 12
    assert all(are_on(accelerators.placement, batch) for batch in given)


@pytest.mark.parametrize("examples", [64, 63, 57], ids=["even", "last of 15", "last of 9"])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "jax arrays"])
def test_training_is_the_same_as_without_reading_ahead(examples, kind):
    x, y = regression_data(examples)

    def train(model):
        if kind == "dataset":
            data = Dataset.from_tensor_slices((x, y)).shuffle(64, seed=1).batch(16)
            return model.fit(data, epochs=2, validation_data=data, verbose=0)
        arrays = (x, y) if kind == "arrays" else map(jax.numpy.asarray, (x, y))
        return model.fit(*arrays, batch_size=16, epochs=2, validation_split=0.2, verbose=0)

    ahead = run_training_under(on_accelerators(mirrored(2)), build, train)
    assert_same_outcome(ahead, run_training_under(mirrored(2), build, train))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool"])
@pytest.mark.parametrize(
    "shares", [Shares(9, 4), Shares(1, 4), Shares(10, 4, (1, 1, 0, 2))], ids=["9", "1", "given"]
)
def test_a_batch_on_the_devices_is_padded_there_as_on_the_host(shares, dtype):
    batch = np.arange(1, 1 + 2 * shares.examples).reshape(-1, 2).astype(dtype)
    padded = step._padding_on_devices(shares)(jax.numpy.asarray(batch))
    np.testing.assert_array_equal(padded, shares.pad(batch, range(4)))
    assert padded.dtype == batch.dtype


def test_a_dataset_is_read_two_batches_ahead_in_a_thread(accelerators):
    read = Reading()
    ahead = []

    class Comparing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ahead.append(read.count - (batch + 1))

    built_in(accelerators).fit(read.dataset(20), callbacks=[Comparing()], verbose=0)
    # Two that wait, and one that is being read.
    assert 0 < max(ahead[:-1]) <= 3
    assert threading.main_thread() not in read.threads - {threading.current_thread()}


def test_an_error_of_the_source_arrives_at_its_step(accelerators):
    def failing(x, y):
        if x[0, 0] == X[24, 0]:
            raise RuntimeError("the fourth batch")
        return x, y

    data = Dataset.from_tensor_slices((X, Y)).batch(8).map(failing)
    model = built_in(accelerators)
    with pytest.raises(Exception, match="the fourth batch"):
        model.fit(data, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3


def test_the_users_own_iterator_is_read_in_the_thread_of_the_loop_when_it_is_needed(
    accelerators, given
):
    read = []

    def batches():
        while True:
            assert threading.current_thread() is threading.main_thread()
            read.append(len(given))
            yield X[:8], Y[:8]

    built_in(accelerators).fit(batches(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0)
    # Keras itself reads the first two to learn their form.
    assert read == [0, 0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_py_dataset_is_read_in_the_thread_of_the_loop(accelerators):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            assert threading.current_thread() is threading.main_thread()
            return X[:8], Y[:8]

    built_in(accelerators).fit(Batches(), verbose=0)


def reading_threads():
    return [each for each in threading.enumerate() if each.name == "unison-data-prefetch"]


def ended():
    for thread in reading_threads():
        thread.join(10)
    return not reading_threads()


def test_threads_end_with_an_epoch_that_a_callback_stops(accelerators):
    class Stopping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    endless = Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    model = built_in(accelerators)
    model.fit(endless, steps_per_epoch=100, callbacks=[Stopping()], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1
    assert ended()


def test_threads_end_when_a_loop_is_interrupted(accelerators):
    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    endless = Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    model = built_in(accelerators)
    with pytest.raises(KeyboardInterrupt):
        model.fit(endless, steps_per_epoch=100, callbacks=[Interrupting()], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert ended()


def test_a_pass_goes_on_in_the_next_epoch(accelerators, given):
    data = Dataset.range(64).map(lambda n: (X[int(n)], Y[int(n)])).batch(8)
    built_in(accelerators).fit(data.repeat(), steps_per_epoch=3, epochs=4, verbose=0)
    first = [np.asarray(x)[0, 0] for x, _ in given]
    np.testing.assert_array_equal(first, [X[8 * (n % 8), 0] for n in range(12)])


def test_another_models_loop_in_a_callback_gets_its_own_batches(accelerators, given):
    other = build()
    expected = other.predict(X, batch_size=16, verbose=0)
    of_other = []

    class Predicting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            of_other.append(other.predict(X, batch_size=16, verbose=0))

    built_in(accelerators).fit(X, Y, batch_size=32, callbacks=[Predicting()], verbose=0)
    for received in of_other:
        np.testing.assert_array_equal(received, expected)


def test_a_backup_of_a_dataset_has_the_position_of_the_batches_that_were_trained(
    accelerators, tmp_path
):
    read = Reading()

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise EpochStoppedError

    def fit(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=2)
        data = read.dataset(8).shuffle(4, seed=3)
        return model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, backup])

    keras.utils.set_random_seed(0)
    with pytest.raises(EpochStoppedError):
        fit(built_in(accelerators), Failing())
    resumed = built_in(accelerators)
    fit(resumed)
    keras.utils.set_random_seed(0)
    whole = built_in(on_accelerators(mirrored(2)))
    whole.fit(Reading().dataset(8).shuffle(4, seed=3), epochs=2, verbose=0)
    for received, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_a_backup_of_shuffled_arrays_resumes_with_the_remaining_batches(accelerators, tmp_path):
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise EpochStoppedError

    def fit(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=2)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks, backup])

    keras.utils.set_random_seed(0)
    with pytest.raises(EpochStoppedError):
        fit(built_in(accelerators), Failing())
    np.random.seed(77)
    resumed = built_in(accelerators)
    fit(resumed)
    keras.utils.set_random_seed(0)
    whole = built_in(on_accelerators(mirrored(2)))
    whole.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    for received, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_on_the_hosts_cores_batches_are_read_when_they_are_needed(two_replicas, given):
    read = Reading()
    built_in(two_replicas).fit(read.dataset(4), verbose=0)
    assert read.threads == {threading.current_thread()}
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given))
