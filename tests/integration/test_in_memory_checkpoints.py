"""`unison run --restarts R --in-memory-checkpoints`: workers that are lost resume from memory.

Whatever is lost, the training ends with the weights and metrics of one to which nothing happened,
bit by bit.
"""

import contextlib
import functools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from parameter_server_threads import free_addresses
from subprocess_program import environment_of_program, kill_group

LIMIT = 200

pytestmark = pytest.mark.timeout(2 * LIMIT)

PROGRAM = Path(__file__).with_name("in_memory_program.py")

#: All steps cost about as much as keeping the state, so that it is kept every few steps.
KEEPING = ("--restarts", "4", "--in-memory-checkpoints", "--checkpoint-overhead", "100")


def command(*arguments):
    return [sys.executable, "-m", "unison", "run", "--no-color", *map(str, arguments)]


def environment():
    return environment_of_program({"KERAS_BACKEND": "jax", "UNISON_LOG": "info"})


def run(*arguments):
    """Returns the output of a job that ends well."""
    done = subprocess.run(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def report(output):
    (line,) = re.findall(r"^(?:\[worker 0\] )REPORT (.*)$", output, re.MULTILINE)
    return json.loads(line)


@functools.cache
def undisturbed(options, given):
    with tempfile.TemporaryDirectory() as folder:
        return report(run(*options, PROGRAM, folder, *given))


def steps_again(output):
    """Returns after which steps the training has resumed."""
    return [int(step) for step in re.findall(r"Training resumes after step (\d+)", output)]


TWO_WORKERS = ("-n", "2")


@pytest.mark.parametrize(
    ("options", "given", "kills"),
    [
        pytest.param(TWO_WORKERS, ("loop",), "30:1", marks=pytest.mark.smoke),
        (TWO_WORKERS, ("loop",), "25:0,40:1,50:0"),
        (TWO_WORKERS, ("fit",), "30:1"),
        (TWO_WORKERS, ("fit",), "3:1,30:1,45:0"),
        (TWO_WORKERS, ("fit", "loops=3", "epochs=2"), "30:1,60:0,100:1"),
        (("-n", "1", "--devices-per-worker", "2"), ("fit", "zero=3"), "30:0"),
    ],
    ids=["loop", "loop thrice", "fit", "fit thrice", "several fits", "ZeRO 3"],
)
def test_a_training_goes_on_as_if_nothing_had_happened(tmp_path, options, given, kills):
    output = run(*options, *KEEPING, PROGRAM, tmp_path, *given, f"kills={kills}")
    assert report(output) == undisturbed(options, given)
    at = [int(kill.split(":")[0]) for kill in kills.split(",")]
    assert output.count("all workers are started again") == len(at)
    # It may be killed before the first checkpoint; later it has lost a few steps at most: they are
    # counted before those which are being kept, on a machine that may be busy.
    resumed = steps_again(output)
    assert len(resumed) == sum(step > 20 for step in at)
    later = [step for step in at if step > 20]
    assert all(-2 <= step - again <= 25 for step, again in zip(later, resumed, strict=True))


def test_a_process_stands_by_and_has_imported_what_the_program_imports(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "known = {'keras', 'unison.train.in_memory'} <= set(sys.modules)\n"
        f"sys.argv[:] = sys.argv; print('KNOWN', known, flush=True)\n"
        f"exec(compile(open({str(PROGRAM)!r}).read(), {str(PROGRAM)!r}, 'exec'))\n"
    )
    given = ("loop", "slow=0.2", "epochs=4", "kills=70:0")
    output = run("-n", 1, *KEEPING, program, tmp_path, *given)
    assert re.findall(r"KNOWN (\w+)", output) == ["False", "True"]
    assert len(steps_again(output)) == 1


# -- several machines ---------------------------------------------------------------------------


class Machine:
    """A machine of a job: its command, at an address of this machine."""

    def __init__(self, place, folder, rendezvous, given):
        options = ("--nnodes", 2, "--rendezvous", rendezvous, "--host", f"127.0.0.{place}")
        self.output = folder / f"machine-{place}-{time.monotonic_ns()}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command(*options, "-n", 1, *KEEPING, PROGRAM, folder, *given),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )

    def text(self):
        return self.output.read_text()

    def lose(self):
        """Kills its command, with which its workers end, and its memory."""
        self.process.kill()
        self.process.wait()
        kill_group(self.process.pid)


@pytest.mark.parametrize("lost", [1, 2], ids=["that of the rendezvous", "another"])
def test_a_whole_machine_is_lost_and_its_state_comes_from_another(tmp_path, lost):
    given = ("loop", "slow=0.05", "epochs=6")
    rendezvous = free_addresses(1)[0]
    with contextlib.ExitStack() as ending:

        def start(place):
            machine = Machine(place, tmp_path, rendezvous, given)
            ending.callback(machine.process.wait)
            ending.callback(kill_group, machine.process.pid)
            return machine

        machines = {place: start(place) for place in (1, 2)}
        steps = tmp_path / "steps-0"
        deadline = time.monotonic() + LIMIT
        while not steps.exists() or len(steps.read_text().splitlines()) < 50:
            assert time.monotonic() < deadline, machines[1].text() + machines[2].text()
            assert all(each.process.poll() is None for each in machines.values())
            time.sleep(0.05)
        machines[lost].lose()
        machines[lost] = start(lost)
        for machine in machines.values():
            machine.process.wait(LIMIT)
        texts = [machine.text() for machine in machines.values()]
    assert [machine.process.returncode for machine in machines.values()] == [0, 0], texts
    together = "".join(texts)
    # Between machines gloo sums, and on one machine shared memory: they round differently.
    expected = undisturbed(TWO_WORKERS, given)
    assert report(together)["seen"] == expected["seen"]
    (resumed,) = steps_again(together)
    assert resumed >= 20
    assert "fetched the state at step" in machines[lost].text(), texts


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--in-memory-checkpoints"], "Give --restarts"),
        (["--checkpoint-overhead", "1"], "is for --in-memory-checkpoints"),
        ([*KEEPING, "--min-workers", "1"], "are for different jobs"),
        ([*KEEPING, "--hosts", "a,b"], "are for different jobs"),
        ([*KEEPING, "--address", "auto"], "are for different jobs"),
        ([*KEEPING[:-1], "0"], "expected a percentage"),
    ],
)
def test_wrong_options_are_refused(arguments, complaint, capsys):
    from unison.cli import main

    try:
        code = main(["run", *arguments, str(PROGRAM), "folder", "fit"])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert complaint in capsys.readouterr().err


def test_ctrl_c_leaves_no_process(tmp_path):
    job = subprocess.Popen(
        command("-n", 2, *KEEPING, PROGRAM, tmp_path, "loop", "slow=0.1", "epochs=50"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    with contextlib.ExitStack() as ending:
        ending.callback(job.wait)
        ending.callback(kill_group, job.pid)
        steps = tmp_path / "steps-0"
        deadline = time.monotonic() + LIMIT
        while not steps.exists() or len(steps.read_text().splitlines()) < 60:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 128 + signal.SIGINT
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout
    assert not left, left
