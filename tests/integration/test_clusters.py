"""Processes whose clusters are wrong end in one error that names the culprit, each in time."""

import json
import socket
import subprocess
import sys

import pytest

from subprocess_program import environment_of_program, kill_group
from unison.runtime.launching import cluster_on_this_machine

PROGRAM = """
import sys
import unison
options = unison.CommunicationOptions(timeout_seconds=float(sys.argv[1]))
unison.MultiWorkerMirroredStrategy(communication_options=options)
"""


def end_of(cluster, indices, timeout: float) -> list[str]:
    """The last line of each process's error."""
    processes = []
    for index in indices:
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": cluster}, "task": task})
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(timeout)],
                env=environment_of_program({"TF_CONFIG": config}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            kill_group(process.pid)
    assert all(process.returncode for process in processes), errors
    return [error.splitlines()[-1] for error in errors]


@pytest.fixture
def three() -> list[str]:
    return cluster_on_this_machine(3).as_dict()["worker"]


def test_two_processes_of_one_index_are_named_on_all(three):
    for error in end_of(three, [0, 1, 1], timeout=60):
        assert "UnavailableError: Two processes came as ['worker 1" in error
        assert "Give each task one process" in error


def test_a_first_worker_that_cannot_be_reached_is_named(three):
    (error,) = end_of(three, [2], timeout=1)
    assert "UnavailableError: worker 2" in error
    assert f"could not reach worker 0 ({three[0]})" in error


def test_a_port_in_use_is_named(three):
    host, port = three[0].split(":")
    with socket.create_server((host, int(port))):
        (error,) = end_of(three, [0], timeout=5)
    assert f"UnavailableError: worker 0 ({three[0]}) cannot listen at its address" in error
    assert "Give it a free port of this machine" in error
