"""Trainings with in-memory checkpoints whose workers or machines are lost at random.

`pytest -m soak tests/soak/test_in_memory_checkpoints.py`; some 40 minutes on two idle cores. The
number of schedules is `UNISON_SOAK_SCHEDULES` (default: 40), that of the first is
`UNISON_SOAK_FIRST` (default: 0). A schedule that fails is run again by its number.
"""

import contextlib
import os
import random
import re

import numpy as np
import pytest

from in_memory_training import (
    LIMIT,
    PROGRAM,
    Machine,
    end_well,
    keeping,
    report,
    resumed_steps,
    run,
    train_until,
    undisturbed,
)
from keras_forms import FORMS
from parameter_server_threads import free_addresses

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


#: The most machines, and the trainings of jobs whose machines change.
MACHINES = 3
CHANGING = (("loop", "plain=1"), ("fit", "plain=1"), ("fit", "plain=1", "zero=3"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT // 4))
def test_machines_that_are_lost_and_come_change_nothing(seed, tmp_path):
    numbers = random.Random(seed)
    given = (*CHANGING[seed % len(CHANGING)], "slow=0.05", "epochs=16")
    rendezvous = free_addresses(1)[0]
    places = iter(range(1, 250))
    with contextlib.ExitStack() as ending:

        def start():
            place = next(places)
            machine = Machine(f"127.0.0.{place}", f"1:{MACHINES}", rendezvous, tmp_path, given)
            ending.callback(machine.lose)
            print(f"machine {place} comes")
            return machine

        machines = [start() for _ in range(MACHINES)]
        at = 25
        for _ in range(numbers.choice((2, 3))):
            train_until(at, tmp_path, machines)
            is_lost = len(machines) == MACHINES or (len(machines) > 1 and numbers.random() < 0.5)
            if is_lost:
                machines.pop(numbers.randrange(len(machines))).lose()
                print(f"a machine is lost after step {at}")
            else:
                machines.append(start())
            at += numbers.randrange(10, 60)
        output = end_well(machines)
    print(output)
    found, expected = report(output), undisturbed(("-n", str(MACHINES)), given)
    # Another number of replicas sums the same examples in another order.
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-3)
    for name in ("seen", "steps"):
        assert found.get(name) == expected.get(name)
    for name, values in found.get("history", {}).items():
        np.testing.assert_allclose(values, expected["history"][name], rtol=1e-2, atol=1e-4)
