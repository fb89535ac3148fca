"""`unison top` and jobs without `unison run`: of `launch`, and of processes that have TF_CONFIG."""

import contextlib
import functools
import subprocess
import sys
import threading
import time
import types

import pytest

from monitoring_reports import all_run, state_of_the_job, state_when
from subprocess_program import environment_of_program, kill_group
from unison.monitoring.running_jobs import running_jobs
from unison.runtime.launching import cluster_on_this_machine, launch, worker_environments

SECONDS = 90

#: Steps until the file is there that its argument names.
PROGRAM = """
import os, sys, time
import numpy as np
import unison
from unison.runtime.process_group import all_gather_json

strategy = unison.MultiWorkerMirroredStrategy()
print("asked", os.environ.get("UNISON_MONITOR"), flush=True)

def step(x):
    return unison.get_replica_context().all_reduce("SUM", x)

number, is_over = 0, False
while not is_over:
    strategy.run(step, args=(np.ones(4, np.float32),))
    number += 1
    unison.monitoring.report(1 / number, examples=8 * number)
    time.sleep(0.02)
    is_over = any(all_gather_json(os.path.exists(sys.argv[1]), "the end"))
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """The jobs of this test, and no others."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def all_is_known(state):
    """Whether both workers run, and it is known what each of them waits for."""
    phases = [worker["phases"] or {} for worker in state["workers"]]
    return all_run(2, state) and all(each.get("others") is not None for each in phases)


@pytest.mark.timeout(200)
def test_a_job_that_something_else_starts_is_watched_on_its_first_worker(tmp_path, own_folder):
    program, stop = tmp_path / "train.py", tmp_path / "stop"
    program.write_text(PROGRAM)
    with contextlib.ExitStack() as ends:
        workers = []
        for environment in worker_environments(cluster_on_this_machine(2)):
            worker = subprocess.Popen(
                [sys.executable, str(program), str(stop)],
                env=environment_of_program({**environment, "UNISON_MONITOR": "1"}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            ends.callback(worker.communicate)
            ends.callback(kill_group, worker.pid)
            workers.append(worker)
        state = state_when(all_is_known, workers[0], SECONDS)
        assert [worker["name"] for worker in state["workers"]] == ["worker 0", "worker 1"]
        assert [worker["process"] for worker in state["workers"]] == [each.pid for each in workers]
        assert state["program"] == f"{program} {stop}"
        shown = subprocess.run(
            [sys.executable, "-m", "unison", "top", str(workers[0].pid), "--once"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "2 of 2 workers run" in shown.stdout
        stop.touch()
        for worker in workers:
            printed, _ = worker.communicate(timeout=SECONDS)
            assert (worker.returncode, printed) == (0, "asked None\n")
    assert list(own_folder.rglob("*.json")) == []


@pytest.mark.timeout(200)
def test_the_workers_of_launch_are_watched_where_that_is_asked_for(tmp_path, own_folder):
    stop = tmp_path / "stop"

    def train(stop):
        import os
        import time

        import unison

        step = 0
        while not os.path.exists(stop):
            step += 1
            unison.monitoring.report(1 / step, step=step, examples=64 * step)
            time.sleep(0.01)
        return step > 0

    returned = []
    options = {"workers": 2, "args": (str(stop),), "timeout": SECONDS, "monitor": True}
    launching = threading.Thread(target=lambda: returned.extend(launch(train, **options)))
    launching.start()
    try:
        job = types.SimpleNamespace(poll=lambda: None if launching.is_alive() else 0)
        state = state_when(functools.partial(all_run, 2), job, SECONDS)
        assert state["program"].endswith("<locals>.train")
        stop.touch()
        last = time.monotonic() + SECONDS
        while state["ended"] is None and time.monotonic() < last:
            state = state_of_the_job() or state
    finally:
        stop.touch()
        launching.join(SECONDS)
    assert state["ended"] == "the job is done"
    assert returned == [True, True]
    assert running_jobs() == []
    assert list(own_folder.rglob("*.json")) == []
