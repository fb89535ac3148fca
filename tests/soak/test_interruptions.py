"""Signals at random moments over all training loops, in one process and in elastic jobs.

`UNISON_SOAK_SIGNALS` says how many a loop, `UNISON_SOAK_SEED` which moments.
"""

import os
import pathlib

import pytest

from elastic_training import require_the_same_training, train, train_alone
from keras_forms import FORMS
from subprocess_program import PYTHON_PATH, run_program

TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = (TESTS / "interruption_program.py").read_text()
PATH = os.pathsep.join([PYTHON_PATH, str(TESTS)])  # the program imports modules beside it
SIGNALS = int(os.environ.get("UNISON_SOAK_SIGNALS", "50"))
SEED = int(os.environ.get("UNISON_SOAK_SEED", "0"))
LIMIT = 600 + 120 * SIGNALS  # seconds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 30)]


@pytest.mark.parametrize("form", FORMS)
def test_every_loop_that_is_interrupted_is_after_a_whole_step(form):
    env = {"UNISON_CPU_DEVICES": "2", "PYTHONPATH": PATH}
    done = run_program(PROGRAM, form, SIGNALS, SEED, env=env, timeout=LIMIT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_every_elastic_loop_that_is_interrupted_is_after_a_whole_step(kind):
    given = (kind, f"epochs={max(4, SIGNALS)}")
    waiting = ("slow=0.02", "full=2", f"patience={LIMIT}")
    alarms = (f"alarms={SIGNALS}", f"seed={SEED}")
    outcome = train(2, [], *given, *alarms, *waiting, timeout=LIMIT)
    lines = [line for line in outcome.output(1) if line.startswith("INTERRUPTED")]
    print(f"seed {SEED}, elastic {kind}: {len(lines)} interruptions")
    assert len(require_the_same_training(outcome, train_alone(*given))) == 2
    assert len(lines) == SIGNALS
