"""`unison run --restarts`: all workers end and start again when one is lost."""

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from keras_forms import forms
from parameter_server_threads import free_addresses
from subprocess_program import environment_of_program, kill_group, unison_run
from unison.runtime.launching.jobs import Job
from unison.runtime.launching.workers import Program

#: Each worker notes its starts. The second one ends so often as it is told to, while others wait.
PROGRAM = """
import json, os, pathlib, signal, sys, time
folder, how, times = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
start = len(list(folder.glob(f"start-{index}-*")))
(folder / f"start-{index}-{start}").write_text(" ".join(config["cluster"]["worker"]))
if start < times:
    if index != 1:
        time.sleep(60)
    while not (folder / f"start-0-{start}").exists():
        time.sleep(0.05)
    if how == "raises":
        raise ValueError("unwell")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
print("done", flush=True)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments, seconds=60, **options):
    return subprocess.run(
        unison_run(*arguments),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **options,
    )


def starts(folder, index):
    return len(list(folder.glob(f"start-{index}-*")))


@pytest.mark.parametrize(
    "how",
    [pytest.param("killed", marks=pytest.mark.smoke), "42", "75"],
    ids=["killed", "preempted", "lost another"],
)
def test_all_workers_start_again_when_one_is_lost(program, tmp_path, how):
    done = run("-n", 2, "--restarts", 3, program, tmp_path, how, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("[worker 0] done") == 1
    assert [starts(tmp_path, index) for index in (0, 1)] == [3, 3]
    assert "unison run: all workers are started again in 0.5 s (1 of 3)" in done.stderr
    assert "unison run: all workers are started again in 1 s (2 of 3)" in done.stderr
    clusters = {(tmp_path / f"start-0-{start}").read_text() for start in range(3)}
    assert len(clusters) == 3  # the ports of those that were killed may still be taken


#: At the first start, the second worker stops in a step. Collectives go on waiting for it, as those
#: between GPUs do.
STUCK = """
import os, pathlib, signal, sys
import numpy as np
import unison
from unison.runtime.liveness import watcher

watcher.shut_down = lambda listeners: 0
options = unison.CommunicationOptions(timeout_seconds=6, implementation="RING")
strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
index = strategy.cluster_resolver.task_id
note = pathlib.Path(sys.argv[1], f"started-{index}")
is_first, _ = not note.exists(), note.touch()

def step(x):
    return unison.get_replica_context().all_reduce("SUM", x)

total = 0.0
for number in range(3):
    if is_first and index == 1 and number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    total += float(strategy.experimental_local_results(strategy.run(step, (np.float32(1),)))[0])
print("the mean is", total / strategy.num_replicas_in_sync, flush=True)
"""


def test_workers_that_are_stuck_in_a_collective_start_again(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(STUCK)
    done = run("-n", 2, "--restarts", 1, program, tmp_path, seconds=90)
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker 1 .* has sent nothing for", done.stdout + done.stderr)
    assert done.stdout.splitlines().count("[worker 0] the mean is 3.0") == 1


def test_a_job_that_is_lost_too_often_ends_as_the_last_time(program, tmp_path):
    done = run("-n", 2, "--restarts", 1, program, tmp_path, "killed", 9)
    assert done.returncode == 128 + signal.SIGKILL
    assert starts(tmp_path, 1) == 2
    assert done.stderr.splitlines()[-1] == (
        "unison run: it is not started again: all 1 restarts are used (--restarts)"
    )


def test_a_program_that_fails_is_started_again_only_if_asked_for(program, tmp_path):
    done = run("-n", 2, "--restarts", 2, program, tmp_path, "raises", 1)
    assert (done.returncode, starts(tmp_path, 0)) == (1, 1)
    assert "a program that fails is not started again (--restarts-on-error)" in done.stderr
    for note in tmp_path.glob("start-*"):
        note.unlink()
    options = ["--restarts", 2, "--restarts-on-error"]
    done = run("-n", 2, *options, program, tmp_path, "raises", 1)
    assert (done.returncode, starts(tmp_path, 0)) == (0, 2)


def test_a_program_that_exits_with_minus_one_has_failed(program, tmp_path):
    done = run("-n", 2, "--restarts", 2, program, tmp_path, "-1", 1)
    assert (done.returncode, starts(tmp_path, 0)) == (255, 1)


def test_without_restarts_nothing_is_said_about_them(program, tmp_path):
    done = run("-n", 2, program, tmp_path, "killed", 1)
    assert (done.returncode, starts(tmp_path, 0)) == (128 + signal.SIGKILL, 1)
    assert "again" not in done.stderr


def test_the_time_is_that_of_all_starts_together(program, tmp_path):
    options = ["--restarts", 99, "--timeout", 4]
    done = run("-n", 2, *options, program, tmp_path, "killed", 99, seconds=40)
    assert done.returncode == 124, done.stderr
    last = done.stderr.splitlines()[-1]
    # Workers have just started, or are about to.
    told = ("the job to end within 4 s, and it had still", "2 workers to end within 4 s. Still run")
    assert last.startswith(tuple(f"unison run: Timed out: expected {each}" for each in told))


def test_workers_that_start_near_the_end_of_the_time_are_told_the_whole():
    with (
        Job([Program(["-c", "import time; time.sleep(60)"], {})]) as job,
        pytest.raises(TimeoutError, match=r"expected 1 workers to end within 4 s\. Still"),
    ):
        job.wait(0.02, of=4.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_a_job_that_is_about_to_start_again(program, tmp_path, number):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    environment = environment_of_program({"XDG_RUNTIME_DIR": str(runtime)})
    options = ["-n", 2, "--restarts", 99, program, tmp_path, "killed", 99]
    job = subprocess.Popen(unison_run(*options), stderr=subprocess.PIPE, text=True, env=environment)
    with contextlib.ExitStack() as ending:
        ending.callback(job.wait)
        ending.callback(job.kill)
        while "in 4 s" not in job.stderr.readline():
            assert job.poll() is None
        job.send_signal(number)
        assert job.wait(timeout=20) == 128 + number
        assert ("interrupted (SIGINT)" in job.stderr.read()) == (number == signal.SIGINT)
    folder = Path(environment["XDG_RUNTIME_DIR"]) / "unison"
    assert not list(folder.glob("*.json"))  # `unison top` finds no job


def test_metrics_are_served_over_all_starts(program, tmp_path):
    address, token = free_addresses(1)[0], "the-token-of-this-test"
    program.write_text(PROGRAM.replace('print("done"', 'time.sleep(20); print("done"'))
    options = ["-n", 2, "--restarts", 1, "--metrics-address", address]
    with contextlib.ExitStack() as ending:
        job = subprocess.Popen(
            unison_run(*options, program, tmp_path, "killed", 1),
            env=environment_of_program({"UNISON_METRICS_TOKEN": token}),
            start_new_session=True,
        )
        ending.callback(job.wait)
        ending.callback(kill_group, job.pid)
        text = ""
        while "unison_restarts_total 1" not in text:
            assert job.poll() is None
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"http://{address}/metrics")
                request.add_header("Authorization", f"Bearer {token}")
                with urllib.request.urlopen(request, timeout=10) as answer:
                    text = answer.read().decode()
    assert f'program="{program} {tmp_path} killed 1",kind="workers"' in text
    assert 'unison_worker_up{worker="worker 1"} 0' in text


def test_metrics_without_a_token_end_the_command(program):
    environment = environment_of_program({})
    environment.pop("UNISON_METRICS_TOKEN", None)
    done = run("--metrics-address", "127.0.0.1:9400", program, env=environment)
    assert done.returncode == 2
    assert "need a token of at least 16 characters in UNISON_METRICS_TOKEN" in done.stderr


def test_restarts_on_error_needs_a_number(program):
    done = run("--restarts-on-error", program)
    assert done.returncode == 2
    assert "--restarts-on-error needs --restarts R" in done.stderr


# -- several machines ---------------------------------------------------------------------------


def on_two_machines(*options, seconds):
    """Runs the command on each of two addresses of this machine; returns codes and outputs."""
    environment = environment_of_program({"KERAS_BACKEND": "jax"})
    common = ["--nnodes", 2, "--rendezvous", free_addresses(1)[0]]
    with contextlib.ExitStack() as ending:
        machines = []
        for place in (1, 2):
            machine = subprocess.Popen(
                unison_run(*common, "--host", f"127.0.0.{place}", *options),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=environment,
            )
            ending.callback(machine.wait)
            ending.callback(kill_group, machine.pid)
            machines.append(machine)
        printed = [machine.communicate(timeout=seconds)[0] for machine in machines]
    return [machine.returncode for machine in machines], printed


TRAINING = """
import os, pathlib, sys
import numpy as np
import unison
folder, form = pathlib.Path(sys.argv[1]), sys.argv[3]
if form == "keras":
    import keras
else:
    import unison.tf as tf
strategy = unison.MultiWorkerMirroredStrategy()
index = strategy.cluster_resolver.task_id
with strategy.scope():
    if form == "tf":
        keras = tf.keras
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")

class Killed(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        mark = folder / "killed"
        if sys.argv[2] == "killed" and index == 1 and batch == 3 and not mark.exists():
            if (folder / "backup").exists() and any((folder / "backup").iterdir()):
                mark.touch()
                os.kill(os.getpid(), 9)

x = np.random.default_rng(1).random((64, 4), np.float32)
backup = keras.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=2)
model.fit(x, x.sum(axis=1), batch_size=8, epochs=3, shuffle=False, verbose=0,
          callbacks=[backup, Killed()])
if index == 0:
    np.savez(folder / "weights.npz", *model.get_weights())
print("worker", index, "is done", flush=True)
"""


@pytest.fixture
def undisturbed(tmp_path):
    """The weights of a job that loses nobody."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    (tmp_path / "training.py").write_text(TRAINING)
    done = run("-n", 2, tmp_path / "training.py", folder, "not", "keras", seconds=120)
    assert done.returncode == 0, done.stderr
    return weights(folder)


def weights(folder: Path):
    with np.load(folder / "weights.npz") as archive:
        return [archive[name] for name in archive.files]


@pytest.mark.timeout(300)
@forms("tf", soaked=["keras"])
def test_a_job_that_starts_again_trains_as_if_nothing_had_happened(form, tmp_path, undisturbed):
    training = [tmp_path / "training.py", tmp_path, "killed", form]
    done = run("-n", 2, "--restarts", 1, *training, seconds=200)
    assert done.returncode == 0, done.stderr
    assert "worker 1 was ended by SIGKILL" in done.stderr
    assert "all workers are started again" in done.stderr
    for ours, expected in zip(weights(tmp_path), undisturbed, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.timeout(300)
def test_the_machines_of_a_job_start_again_together(tmp_path, undisturbed):
    training = [tmp_path / "training.py", tmp_path, "killed", "keras"]
    codes, printed = on_two_machines("--restarts", 1, *training, seconds=250)
    assert codes == [0, 0], printed
    assert all("all workers are started again" in text for text in printed), printed
    for ours, expected in zip(weights(tmp_path), undisturbed, strict=True):
        # Between machines gloo sums, and on one machine shared memory: they round differently.
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(120)
def test_machines_whose_others_have_failed_end_as_their_last_start_did(program, tmp_path):
    program.write_text(
        "import json, os, sys, time\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "time.sleep(index)\n"
        "sys.exit([3, 75][index])\n"
    )
    options = ["--rendezvous-timeout", 15, "--restarts", 2, program]
    codes, printed = on_two_machines(*options, seconds=100)
    assert sorted(codes) == [3, 75], printed
    assert any("the workers are not started again: Timed out" in text for text in printed) or any(
        "the workers are not started again: Could not reach" in text for text in printed
    ), printed


@pytest.mark.timeout(120)
def test_a_machine_whose_command_is_lost_is_started_again_by_ssh(program, tmp_path):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done\n'
        'shift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    path = f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    environment = environment_of_program({"KERAS_BACKEND": "jax", "PATH": path})
    options = ["--hosts", "127.0.0.1,other-machine", "--rendezvous", free_addresses(1)[0]]
    job = [*options, "-n", 1, "--restarts", 1, program, tmp_path, "killed", 1]
    done = run(*job, seconds=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all workers are started again" in done.stderr
    assert re.search(r"\[worker 1\] done", done.stdout)
    assert [starts(tmp_path, index) for index in (0, 1)] == [2, 2]
