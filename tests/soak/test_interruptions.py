"""Signals at random moments over all training loops.

`UNISON_SOAK_SIGNALS` says how many a loop, `UNISON_SOAK_SEED` which moments.
"""

import os
import pathlib

import pytest

from subprocess_program import PYTHON_PATH, run_program

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = (TESTS / "interruption_program.py").read_text()
PATH = os.pathsep.join([PYTHON_PATH, str(TESTS)])  # the program imports modules beside it
SIGNALS = int(os.environ.get("UNISON_SOAK_SIGNALS", "50"))
SEED = int(os.environ.get("UNISON_SOAK_SEED", "0"))
LIMIT = 600 + 120 * SIGNALS  # seconds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 30)]


def test_every_loop_that_is_interrupted_is_after_a_whole_step():
    env = {"UNISON_CPU_DEVICES": "2", "PYTHONPATH": PATH}
    done = run_program(PROGRAM, SIGNALS, SEED, env=env, timeout=LIMIT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
