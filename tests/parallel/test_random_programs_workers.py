"""Some random programs under two workers; `tests/soak` has more. See `random_programs`."""

import pytest

import random_programs


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_random_programs_train_under_two_workers_as_on_one_device(devices):
    report = random_programs.check_under_two_workers(4, 3 * devices, 3, devices)
    assert report.failures == []
