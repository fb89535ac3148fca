"""300 retraces, 100 strategies and 50 killed workers leave nothing behind.

`pytest -m soak tests/soak/test_leaks.py`; some 20 minutes on two idle cores. The numbers of rounds
are divided by `UNISON_SOAK_SHORTER` (default: 1).
"""

import os
import pathlib

import pytest

from elastic_commands import Command
from elastic_training import ENVIRONMENT
from job_leaks import kill_workers
from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = (TESTS / "leak_program.py").read_text()
WORKER = TESTS / "integration" / "elastic_worker.py"
TRAINING = TESTS / "integration" / "elastic_program.py"
SHORTER = int(os.environ.get("UNISON_SOAK_SHORTER", "1"))
LIMIT = 3600  # seconds; the machine may be busy

#: Bytes that each killed worker may add to the training of the other one, which compiles its step
#: for the group without it and, again, with the next one.
BYTES_A_GROUP = 400_000

ROUNDS = {
    "retraces_of_run": 300,
    "retraces_of_fit": 300,
    "recompiled_models": 300,
    "strategies": 100,
    "killed_data_workers": 50,
}

#: The rounds before the first census. Garbage waits while functions are traced, so that memory is
#: reused after more of them.
WARM_UP = {"strategies": 40}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 60)]


@pytest.mark.parametrize("loop", ROUNDS)
def test_nothing_is_left_of(loop):
    done = run_program(
        PROGRAM,
        loop,
        WARM_UP.get(loop, 6),
        ROUNDS[loop] // SHORTER,
        env={**FEW_OPTIMIZATIONS, "PYTHONPATH": os.pathsep.join([str(TESTS), PYTHON_PATH])},
        timeout=LIMIT,
        imported=("jax", "keras", "unison"),
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_supervisor_and_the_other_worker_are_as_before_when_50_workers_are_killed(tmp_path):
    with Command("--min-workers", 1, "-n", 2, "--restarts", 60, WORKER, tmp_path) as job:
        assert kill_workers(job, warm_up=3, kills=50 // SHORTER) == []


def test_a_training_holds_as_much_as_before_when_50_workers_are_killed(tmp_path):
    program = tmp_path / "training.py"
    program.write_text(
        "import os, runpy, sys\n"
        "print('pid', os.getpid(), 'trains', flush=True)\n"
        f"sys.argv = [{str(TRAINING)!r}, 'loop', 'epochs=1000000', 'slow=0.01']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ("--min-workers", 1, "-n", 2, "--restarts", 60)
    with Command(*options, program, **ENVIRONMENT) as job:
        assert kill_workers(job, 3, 50 // SHORTER, BYTES_A_GROUP) == []
