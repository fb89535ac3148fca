"""Trainings with in-memory checkpoints whose workers are killed at random.

`pytest -m soak tests/soak/test_in_memory_checkpoints.py`; some 15 minutes on two idle cores. The
number of schedules is `UNISON_SOAK_SCHEDULES` (default: 40), that of the first is
`UNISON_SOAK_FIRST` (default: 0). A schedule that fails is run again by its number.
"""

import os
import random
import re

import pytest

from in_memory_training import LIMIT, PROGRAM, keeping, report, resumed_steps, run, undisturbed
from keras_forms import FORMS

FIRST = int(os.environ.get("UNISON_SOAK_FIRST", "0"))
COUNT = int(os.environ.get("UNISON_SOAK_SCHEDULES", "40"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * LIMIT)]

#: Options of the job, how many workers it has, and the program's arguments.
TRAININGS = (
    (("-n", 2), 2, ("loop", "epochs=6")),
    (("-n", 2), 2, ("fit", "epochs=6")),
    (("-n", 3), 3, ("loop", "epochs=6")),
    (("-n", 3), 3, ("fit", "epochs=6")),
    (("-n", 2), 2, ("fit", "loops=3", "epochs=2")),
    (("-n", 1, "--devices-per-worker", 2), 1, ("fit", "epochs=6", "zero=3")),
)

#: The steps of each of them.
STEPS = 114


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_training_ends_as_if_nothing_had_happened(seed, tmp_path):
    numbers = random.Random(seed)
    options, workers, given = TRAININGS[seed % len(TRAININGS)]
    at = sorted(numbers.randrange(1, STEPS) for _ in range(numbers.choice((1, 1, 2, 3))))
    if len(at) > 1 and numbers.random() < 0.3:
        at[1] = at[0]  # both at about the same time
    # After a step: in the next one, while a checkpoint is begun, written or copied.
    kills = [
        f"{step}:{numbers.randrange(workers)}:{numbers.choice((0, numbers.randrange(1, 40)))}"
        for step in at
    ]
    overhead = numbers.choice((100, 100, 20))
    given += (f"form={FORMS[seed // len(TRAININGS) % 2]}",)
    print(f"seed {seed}: {options} {given}, overhead {overhead} %, kills {kills}")
    output = run(
        *(*options, *keeping(len(kills), overhead), PROGRAM, tmp_path, *given),
        f"kills={','.join(kills)}",
    )
    print(output)
    assert report(output) == undisturbed(options, given)
    resumed = resumed_steps(output)
    assert len(resumed) <= output.count("all workers are started again") <= len(kills)
    # Two intervals, if a checkpoint is being written; what is measured first is not yet logged.
    most = max((int(every) for every in re.findall(r"every (\d+) steps", output)), default=10)
    killed = [int(mark.read_text().split()[0]) for mark in sorted(tmp_path.glob("kill-*"))]
    if len(resumed) == len(killed):
        for step, again in zip(killed, resumed, strict=True):
            assert step - again <= max(2 * most, 10) + 2
