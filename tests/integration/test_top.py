"""`unison top` and a job that runs: its workers report, one is killed, one joins, it goes on.

One launch serves all that is looked at. What the page makes of a job, a browser shows.
"""

import contextlib
import functools
import html
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from monitoring_reports import all_run, state_of_the_job, state_when, told, watched
from subprocess_program import environment_of_program, kill_group
from unison.monitoring.collector import Collector
from unison.monitoring.running_jobs import running_jobs

SECONDS = 120

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

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
        self.program = folder / "train.py"
        self.program.write_text(PROGRAM)
        (folder / "runtime").mkdir(mode=0o700)
        self.environment = environment_of_program(
            {"XDG_RUNTIME_DIR": str(folder / "runtime"), "UNISON_LOG": "info"}
        )
        self.started = []
        options = ("-n", 2, "--min-workers", 1, "--max-workers", 3, "--folder", folder / "job")
        self.process = self.start(*options)

    def start(self, *options, **environment):
        """Starts `unison run`."""
        process = subprocess.Popen(
            self.command("run", *options, self.program),
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    @staticmethod
    def command(*arguments):
        return [sys.executable, "-m", "unison", *map(str, arguments)]

    def state_when(self, is_so):
        return state_when(is_so, self.process, SECONDS)

    def end(self):
        """Ends the job as Ctrl-C does, and returns its exit code and what it has printed."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output

    def kill(self):
        with contextlib.suppress(TypeError, OSError):
            for worker in state_of_the_job()["workers"]:
                kill_group(worker["process"])
        for process in self.started:
            kill_group(process.pid)
            process.communicate()


@pytest.fixture
def program(tmp_path, monkeypatch):
    started = RunningProgram(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    try:
        yield started
    finally:
        started.kill()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_job_is_watched_from_its_first_step_over_a_loss_to_its_end(program):
    state = program.state_when(functools.partial(all_run, 2))
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
        let_one_join(program)
        code, output = program.end()
        printed, said = watching.communicate(timeout=SECONDS)
    finally:
        watching.kill()
    assert code == 130, output
    assert (watching.returncode, said) == (0, "")
    assert "The job has ended: exit code 130 (SIGINT)" in printed
    assert running_jobs() == []
    assert "monitor" not in output  # nobody has asked for anything
    look_at_the_messages(output)


def lose_a_worker(program, state):
    """Kills a worker, and sees the other one go on alone, and then the lost one come back."""
    before = state["step"]
    os.kill(state["workers"][0]["process"], signal.SIGKILL)
    state = program.state_when(
        lambda state: state["recoveries"] == 2 and state["workers"][0]["state"] == "running"
    )
    assert state["step"] >= before
    assert state["last_recovery_seconds"] > 0
    assert any("worker 0 was lost (SIGKILL)" in event["text"] for event in state["events"])


def let_one_join(program):
    """Adds a worker by another command, which reports as the others do."""
    folder = program.folder / "job"
    token, address = ((folder / name).read_text().strip() for name in ("token", "address"))
    program.start("--join", address, UNISON_ELASTIC_TOKEN=token)
    state = program.state_when(functools.partial(all_run, 3))
    joined = state["workers"][2]
    assert joined["name"].startswith("worker 0 of ")
    assert joined["step"] > 0
    assert joined["memory_bytes"] > 2**20
    assert len(running_jobs()) == 1  # the command shows nothing by itself


def look_at_the_messages(output):
    """Each event is one line of one worker, which says who it is, and at which place now.

    A group that was not complete in time is formed again, with as many workers.
    """
    said = re.findall(r"unison (worker \d[^:]*): View \d+: (\d) workers continue", output)
    sizes = [int(size) for size, _ in itertools.groupby(size for _, size in said)]
    assert sizes == [2, 1, 2, 3], output
    # Who has been in the group before comes first.
    assert [name for name, _ in itertools.groupby(name for name, _ in said)] == [
        "worker 0 (index 0)",
        "worker 1 (index 0)",
    ], output


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed that could show the page")
def test_a_browser_without_a_screen_shows_what_is_known_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setattr("unison.monitoring.job._SILENCE", 1e9)  # the browser takes its time
    names = [f"worker {index}" for index in range(3)]
    job = watched(kind="elastic", workers=names)
    job.happened({"event": "process lost", "worker": 0}, "worker 0 was lost (SIGKILL)")
    for second in range(4):
        job._rated_at = 0.0  # as if a second had passed
        for name in names:
            about = {"examples": 640 * second, "loss": [10 * second, 0.5**second]}
            job.hear(told(name, now=1000.0 + second, steps=10 * (second + 1), **about))
    with Collector(job) as collector:
        finished = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--virtual-time-budget=4000",
                f"--user-data-dir={tmp_path}",
                "--dump-dom",
                f"http://{collector.address}/?token={collector.token}",
            ],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    shown = html.unescape(finished.stdout)
    assert "3 of 3 workers run" in shown, finished.stderr
    assert re.search(r"<td>worker 1</td><td>running</td>", shown)
    assert re.search(r"<dt>loss</dt><dd>0.125", shown)
    assert shown.count("<svg") == 2  # loss and examples/s
    assert "worker 0 was lost (SIGKILL)" in shown
    assert re.search(r"<title>\S*train.py", shown)
