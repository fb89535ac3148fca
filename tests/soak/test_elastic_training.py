"""Trainings with random faults: each must end as one to which nothing happens.

`pytest -m soak tests/soak/test_elastic_training.py`; some 25 minutes on two idle cores. The number
of schedules is `UNISON_SOAK_SCHEDULES` (default: 100), that of the first is `UNISON_SOAK_FIRST`
(default: 0). A schedule that fails is run again by its number.
"""

import functools
import os

import pytest

import elastic_training
from elastic_training import random_faults, require_the_same_training, sizes, train, train_alone
from keras_forms import FORMS
from unison.testing import check

FIRST = int(os.environ.get("UNISON_SOAK_FIRST", "0"))
COUNT = int(os.environ.get("UNISON_SOAK_SCHEDULES", "100"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(elastic_training.SECONDS + 60)]


@functools.cache
def alone(*given):
    return train_alone(*given)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_training_ends_as_if_nothing_had_happened(seed, tmp_path):
    program = ("fit", "fit", "loop")[seed % 3]
    workers = (2, 3)[seed % 2]
    given = [program, "epochs=4"]
    phases = ["start", "compile"]
    if program == "fit":
        phases += ["evaluate", "read"]
        given += ["data=dataset"] * (seed % 4 == 3)
    if seed % 5:
        steps, more = 48, ["slow=0.02", f"full={workers}"]
    else:  # many steps are one
        steps, more = 8, []
    if program == "fit" and seed % 4 == 0:
        phases += ["checkpoint"]
        more.append(f"folder={tmp_path}")
    faults = random_faults(seed, workers, steps, phases)
    more.append(f"form={FORMS[seed // 3 % 2]}")
    print(f"seed {seed}: {workers} workers, {program} {more}", *faults, sep="\n")
    outcome = train(workers, faults, *given, *more, heartbeat_timeout=3.0)
    print(f"ended with {outcome.exit_code} after {outcome.seconds:.0f} s; of the faults,")
    print(f"those have happened: {sorted(outcome.fired)}; sizes of the groups: {sizes(outcome)}")
    assert outcome.fired
    assert check(outcome.history) == []
    require_the_same_training(outcome, alone(*given))
