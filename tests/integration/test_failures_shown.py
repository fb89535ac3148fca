"""What a user sees of a job that fails or is interrupted: one traceback, or one line."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from elastic_commands import processes_of
from subprocess_program import environment_of_program, unison_run

pytestmark = pytest.mark.slow

SECONDS = 120

TRAINING = """
import sys
import numpy as np
import unison.tf as tf

where = sys.argv[1]

def fails():
    raise ValueError("mine")  # here

def mapped(x, y):
    if where == "map":
        fails()
    return x, y

class Callback(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if where == "callback" and batch == 2:
            fails()

class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        if where == "train_step":
            fails()
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

def step(x):
    if where == "run":
        fails()
    return x

def main():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    strategy.run(step, args=(np.ones(3, "float32"),))
    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse")
    x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).map(mapped).batch(8)
    model.fit(data, verbose=0, callbacks=[Callback()])
    print("READY", flush=True)
    model.fit(data, verbose=0, epochs=10**6)

main()
"""

COORDINATING = """
import sys
import unison.tf as tf

where = sys.argv[1]

def fails():
    raise ValueError("mine")  # here

def step(iterator):
    if where == "schedule":
        fails()
    return next(iterator)

def mapped(x):
    if where == "map":
        fails()
    return x

def data():
    return tf.data.Dataset.range(8).map(mapped).batch(2).repeat()

strategy = tf.distribute.ParameterServerStrategy()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(data))
coordinator.schedule(step, args=(iterator,))
coordinator.join()
print("READY", flush=True)
while True:
    coordinator.schedule(step, args=(iterator,))
    coordinator.join()
"""

LAUNCHING = """
import jax.numpy as jnp
import unison
from unison.runtime.launching import launch

def train():
    strategy = unison.MultiWorkerMirroredStrategy()

    def step(x):
        raise ValueError("mine")  # here

    strategy.run(step, args=(jnp.ones(3),))

launch(train, workers=2)
"""

JOBS = {
    "plain": ["-n", 2],
    "elastic": ["-n", 2, "--min-workers", 1],
    "restarted": ["-n", 2, "--restarts", 1],
    "parameter servers": ["--workers=2", "--ps=1"],
}


@pytest.fixture
def start(tmp_path):
    """Starts a program, whose output has both streams; it is killed at the end, or in time."""
    path = tmp_path / "program.py"
    started = []

    def start(text, *command):
        path.write_text(text)
        process = subprocess.Popen(
            [*command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment_of_program({"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}),
            start_new_session=True,
        )
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        started.append((process, watchdog))
        return process

    start.path = path
    yield start
    for process, watchdog in started:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    assert not processes_of(tmp_path)


def started_job(start, job, where):
    text = COORDINATING if job == "parameter servers" else TRAINING
    return start(text, *unison_run(*JOBS[job], start.path, where))


def require_one_traceback(printed, text):
    assert printed.count("Traceback (most recent call last)") == 1, printed
    files = re.findall(r'File "(.*?)", line (\d+)', printed)
    assert not [file for file, _ in files if re.search(r"/(unison|jax|jaxlib|keras)/", file)]
    file, line = files[-1]
    assert file.endswith("program.py"), printed
    assert "# here" in text.splitlines()[int(line) - 1], printed


@pytest.mark.parametrize(
    ("job", "where"),
    [
        ("plain", "train_step"),
        pytest.param("plain", "map", marks=pytest.mark.soak),
        ("plain", "callback"),
        ("plain", "run"),
        pytest.param("elastic", "train_step", marks=pytest.mark.soak),
        pytest.param("elastic", "map", marks=pytest.mark.soak),
        ("elastic", "callback"),
        pytest.param("elastic", "run", marks=pytest.mark.soak),
        ("restarted", "callback"),
        ("parameter servers", "schedule"),
        ("parameter servers", "map"),
    ],
)
def test_a_failure_of_all_workers_shows_one_traceback_which_ends_in_the_users_line(
    start, job, where
):
    process = started_job(start, job, where)
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, printed
    require_one_traceback(printed, start.path.read_text())


def test_a_launched_function_that_fails_shows_its_traceback_once(start):
    process = start(LAUNCHING, sys.executable, str(start.path))
    printed, _ = process.communicate(timeout=SECONDS)
    of_workers = [line for line in printed.splitlines() if line.startswith("[worker ")]
    require_one_traceback("\n".join(of_workers), LAUNCHING)
    own = printed[printed.index("\nTraceback") :]
    assert "launching/functions.py" not in own
    assert "WorkerError: worker " in own
    assert "ValueError: mine" in own


@pytest.mark.parametrize("job", ["plain", "elastic", "parameter servers"])
def test_ctrl_c_shows_no_traceback(start, job):
    process = started_job(start, job, "nowhere")
    begun, running = 0, 1 if job == "parameter servers" else 2
    while begun < running:  # a line that is interrupted while it is printed is not whole
        line = process.stdout.readline()
        assert line, "the job has ended"
        begun += "READY" in line
    os.killpg(process.pid, signal.SIGINT)
    printed = process.stdout.read()
    assert process.wait(SECONDS) == 128 + signal.SIGINT
    assert "Traceback" not in printed
    assert "KeyboardInterrupt" not in printed
    lines = [line for line in printed.splitlines() if "READY" not in line]
    assert len(lines) == (2 if job == "elastic" else 1), printed
    if job == "elastic":  # it saves its state, and says where it is
        assert "stopping: the workers save" in lines[0]
        assert "to resume: unison run --folder " in lines[1]
