"""Whatever brings Keras to a program, and when, its models have all that Unison adds to Keras.

Each form is a program of its own, since Keras is imported once in a process.
"""

import functools
import json
import os
import pathlib

import pytest

from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

TESTS = str(pathlib.Path(__file__).parents[1])

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
    # Programs for TensorFlow import Keras by its own name, too.
    "keras-imported-before-unison.tf": ("import keras\nimport unison.tf", ""),
    "keras-imported-after-unison.tf": ("import unison.tf\nimport keras", ""),
    "keras-in-the-scope-after-unison.tf": ("import unison.tf", "import keras"),
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


REPLACED = """
import json
{above}
import unison
from keras_replacements import names_of_the_face, replacements

def look():
    return {{**replacements(), **names_of_the_face(), "loops": loops()}}

def loops():
    from unison.keras.trainer import trainer_made
    return [made.__module__ for made in trainer_made]

def use(**arguments):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **arguments)

strategy = unison.OneDeviceStrategy("CPU:0")
with strategy.scope():
    {inside}
    use()
    found = {{"in the scope": look()}}
use(**{arguments})
found["behind it"] = look()
with strategy.scope():
    use()
    found["in another scope"] = look()
print(json.dumps(found))
"""

#: Of each file that adds to Keras, something that it adds, and the file.
ADDED = {
    "keras.src.backend.compute_output_spec": "keras/control_flow.py",
    "keras.src.backend.jax.trainer.JAXEpochIterator._get_iterator": "keras/feeding.py",
    "keras.src.callbacks.backup_and_restore.BackupAndRestore.on_epoch_end": "train/keras_backup.py",
    "keras.src.callbacks.callback_list.CallbackList.set_model": "train/keras_backup.py",
    "keras.src.callbacks.orbax_checkpoint.OrbaxCheckpoint.set_model": "saving/keras_orbax.py",
    "keras.src.layers.preprocessing.normalization.Normalization.adapt": "keras/datasets.py",
    "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5": "saving/keras_files.py",
    "keras.src.losses.loss.scale_loss_for_distribution": "keras/losses.py",
    "keras.src.saving.saving_lib.save_model": "saving/keras_files.py",
    "keras.src.trainers.data_adapters.get_data_adapter": "keras/datasets.py",
}
ADDED_IN_SCOPES = {
    "keras.src.backend.Variable.__init__": "keras/scope.py",
    "keras.src.backend.jax.trainer.JAXTrainer.__init__": "keras/scope.py",
    "keras.src.layers.normalization.batch_normalization.BatchNormalization.__init__": (
        "keras/scope.py"
    ),
    "keras.src.metrics.metric.Metric.__init__": "keras/scope.py",
    "keras.src.models.model.Model.__new__": "keras/scope.py",
    "keras.src.optimizers.optimizer.Optimizer.__init__": "keras/scope.py",
}
ADDED_BY_TENSORFLOWS_FACE = {
    "keras.layers.StringLookup": "tf.keras.layers.StringLookup",
    "keras.src.backend.jax.trainer.JAXTrainer.compute_loss_and_updates": "tf/keras/masks.py",
    "keras.src.layers.layer.Layer.weights": "tf/keras/sharded_weights.py",
    "keras.src.models.functional.Functional._adjust_input_rank": "keras/text_input.py",
    "keras.src.models.model.Model.save": "tf/keras/old_saving.py",
    "keras.src.models.model.Model.train_step": "tf/keras/old_models.py",
    "keras.src.optimizers.base_optimizer.BaseOptimizer.__init__": "tf/keras/old_optimizers.py",
    "keras.src.utils.file_utils.get_file": "tf/keras/utils.py",
    "unison.tf.keras.callbacks.ModelCheckpoint": "tf.keras.callbacks.ModelCheckpoint",
    "unison.tf.keras.callbacks.TensorBoard": "tf.keras.callbacks.TensorBoard",
}
#: Makes a program one of a worker that keeps its state in the memory of its host.
KEEPING = """
import json, os
told = {"owner": os.getppid(), "slots": [], "former": [], "own": 0, "at_start": None}
told |= {"overhead": 0, "is_copied": False}
os.environ["UNISON_HOST_MEMORY"] = json.dumps(told)
"""

#: The forms that the others are like, by whether they have TensorFlow's face.
FIRST = {False: "keras-imported-first", True: "tf.keras-above-the-scope"}


@functools.cache
def replaced(form):
    """What is Unison's in Keras, and in `tf.keras`, where a program of a form opens its scopes."""
    above, inside = FORMS[form]
    # Keras 2's arguments stay when the scope that brought them is closed.
    arguments = {"experimental_run_tf_function": False} if has_the_face(form) else {}
    source = REPLACED.format(above=above, inside=inside or "pass", arguments=arguments)
    environment = {
        "PYTHONPATH": os.pathsep.join([PYTHON_PATH, TESTS]),
        # As in elastic jobs, and in those that keep checkpoints in memory.
        "UNISON_ELASTIC": "{}",
    }
    done = run_program(KEEPING + source, env=environment, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def has_the_face(form):
    return "tf" in form


@pytest.mark.parametrize("form", [form for form in FORMS if form not in FIRST.values()])
def test_all_that_unison_adds_to_keras_is_there_however_keras_came(form):
    """In the scope that brings Keras, behind it, and in another one."""
    found, first = replaced(form), replaced(FIRST[has_the_face(form)])
    for place, names in first.items():
        differing = {
            name: (found[place].get(name), names.get(name))
            for name in found[place] | names
            if found[place].get(name) != names.get(name)
        }
        assert differing == {}, place


@pytest.mark.parametrize("form", FIRST.values())
def test_of_each_file_that_adds_to_keras_something_is_found(form):
    found = replaced(form)
    added = ADDED | ADDED_BY_TENSORFLOWS_FACE if has_the_face(form) else ADDED
    for place, expected in {
        "in the scope": added | ADDED_IN_SCOPES,
        "behind it": added,
        "in another scope": added | ADDED_IN_SCOPES,
    }.items():
        for name, source in expected.items():
            assert source in str(found[place].get(name)), (place, name)
        assert found[place]["loops"] == [
            "unison.train.keras_elastic",
            "unison.train.keras_in_memory",
        ]
    for name in ADDED_IN_SCOPES:
        assert "keras/scope.py" not in str(found["behind it"].get(name)), name
