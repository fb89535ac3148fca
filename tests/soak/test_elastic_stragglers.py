"""A worker of an elastic job keeps the others waiting: `unison run` says which one, and where.

`pytest -m soak tests/soak/test_elastic_stragglers.py`; some 20 seconds, since nobody is late before
5 have passed.
"""

import re

import pytest

from subprocess_program import UNISON, run_program

#: Trains; the second worker does something else for a while.
PROGRAM = """
import json, os, time
os.environ.setdefault("KERAS_BACKEND", "jax")
is_second = json.loads(os.environ["UNISON_ELASTIC"])["slot"] == 1
import keras
import numpy as np
import unison

def dawdle():
    time.sleep(12)

class Dawdling(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and is_second:
            dawdle()

x = np.ones((320, 8), "float32")
with unison.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Dawdling()])
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(200)]


def test_the_worker_that_is_late_is_named_with_its_stack(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    options = ("-n", 2, "--min-workers", 1, "--folder", tmp_path / "job", program)
    finished = run_program(UNISON, "run", *options, timeout=150)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    late = re.findall(r"(worker \d) has kept the others waiting for", output)
    assert late == ["worker 1"], output
    assert "in dawdle" in output
    assert re.search(r"worker 1 has resumed after \d+\.\d s", output), output
