"""`unison top` and a job that runs: its workers report, one is killed, and the job goes on.

One launch serves all that is looked at; a browser looks at the page as well, if there is one.
"""

import contextlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from subprocess_program import environment_of_program, kill_group
from unison.monitoring.running_jobs import running_jobs

SECONDS = 60

#: Trains for a long time.
PROGRAM = """
import os, time
os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import numpy as np
import unison

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
with unison.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, epochs=10_000, verbose=0, callbacks=[Slow()])
"""


class RunningProgram:
    """The program under `unison run --min-workers 1`, and `unison top` beside it."""

    def __init__(self, folder):
        self.folder = folder
        program = folder / "train.py"
        program.write_text(PROGRAM)
        (folder / "runtime").mkdir(mode=0o700)
        self.environment = environment_of_program({"XDG_RUNTIME_DIR": str(folder / "runtime")})
        self.process = subprocess.Popen(
            self.command("run", "-n", 2, "--min-workers", 1, "--folder", folder / "job", program),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def command(*arguments):
        return [sys.executable, "-m", "unison", *map(str, arguments)]

    def state_when(self, is_so):
        """What is known of the job as soon as `is_so` of it."""
        last = time.monotonic() + SECONDS
        while time.monotonic() < last:
            state = self._state()
            if state is not None and is_so(state):
                return state
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.2)
        raise TimeoutError(f"It did not come to this: {state}")

    def end(self):
        """Ends the job as Ctrl-C does, and returns its exit code and what it has printed."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output

    def kill(self):
        with contextlib.suppress(TypeError, OSError):
            for worker in self._state()["workers"]:
                kill_group(worker["process"])
        kill_group(self.process.pid)
        self.process.wait()

    def _state(self):
        jobs = running_jobs()
        if not jobs:
            return None
        connection = http.client.HTTPConnection(jobs[0].address, timeout=10)
        with contextlib.closing(connection):
            connection.request(
                "GET", "/state.json", headers={"Authorization": f"Bearer {jobs[0].token}"}
            )
            return json.loads(connection.getresponse().read())


@pytest.fixture
def program(tmp_path, monkeypatch):
    started = RunningProgram(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    try:
        yield started
    finally:
        started.kill()


@pytest.mark.timeout(240)
def test_a_job_is_watched_from_its_first_step_over_a_loss_to_its_end(program):
    state = program.state_when(
        lambda state: (
            all(worker["state"] == "running" for worker in state["workers"])
            and state["loss"] is not None
            and state["examples_per_second"] is not None
        )
    )
    assert [worker["name"] for worker in state["workers"]] == ["worker 0", "worker 1"]
    assert all(worker["memory_bytes"] > 2**20 for worker in state["workers"])
    assert all(worker["step_seconds"]["p50"] >= 0.02 for worker in state["workers"])
    assert all(worker["sent_bytes"] > 0 for worker in state["workers"])
    watching = subprocess.Popen(
        program.command("top"),
        env=program.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lose_a_worker(program, state)
        look_at_the_page(program)
        code, output = program.end()
        printed, said = watching.communicate(timeout=SECONDS)
    finally:
        watching.kill()
    assert code == 130, output
    assert (watching.returncode, said) == (0, "")
    assert "The job has ended: exit code 130 (SIGINT)" in printed
    assert running_jobs() == []
    assert "monitor" not in output  # nobody has asked for anything


def lose_a_worker(program, state):
    """Kills a worker, and sees the other one go on alone, and then the lost one come back."""
    before = state["step"]
    os.kill(state["workers"][1]["process"], signal.SIGKILL)
    state = program.state_when(
        lambda state: state["recoveries"] == 2 and state["workers"][1]["state"] == "running"
    )
    assert state["step"] >= before
    assert state["last_recovery_seconds"] > 0
    assert any("worker 1 was lost (SIGKILL)" in event["text"] for event in state["events"])


def look_at_the_page(program):
    """Opens the page in a browser without a screen, if there is one, and reads what it shows."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    browser = browser or shutil.which("google-chrome")
    if browser is None:
        return
    url = running_jobs()[0].url
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    profile = f"--user-data-dir={program.folder / 'browser'}"
    finished = subprocess.run(
        [browser, *options, profile, "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    shown = html.unescape(finished.stdout)
    assert "2 of 2 workers run" in shown, finished.stderr
    assert re.search(r"<td>worker 1</td><td>running</td>", shown)
    assert re.search(r"<dt>loss</dt><dd>[\d.]+", shown)
    assert shown.count("<svg") == 2  # loss and examples/s
    assert "worker 1 was lost (SIGKILL)" in shown
    assert re.search(r"<title>\S*train.py", shown)
