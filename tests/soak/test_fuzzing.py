"""2,000 changed files of every format that is read; about an hour."""

import os

import pytest

import fuzzing
from fuzzed.formats import FORMATS

CASES = int(os.environ.get("UNISON_SOAK_CASES", "2000"))
SEED = int(os.environ.get("UNISON_SOAK_SEED", "1"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_file_holds_reading_it_ends_in_right_data_or_a_clear_error(name):
    (report,) = fuzzing.fuzz([name], SEED, CASES)
    print(report)
    assert report.failures == []
