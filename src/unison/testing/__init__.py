"""Tests of jobs whose workers may be lost: `run` injects faults into them, and `check` verifies
what the workers have done.

    outcome = unison.testing.run("train.py", workers=3, faults=[Fault("kill", worker=0, step=20)])
    outcome.assert_fired()
    outcome.assert_sound()
"""

from unison.runtime.elastic.faults import Fault, InjectedError
from unison.testing.checking import Finding, check, read_history
from unison.testing.jobs import Outcome, run
from unison.testing.recording import record_examples

__all__ = [
    "Fault",
    "Finding",
    "InjectedError",
    "Outcome",
    "check",
    "read_history",
    "record_examples",
    "run",
]
