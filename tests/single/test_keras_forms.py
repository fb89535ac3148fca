"""Whatever brings Keras to a program, and when, its models have all that Unison adds to Keras.

Each form is a program of its own, since Keras is imported once in a process.
"""

import json

import pytest

from subprocess_program import FEW_OPTIMIZATIONS, run_program

#: How a program comes to Keras: what stands above the scope, and at its beginning.
FORMS = {
    "keras-imported-first": ("import keras", ""),
    "unison.keras-imported-first": ("import unison.keras, keras", ""),
    "tf.keras-above-the-scope": ("import unison.tf as tf; keras = tf.keras", ""),
    # As TensorFlow's guide writes it: Keras is not imported when the scope is entered.
    "tf.keras-in-the-scope": ("import unison.tf as tf", "keras = tf.keras"),
    "tf.keras-in-the-second-scope": (
        "import unison.tf as tf\nwith tf.distribute.OneDeviceStrategy('CPU:0').scope(): pass",
        "keras = tf.keras",
    ),
    "unison.tf-in-the-scope": ("", "from unison.tf import keras"),
    "unison.keras-in-the-scope": ("", "import unison.keras, keras"),
}

PROGRAM = """
import json, os, sys
import numpy as np
import unison
{above}

strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    {inside}

    class Failing(keras.layers.Layer):
        fails = False

        def save_own_variables(self, store):
            if self.fails:
                raise RuntimeError("no room")

        def call(self, inputs):
            return inputs

    failing = Failing()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), failing])
    model.compile("sgd", "mse")

class Stopping(keras.callbacks.Callback):
    def __init__(self, at):
        super().__init__()
        self.at, self.batches = at, []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)
        if batch == self.at:
            raise InterruptedError

def train(at):
    backup = keras.callbacks.BackupAndRestore("backup", save_freq=1)
    stopping = Stopping(at)
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[stopping, backup])
    except InterruptedError:
        pass
    return stopping.batches

x = np.ones((24, 2), "float32")
told = {{"stopped": train(3), "resumed": train(None)}}

model.save("model.keras")
with open("model.keras", "rb") as file:
    before = file.read()
failing.fails = True
try:
    model.save("model.keras")
except RuntimeError:
    pass
with open("model.keras", "rb") as file:
    told["is_whole"] = file.read() == before
told["files"] = sorted(os.listdir())
print(json.dumps(told))
"""


@pytest.mark.parametrize("form", FORMS)
def test_backups_resume_within_an_epoch_and_files_are_replaced_whole(form, tmp_path):
    above, inside = FORMS[form]
    source = PROGRAM.format(above=above, inside=inside or "pass")
    environment = {"UNISON_CPU_DEVICES": "2", **FEW_OPTIMIZATIONS}
    done = run_program(source, env=environment, folder=tmp_path, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["stopped"] == [0, 1, 2, 3]
    assert told["resumed"] == [3, 4, 5]
    assert told["is_whole"]
    assert told["files"] == ["model.keras"]


CLASSES = """
import json, types
{above}
import unison

def origins(function):
    # Where a function comes from, and the functions that it wraps.
    while function is not None:
        function = getattr(function, "__func__", getattr(function, "fget", function))
        code = getattr(function, "__code__", None)
        yield code and f"{{code.co_filename}}:{{code.co_firstlineno}}"
        function = getattr(function, "__wrapped__", None)

strategy = unison.OneDeviceStrategy("CPU:0")
with strategy.scope():
    {inside}
    keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse")
classes = [keras.Model, keras.Variable, keras.layers.Layer, keras.layers.BatchNormalization]
classes += [keras.metrics.Metric, keras.optimizers.Optimizer]
found = {{
    f"{{owner.__name__}}.{{name}}": [*origins(value)]
    for kind in classes
    for owner in kind.__mro__
    for name, value in vars(owner).items()
    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
}}
keras.Sequential([keras.layers.Dense(1)]).compile("sgd", "mse", **{arguments})
print(json.dumps(found))
"""


def classes_after_a_scope(form, arguments):
    above, inside = FORMS[form]
    source = CLASSES.format(above=above, inside=inside or "pass", arguments=arguments)
    done = run_program(source, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_keras_classes_are_the_same_after_a_scope_however_tensorflows_keras_came():
    """Also with the arguments of Keras 2: they stay when the scope that brought them is closed."""
    arguments = {"experimental_run_tf_function": False}
    above = classes_after_a_scope("tf.keras-above-the-scope", arguments)
    inside = classes_after_a_scope("tf.keras-in-the-scope", arguments)
    assert inside == above
    assert "Trainer.compile" in inside
