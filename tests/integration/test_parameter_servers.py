"""Workers, servers and coordinators in processes of their own, which are killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import unison
from parameter_server_threads import free_addresses, until
from server_program import write_program
from subprocess_program import PYTHON_PATH, stop_process
from unison.cli import main
from unison.errors import CancelledError, UnavailableError
from unison.parameter_server import ClusterCoordinator, ParameterServerStrategy
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver
from warm_processes import start_program

KEY = "cd" * 32
TESTS = os.path.dirname(os.path.dirname(__file__))
SECONDS = 120


#: What `python -m unison.parameter_server` runs.
SERVING = "from unison.parameter_server.serving import main; main()"


class Cluster:
    """Workers and servers as processes, which are killed at the end.

    Args:
        workers, servers: How many there are.
        only: Variables of the environment of one of them, by job and index.
        environment: Those of all.
    """

    def __init__(self, workers, servers, only=None, **environment):
        addresses = free_addresses(workers + servers)
        self.spec = ClusterSpec({"worker": addresses[:workers], "ps": addresses[workers:]})
        self._environment = environment
        self._only = only or {}
        self._said = {}
        self.processes = {}
        for job, count in (("worker", workers), ("ps", servers)):
            for index in range(count):
                self.start(job, index)

    def environment(self, job, index):
        config = {"cluster": self.spec.as_dict(), "task": {"type": job, "index": index}}
        return {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "UNISON_KEY": KEY,
            "JAX_PLATFORMS": "cpu",
            "NPROC": "1",
            "PYTHONPATH": PYTHON_PATH,
            **self._environment,
            **self._only.get((job, index), {}),
        }

    def start(self, job, index):
        self._said[job, index] = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        with open(os.devnull, "r+b") as nothing:
            self.processes[job, index] = start_program(
                SERVING,
                imported=("jax", "unison"),
                server=index % 2,
                environment=self.environment(job, index),
                stdin=nothing,
                stdout=nothing,
                stderr=self._said[job, index],
            )

    def said(self, job, index):
        """What a process, which has ended, has written to its standard error."""
        self._said[job, index].seek(0)
        return self._said[job, index].read().decode()

    def send(self, number, job, index):
        os.kill(self.processes[job, index].pid, number)

    def stop(self, job, index):
        stop_process(self.processes[job, index].pid)

    def kill(self, job, index):
        self.send(signal.SIGKILL, job, index)
        self.processes[job, index].wait(SECONDS)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait(SECONDS)
        for file in self._said.values():
            file.close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("UNISON_KEY", KEY)


@pytest.fixture
def start():
    with contextlib.ExitStack() as ending:

        def started(workers, servers, seconds=SECONDS, mode=None, only=None, **environment):
            cluster = Cluster(workers, servers, only, **environment)
            ending.callback(cluster.close)
            strategy = ParameterServerStrategy(
                SimpleClusterResolver(cluster.spec), timeout_seconds=SECONDS, **(mode or {})
            )
            # Once they are there, which takes long on few cores.
            strategy.timeout_seconds = strategy.store.patience = seconds
            coordinator = ClusterCoordinator(strategy)
            ending.callback(coordinator.end)
            return cluster, strategy, coordinator

        yield started


def counters(strategy):
    """Two variables on two servers, and a function that adds to both."""
    with strategy.scope():
        first = unison.Variable(np.zeros(1000, np.float32))
        second = unison.Variable(np.zeros(1000, np.float32))
    assert first.cell.shards[0].server != second.cell.shards[0].server

    def add(x):
        first.assign_add(x * jnp.ones(1000))
        second.assign_add(x * jnp.ones(1000))
        return x

    return first, second, add


@pytest.mark.smoke
def test_calls_of_killed_workers_count_once(start):
    cluster, strategy, coordinator = start(2, 2)
    first, second, add = counters(strategy)
    values = []
    for kill in range(2):
        values += [coordinator.schedule(add, args=(1.0,)) for _ in range(150)]
        until(lambda value=values[150 * kill + 40]: value.is_ready, "calls are run")
        cluster.kill("worker", kill % 2)
        cluster.start("worker", kill % 2)
    coordinator.join()
    assert np.all(first.numpy() == 300)
    assert np.all(second.numpy() == 300)
    assert all(float(value.fetch()) == 1.0 for value in values)
    # The last one is used again: alone, it does all there is to do.
    until(lambda: not coordinator._dispatcher.workers[1].is_lost, "worker 1 comes back")
    cluster.kill("worker", 0)
    coordinator.schedule(add, args=(2.0,))
    coordinator.join()
    assert np.all(first.numpy() == 302)


def test_a_stopped_worker_is_given_up_and_its_late_push_does_not_count(start):
    cluster, strategy, coordinator = start(2, 2)
    first, second, add = counters(strategy)
    for _ in range(20):
        coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    strategy.timeout_seconds = 3
    values = [coordinator.schedule(add, args=(1.0,)) for _ in range(200)]
    until(lambda: values[30].is_ready, "calls are run")
    cluster.stop("worker", 0)
    coordinator.join()
    cluster.send(signal.SIGCONT, "worker", 0)
    for _ in range(20):
        coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    assert np.all(first.numpy() == 240)
    assert np.all(second.numpy() == 240)


def test_a_killed_server_ends_the_job_with_an_error_that_names_it(start):
    cluster, strategy, coordinator = start(1, 2)
    _, _, add = counters(strategy)
    coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    cluster.kill("ps", 1)
    value = coordinator.schedule(add, args=(1.0,))
    with pytest.raises(UnavailableError, match=r"Parameter server 1 .* is lost"):
        coordinator.join()
    with pytest.raises(UnavailableError):
        value.fetch()


def test_a_stopped_server_is_noticed_and_named(start):
    cluster, strategy, coordinator = start(1, 2, seconds=5)
    until(lambda: not coordinator._dispatcher.workers[0].is_lost, "the worker is there")
    first, _, add = counters(strategy)
    coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    cluster.stop("ps", first.cell.shards[0].server)
    value = coordinator.schedule(add, args=(1.0,))
    try:
        with pytest.raises(UnavailableError, match=r"is lost.*no heartbeat for 5 s"):
            coordinator.join()
        with pytest.raises(UnavailableError):
            value.fetch()
        with pytest.raises(UnavailableError, match="no heartbeat"):
            first.numpy()
    finally:
        cluster.send(signal.SIGCONT, "ps", first.cell.shards[0].server)


def test_steps_go_on_without_workers_that_are_killed_or_stopped(start):
    cluster, strategy, coordinator = start(3, 2, mode={"synchronous": True, "backup_workers": 1})
    with strategy.scope():
        sums = [
            unison.Variable(np.zeros(10, np.float32), aggregation=unison.VariableAggregation.SUM)
            for _ in range(2)
        ]

    def add(x):
        for total in sums:
            total.assign_add(x * jnp.ones(10))

    def run(count):
        return [coordinator.schedule(add, args=(1.0,)) for _ in range(count)]

    values = run(20)
    until(lambda: values[0].is_ready, "steps are run")
    cluster.stop("worker", 0)
    coordinator.join()  # the other two are enough
    cluster.send(signal.SIGCONT, "worker", 0)
    more = run(50)
    until(lambda: more[10].is_ready, "steps are run")
    cluster.kill("worker", 1)
    cluster.start("worker", 1)
    coordinator.join()
    for total in sums:
        assert np.all(total.numpy() == 2 * 70)


def snapshots_in(folder):
    """Has a server write its snapshots there."""
    return {"UNISON_PS_CHECKPOINTS": str(folder), "UNISON_PS_CHECKPOINT_SECONDS": "0.2"}


def most_lost(caplog):
    """How many updates are lost at most, as the last warning says."""
    return int(re.findall(r"at most (\d+) are lost", caplog.text)[-1])


def test_a_killed_server_comes_back_from_its_snapshot(start, tmp_path, caplog):
    cluster, strategy, coordinator = start(2, 2, **snapshots_in(tmp_path))
    first, second, add = counters(strategy)
    for _ in range(50):
        coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    time.sleep(1)  # a snapshot is written
    lost, kept = (first, second) if first.cell.shards[0].server == 1 else (second, first)
    cluster.kill("ps", 1)
    cluster.start("ps", 1)
    for _ in range(50):
        coordinator.schedule(add, args=(1.0,))
    coordinator.join()
    assert np.all(kept.numpy() == 100)
    assert np.all(lost.numpy() == 100)  # nothing came after the snapshot
    assert "has restarted with its state after 50 updates" in caplog.text
    # Now with calls on their way.
    values = [coordinator.schedule(add, args=(1.0,)) for _ in range(400)]
    until(lambda: values[60].is_ready, "calls are run")
    cluster.kill("ps", 1)
    cluster.start("ps", 1)
    coordinator.join()
    assert np.all(kept.numpy() == 500)
    (found,) = set(lost.numpy().tolist())
    assert 500 - most_lost(caplog) <= found <= 500


@pytest.mark.timeout(240)
def test_steps_of_all_workers_go_on_when_a_server_comes_back_and_end_when_none_does(
    start, tmp_path, caplog
):
    cluster, strategy, coordinator = start(
        3,
        2,
        mode={"synchronous": True, "backup_workers": 1},
        only={("ps", 1): snapshots_in(tmp_path)},
    )
    with strategy.scope():
        sums = [
            unison.Variable(np.zeros(10, np.float32), aggregation=unison.VariableAggregation.SUM)
            for _ in range(2)
        ]
    kept, lost = sorted(sums, key=lambda total: total.cell.shards[0].server)

    def add(x):
        for total in sums:
            total.assign_add(x * jnp.ones(10))

    values = [coordinator.schedule(add, args=(1.0,)) for _ in range(300)]
    until(lambda: values[30].is_ready, "steps are run")
    until(lambda: any(tmp_path.glob("ps-1.*.snapshot")), "a snapshot is written")
    cluster.kill("ps", 1)
    cluster.start("ps", 1)
    coordinator.join()
    # Each step has what two workers have added, on both servers.
    assert np.all(kept.numpy() == 2 * 300)
    (found,) = set(lost.numpy().tolist())
    assert found % 2 == 0
    assert 300 - most_lost(caplog) <= found / 2 <= 300
    # The other server keeps no snapshots.
    values = [coordinator.schedule(add, args=(1.0,)) for _ in range(300)]
    until(lambda: values[10].is_ready, "steps are run")
    cluster.kill("ps", 0)
    with pytest.raises(UnavailableError, match=r"Parameter server 0 .* is lost"):
        coordinator.join()
    with pytest.raises((UnavailableError, CancelledError)):
        values[-1].fetch()


COORDINATOR = """
import time, unison
from unison.parameter_server import *
strategy = ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    total = unison.Variable(0.0)
coordinator.schedule(lambda: total.assign_add(1.0))
coordinator.join()
print("ready", flush=True)
time.sleep(100)
"""


def test_workers_and_servers_end_with_a_killed_coordinator():
    cluster = Cluster(1, 1)
    coordinator = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR],
        env=cluster.environment("chief", 0),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert coordinator.stdout.readline() == "ready\n"
        coordinator.kill()
        for (job, index), process in cluster.processes.items():
            assert process.wait(SECONDS) == 75
            assert "The connection to the coordinator is closed" in cluster.said(job, index)
    finally:
        coordinator.kill()
        coordinator.wait(SECONDS)
        coordinator.stdout.close()
        cluster.close()


EXITING = """
if len(sys.argv) > 1:
    raise SystemExit(int(sys.argv[1]))
"""


COMMAND = [sys.executable, "-c", "from unison.cli import main; raise SystemExit(main())"]


def run(folder, workers, servers, *arguments, at_the_end=EXITING):
    write_program(folder, at_the_end)
    return subprocess.run(
        [
            *(*COMMAND, "run", f"--workers={workers}", f"--ps={servers}"),
            *(str(folder / "program.py"), *arguments),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PYTHON_PATH, TESTS])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.smoke
def test_unison_run_starts_workers_and_servers(tmp_path):
    finished = run(tmp_path, 2, 2)
    assert finished.returncode == 0, finished.stderr
    assert "[chief] total 60.0" in finished.stdout


def test_unison_run_ends_as_its_program(tmp_path):
    finished = run(tmp_path, 1, 1, "3")
    assert finished.returncode == 3
    assert "exit code 3" in finished.stderr


#: Keras comes to a strategy whose servers have variables already.
FITTING = """
import numpy as np
from keras_forms import scope_with_keras

x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")


def losses(strategy, form):
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    y = x.sum(1, keepdims=True)
    fitted = model.fit(x, y, 16, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0)
    return [*fitted.history["loss"], model.evaluate(x, y, verbose=0)]


for of in (strategy, unison.OneDeviceStrategy("CPU:0")):
    print("losses", *losses(of, sys.argv[1] if of is strategy else "keras"))
"""


@pytest.mark.parametrize("form", [pytest.param("keras", marks=pytest.mark.soak), "tf"])
def test_fit_in_a_job_of_workers_and_servers_equals_fit_on_one_device(form, tmp_path):
    finished = run(tmp_path, 1, 2, form, at_the_end=FITTING)
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines() if "losses" in line]
    together, alone = ([float(word) for word in line[-3:]] for line in lines)
    np.testing.assert_allclose(together, alone, rtol=1e-4)


INTERRUPTED = """
import time
try:
    print("trained", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("saved", float(total), flush=True)
"""


def test_a_program_that_ctrl_c_has_interrupted_can_save_what_is_on_the_servers(tmp_path):
    write_program(tmp_path, INTERRUPTED)
    command = [*COMMAND, "run", "--workers=1", "--ps=1", str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        watchdog = threading.Timer(SECONDS, job.kill)
        watchdog.start()
        try:
            for line in job.stdout:
                if "trained" in line:
                    break
            job.send_signal(signal.SIGINT)
            printed = job.stdout.read()
        finally:
            job.kill()
            watchdog.cancel()
    assert "saved 60.0" in printed


SHARING = """
import sys
import unison
from unison.parameter_server import ClusterCoordinator, ParameterServerStrategy, VariableStore

strategy = ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
with strategy.scope(), VariableStore("totals"):
    total = unison.Variable(0.0, name="total")
for _ in range(10):
    coordinator.schedule(lambda: total.assign_add(1.0))
coordinator.join()
print("total", float(total))
"""


@pytest.mark.soak
def test_jobs_one_after_the_other_share_a_server_that_outlives_them(tmp_path):
    (address,) = free_addresses(1)
    (tmp_path / "program.py").write_text(SHARING)
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    serve = [sys.executable, "-m", "unison.parameter_server", "--serve", address]
    server = subprocess.Popen([*serve, "--checkpoints", str(tmp_path / "kept")], env=environment)
    try:
        for total in (10.0, 20.0):
            finished = subprocess.run(
                [*COMMAND, "run", "--ps-at", address, str(tmp_path / "program.py")],
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert finished.returncode == 0, finished.stderr
            assert f"[chief] total {total}" in finished.stdout
        assert server.poll() is None
        server.terminate()
        assert server.wait(SECONDS) == 130
    finally:
        server.kill()
        server.wait(SECONDS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ps", "0"], "at least 1 for --ps"),
        (["--ps-checkpoints", "folder"], "give --ps"),
        (["--ps", "1", "--min-workers", "1"], "--min-workers"),
        (["--ps", "1", "--max-workers", "1"], "--max-workers"),
        (["--ps", "1", "--ps-at", "127.0.0.1:1"], "--ps-at to use those that run"),
        (["--ps-at", "nowhere"], "HOST:PORT"),
        (["--ps", "1", "--env", "slurm"], "no recipe for parameter servers"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(options, said, tmp_path, capsys):
    (tmp_path / "program.py").touch()
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["run", *options, str(tmp_path / "program.py")]))
    assert ended.value.code != 0
    assert said in capsys.readouterr().err


def test_a_job_on_a_ray_cluster_needs_ray_and_names_the_extra(tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").touch()
    monkeypatch.setitem(sys.modules, "ray", None)
    options = ["--workers", "2", "--ps", "1", "--address", "auto"]
    assert main(["run", *options, str(tmp_path / "program.py")]) == 2
    assert "pip install 'unison[ray]'" in capsys.readouterr().err
