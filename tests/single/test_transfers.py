"""A steady step copies nothing between host and devices that the program has not asked for.

JAX refuses such copies inside `jax.transfer_guard("disallow")`; a batch is put on the devices
explicitly, and only logs that somebody reads come back.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import mirrored, regression_data
from unison.data import Dataset
from unison.keras import grouping

STEPS = 20
X, Y = regression_data(STEPS * 8)


class Guarding(keras.callbacks.Callback):
    """Lets an epoch's steps run without copies; what Keras does before and after them may copy."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self._guard = contextlib.ExitStack()

    def set_model(self, model):
        super().set_model(model)
        store = vars(model)["jax_state_sync"]

        def storing():
            store()  # runs the steps that wait
            self._guard.close()

        vars(model)["jax_state_sync"] = storing

    def on_epoch_begin(self, epoch, logs=None):
        if epoch > 1:  # the first ones compile
            self._guard.enter_context(jax.transfer_guard("disallow"))

    def on_epoch_end(self, epoch, logs=None):
        self.steps = int(self.model.optimizer.iterations.numpy())


@pytest.mark.parametrize("most", [1, 16], ids=["single steps", "groups"])
@pytest.mark.parametrize("is_host", [True, False], ids=["on CPUs", "on accelerators"])
def test_fit_copies_nothing_in_a_steady_step(is_host, most, monkeypatch):
    monkeypatch.setattr(grouping, "_MOST_GROUPED_STEPS", most)
    # Which steps are worth a group on accelerators is measured: not here.
    monkeypatch.setattr(grouping.Trial, "group_size", lambda trial: most)
    monkeypatch.setattr(grouping.Trial, "pays_off", lambda trial, steps: True)
    strategy = mirrored(2)
    strategy.placement.is_host = is_host
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    guarding = Guarding()
    data = Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(data, epochs=3, verbose=0, callbacks=[guarding])
    assert guarding.steps == 3 * STEPS


def test_a_loop_of_run_copies_nothing_in_a_steady_step(two_replicas):
    with two_replicas.scope():
        weights = unison.Variable(
            np.zeros((6, 1), "float32"), aggregation=unison.VariableAggregation.MEAN
        )
        losses = unison.Variable(
            np.float32(0),
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )

    def step(batch):
        x, y = batch
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights.value())
        weights.assign_sub(0.1 * gradient)
        losses.assign_add(loss)
        return loss

    data = Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    batches = iter(two_replicas.experimental_distribute_dataset(data))
    for _ in range(3):
        two_replicas.run(step, (next(batches),))
    with jax.transfer_guard("disallow"):
        results = [two_replicas.run(step, (next(batches),)) for _ in range(STEPS)]
    assert len(results) == STEPS
    assert np.isfinite(losses.numpy())
