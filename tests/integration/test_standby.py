"""Standbys: processes that wait to be a worker, and then run its program as any process does."""

import contextlib
import difflib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from subprocess_program import PYTHON_PATH
from unison.runtime.launching import Job, ProcessWorker, Program
from unison.runtime.launching.standby import StandbyWorkers
from unison.runtime.launching.workers import REPORTS_VARIABLE

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

#: Seconds in which a standby is ready, or a process ends, on a machine that is busy.
LONG = 60

#: The last module that a standby imports: it tells its process, and that it waits now, or soon.
IS_READY = """
import os, pathlib
file = pathlib.Path("written")
file.write_text(str(os.getpid()))
file.replace("ready")
"""

#: Whatever a program can see of how it was started. Python opens some files while it starts.
FACTS = """
import os, signal, sys, threading
import __main__
print(sys.argv, sys.orig_argv, sys.path, sys.flags)
print({name: type(value) for name, value in vars(__main__).items()}, __name__, __file__)
print(__spec__ and __spec__.name, __package__, __builtins__, __cached__)
print(sorted(os.environ.items()), os.popen("env | sort").read())
print(sorted(os.listdir("/proc/self/fd")), [os.get_inheritable(each) for each in range(3)])
print(sys.stdin.read(), sys.stdout, sys.stdout.seekable(), sys.stdout.write_through, sys.stderr)
print([each.name for each in threading.enumerate()], os.sched_getaffinity(0))
print(os.getpgid(0) == os.getsid(0) == os.getpid())
print([signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print(getattr(sys.modules.get("sitecustomize"), "__file__", None), os.getcwd(), sys.excepthook)
print(sys._getframe().f_back and sys._getframe().f_back.f_code.co_filename)
"""

RAISES = """
class Own(Exception): pass
def fails():
    try:
        {}["key"]
    except KeyError as error:
        raise Own("unwell") from error
fails()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with the module that tells of a standby."""
    (tmp_path / "is_ready.py").write_text(IS_READY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return tmp_path


def of_script(source, *arguments, name="train.py", **options):
    with open(name, "w") as file:
        file.write(source)
    return Program(["-u", os.path.abspath(name), *arguments], {}, **options)


def wait_until(holds):
    last = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < last, "It takes too long."
        time.sleep(0.02)


def ready(standbys, program, modules=(), environment=()):
    """Prepares a standby, and returns its process once it waits."""
    with contextlib.suppress(FileNotFoundError):
        os.remove("ready")
    standbys.prepare(0, program, [*modules, "is_ready"], dict(environment))
    wait_until(lambda: os.path.exists("ready"))
    with open("ready") as file:
        return int(file.read())


def run(standbys, program, then=lambda worker: None):
    """Runs a program; returns its lines, its exit code, and its process."""
    lines, workers = [], []

    def start(index, program, on_line):
        workers.append(standbys.start(index, program, on_line))
        return workers[-1]

    with Job([program], lambda _, line: lines.append(line), start=start) as job:
        then(workers[0])
        job.wait(timeout=LONG)
    return lines, workers[0].exit_code, workers[0]._process.pid


def both(program, modules=()):
    """Returns what a program does in a fresh process, and in a standby."""
    with StandbyWorkers() as standbys:
        *fresh, _ = run(standbys, program)
        process = ready(standbys, program, modules)
        *waited, own = run(standbys, program)
        assert own == process
    return fresh, waited


def differences(fresh, waited):
    (lines, *code), (others, *other_code) = fresh, waited
    changed = [line for line in difflib.ndiff(lines, others) if not line.startswith(" ")]
    return changed + [(code, other_code)] * (code != other_code)


def is_running(process):
    """Whether there is such a process, also one that nobody has waited for."""
    return os.path.exists(f"/proc/{process}")


@pytest.mark.parametrize("form", ["script", "link", "module", "command"])
def test_a_program_sees_what_it_sees_in_a_fresh_process(folder, form):
    (folder / "package").mkdir()
    (folder / "package" / "is_ready.py").write_text(IS_READY)
    (folder / "package" / "train.py").write_text(FACTS + RAISES)
    (folder / "linked.py").symlink_to("package/train.py")
    arguments = {
        "script": ["package/train.py"],
        "link": ["linked.py"],
        "module": ["-m", "package.train"],
        "command": ["-c", "__file__ = __cached__ = None" + FACTS + RAISES],
    }[form]
    core = min(os.sched_getaffinity(0))
    program = Program(["-u", *arguments, "a", "-b c"], {"TF_CONFIG": "{}"}, cores=[core])
    fresh, waited = both(program)
    assert fresh[1] == 1
    assert fresh[0][-1] in ("Own: unwell", "__main__.Own: unwell", "package.train.Own: unwell")
    assert differences(fresh, waited) == []


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import atexit, sys; atexit.register(print, 'after'); sys.exit('words')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); print('here')", 130),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("print('one')\nx = = 1\n", 1),
        ("import sys; sys.excepthook = lambda *error: print('own', error[0]); 1 / 0", 1),
        ("import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)", 0),
    ],
    ids=["exit", "words", "interrupted", "killed", "no Python", "own hook", "pickled"],
)
def test_a_program_ends_as_in_a_fresh_process(source, code):
    fresh, waited = both(of_script(source))
    assert fresh[1] == code
    assert differences(fresh, waited) == []


def test_modules_are_imported_before(folder):
    (folder / "broken.py").write_text("print('broken', flush=True)\n1 / 0")
    (folder / "leaves.py").write_text("raise SystemExit")
    asks = "import sys; print([each in sys.modules for each in ('json.tool', 'broken', 'leaves')])"
    modules = ["nowhere", "broken", "leaves", "json.tool"]
    fresh, waited = both(of_script(asks), modules)
    assert fresh == [["[False, False, False]"], 0]
    assert waited == [["[True, False, False]"], 0]


def test_a_program_has_its_own_environment(folder, monkeypatch):
    (folder / "sets.py").write_text(
        "import os\n"
        "print(os.environ['SET_BEFORE'])\n"
        "assert os.environ['SET_BEFORE'] == 'yes'\n"
        "os.environ['SET'] = os.environ['TF_CONFIG'] = 'by an import'\n"
        "os.environ.setdefault('DEFAULT', 'none')\n"
        "os.environ.pop('REMOVED')\n"
    )
    names = ["SET_BEFORE", "SET", "TF_CONFIG", "DEFAULT", "REMOVED", "OLD", "NEW"]
    program = of_script(f"import os; print([os.environ.get(name) for name in {names}])")
    monkeypatch.setenv("REMOVED", "not yet")

    def having(**environment):
        return Program(program.arguments, environment)

    with StandbyWorkers() as standbys:
        before = {"SET_BEFORE": "yes", "DEFAULT": "before"}
        process = ready(standbys, having(TF_CONFIG="1", OLD="1"), ["sets"], before)
        lines, _, own = run(standbys, having(TF_CONFIG="2", NEW="2"))
    assert own == process
    assert lines == [str([None, "by an import", "2", "before", None, None, "2"])]


def test_the_environments_own_sitecustomize_is_run(folder, monkeypatch):
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import sys; sys.own = 'ran'; 1 / 0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), PYTHON_PATH]))
    program = of_script("import sys; print(sys.own, 'sitecustomize' in sys.modules)")
    fresh, waited = both(program)
    assert fresh[0][-1] == "ran False"
    assert waited[0][-1] == "ran False"


def test_a_standby_without_another_sitecustomize_shows_none(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fresh, waited = both(of_script(FACTS))
    assert differences(fresh, waited) == []


def test_descriptors_are_inherited():
    reading, writing = os.pipe()
    program = of_script(f"import os; os.write({writing}, b'here')", inherited=[writing])
    try:
        for _ in range(2):
            with StandbyWorkers() as standbys:
                run(standbys, program)  # fresh
                assert os.read(reading, 100) == b"here"
                process = ready(standbys, program)
                assert run(standbys, program) == ([], 0, process)
                assert os.read(reading, 100) == b"here"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_standby_with_another_file_under_the_number_is_not_used(folder):
    descriptor = os.open(folder / "first", os.O_CREAT | os.O_WRONLY)
    other = os.open(folder / "second", os.O_CREAT | os.O_WRONLY)
    program = of_script(f"import os; os.write({descriptor}, b'here')", inherited=[descriptor])
    try:
        with StandbyWorkers() as standbys:
            process = ready(standbys, program)
            os.dup2(other, descriptor)
            assert run(standbys, program)[2] != process
            assert not is_running(process)
    finally:
        os.close(descriptor)
        os.close(other)
    assert (folder / "second").read_text() == "here"


def test_reports_go_to_the_program_that_is_started():
    source = f"""
import os
descriptor, inode = map(int, os.environ["{REPORTS_VARIABLE}"].split(":"))
assert os.fstat(descriptor).st_ino == inode
os.write(descriptor, b"a report\\n")
"""
    reports, others = [], []
    program = of_script(source, on_report=lambda line, ahead: reports.append(line))
    unheard = of_script(source, on_report=lambda line, ahead: others.append(line))
    with StandbyWorkers() as standbys:
        process = ready(standbys, unheard)
        assert run(standbys, program) == ([], 0, process)
    assert (reports, others) == ([b"a report\n"], [])


def test_a_killed_standby_is_not_used():
    program = of_script("print('done')")
    with StandbyWorkers() as standbys:
        process = ready(standbys, program)
        os.kill(process, signal.SIGKILL)
        ended = os.WEXITED | os.WNOWAIT
        os.waitid(os.P_PID, process, ended)
        lines, code, own = run(standbys, program)
        assert own != process
        assert (lines, code) == (["done"], 0)
        assert not is_running(process)
        process = ready(standbys, program)  # and another one can be prepared
        assert run(standbys, program) == (["done"], 0, process)


@pytest.mark.parametrize(
    "changed",
    [{"cores": [0]}, {"environment": {"PYTHONHASHSEED": "1"}}, {"arguments": ["-u", "-c", ""]}],
    ids=["cores", "variables of Python", "arguments"],
)
def test_a_standby_for_another_program_is_not_used(changed):
    program = of_script("")
    kept = {"arguments": program.arguments, "environment": {}}
    with StandbyWorkers() as standbys:
        process = ready(standbys, program)
        assert run(standbys, Program(**kept | changed))[2] != process
        assert not is_running(process)


@pytest.mark.parametrize(
    "program",
    [
        Program(["-u", "is_ready.py"], {}, call=b""),
        Program(["-S", "is_ready.py"], {}),
        Program(["-u", "-E", "is_ready.py"], {}),
    ],
    ids=["called", "without its startup", "without its variables"],
)
def test_a_program_that_would_not_wait_is_not_prepared(program):
    with StandbyWorkers() as standbys:
        standbys.prepare(1, program, [], {})
        ready(standbys, of_script(""))  # which is prepared after it would have been
        worker = standbys.start(1, program, lambda worker, line: None)
        worker.close()
    assert type(worker) is ProcessWorker


def test_unused_standbys_end_with_the_context():
    before = set(threading.enumerate())
    descriptors = set(os.listdir("/proc/self/fd"))
    with StandbyWorkers() as standbys:
        process = ready(standbys, of_script(""))
        assert is_running(process)
    assert not is_running(process)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_standby_is_there_once():
    program = of_script("")
    with StandbyWorkers() as standbys:
        process = ready(standbys, program)
        os.remove("ready")
        standbys.prepare(0, program, ["is_ready"], {})
        time.sleep(0.5)
        assert not os.path.exists("ready")
        assert run(standbys, program)[2] == process


def test_a_standby_outlives_the_thread_that_asks_for_it():
    program = of_script("print('done')")
    with StandbyWorkers() as standbys:
        asks = threading.Thread(target=standbys.prepare, args=(0, program, ["is_ready"], {}))
        asks.start()
        asks.join()
        wait_until(lambda: os.path.exists("ready"))
        with open("ready") as file:
            assert run(standbys, program) == (["done"], 0, int(file.read()))


def test_a_standby_that_is_not_ready_becomes_the_worker(folder):
    (folder / "waits.py").write_text(
        "import os, time\nopen('begun', 'w').close()\n"
        "while not os.path.exists('go on'): time.sleep(0.02)\n"
    )
    program = of_script("import sys; print('waits' in sys.modules)")
    with StandbyWorkers() as standbys:
        standbys.prepare(0, program, ["waits"], {})
        wait_until(lambda: os.path.exists("begun"))
        done = run(standbys, program, then=lambda worker: (folder / "go on").touch())
    assert done[:2] == (["True"], 0)


def test_an_interrupt_reaches_a_standby_that_is_not_ready(folder):
    (folder / "waits.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(100)")
    program = of_script("print('never')")
    with StandbyWorkers() as standbys:
        standbys.prepare(0, program, ["waits"], {})
        wait_until(lambda: os.path.exists("begun"))
        done = run(standbys, program, then=lambda worker: worker.signal(signal.SIGINT))
    assert done[:2] == ([], 128 + signal.SIGINT)


def priorities(process):
    """The values of a process, and of its session's group where there are some."""
    try:
        with open(f"/proc/{process}/autogroup") as file:
            group = int(file.read().split()[-1])
    except OSError:
        group = 0
    return os.getpriority(os.PRIO_PROCESS, process), group


def test_a_standby_has_a_low_priority_until_it_is_used(folder):
    (folder / "threads.py").write_text(
        "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)\nthread.start()\n"
    )
    waits = "import os, time\nwhile not os.path.exists('go on'): time.sleep(0.02)\n"
    program = of_script(waits)
    usual = (os.getpriority(os.PRIO_PROCESS, 0), 0)
    with StandbyWorkers() as standbys:
        process = ready(standbys, program, ["threads"])
        low = priorities(process)
        if os.geteuid() == 0 or os.path.exists("/proc/self/autogroup"):
            assert low > usual

        def then(worker):
            threads = [int(each) for each in os.listdir(f"/proc/{process}/task")]
            assert len(threads) == 2
            wait_until(lambda: {priorities(each) for each in threads} == {usual})
            (folder / "go on").touch()

        assert run(standbys, program, then) == ([], 0, process)


UNPRIVILEGED = """
import os, signal, subprocess, sys
from unison.runtime.launching.priorities import LowPriority
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sleeping = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
low = [LowPriority(each.pid) for each in sleeping]
def show():
    groups = [open(f"/proc/{each.pid}/autogroup").read().split()[-1] for each in sleeping]
    print(groups[0], [os.getpriority(os.PRIO_PROCESS, each.pid) for each in sleeping])
    return groups
show()
for each in low:
    each.undo()
print(set(show()))
for each in sleeping:
    each.kill()
    each.wait()
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/proc/self/autogroup"),
    reason="becomes a user without privileges, where Linux groups processes by session",
)
def test_a_low_priority_is_undone_without_privileges():
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["10 [0, 0, 0]", "0 [0, 0, 0]", "{'0'}"]


def test_children_of_a_program_find_its_functions():
    source = """
import multiprocessing
def twice(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(twice, [1, 2]))
"""
    fresh, waited = both(of_script(source))
    assert fresh == [["[2, 4]"], 0]
    assert differences(fresh, waited) == []


LAUNCHER = """
import sys, time
from unison.runtime.launching import Program
from unison.runtime.launching.standby import StandbyWorkers
with StandbyWorkers() as standbys:
    standbys.prepare(0, Program(["-u", "train.py"], {}), ["is_ready"], {})
    time.sleep(100)
"""


def test_a_standby_ends_with_its_launcher(folder):
    of_script("open('run', 'w')")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER])
    try:
        wait_until(lambda: os.path.exists("ready"))
        process = int((folder / "ready").read_text())
        assert is_running(process)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not is_running(process))
    assert not (folder / "run").exists()


def test_a_worker_that_no_standby_was_prepared_for_is_started():
    with StandbyWorkers() as standbys:
        worker = standbys.start(0, of_script("print('done')"), lambda worker, line: None)
        worker.close()
    assert type(worker) is ProcessWorker
    assert worker.exit_code == 0
