"""Workers on a Ray cluster that are killed, late, talkative, or asked for from elsewhere."""

import os
import re
import signal
from pathlib import Path

import pytest

from ray_cluster import (
    ends_within,
    processes_of,
    ray_cluster,
    run,
    started,
    with_ray,
    written_program,
)
from unison.runtime.launching import WorkerError, launch

pytestmark = [with_ray, pytest.mark.soak, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def address():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return written_program(tmp_path)


def test_much_output_arrives_in_order(address, program):
    done = run(address.address, "-n", 1, "--cpus-per-worker", 1, program, "much")
    assert done.returncode == 5
    numbers = re.findall(r"^\[worker 0\] (\d+)$", done.stdout, re.MULTILINE)
    assert numbers == [str(number) for number in range(30_000)]


def test_a_bound_ends_workers_that_take_longer(address, program):
    done = run(address.address, "--timeout", 1.5, program, "wait", program.parent.name)
    assert done.returncode == 124
    assert "Timed out: " in done.stderr
    assert "Still running: [0, 1]" in done.stderr
    assert ends_within(program, 10)


def test_the_workers_end_with_the_command(address, program):
    with started(address.address, program) as process:
        process.kill()
    assert ends_within(program, 30)


def test_a_worker_that_is_killed_is_told_of(address, program):
    with started(address.address, program) as process:
        os.kill(processes_of(program)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGKILL
        assert "was ended by SIGKILL; the other one was ended" in errors


def test_a_cluster_is_reached_from_outside(address, program):
    done = run(address.for_clients, program, "raise")
    assert done.returncode == 1, done.stderr
    assert "ValueError: worker one is unwell" in done.stderr


def test_launch_raises_what_the_first_worker_raised(address):
    def fail():
        raise ValueError("not me")

    with pytest.raises(WorkerError, match=r"(?s)worker 0 failed.*ValueError: not me"):
        launch(fail, 1, timeout=100, address=address.address, on_line=lambda *line: None)


def test_a_cluster_that_is_not_there_is_named_in_one_line(program):
    done = run("127.0.0.1:1", program)
    assert done.returncode == 2
    assert "Nobody listens at 127.0.0.1:1" in done.stderr
    assert len(done.stderr.splitlines()) == 1
