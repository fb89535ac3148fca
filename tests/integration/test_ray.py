"""`unison run --address` and `launch(address=)`: workers and servers on a Ray cluster's nodes.

The cluster is a real one with two nodes, at two loopback addresses of this machine. More, that
takes minutes, is in `tests/soak`.
"""

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_training import require_the_same_training, train, train_alone
from monitoring_reports import all_run, state_when
from ray_cluster import (
    NODES,
    add_node,
    command,
    ends_within,
    lose_node,
    ray_cluster,
    run,
    started,
    with_ray,
    written_program,
)
from server_program import write_program
from unison.cli import main
from unison.errors import UnavailableError
from unison.runtime.launching import Program, launch
from unison.runtime.launching import ray_cluster as clusters
from unison.runtime.launching.ray_nodes import WorkerActor

pytestmark = [with_ray, pytest.mark.timeout(360)]

TRAINING = """
import json, os, sys
import jax
from jax.experimental import multihost_utils
import unison

strategy = unison.MultiWorkerMirroredStrategy()
total = multihost_utils.process_allgather(jax.numpy.ones(())).sum()
report = {
    "replicas": strategy.num_replicas_in_sync,
    "sum": float(total),
    "addresses": json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"],
    "threads": os.environ["NPROC"],
    "forwarded": os.environ["UNISON_OF_THE_TEST"],
}
sys.stdout.write(json.dumps(report) + "\\n")
multihost_utils.sync_global_devices("end")
"""


@pytest.fixture(scope="module")
def address():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return written_program(tmp_path)


@pytest.mark.soak
def test_the_workers_of_a_job_get_a_key_of_their_own(address, monkeypatch):
    monkeypatch.delenv("UNISON_KEY")

    def own_key():
        import os

        return os.environ["UNISON_KEY"]

    first, second = launch(own_key, address=address.address, timeout=200)
    assert first == second
    assert len(bytes.fromhex(first)) == 32


@pytest.mark.soak
def test_workers_come_together_one_a_node_by_default(address, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINING)
    done = run(address.address, "--devices-per-worker", 1, program)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^\[worker (\d)\] (\{.*\})$", done.stdout, re.MULTILINE))
    first, second = (json.loads(said[worker]) for worker in "01")
    assert first == second
    assert (first["replicas"], first["sum"]) == (2, 2.0)
    assert {own.split(":")[0] for own in first["addresses"]} == set(NODES)
    assert first["threads"] == "2"
    assert first["forwarded"] == "yes"


WATCHED = """
import time
import unison
from unison.data import Dataset

strategy = unison.MultiWorkerMirroredStrategy()
dataset = Dataset.range(64).batch(8).repeat()

def step(x):
    return unison.aggregate(x.sum())

for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(batch,))
    unison.monitoring.report(0.5)
    time.sleep(0.02)
"""


@pytest.mark.soak
def test_workers_of_all_nodes_are_watched_from_here(address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text(WATCHED)
    process = subprocess.Popen(
        command(address.address, "--devices-per-worker", 1, program),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        state = state_when(functools.partial(all_run, 2), process, seconds=200)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert [worker["name"] for worker in state["workers"]] == ["worker 0", "worker 1"]
    assert all(worker["step"] > 0 for worker in state["workers"])
    assert all(worker["step_seconds"]["p50"] >= 0.02 for worker in state["workers"])
    assert all(worker["memory_bytes"] > 2**20 for worker in state["workers"])
    assert len({worker["process"] for worker in state["workers"]}) == 2


def test_the_first_failure_ends_all_and_is_explained(address, program):
    done = run(address.address, program, "raise", program.parent.name)
    assert done.returncode == 1, done.stderr
    assert "ValueError: worker one is unwell" in done.stderr
    assert "the other one was ended" in done.stderr
    assert ends_within(program, 30)


@pytest.mark.soak
def test_ctrl_c_reaches_the_workers(address, program):
    with started(address.address, program) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert "Traceback" not in output
    assert ends_within(program, 30)


def test_launch_gives_what_every_worker_returned(address):
    def where(scale):
        task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        return scale * task, os.environ["EXTRA"]

    environment = {"EXTRA": "e"}
    results = launch(
        where, args=(10,), environment=environment, timeout=200, address=address.address
    )
    assert results == [(0, "e"), (10, "e")]


def test_more_than_there_is_cannot_be_had(address, program):
    done = run(address.address, "-n", 3, "--cpus-per-worker", 2, program)
    assert done.returncode == 2
    assert "Expected room for 3 workers with {'CPU': 2} each" in done.stderr


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("ray://127.0.0.1:1", "Nobody listens at ray://127.0.0.1:1"),
        ("somewhere", "Expected auto, HOST:PORT or ray://HOST:PORT. Received: 'somewhere'"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(where, said):
    with pytest.raises(UnavailableError, match=re.escape(said)):
        launch(lambda: None, address=where)


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'unison\[ray\]'"):
        launch(lambda: None, address="auto")


def test_nobody_answers_for_ever(monkeypatch):
    monkeypatch.setattr(clusters, "_SECONDS_TO_JOIN", 0.2)
    monkeypatch.setattr("ray.init", lambda *args, **kwargs: time.sleep(20))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UnavailableError, match=r"no answer within 0.2 s"),
    ):
        launch(lambda: None, address=f"127.0.0.1:{silent.getsockname()[1]}")


def test_the_last_of_many_lines_come_before_the_exit_code():
    actor = WorkerActor()
    says = "print(*range(15_000), sep='\\n', flush=True); raise SystemExit(3)"
    actor.start(Program(["-c", says], {}))
    last = time.monotonic() + 60
    while actor._worker.exit_code is None and time.monotonic() < last:
        time.sleep(0.05)  # more lines wait than are kept
    told = []
    exit_code = None
    while exit_code is None and time.monotonic() < last:
        answer = actor.tell()
        exit_code = answer.exit_code
        told += answer.lines
    assert exit_code == 3
    assert told == [str(number) for number in range(15_000)]


@contextlib.contextmanager
def running(address, folder: Path, *arguments: object):
    """The command of a job, and what waits until it says something."""
    process = subprocess.Popen(
        command(address.address, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},  # what a killed one leaves
    )
    watchdog = threading.Timer(200, process.kill)
    watchdog.start()
    said = []

    def says(words: str) -> str:
        for line in process.stdout:
            said.append(line)
            if words in line:
                return line
        raise AssertionError((words, said))

    try:
        yield process, says
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@contextlib.contextmanager
def elastic_job(address, folder: Path, *options: str, workers: int = 2):
    """The command of a job that two workers begin, and what waits until it says something."""
    worker = Path(__file__).with_name("elastic_worker.py")
    options = ("--min-workers", "1", "--max-workers", str(workers), *options)
    with running(address, folder, *options, worker, folder) as (process, says):
        says("the job runs: 2 workers")
        yield process, says
    require_none_is_left(folder)


def require_none_is_left(folder: Path) -> None:
    last = time.monotonic() + 30
    while workers_of(folder) and time.monotonic() < last:
        time.sleep(0.1)
    assert workers_of(folder) == []


def end_well(folder: Path, process: subprocess.Popen, says) -> None:
    """Lets the workers end, and waits for the end of the job."""
    (folder / "end").touch()
    says("the job is done")
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_an_elastic_job_starts_a_lost_worker_again_on_its_node(address, tmp_path):
    with elastic_job(address, tmp_path) as (process, says):
        first, _ = workers_of(tmp_path)
        os.kill(first, signal.SIGKILL)
        says("(SIGKILL); it is started again (1 of 10)")
        says("regrouped: 2 workers")
        end_well(tmp_path, process, says)


def test_nothing_is_left_of_an_elastic_job_whose_command_is_killed(address, tmp_path):
    with elastic_job(address, tmp_path, "--grace", "1"):
        assert len(workers_of(tmp_path)) == 2  # the block's end kills the command


def workers_of(folder: Path) -> list[int]:
    """The workers that have the folder as an argument, without their guards and the command."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes() if process.name.isdecimal() else b""
            if command.split(b"\0")[1:-1] == [b"-u", b"elastic_worker.py", str(folder).encode()]:
                found.append(int(process.name))
    return found


# -- nodes that are lost and added ---------------------------------------------------------------


@pytest.fixture
def cluster():
    """A cluster of two nodes, which may get others."""
    with ray_cluster() as cluster:
        yield cluster


def test_an_elastic_job_goes_on_without_a_node_and_uses_one_that_is_added(cluster, tmp_path):
    options = ("--cpus-per-worker", "2")
    with elastic_job(cluster, tmp_path, *options, workers=3) as (process, says):
        added = add_node(cluster, "127.0.0.4")
        says("worker 2 is started on node 127.0.0.4")
        says("regrouped: 3 workers")
        lose_node(cluster, added)
        says("regrouped: 2 workers (worker 0, worker 1)")
        says("worker 2 was lost (its node 127.0.0.4 is lost); it is started again (1 of 10)")
        says("worker 2 waits to be started: no node of the Ray cluster has room for it")
        add_node(cluster, "127.0.0.5")
        says("worker 2 is started on node 127.0.0.5")
        says("regrouped: 3 workers")
        end_well(tmp_path, process, says)


def test_a_worker_of_a_lost_node_is_started_on_one_that_has_room(cluster, tmp_path):
    lost = add_node(cluster, "127.0.0.4")
    options = ("--min-workers", 2, "--max-workers", 3, "--cpus-per-worker", 1)
    worker = Path(__file__).with_name("elastic_worker.py")
    with running(cluster, tmp_path, *options, worker, tmp_path) as (process, says):
        index = re.search(r"worker (\d) is started", says("is started on node 127.0.0.4"))[1]
        says("the job runs: 3 workers")
        lose_node(cluster, lost)
        says(f"worker {index} was lost (its node 127.0.0.4 is lost)")
        line = says(f"worker {index} is started on node")
        assert any(node in line for node in NODES), line
        says("regrouped: 3 workers")
        end_well(tmp_path, process, says)
    require_none_is_left(tmp_path)


WAITING = """
import json, os, pathlib, sys, time

told = json.loads(os.environ["TF_CONFIG"])
print("of", len(told["cluster"]["worker"]), flush=True)
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.05)
"""


def test_all_workers_start_again_on_the_nodes_that_are_left(cluster, tmp_path):
    lost = add_node(cluster, "127.0.0.4")
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    with running(cluster, tmp_path, "--restarts", 1, program, tmp_path) as (process, says):
        for _ in range(3):
            says("] of 3")
        lose_node(cluster, lost)
        says("was lost with its node 127.0.0.4; the other workers were ended")
        for _ in range(2):
            says("] of 2")
        (tmp_path / "end").touch()
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert ends_within(program, 30)


def test_all_workers_wait_for_a_node_that_replaces_a_lost_one(cluster, tmp_path):
    lost = add_node(cluster, "127.0.0.4")
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    options = ("--restarts", 1, "-n", 3, "--cpus-per-worker", 2)
    with running(cluster, tmp_path, *options, program, tmp_path) as (process, says):
        for _ in range(3):
            says("] of 3")
        lose_node(cluster, lost)
        says("Waiting for nodes, 300 s at most")
        add_node(cluster, "127.0.0.5")
        for _ in range(3):
            says("] of 3")
        (tmp_path / "end").touch()
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert ends_within(program, 30)


@pytest.mark.soak
def test_each_example_is_used_once_while_nodes_are_lost_and_added(cluster, tmp_path):
    given = ("loop", "epochs=4")
    folder = tmp_path / "job"
    options = ("--address", cluster.address, "--cpus-per-worker", 2)
    formed = []

    def forms(size):
        """Waits until the next group has been formed, which has this size."""
        last = time.monotonic() + 60
        found = []
        while len(found) <= len(formed) and time.monotonic() < last:
            time.sleep(0.1)
            with contextlib.suppress(FileNotFoundError):
                lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
                events = [json.loads(line) for line in lines if line.endswith("\n")]
                found = [len(each["workers"]) for each in events if each["event"] == "started"]
        formed.append(found[len(formed)])
        assert formed[-1] == size

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            train, 3, [], *given, "full=3", options=options, folder=folder, min_workers=2
        )
        forms(2)
        node = add_node(cluster, "127.0.0.4")
        forms(3)
        lose_node(cluster, node)
        forms(2)
        add_node(cluster, "127.0.0.5")
        forms(3)
        outcome = training.result(150)
    assert len(require_the_same_training(outcome, train_alone(*given))) == 3


# -- parameter servers ---------------------------------------------------------------------------


@pytest.fixture
def program_with_servers(tmp_path):
    return write_program(tmp_path, 'print("at", *strategy.worker_addresses)\n')


def test_workers_and_servers_run_on_the_nodes(address, program_with_servers):
    options = ("--workers", 2, "--ps", 1, "--cpus-per-worker", 1)
    finished = run(address.address, *options, program_with_servers)
    assert finished.returncode == 0, finished.stderr
    assert "[chief] total 60.0" in finished.stdout
    readers = re.findall(r"^\[(.*)\] reads$", finished.stdout, re.MULTILINE)
    assert set(readers) <= {"worker 0", "worker 1"}
    assert readers
    assert any(node in finished.stdout for node in NODES)


@contextlib.contextmanager
def taken(address, cpus):
    """CPUs of the cluster that another job has, which has come before."""
    import ray
    from ray.util.placement_group import placement_group

    ray.init(address.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        assert placement_group([{"CPU": 1}] * cpus).wait(60)
        yield
    finally:
        ray.shutdown()


def test_servers_for_which_there_is_no_room_end_the_job_with_an_error(
    address, program_with_servers, monkeypatch, capsys
):
    monkeypatch.setattr(clusters, "_SECONDS_FOR_ROOM", 0.5)
    with taken(address, 2):
        for servers, said in (
            (3, "Expected room for 5 workers"),  # there never is
            (1, "Others left after 0.5 s only"),  # not now
        ):
            options = ["--workers", "2", "--ps", str(servers), "--cpus-per-worker", "1"]
            script = str(program_with_servers)
            code = main(["run", "--address", address.address, *options, script])
            assert code == 2
            assert said in capsys.readouterr().err
