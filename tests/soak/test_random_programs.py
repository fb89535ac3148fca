"""2,000 random programs on several replicas, and a tenth as many under two workers.

`UNISON_SOAK_PROGRAMS` says how many, `UNISON_SOAK_SEED` which.
"""

import os

import pytest

import random_programs

PROGRAMS = int(os.environ.get("UNISON_SOAK_PROGRAMS", "2000"))
SEED = int(os.environ.get("UNISON_SOAK_SEED", "1"))
LIMIT = 600 + random_programs.SECONDS_EACH * PROGRAMS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT)]


def failures_of(programs, **options):
    reports = random_programs.check_in_processes(SEED, 0, programs, **options)
    return [failure for report in reports for failure in report.failures]


def test_random_programs_train_on_several_replicas_as_on_one_device():
    assert failures_of(PROGRAMS) == []


@pytest.mark.parametrize("devices", [1, 2])
def test_random_programs_train_under_two_workers_as_on_one_device(devices):
    assert failures_of(max(1, PROGRAMS // 20), processes=1, workers=devices) == []
