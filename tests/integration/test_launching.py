"""`unison run` and `launch`: workers start, print, fail and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unison.runtime.launching import Job, Program, WorkerError, launch

#: Says which worker it is, and does what its first argument says.
PROGRAM = """
import json, os, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
what = sys.argv[1] if len(sys.argv) > 1 else "end"
print("here", sys.argv[1:], flush=True)
if what == "raise" and task == 1:
    raise ValueError("worker one is unwell")
if what == "exit" and task == 1:
    os._exit(7)
if what == "killed" and task == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if what == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what in ("raise", "exit", "killed", "stubborn", "wait"):
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments: object, timeout: float = 60) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "unison", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def processes_of(program: Path) -> list[int]:
    """Those that run the program, and their children."""
    running = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            running[int(folder.name)] = (parent, command)
    own = {pid for pid, (_, command) in running.items() if str(program).encode() in command}
    own |= {pid for pid, (parent, _) in running.items() if parent in own}
    return sorted(own)


def ends_within(program: Path, seconds: float) -> bool:
    last = time.monotonic() + seconds
    while processes_of(program):
        if time.monotonic() > last:
            return False
        time.sleep(0.05)
    return True


def started(program: Path, *arguments: object) -> subprocess.Popen:
    """`unison run` of two workers that both have said that they are here."""
    command = [sys.executable, "-m", "unison", "run", "-n", "2", str(program), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "here" in process.stdout.readline()
    return process


def test_every_line_has_its_workers_name(program):
    done = run("-n", 3, program, "one", "--two")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[worker {index}] here ['one', '--two']" for index in range(3)]


def test_a_worker_alone_is_the_default(program):
    assert run(program).stdout == "[worker 0] here []\n"


def test_a_module_runs_by_its_name():
    done = run("-n", 2, "-m", "platform")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2


def test_the_environment_can_be_printed_instead(program):
    done = run("-n", 2, "--devices-per-worker", 4, "--env", "tf-config", program)
    assert "here" not in done.stdout
    shell = subprocess.run(
        ["sh", "-c", done.stdout + '\nprintf \'%s %s\' "$UNISON_CPU_DEVICES" "$TF_CONFIG"'],
        capture_output=True,
        text=True,
        check=True,
    )
    devices, config = shell.stdout.split(" ", 1)
    assert devices == "4"
    described = json.loads(config)
    assert described["task"] == {"type": "worker", "index": 1}
    addresses = described["cluster"]["worker"]
    assert len(set(addresses)) == 2
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


@pytest.mark.parametrize(
    ("what", "exit_code", "said"),
    [
        ("raise", 1, "ValueError: worker one is unwell"),
        ("exit", 7, "worker 1 failed with exit code 7"),
        ("killed", 128 + signal.SIGKILL, "worker 1 was ended by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_and_is_explained(program, what, exit_code, said):
    done = run("-n", 2, program, what)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert "the other one was ended" in done.stderr
    assert not processes_of(program)


def test_children_of_workers_end_with_them(program):
    assert run("-n", 2, program, "child").returncode == 0
    assert not processes_of(program)


def test_ctrl_c_reaches_the_workers(program):
    process = started(program, "wait")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert output.count("KeyboardInterrupt") == 2
    assert not processes_of(program)


def test_the_second_ctrl_c_kills_workers_that_do_not_listen(program):
    process = started(program, "stubborn")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert not processes_of(program)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_the_command(program, number):
    process = started(program, "wait")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert ends_within(program, 10)


def test_a_bound_ends_workers_that_take_longer(program):
    done = run("-n", 2, "--timeout", 1.5, program, "wait")
    assert done.returncode == 124
    assert "Still running: [0, 1]" in done.stderr
    assert not processes_of(program)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "x.py"], "Expected at least 1 for -n. Received: 0"),
        (["--devices-per-worker", "0", "x.py"], "Expected at least 1 for --devices-per-worker"),
        (["no-such-file.py"], "There is no program 'no-such-file.py'"),
        (["--host", "203.0.113.1", __file__], "Cannot listen on 203.0.113.1"),
        (["--env", "fortran", __file__], "invalid choice: 'fortran'"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_launch_gives_what_every_worker_returned():
    def where(scale):
        task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        return scale * task, os.environ["EXTRA"], os.environ["UNISON_CPU_DEVICES"]

    results = launch(
        where, 3, args=(10,), devices_per_worker=2, environment={"EXTRA": "e"}, timeout=60
    )
    assert results == [(0, "e", "2"), (10, "e", "2"), (20, "e", "2")]


def test_launch_raises_what_the_first_worker_raised():
    def fail():
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise ValueError("not me")
        time.sleep(600)

    lines = []
    with pytest.raises(WorkerError, match=r"(?s)worker 1 failed.*ValueError: not me") as caught:
        launch(fail, timeout=60, on_line=lambda worker, line: lines.append((worker, line)))
    assert (caught.value.worker, caught.value.exit_code) == (1, 1)
    assert (1, "ValueError: not me") in lines


def test_an_error_is_shown_with_the_one_that_it_came_of():
    def fail():
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(WorkerError, match=r"(?s)ValueError: inner.*RuntimeError: outer"):
        launch(fail, workers=1, timeout=60, on_line=lambda *line: None)


def test_launch_has_a_bound():
    with pytest.raises(TimeoutError, match=r"Still running: \[0, 1\]"):
        launch(lambda: time.sleep(600), timeout=3)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled"):
        launch(lambda: lock)


def test_what_cannot_be_sent_back_is_named():
    with pytest.raises(WorkerError, match=r"cannot be pickled.*Return numbers"):
        launch(threading.Lock, workers=1, timeout=60, on_line=lambda *line: None)


def test_a_program_that_cannot_start_leaves_no_worker(tmp_path):
    waiting = Program([sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)], {})
    broken = Program([sys.executable, "-c", "pass"], {"BAD\0NAME": "x"})
    with pytest.raises(ValueError, match="null byte"), Job([waiting, broken]):
        pass
    assert not processes_of(tmp_path)
