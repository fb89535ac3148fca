"""`unison run` and `launch`: workers start, print, fail and end together."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from subprocess_program import UNISON, environment_of_program, kill_group, run_program
from unison.cli import main
from unison.runtime.exit_codes import LOST_ANOTHER
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

TASK = {"TF_CONFIG": '{"task": {"index": 0}}'}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """`unison run` in a warm process; the workers that it starts are fresh ones."""
    return run_program(UNISON, "run", *arguments, timeout=timeout, imported=("jax", "unison"))


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


def started(program: Path, *arguments: object, options: Sequence[str] = ()) -> subprocess.Popen:
    """`unison run` of two workers that both have said that they are here."""
    command = [sys.executable, "-m", "unison", "run", "-n", "2", *options, str(program)]
    return begun([*command, *map(str, arguments)])


def begun(command: Sequence[str]) -> subprocess.Popen:
    """A process whose two workers have both said that they are here."""
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


def test_a_worker_has_gpus_of_its_own_and_keras_runs_on_jax(tmp_path):
    """On a machine where the driver lists two GPUs, and nobody has chosen a backend."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: B'\n")
    driver.chmod(0o755)
    plugin = tmp_path / "site" / "jax_plugins" / "xla_cuda12"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("raise SystemExit('JAX was started')")
    program = tmp_path / "program.py"
    program.write_text(
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['KERAS_BACKEND'])"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "",
        "KERAS_HOME": str(tmp_path),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{plugin.parents[1]}{os.pathsep}{os.environ['PYTHONPATH']}",
    }
    del environment["KERAS_BACKEND"]
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-m", "unison", "run", "-n", "2", str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0 jax", "[worker 1] 1 jax"]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_runs_by_its_name():
    done = run("-n", 2, "-m", "platform")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2


def in_terminal(*arguments: object, **variables: str) -> str:
    """What `unison run` writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "unison", "run", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", **variables}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        written = b""
        with contextlib.suppress(OSError):  # how the end of a terminal is read
            while read := os.read(ours, 1 << 16):
                written += read
        watchdog.cancel()
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


@pytest.fixture
def colourful(tmp_path: Path) -> Path:
    path = tmp_path / "colourful.py"
    path.write_text("""
import sys
print("plain \\x1b[31mred\\x1b[0m [bold]ünï ✓[/bold] :smile:")
print("x" * 200)
for state in range(100):
    sys.stdout.write("\\b" * 9 + "\\r" + f"{state}/99 done")
print()
sys.stdout.write("without an end")
""")
    return path


def test_a_terminal_shows_names_in_colours_and_of_a_progress_bar_the_last_state(colourful):
    written = in_terminal(colourful)
    name = "\x1b[36m[worker 0] \x1b[0m"
    assert f"{name}plain \x1b[31mred\x1b[0m [bold]ünï ✓[/bold] :smile:\r\n" in written
    assert f"{name}{'x' * 200}\r\n" in written
    assert f"{name}without an end\r\n" in written
    assert "of 1 workers run" in written
    assert "99/99 done\r\n" in written
    assert written.count("/99 done") <= 3


@pytest.mark.parametrize(("option", "variables"), [("--no-color", {}), (None, {"NO_COLOR": "1"})])
def test_colours_can_be_left_out(colourful, option, variables):
    written = in_terminal(*[option] * (option is not None), colourful, **variables)
    assert "[worker 0] plain red [bold]" in written
    assert "\x1b[3" not in written


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
        ("raise", 1, "worker 1 failed with exit code 1: ValueError: worker one is unwell"),
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


def test_the_traceback_of_a_failure_is_printed_once(program):
    done = run("-n", 2, program, "raise")
    assert (done.stdout + done.stderr).count("Traceback") == 1


def test_a_worker_that_fails_by_itself_is_not_masked_by_one_that_misses_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import json, os, time
from unison.errors import UnavailableError
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    raise UnavailableError(message="worker 1 has left")
time.sleep(1)
raise SystemExit(9)
""")
    done = run("-n", 2, program)
    assert done.returncode == 9
    assert "worker 1 failed with exit code 9" in done.stderr


def test_where_all_miss_another_the_first_is_shown(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
from unison.errors import UnavailableError
raise UnavailableError(message="nobody is there")
""")
    done = run("-n", 2, program)
    assert done.returncode == LOST_ANOTHER
    assert "UnavailableError: nobody is there" in done.stderr


def test_children_of_workers_end_with_them(program):
    assert run("-n", 2, program, "child").returncode == 0
    assert not processes_of(program)


@pytest.mark.parametrize("options", [(), ("--restarts", "3")], ids=["once", "with restarts"])
def test_ctrl_c_reaches_the_workers(program, options):
    process = started(program, "wait", options=options)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGINT
    assert output == ""
    assert errors == "unison run: interrupted (SIGINT); the 2 workers were ended\n"
    assert not processes_of(program)


def test_ctrl_c_ends_the_workers_of_a_launched_function(tmp_path):
    program = tmp_path / "launching.py"
    program.write_text("""
import time
from unison.runtime.launching import launch

def wait():
    print("here", flush=True)
    time.sleep(600)

launch(wait, workers=2)
""")
    process = begun([sys.executable, str(program)])
    with contextlib.ExitStack() as ending:
        ending.callback(process.kill)
        workers = processes_of(program)
        assert len(workers) >= 3  # with the process itself
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGINT
    assert output == ""
    assert errors == f"KeyboardInterrupt: {program}, line 9, in <module>\n"
    last = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < last
        time.sleep(0.05)


def test_ctrl_c_reaches_workers_of_a_process_that_passes_over_it(program):
    lines = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Job(
            [Program([str(program), "wait"], TASK)], lambda _, line: lines.append(line)
        ) as job:
            last = time.monotonic() + 30
            while not lines and time.monotonic() < last:
                time.sleep(0.05)
            job.signal(signal.SIGINT)
            job.wait(timeout=90)
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines[-1] == "KeyboardInterrupt"


def test_the_second_ctrl_c_kills_workers_that_do_not_listen(program):
    process = started(program, "stubborn")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGINT
    assert not processes_of(program)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_the_command(program, number):
    process = started(program, "wait")
    process.send_signal(number)
    process.communicate(timeout=90)
    assert ends_within(program, 30)


def test_a_bound_ends_workers_that_take_longer(program):
    done = run("-n", 2, "--timeout", 1.5, program, "wait")
    assert done.returncode == 124
    assert "Timed out: " in done.stderr
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
        (["--cpus-per-worker", "2", __file__], "--cpus-per-worker is for Ray clusters"),
        (["--address", "auto", "--host", "127.0.0.1", __file__], "leave it out with --address"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, said, capsys):
    try:
        status = main(["run", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.smoke
def test_launch_gives_what_every_worker_returned():
    def where(scale):
        task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        return scale * task, os.environ["EXTRA"], os.environ["UNISON_CPU_DEVICES"]

    results = launch(
        where, 3, args=(10,), devices_per_worker=2, environment={"EXTRA": "e"}, timeout=120
    )
    assert results == [(0, "e", "2"), (10, "e", "2"), (20, "e", "2")]


def test_launch_raises_what_the_first_worker_raised():
    def fail():
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise ValueError("not me")
        time.sleep(600)

    lines = []
    with pytest.raises(WorkerError, match=r"(?s)worker 1 failed.*ValueError: not me") as caught:
        launch(fail, timeout=120, on_line=lambda worker, line: lines.append((worker, line)))
    assert (caught.value.worker, caught.value.exit_code) == (1, 1)
    assert (1, "ValueError: not me") in lines


def test_an_error_is_shown_with_the_one_that_it_came_of():
    def fail():
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(WorkerError, match=r"(?s)ValueError: inner.*RuntimeError: outer"):
        launch(fail, workers=1, timeout=120, on_line=lambda *line: None)


def test_launch_has_a_bound():
    with pytest.raises(TimeoutError, match=r"Timed out: .* Still running: \[0, 1\]"):
        launch(lambda: time.sleep(600), timeout=1)


@pytest.mark.parametrize("ends", [lambda: sys.exit(0), lambda: os._exit(0)])
def test_a_worker_that_ends_without_returning_is_named(ends):
    with pytest.raises(WorkerError, match="worker 0 ended without returning") as caught:
        launch(ends, workers=1, timeout=120, on_line=lambda *line: None)
    assert (caught.value.worker, caught.value.exit_code) == (0, 0)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled"):
        launch(lambda: lock)


def test_what_cannot_be_sent_back_is_named():
    with pytest.raises(WorkerError, match=r"cannot be pickled.*Return numbers"):
        launch(threading.Lock, workers=1, timeout=120, on_line=lambda *line: None)


def test_a_program_that_cannot_start_leaves_no_worker(tmp_path):
    waiting = Program(["-c", "import time; time.sleep(600)", str(tmp_path)], {})
    broken = Program(["-c", "pass"], {"BAD\0NAME": "x"})
    with pytest.raises(ValueError, match="null byte"), Job([waiting, broken]):
        pass
    assert not processes_of(tmp_path)


LISTENING = """
import glob, ipaddress, os, sys
import jax
from jax.experimental import multihost_utils
import unison

def listening():
    own = set()
    for file in glob.glob("/proc/self/fd/*"):
        try:
            own.add(os.readlink(file))
        except OSError:  # the folder's own
            pass
    for table in ("tcp", "tcp6"):
        for row in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            _, local, _, state, *_, = row.split()
            if state == "0A" and f"socket:[{row.split()[9]}]" in own:
                told = bytes.fromhex(local.split(":")[0])
                words = [told[start : start + 4][::-1] for start in range(0, len(told), 4)]
                address = ipaddress.ip_address(b"".join(words))
                yield getattr(address, "ipv4_mapped", None) or address

unison.MultiWorkerMirroredStrategy()
assert multihost_utils.process_allgather(jax.numpy.ones(())).sum() == 2
sys.stdout.write("".join(f"{address}\\n" for address in listening()))
multihost_utils.sync_global_devices("end")
"""


def test_workers_listen_at_their_address_and_the_loopback_address_only(tmp_path):
    address = "127.0.0.5"
    program = tmp_path / "program.py"
    program.write_text(LISTENING)
    done = run("-n", 2, "--host", address, program)
    assert done.returncode == 0, done.stderr
    heard = set(re.findall(r"^\[worker \d\] ([\da-f.:]+)$", done.stdout, re.MULTILINE))
    assert heard - {"127.0.0.1"} == {address}


#: Trains with the workers of the other machine, and prints who they are.
ON_TWO_MACHINES = """
import jax, unison
strategy = unison.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", strategy.run(lambda: jax.numpy.ones(())), axis=None)
print("worker", strategy.cluster_resolver.task_id, "of", int(total), flush=True)
"""


def test_the_machines_of_a_job_are_started_one_by_one(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(ON_TWO_MACHINES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    common = ["--nnodes", "2", "--rendezvous", rendezvous, "--rendezvous-timeout", "60"]
    environment = environment_of_program({"KERAS_BACKEND": "jax"})
    with contextlib.ExitStack() as ending:
        machines = []
        for place in ("1", "2"):
            own = ["--host", f"127.0.0.{place}", "-n", place, str(program)]
            machines.append(started_command(ending, [*common, *own], env=environment))
        printed = [machine.communicate(timeout=180)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed
    lines = [line for text in printed for line in text.splitlines() if "of" in line]
    assert sorted(lines) == [f"[worker {index}] worker {index} of 3" for index in range(3)]


def started_command(
    ending: contextlib.ExitStack, arguments: list[str], **options: Any
) -> subprocess.Popen[str]:
    """Starts `unison run`, in a group of processes that ends with `ending`."""
    command = subprocess.Popen(
        [sys.executable, "-m", "unison", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )
    ending.callback(command.wait)
    ending.callback(kill_group, command.pid)
    return command


#: Runs the command here, in place of another machine, whose name it notes.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
echo "$@" >> "$(dirname "$0")/reached"
shift
exec sh -c "$*"
"""


@pytest.fixture
def on_hosts(tmp_path: Path):
    """Starts `unison run --hosts` with a machine that only the `ssh` of this fixture knows."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    path = f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    environment = environment_of_program({"KERAS_BACKEND": "jax", "PATH": path})
    with contextlib.ExitStack() as ending:

        def start(*arguments: str) -> subprocess.Popen[str]:
            options = ["--hosts", "127.0.0.1,other-machine:2", "--rendezvous", rendezvous]
            command = [*options, *arguments]
            return started_command(ending, command, env=environment, cwd=tmp_path)

        yield start


def test_a_job_is_started_on_machines_by_ssh(on_hosts, tmp_path):
    (tmp_path / "train.py").write_text(ON_TWO_MACHINES)
    machine = on_hosts("train.py")
    printed = machine.communicate(timeout=180)[0]
    assert machine.returncode == 0, printed
    lines = [line for line in printed.splitlines() if " of " in line]
    assert sorted(lines) == [f"[worker {index}] worker {index} of 3" for index in range(3)]
    reached = (tmp_path / "bin" / "reached").read_text()
    assert reached.startswith("other-machine ")
    # The key is not among the arguments, which all users of a machine can see.
    assert re.search(r"[0-9a-f]{64}", reached) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_nothing_is_left_on_machines_when_the_command_has_ended(on_hosts, program, number):
    machine = on_hosts(str(program), "wait")
    assert machine.stdout is not None
    printed = []
    while sum("here" in line for line in printed) < 3:
        line = machine.stdout.readline()
        assert line, printed
        printed.append(line)
    os.kill(machine.pid, number)
    assert ends_within(program, 30)


def test_a_worker_that_fails_ends_those_of_the_other_machines(on_hosts, program):
    machine = on_hosts(str(program), "exit")
    printed = machine.communicate(timeout=120)[0]
    assert machine.returncode == 7, printed
    assert "unison run: worker 1 failed with exit code 7; the other one was ended" in printed
    last = printed.splitlines()[-1]
    assert "failed with exit code 7; those of the other one were ended" in last
    assert ends_within(program, 30)
