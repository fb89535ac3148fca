"""Keras models on parameter servers, in programs to which Keras comes in either way."""

import contextlib
import functools
import json
import os
import pathlib
import tempfile

import keras
import numpy as np
import pytest

from keras_comparison import assert_close
from keras_features.program import FEATURES
from keras_features.running import NOT_ON_SERVERS, ON_SERVERS, results_of
from keras_forms import FORMS, forms
from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

PROGRAM = """
import json, sys
import numpy as np
import unison
from keras_forms import scope_with_keras
from parameter_server_threads import clusters
from unison.parameter_server import FixedShardsPartitioner

form, folder = sys.argv[1:]
if form == "keras":
    import keras
rng = np.random.default_rng(0)
x = rng.normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def train(strategy, form, **more):
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(8, kernel_regularizer="l2")
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])

    class Stopping(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)
            if more and epochs == [0, 1]:
                raise InterruptedError

    epochs = []
    callbacks = [Stopping(), *(make(keras) for make in more.values())]
    fit = lambda: model.fit(x, y, batch_size=16, epochs=3, steps_per_epoch=3, verbose=0,
                            callbacks=callbacks, shuffle=False)
    try:
        history = fit()
    except InterruptedError:
        history = fit()
    told = {name: [float(value) for value in values] for name, values in history.history.items()}
    told["evaluate"] = [float(value) for value in model.evaluate(x, y, verbose=0)]
    told["predict"] = model.predict(x[:4], verbose=0).ravel().tolist()
    return told, epochs, model


with clusters() as start:
    # The kernels are divided between the servers.
    strategy, _ = start(servers=2, partitioner=FixedShardsPartitioner(2))
    told, epochs, model = train(
        strategy,
        form,
        backup=lambda keras: keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        checkpoint=lambda keras: keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
    )
    weights = [variable.numpy() for variable in model.trainable_weights]
    told["shards"] = len(model.layers[0].weights)
import keras

loaded = keras.models.load_model(f"{folder}/model.keras").get_weights()
told["is saved"] = all(np.array_equal(a, b) for a, b in zip(loaded, weights, strict=True))
alone, _, _ = train(unison.OneDeviceStrategy("CPU:0"), "keras")
print(json.dumps([told, alone, epochs]))
"""


def printed(program, *arguments, **options):
    """What a program prints last."""
    tests = str(pathlib.Path(__file__).parents[1])
    environment = {
        "PYTHONPATH": os.pathsep.join([PYTHON_PATH, tests]),
        "UNISON_KEY": "ab" * 32,
        **FEW_OPTIMIZATIONS,
    }
    imported = ("jax", "unison")
    done = run_program(program, *arguments, env=environment, imported=imported, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@forms(*FORMS)
def test_a_training_that_is_interrupted_and_resumed_equals_one_on_one_device(form, tmp_path):
    told, alone, epochs = printed(PROGRAM, form, str(tmp_path))
    # The kernel and the bias; TensorFlow's layers list each of their shards.
    assert told.pop("shards") == {"keras": 2, "tf": 4}[form]
    for name, expected in alone.items():  # a history is that of the epochs that were run last
        own = told[name]
        np.testing.assert_allclose(own, expected[-len(own) :], rtol=1e-4, atol=1e-5)
    assert epochs == [0, 1, 1, 2]
    assert told["is saved"]


OTHERS = [name for name in FEATURES if name not in (*ON_SERVERS, *NOT_ON_SERVERS)]


@functools.cache
def results_on_servers(form, names):
    program = "from keras_features.running import main_on_servers; main_on_servers()"
    with tempfile.TemporaryDirectory() as folder:
        return printed(program, form, folder, *names, timeout=200)


# `test_parameter_server_keras.py` imports Keras first.
@forms("tf", soaked=["keras"])
@pytest.mark.parametrize(
    "name", [*ON_SERVERS, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)]
)
def test_parameter_servers_give_what_one_device_gives(form, name, tmp_path):
    group = ON_SERVERS if name in ON_SERVERS else OTHERS
    received = results_on_servers(form, tuple(group))[name]
    assert not isinstance(received, str), received  # it raised this
    alone = results_of([name], tmp_path, contextlib.nullcontext(keras))[name]
    assert not isinstance(alone, str), alone
    assert_close(received, alone)
