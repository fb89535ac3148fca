"""What a warm process runs goes on as in a fresh one, and ends with those that started it."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from subprocess_program import environment_of_program, run_program
from warm_processes import WarmProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="JAX is forked on Linux only")

#: Something that is soon imported, and that nobody uses here.
IMPORTED = ("wave",)


def run(source, *arguments, **options):
    return run_program(textwrap.dedent(source), *arguments, imported=IMPORTED, **options)


@pytest.mark.parametrize(
    ("ends", "returncode", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise ValueError('unwell')", 1, "ValueError: unwell\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_program_ends_as_python_ends_it(ends, returncode, said):
    finished = run(ends)
    assert finished.returncode == returncode
    assert finished.stderr.endswith(said)
    assert bool(finished.stderr) == bool(said)


def test_a_program_has_its_arguments_its_input_its_folder_and_its_environment_only(tmp_path):
    program = """
    import os, sys
    print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ["GIVEN"], "EXTRA" in os.environ)
    """
    finished = run(program, "one", 2, given="read", folder=tmp_path, env={"GIVEN": "told"})
    assert finished.stdout == f"['-c', 'one', '2'] read {tmp_path} told False\n"


def test_a_program_finds_modules_on_its_own_path(tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    program = "import beside; print(beside.WORD)"
    assert run(program, env={"PYTHONPATH": str(tmp_path)}).stdout == "found\n"
    assert run(program, folder=tmp_path).stdout == "found\n"
    assert "No module named 'beside'" in run(program).stderr


def test_what_is_imported_already_must_be_imported_all_the_same():
    finished = run("print('wave' in __import__('sys').modules, flush=True); wave.open('x')")
    assert finished.stdout == "True\n"
    assert "NameError: name 'wave' is not defined" in finished.stderr


def test_what_is_to_run_at_the_end_runs_after_threads_have_ended():
    program = """
    import atexit, sys, threading, time
    atexit.register(print, "at exit")
    sys.excepthook = lambda kind, error, trace: print("hook:", error)
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    raise ValueError("unwell")
    """
    assert run(program).stdout.splitlines() == ["hook: unwell", "thread", "at exit"]


def test_programs_draw_different_random_numbers():
    program = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (run_program(program, imported=("numpy",)).stdout.split() for _ in range(2))
    assert set(first).isdisjoint(second)


def started(source, folder, server=0):
    """A warm process, and what it writes."""
    written = (folder / f"written{server}").open("w+b")
    with tempfile.TemporaryFile() as nothing:
        return WarmProcess(
            source,
            environment=environment_of_program({}),
            stdin=nothing,
            stdout=written,
            stderr=written,
            imported=IMPORTED,
            server=server,
        ), written


def test_sets_have_another_order_in_the_processes_of_another_server(tmp_path):
    hashes = []
    for server in (0, 1):
        process, written = started("print(hash('a word'))", tmp_path, server)
        with written:
            assert process.wait(30) == 0
            written.seek(0)
            hashes.append(written.read())
    assert hashes[0] != hashes[1]


LEAVING_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep({seconds})
"""


def is_running(pid):
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return about.rpartition(")")[2].split()[0] not in "ZX"


def ends_soon(pid):
    last = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < last:
        time.sleep(0.02)
    return not is_running(pid)


def test_children_of_a_program_end_with_it():
    assert ends_soon(int(run(LEAVING_A_CHILD.format(seconds=0)).stdout))


def test_a_program_that_takes_too_long_is_ended_with_its_children():
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        run(LEAVING_A_CHILD.format(seconds=600), timeout=4)
    assert ends_soon(int(expired.value.output))


def test_a_program_that_is_killed_is_known_to_have_ended(tmp_path):
    process, written = started("import time; time.sleep(600)", tmp_path)
    with written:
        assert process.poll() is None
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        assert not is_running(process.pid)


def test_a_program_ends_with_the_process_that_has_started_it(tmp_path):
    starter = """
    import os, sys
    from pathlib import Path
    from single.test_warm_processes import started
    process, _ = started("import time; time.sleep(600)", Path(sys.argv[1]))
    print(process.pid, flush=True)
    os._exit(0)
    """
    path = os.pathsep.join(filter(None, sys.path))
    finished = run_program(textwrap.dedent(starter), tmp_path, env={"PYTHONPATH": path})
    assert ends_soon(int(finished.stdout)), finished.stderr


def test_an_environment_that_jax_has_not_been_imported_in_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    environment = environment_of_program({"JAX_ENABLE_X64": "0"})
    with (tmp_path / "written").open("w+b") as file:
        files = {"stdin": file, "stdout": file, "stderr": file}
        with pytest.raises(ValueError, match="X64"):
            WarmProcess("pass", environment=environment, imported=IMPORTED, **files)
    # `run_program` starts a fresh process there.
    finished = run("import sys; print('wave' in sys.modules)", env={"JAX_ENABLE_X64": "0"})
    assert finished.stdout == "False\n"
