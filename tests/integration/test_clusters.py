"""Processes whose clusters are wrong end in one error that names the culprit, each in time."""

import contextlib
import json
import os
import socket
import tempfile

import pytest

from subprocess_program import environment_of_program, kill_group
from unison.runtime.launching import cluster_on_this_machine
from warm_processes import start_program

PROGRAM = """
import sys
import unison
options = unison.CommunicationOptions(timeout_seconds=float(sys.argv[1]))
unison.MultiWorkerMirroredStrategy(communication_options=options)
"""


def end_of(cluster, indices, timeout: float) -> list[str]:
    """The last line of each process's error."""
    with contextlib.ExitStack() as ending:
        nothing = ending.enter_context(open(os.devnull, "r+b"))
        said = [ending.enter_context(tempfile.TemporaryFile()) for _ in indices]
        processes = []
        for index, file in zip(indices, said, strict=True):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": cluster}, "task": task})
            process = start_program(
                *(PROGRAM, str(timeout)),
                imported=("jax", "unison"),
                environment=environment_of_program({"TF_CONFIG": config}),
                stdin=nothing,
                stdout=nothing,
                stderr=file,
            )
            ending.callback(process.wait)
            ending.callback(kill_group, process.pid)
            processes.append(process)
        codes = [process.wait(100) for process in processes]
        for file in said:
            file.seek(0)
        errors = [file.read().decode() for file in said]
    assert all(codes), errors
    return [error.splitlines()[-1] for error in errors]


@pytest.fixture
def three() -> list[str]:
    return cluster_on_this_machine(3).as_dict()["worker"]


def test_two_processes_of_one_index_are_named_on_all(three):
    for error in end_of(three, [0, 1, 1], timeout=60):
        assert "UnavailableError: Duplicate registration for ['worker 1" in error
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
