"""What must be true of an elastic training, whatever has happened to its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np

from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program
from unison import testing
from unison.testing import Fault, Outcome

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "integration" / "elastic_program.py"

#: What may differ by the order in which float32 gradients of other shares are summed: some units
#: in the last place for each of about a hundred steps. A batch that is left out or used twice moves
#: the weights a hundred times as far (see `test_a_batch_more_or_less_would_show`).
ROUND_OFF = 2e-5

#: The limit of a job; the machine may be busy.
SECONDS = 120

ENVIRONMENT = {
    "PYTHONPATH": PYTHON_PATH,
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "UNISON_CPU_DEVICES": "1",
}


def train(
    workers: int,
    faults: Sequence[Fault],
    *given: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Outcome:
    """Runs the program in an elastic job."""
    return testing.run(
        PROGRAM,
        *given,
        workers=workers,
        faults=faults,
        environment={**ENVIRONMENT, **environment},
        **{"timeout": SECONDS, **options},
    )


def train_alone(*given: str) -> dict[str, Any]:
    """Runs the program in one process to which nothing happens, and returns its report."""
    done = run_program(
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')",
        PROGRAM,
        *given,
        env={"NPROC": "1", "UNISON_CPU_DEVICES": "1", **FEW_OPTIMIZATIONS},
        timeout=SECONDS,
        imported=("jax", "keras", "unison"),
    )
    assert done.returncode == 0, done.stderr
    (report,) = _reports(done.stdout.splitlines())
    return report


def reports(outcome: Outcome) -> list[dict[str, Any]]:
    """Returns what the workers that came to the end have reported."""
    return _reports([line for _, line in outcome.lines])


def _reports(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line[7:]) for line in lines if line.startswith("REPORT ")]


def require_the_same_training(outcome: Outcome, alone: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Asserts that a job has ended with what the training gives to which nothing happens.

    Returns:
        What the workers that came to the end have reported.
    """
    outcome.assert_ended(0)
    outcome.assert_sound()
    found = reports(outcome)
    assert found, outcome.lines
    for report in found:
        # Each example of each epoch, by its number.
        assert report["seen"] == alone["seen"]
        # Bit for bit among the workers.
        assert report["digest"] == found[0]["digest"]
        assert report["history"] == found[0]["history"]
    np.testing.assert_allclose(found[0]["weights"], alone["weights"], rtol=0, atol=ROUND_OFF)
    for name, values in (alone["history"] or {}).items():
        np.testing.assert_allclose(found[0]["history"][name], values, rtol=0, atol=ROUND_OFF)
    return found


def sizes(outcome: Outcome) -> list[int]:
    """Returns how many members the views had that were started, in order."""
    return [len(event["workers"]) for event in outcome.events if event["event"] == "started"]


def random_faults(seed: int, workers: int, steps: int, phases: Sequence[str]) -> list[Fault]:
    """Returns faults that do not touch one of the workers, so that the state is never lost.

    Args:
        seed: The seed.
        workers: How many workers there are.
        steps: How many steps the training has at least.
        phases: Through which phases it goes, beside those of each step.
    """
    draw = Random(seed)
    victims = draw.sample(range(workers), draw.randint(1, workers - 1))
    kinds = ["kill", "kill", "kill", "stop", "stop", "terminate", "slow"]
    step = draw.randrange(steps * 3 // 4)
    faults = []
    for victim in victims:
        kind = draw.choice(kinds)
        seconds = {"stop": draw.choice([None, 0.5, 6.0]), "slow": 2.0}.get(kind)
        phase = draw.choice([*phases, "step", "exchange", "exchange", "commit"])
        occurrence = draw.randint(1, 3)
        at = 0 if phase in ("start", "compile") else step
        if phase == "start":
            occurrence = 1 + occurrence % 2
        elif phase == "compile" and not faults:
            occurrence = 1  # a loop may have one program, and something is to happen
        faults.append(Fault(kind, victim, at, phase, occurrence, seconds))
        if draw.random() < 0.5:  # else all at once
            step = min(step + draw.randrange(steps // 4), steps * 3 // 4)
    if draw.random() < 0.4:  # something goes wrong, too, while the others come together again
        victim = draw.choice(victims)
        occurrence = draw.randint(1, 6)
        faults.append(Fault("kill", victim, step + 1, "recovery", occurrence))
    return faults
