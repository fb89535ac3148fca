"""Some 25 changed files of every format that is read; `tests/soak` has 2,000 of each.

See `fuzzing`, which says what a case must end in, and runs one alone.
"""

import pytest

import fuzzing
from fuzzed import wrong
from fuzzed.formats import FORMATS

CASES = 25
SEED = 7

# Which the fixtures are.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports():
    """What became of the cases of each format."""
    return {report.name: report for report in fuzzing.fuzz([*FORMATS], SEED, CASES)}


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_file_holds_reading_it_ends_in_right_data_or_a_clear_error(reports, name):
    assert reports[name].failures == []
    assert sum(reports[name].outcomes.values()) == CASES


@pytest.mark.smoke
def test_a_few_changed_files_of_two_formats_are_read_rightly_or_not_at_all():
    for report in fuzzing.fuzz(["checkpoint", "tfrecord"], SEED, 5):
        assert report.failures == []
        assert sum(report.outcomes.values()) == 5


# -- the machine itself --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong_reports():
    """What became of the cases of readers that do what they should not."""
    at_once = [name for name in wrong.FORMATS if name != "hang"]
    reports = fuzzing.fuzz(at_once, SEED, 2, wrong.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzzing, "PATIENCE", 3.0)
        reports += fuzzing.fuzz(["hang"], SEED, 1, wrong.__name__)
    return {report.name: report for report in reports}


@pytest.mark.parametrize("read", wrong.WRONG)
def test_a_reader_that_does_what_it_should_not_is_found(wrong_reports, read):
    report = wrong_reports[read.__name__]
    assert len(report.failures) == sum(report.outcomes.values()) > 0
    for number, failure in enumerate(report.failures):
        assert wrong.WRONG[read] in failure
        assert f"python tests/fuzzing.py {read.__name__} --seed {SEED} --case {number}" in failure


def test_a_case_is_the_same_whenever_it_runs():
    one, other = (fuzzing.chance_of("checkpoint", 7, 12).random() for _ in range(2))
    assert one == other
    assert fuzzing.chance_of("checkpoint", 8, 12).random() != one
