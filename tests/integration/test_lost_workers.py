"""Workers that die, get stuck, leave early or run another program: the others say who and where.

The programs are in `losing_workers.py`. Their processes are really killed and stopped.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.launching import cluster_on_this_machine, worker_environments
from warm_processes import start_program

PROGRAMS = Path(__file__).with_name("losing_workers.py")

#: Seconds after which a test has failed.
LIMIT = 90


@dataclasses.dataclass
class Ended:
    """How a worker ended: its exit code (None: it had to be killed), and what it printed."""

    exit_code: int | None
    output: str

    @property
    def caught(self) -> str:
        """The error that the program caught."""
        return self.output.partition("CAUGHT ")[2].partition("\nEND")[0]


def run(program, workers=2, timeout=60.0, implementation="AUTO", stays=None, devices=1):
    """Runs a program in several processes; `stays` is one that nobody waits for."""
    environments = worker_environments(cluster_on_this_machine(workers), devices)
    with contextlib.ExitStack() as ending:
        nothing = ending.enter_context(open(os.devnull, "rb"))
        files = [ending.enter_context(tempfile.TemporaryFile()) for _ in environments]
        processes = []
        for index, (environment, file) in enumerate(zip(environments, files, strict=True)):
            process = start_program(
                "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')",
                *(str(PROGRAMS), program, str(timeout), implementation),
                imported=("jax", "unison"),
                server=index % 2,
                environment=os.environ | environment,
                stdin=nothing,
                stdout=file,
                stderr=file,
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            processes.append(process)
        last = time.monotonic() + LIMIT
        with contextlib.suppress(subprocess.TimeoutExpired):
            for index, process in enumerate(processes):
                if index != stays:
                    process.wait(max(last - time.monotonic(), 0.1))
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        for file in files:
            file.seek(0)
        outputs = [file.read().decode() for file in files]
        return [Ended(code, output) for code, output in zip(codes, outputs, strict=True)]


def name_of(worker):
    return rf"worker {worker} \(127\.0\.0\.1:\d+\)"


@pytest.mark.parametrize(
    ("program", "victim", "implementation"),
    [
        ("first_of_three_is_killed", 0, "RING"),
        ("second_of_three_is_killed", 1, "RING"),
        ("second_of_three_is_killed", 1, "AUTO"),
    ],
)
def test_survivors_of_a_killed_worker_raise_an_error_that_names_it(program, victim, implementation):
    ended = run(program, workers=3, implementation=implementation)
    assert ended[victim].exit_code == -signal.SIGKILL
    for index in {0, 1, 2} - {victim}:
        assert ended[index].exit_code == 0, ended[index].output
        assert re.match(
            rf"UnavailableError: {name_of(victim)} has died.*"
            rf"This worker, {name_of(index)}, is in operation \d+ \((run of train_step|reduce by)",
            ended[index].caught,
        ), ended[index].output


def test_an_error_that_nobody_catches_ends_the_survivor_with_a_code_of_its_own():
    survivor, _ = run("nobody_catches")
    assert survivor.exit_code == LOST_ANOTHER
    last_line = survivor.output.rstrip().splitlines()[-1]
    assert re.match(rf"unison\.errors\.UnavailableError: {name_of(1)} has died", last_line)


@pytest.mark.parametrize(
    ("program", "exit_code", "error", "shown"),
    [
        ("one_raises", 1, "ValueError: one is unwell", "ValueError: one is unwell"),
        ("one_is_interrupted", 130, "KeyboardInterrupt", "in interrupted"),
    ],
)
def test_the_error_of_a_worker_is_told_to_the_others(program, exit_code, error, shown):
    survivor, culprit = run(program)
    assert re.match(rf"UnavailableError: {name_of(1)} has failed: {error}\. ", survivor.caught), (
        survivor.output
    )
    assert culprit.exit_code == exit_code
    assert culprit.output.rstrip().endswith(shown)


def test_no_replica_waits_for_one_whose_function_on_the_host_has_failed():
    survivor, culprit = run("a_function_on_the_host_fails_on_one_replica", devices=2)
    assert re.match(
        rf"UnavailableError: {name_of(1)} has failed: ValueError: one is unwell\. ", survivor.caught
    ), survivor.output
    assert culprit.output.rstrip().endswith("ValueError: one is unwell"), culprit.output


@pytest.mark.parametrize(
    ("program", "victim"),
    [pytest.param("the_first_is_stopped", 0, marks=pytest.mark.soak), ("one_is_stopped", 1)],
)
def test_a_stopped_worker_is_named_when_the_limit_has_passed(program, victim):
    ended = run(program, timeout=12.0, stays=victim)
    assert re.match(
        rf"DeadlineExceededError: {name_of(victim)} has sent nothing for \d+ s.*"
        r"Last reported: .*is in operation \d+ \((run of train_step|reduce by SUM)\)",
        ended[1 - victim].caught,
    ), ended[1 - victim].output


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [
        ("one_is_stopped_and_nothing_released", 0),  # it catches the error in its next call
        ("a_result_is_read_and_nothing_released", LOST_ANOTHER),
    ],
)
def test_a_process_whose_backend_is_stuck_in_a_collective_ends(program, exit_code):
    survivor, _ = run(program, timeout=8.0, implementation="RING", stays=1)
    assert survivor.exit_code == exit_code, survivor.output
    assert re.search(
        rf"DeadlineExceededError: {name_of(1)} has sent nothing for \d+ s", survivor.output
    )


def test_a_stuck_worker_is_named_and_ended():
    culprit, survivor = run("one_loops", timeout=12.0)
    assert re.match(
        rf"DeadlineExceededError: {name_of(0)} has kept {name_of(1)} waiting for \d+ s in "
        r"operation \d+ .*\. Last reported: operation \d+ \(run of train_step\), for",
        survivor.caught,
    ), survivor.output
    assert culprit.exit_code == LOST_ANOTHER
    assert "The others have given up on this worker" in culprit.output
    # Before, the survivor has asked where it is.
    assert "has kept the others waiting for" in survivor.output
    assert re.search(r"line \d+, in looping", survivor.output), survivor.output


def test_a_worker_that_exits_early_is_named_at_once():
    survivor, leaver = run("one_exits")
    assert leaver.exit_code == 0
    assert re.match(
        rf"UnavailableError: {name_of(1)} has left after \d+ operations, while {name_of(0)} is in "
        r"operation \d+ ",
        survivor.caught,
    ), survivor.output


def test_another_number_of_steps_is_seen_at_the_first_operation_that_differs():
    for own, ended in enumerate(run("one_takes_fewer_steps")):
        assert ended.caught.startswith("InvalidArgumentError"), ended.output
        assert "of train_step" in ended.caught
        assert "reduce by SUM" in ended.caught
        assert re.search(
            rf"{name_of(1 - own)} runs a different program", ended.caught
        ) or re.search(rf"{name_of(own)} runs a different program", ended.caught)


def test_a_worker_that_ends_in_keras_is_named():
    survivor, victim = run("one_ends_in_keras")
    assert victim.exit_code == 3
    assert re.match(
        rf"UnavailableError: {name_of(1)} has died.*train_step of model 'net'", survivor.caught
    ), survivor.output


def test_models_that_differ_are_refused_on_all_workers():
    for ended in run("models_differ"):
        assert ended.caught.startswith("InvalidArgumentError"), ended.output
        assert "float32[2,3,4]" in ended.caught
        assert "float32[2,3,5]" in ended.caught


def test_shapes_that_differ_are_refused_on_all_workers():
    for ended in run("shapes_differ", implementation="RING"):
        assert ended.caught.startswith("InvalidArgumentError"), ended.output
        assert ended.caught.count("run of step_of_shapes: inputs") == 2
        assert "float32[2]" in ended.caught
        assert "float32[3]" in ended.caught


def test_operations_in_another_order_are_refused_on_all_workers():
    for ended in run("orders_differ"):
        assert ended.caught.startswith("InvalidArgumentError"), ended.output
        assert "run of first" in ended.caught
        assert "run of second" in ended.caught


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("one_is_killed_in_an_agreement", "has died"),
        ("one_exits_in_an_agreement", "has left the job"),
    ],
)
def test_agreements_do_not_wait_for_a_lost_worker(program, said):
    _, survivor = run(program)
    assert re.match(
        rf"UnavailableError: {name_of(0)} {said}.*an agreement \(The number of the day\)",
        survivor.caught,
    ), survivor.output


@pytest.mark.parametrize(
    ("program", "implementation"),
    [
        ("all_end_one_by_one", "AUTO"),
        ("the_first_ends_last", "AUTO"),
        ("no_one_reads_the_last_step", "RING"),
    ],
)
def test_workers_that_have_done_the_same_end_quietly(program, implementation):
    for ended in run(program, implementation=implementation):
        assert ended.exit_code == 0, ended.output
        said = [line for line in ended.output.splitlines() if "[Gloo]" not in line]
        assert said == ["END"], ended.output
