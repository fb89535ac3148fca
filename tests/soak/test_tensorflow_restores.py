"""Checkpoints that Unison writes for TensorFlow, restored by TensorFlow.

    UNISON_TENSORFLOW_PYTHON=.peers/tensorflow/bin/python pytest -m soak \\
        tests/soak/test_tensorflow_restores.py
"""

import json
import os
import subprocess

import keras
import numpy as np
import pytest

import unison
from unison.train import Checkpoint

PYTHON = os.environ.get("UNISON_TENSORFLOW_PYTHON")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON, reason="needs an interpreter with TensorFlow"),
]

IN_TENSORFLOW = """
import json, sys
import keras, numpy as np, tensorflow as tf

class Parts(tf.Module):
    def __init__(self):
        self.table = tf.Variable(np.zeros((2, 2), np.float32))
        self.counts = [tf.Variable(0), {"half": tf.Variable(0.0, dtype=tf.bfloat16)}]

def sequential():
    layers = [keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])

def functional():
    first = keras.Input((4,))
    return keras.Model(first, keras.layers.Dense(1)(keras.layers.Dense(3)(first)))

models = {"sequential": sequential(), "functional": functional()}
for model in models.values():
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
parts = Parts()
path = tf.train.latest_checkpoint(sys.argv[1])
tf.train.Checkpoint(parts=parts, **models).restore(path).assert_consumed()
x = np.ones((2, 4), np.float32)
print(json.dumps({
    "parts": [parts.table.numpy().tolist(), int(parts.counts[0]), float(parts.counts[1]["half"])],
    "predictions": {name: model.predict(x, verbose=0).tolist() for name, model in models.items()},
    "slots": {
        name: [float(np.sum(slot)) for slot in model.optimizer.variables]
        for name, model in models.items()
    },
}))
"""


def sequential():
    layers = [keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def functional():
    first = keras.Input((4,))
    return keras.Model(first, keras.layers.Dense(1)(keras.layers.Dense(3)(first)))


def test_tensorflow_restores_what_unison_has_written(tmp_path):
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        models = {"sequential": sequential(), "functional": functional()}
        for model in models.values():
            model.compile("adam", "mse")
    for model in models.values():
        model.fit(x, y, verbose=0)
    parts = unison.Module()
    parts.table = unison.Variable(np.arange(4, dtype=np.float32).reshape(2, 2))
    parts.counts = [unison.Variable(7), {"half": unison.Variable(1.5, dtype="bfloat16")}]
    Checkpoint(format="tensorflow", parts=parts, **models).save(tmp_path / "ckpt")
    done = subprocess.run(
        [PYTHON, "-c", IN_TENSORFLOW, tmp_path],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parts"] == [[[0, 1], [2, 3]], 7, 1.5]
    for name, model in models.items():
        expected = model.predict(x[:2], verbose=0)
        np.testing.assert_allclose(found["predictions"][name], expected, rtol=1e-5)
        slots = [float(np.sum(slot.numpy())) for slot in model.optimizer.variables]
        np.testing.assert_allclose(found["slots"][name], slots, rtol=1e-5)
