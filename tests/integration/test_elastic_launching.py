"""`unison run --min-workers`: workers are lost, come back and join, and nothing is left behind."""

import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_commands import SECONDS, Command, processes_of, soon

WORKER = Path(__file__).with_name("elastic_worker.py")

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `unison run` with the worker above; nothing of it is left at the end."""
    started: list[Command] = []

    def start(*options: object, what: str = "", **environment: str) -> Command:
        last = [WORKER, tmp_path, *([what] if what else [])]
        started.append(Command(*options, *last, **environment))
        return started[-1]

    yield start
    still_run = [one.process for one in started if one.process.poll() is None]
    for process in still_run:
        process.kill()
        process.wait(SECONDS)
    left = processes_of(tmp_path)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert still_run or left == []


@pytest.mark.smoke
def test_workers_are_lost_and_join_and_the_job_goes_on(command, tmp_path):
    job = tmp_path / "job"
    first = command("--min-workers", 1, "--max-workers", 3, "-n", 2, "--folder", job)
    first.says(r"^\[unison\] the job runs: 2 workers \(worker 0, worker 1\)$")

    # A worker that is killed is started again, and joins.
    killed = first.pid(1)
    os.kill(killed, signal.SIGKILL)
    first.says(r"^\[unison\] worker 1 was lost \(SIGKILL\); it is started again \(1 of 10\)$")
    told = len(first.messages)
    first.says(r"^\[unison\] regrouped: 2 workers .* after [\d.]+ s; worker 1 joined$")
    soon(lambda: first.pid(1) != killed)

    # The folder cannot be used twice.
    second = command("--min-workers", 1, "--folder", job)
    assert second.ends() == 2
    assert "Another `unison run` runs the job" in second.messages[0]

    # Others may add workers, if they know the secret, which is on no command line.
    shown = first.says(
        r"^\[unison\] more workers: UNISON_ELASTIC_TOKEN=\$\(cat (.*?)\) unison run "
    )
    secret = Path(shown[1])
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    token = secret.read_text()
    for pid in processes_of(tmp_path):
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    address = (job / "address").read_text().strip()
    third = command("--join", address, "--workers", 1, UNISON_ELASTIC_TOKEN=token)
    first.says(r"^\[unison\] regrouped: 3 workers .*; worker 0 of .* joined$", told)

    # One that is told to end leaves before it does, and is started again.
    told = len(first.messages)
    os.kill(first.pid(0), signal.SIGTERM)
    first.says(r"^\[unison\] worker 0 leaves: it is to end soon$", told)
    first.says(r"^\[unison\] worker 0 was lost \(SIGTERM\); it is started again", told)
    first.says(r"^\[unison\] regrouped: 3 workers .*; worker 0 joined$", told)

    (tmp_path / "end").touch()
    assert first.ends() == 0
    assert third.ends() == 0
    assert "[unison] the job is done" in first.messages
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("process lost") == 2
    assert events[-1]["time"] >= events[0]["time"]
    assert not (job / "state").exists()


def test_nothing_is_left_of_a_command_that_is_killed_and_the_next_goes_on(command, tmp_path):
    job = tmp_path / "job"
    options = ("--min-workers", 2, "--wait", 1, "--grace", 4, "--folder", job)
    first = command(*options, what="deaf")
    first.says("the job runs: 2 workers")
    time.sleep(0.2)  # some steps
    first.process.kill()
    soon(lambda: not any(map(is_running, [first.pid(0), first.pid(1)])))
    second = command(*options)
    second.says(r"^\[unison\] the job resumes from .*/job/state$")
    assert int(second.says(r"^\[worker 0\] pid \d+ of 2 from (\d+)$")[1]) > 0

    second.process.send_signal(signal.SIGTERM)
    assert second.ends() == 128 + signal.SIGTERM
    assert int((job / "state").read_text()) > 0
    # A stop is expected to end the workers: it is not said of each.
    assert not [line for line in second.messages if "has ended with exit code 78" in line]


def is_running(pid: int) -> bool:
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return about.rpartition(")")[2].split()[0] not in "ZX"


def test_workers_that_do_not_end_are_killed_after_the_commands_death(command, tmp_path):
    first = command("--min-workers", 2, "--grace", 1, "--folder", tmp_path / "job", what="stubborn")
    soon(lambda: len(processes_of(tmp_path)) >= 5)  # with their guards
    first.process.kill()
    soon(lambda: not processes_of(tmp_path))


def test_too_few_workers_save_and_say_so(command, tmp_path):
    first = command("--min-workers", 2, "--restarts", 0, "--wait", 0.5, TMPDIR=str(tmp_path))
    first.says("the job runs: 2 workers")
    os.kill(first.pid(0), signal.SIGKILL)
    assert first.ends() == 77
    (given_up,) = [line for line in first.messages if "not started again" in line]
    assert "worker 0 was lost (SIGKILL)" in given_up
    assert "all 0 restarts are used (--restarts)" in given_up
    assert any("exit code 77" in line and "2 workers are needed" in line for line in first.messages)
    # Nobody gave a folder, so it is said where the state is.
    folder = Path(first.says(r"to resume: unison run --folder (\S+) ")[1])
    assert folder.parent == tmp_path
    assert (folder / "state").exists()


def test_ctrl_c_lets_the_workers_save(command, tmp_path):
    job = tmp_path / "job"
    first = command("--min-workers", 1, "-n", 2, "--folder", job)
    first.says("the job runs: 2 workers")
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == 128 + signal.SIGINT
    assert (job / "state").exists()
    assert any("stopping: the workers save" in line for line in first.messages)


def test_a_worker_that_hangs_is_left_out_and_comes_back(command, tmp_path):
    first = command("--min-workers", 1, "-n", 2, "--heartbeat-timeout", 1)
    first.says("the job runs: 2 workers")
    hung = first.pid(1)
    os.kill(hung, signal.SIGSTOP)
    first.says(r"^\[unison\] worker 1 is out of the group: ")
    first.says(r"^\[unison\] regrouped: 1 worker \(worker 0\), from step")
    told = len(first.messages)
    os.kill(hung, signal.SIGCONT)
    first.says(r"^\[unison\] regrouped: 2 workers .*; worker 1 joined$", told)
    (tmp_path / "end").touch()
    assert first.ends() == 0


@pytest.mark.soak
def test_a_worker_that_wakes_after_the_end_leaves_nothing_to_resume(command, tmp_path):
    job = tmp_path / "job"
    first = command("--min-workers", 1, "-n", 2, "--heartbeat-timeout", 1, "--folder", job)
    first.says("the job runs: 2 workers")
    stopped = first.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    first.says(r"^\[unison\] regrouped: 1 worker \(worker 0\), from step")
    (tmp_path / "end").touch()
    first.says(r"^\[unison\] the job is done$")
    os.kill(stopped, signal.SIGCONT)
    assert first.ends() == 0
    assert not (job / "state").exists()
    assert not any("to resume" in line for line in first.messages)


@pytest.mark.soak
def test_a_worker_that_hangs_for_too_long_is_killed_and_started_again(command, tmp_path):
    first = command("--min-workers", 1, "-n", 2, "--heartbeat-timeout", 1, "--wait", 1)
    first.says("the job runs: 2 workers")
    os.kill(first.pid(1), signal.SIGSTOP)
    first.says(r"^\[unison\] worker 1 was lost \(SIGKILL\); it is started again \(1 of 10\)$")
    first.says(r"^\[unison\] regrouped: 2 workers .*; worker 1 joined$")
    (tmp_path / "end").touch()
    assert first.ends() == 0


def test_a_program_that_raises_ends_the_job_with_its_traceback(command):
    first = command("--min-workers", 1, "-n", 2, what="raise")
    assert first.ends() == 1
    error = "ValueError: worker one is unwell"
    assert f"[unison] worker 1 failed with exit code 1, which ends the job: {error}" in (
        first.messages
    )
    assert not any("started again" in line for line in first.messages)


def test_a_program_that_crashes_at_once_is_not_started_for_ever(command):
    first = command("--min-workers", 1, what="crash")
    assert first.ends() == 128 + signal.SIGSEGV
    assert sum("is started again" in line for line in first.messages) == 2
    assert any("3 times in a row" in line for line in first.messages)


def test_a_stranger_cannot_join(command, tmp_path):
    job = tmp_path / "job"
    first = command("--min-workers", 1, "--folder", job)
    first.says("the job runs: 1 worker")
    address = (job / "address").read_text().strip()
    second = command("--join", address, "--wait", 0.5, UNISON_ELASTIC_TOKEN="guessed")
    assert second.ends() == 78
    (tmp_path / "end").touch()
    assert first.ends() == 0
    assert not any("joined" in line for line in first.messages)


@pytest.mark.soak
def test_a_job_may_have_no_workers_of_its_own(command, tmp_path):
    job = tmp_path / "job"
    first = command("--min-workers", 1, "--max-workers", 2, "--workers", 0, "--folder", job)
    first.says("more workers: ")
    address = (job / "address").read_text().strip()
    token = (job / "token").read_text()
    second = command("--join", address, UNISON_ELASTIC_TOKEN=token)
    first.says(r"the job runs: 1 worker \(worker 0 of ")
    (tmp_path / "end").touch()
    assert second.ends() == 0
    assert first.ends() == 0
