"""Features of Keras on two replicas, in programs to which Keras comes in either form.

In TensorFlow's form, `tf.keras` is met inside the scope, as its guide writes programs. A group of
features is a program of its own: Keras is imported once in a process.
"""

import contextlib
import functools
import json
import os
import pathlib
import tempfile

import keras
import pytest

from keras_comparison import ROUND_OFF, assert_close
from keras_features.program import DEVICES
from keras_features.running import GROUPS, results_of
from keras_forms import IMPORTED
from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

PROGRAM = "from keras_features.running import main; main()"
#: Sums of float16 over other numbers of examples.
ROUND_OFFS = {"mixed_precision_with_loss_scaling": {"rtol": 5e-3, "atol": 5e-4}}
TESTS = str(pathlib.Path(__file__).parents[1])


@functools.cache
def results_of_program(form, group):
    environment = {
        "PYTHONPATH": os.pathsep.join([PYTHON_PATH, TESTS]),
        "UNISON_CPU_DEVICES": str(DEVICES),
        **FEW_OPTIMIZATIONS,
    }
    imported = tuple(name for name in IMPORTED[form] if name != "pytest")
    with tempfile.TemporaryDirectory() as folder:
        done = run_program(
            PROGRAM, form, group, folder, env=environment, imported=imported, timeout=200
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# The other tests of Keras import it first, as the programs of that form do.
@pytest.mark.parametrize("form", [pytest.param("keras", marks=pytest.mark.soak), "tf"])
@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, names in GROUPS.items() for name in names],
)
def test_two_replicas_give_what_one_device_gives(form, group, name, tmp_path):
    received = results_of_program(form, group)[name]
    assert not isinstance(received, str), received  # it raised this
    alone = results_of([name], tmp_path, contextlib.nullcontext(keras))[name]
    assert not isinstance(alone, str), alone
    assert_close(received, alone, round_off=ROUND_OFFS.get(name, ROUND_OFF))
