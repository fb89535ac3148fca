"""Of the tracebacks of a job's workers, one is shown for each failure, in one piece."""

import logging

import pytest

from unison.runtime.launching.distinct_tracebacks import SAME, DistinctTracebacks
from unison.tracebacks import NOTE

HEADING = "Traceback (most recent call last):"
TRAINING = [HEADING, '  File "train.py", line 3, in train', "    fails()"]
OTHER = [HEADING, '  File "train.py", line 9, in evaluate', "    fails()"]


@pytest.fixture
def shown():
    return []


@pytest.fixture
def output(shown):
    return DistinctTracebacks(lambda worker, line: shown.append((worker, line)))


def print_all(output, worker, lines):
    for line in lines:
        output(worker, line)


def of(worker, lines):
    return [(worker, line) for line in lines]


def test_lines_are_passed_on_at_once(output, shown):
    print_all(output, 1, ["step 1", "", NOTE])
    assert shown == of(1, ["step 1", "", NOTE])


def test_the_same_traceback_is_shown_once_and_each_error(output, shown):
    print_all(output, 1, [*TRAINING, "ValueError: 1", NOTE])
    print_all(output, 0, [*TRAINING, "ValueError: 0", NOTE, "bye"])
    assert shown[:5] == of(1, [*TRAINING, "ValueError: 1", NOTE])
    assert shown[5:] == of(0, [f"ValueError: 0 {SAME}", "bye"])


def test_different_tracebacks_are_shown(output, shown):
    print_all(output, 0, [*TRAINING, "ValueError: a"])
    print_all(output, 1, [*OTHER, "ValueError: a"])
    assert shown == of(0, [*TRAINING, "ValueError: a"]) + of(1, [*OTHER, "ValueError: a"])


def test_lines_of_other_workers_do_not_come_between(output, shown):
    for first, second in zip(TRAINING, OTHER, strict=True):
        output(0, first)
        output(1, second)
    output(2, "step 1")
    output(1, "ValueError: b")
    output(0, "ValueError: a")
    assert shown == [
        (2, "step 1"),
        *of(1, [*OTHER, "ValueError: b"]),
        *of(0, [*TRAINING, "ValueError: a"]),
    ]


def test_of_a_worker_that_has_lost_the_failed_one_the_error_is_shown(output, shown):
    lost = "unison.errors.UnavailableError: worker 1 has failed: ValueError: a"
    print_all(output, 1, [*TRAINING, "ValueError: a"])
    print_all(output, 0, [*OTHER, lost])
    assert shown[4:] == [(0, lost)]


@pytest.mark.parametrize("following", [[], ["", NOTE]], ids=["no note", "a note"])
def test_so_it_is_if_its_traceback_comes_first(output, shown, following):
    lost = "unison.errors.UnavailableError: worker 1 has failed: ValueError: a"
    print_all(output, 0, [*OTHER, lost, *following])
    assert shown == []
    print_all(output, 1, [*TRAINING, "ValueError: a"])
    assert shown == [*of(1, [*TRAINING, "ValueError: a"]), (0, lost)]


def test_of_workers_that_have_lost_another_that_printed_nothing_one_is_shown(output, shown):
    lost = "unison.errors.UnavailableError: worker 2 has died"
    print_all(output, 0, [*TRAINING, lost, NOTE])
    print_all(output, 1, [*OTHER, lost, NOTE])
    output.close()
    assert shown == [*of(0, [*TRAINING, lost, NOTE]), (1, lost)]


def test_a_worker_that_goes_on_after_it_has_lost_another_shows_its_traceback(output, shown):
    lost = "unison.errors.UnavailableError: worker 2 has died"
    print_all(output, 0, [*TRAINING, lost, "step 1"])
    assert shown == of(0, [*TRAINING, lost, "step 1"])


def test_the_cause_of_having_lost_another_is_held_too(output, shown):
    lost = "unison.errors.UnavailableError: worker 2 has died"
    between = ["", "The above exception was the direct cause of the following exception:", ""]
    chained = [*TRAINING, lost, *between, *OTHER, lost]
    print_all(output, 0, chained)
    assert shown == []
    output.close()
    assert shown == of(0, [*TRAINING, lost, *between, lost])


def test_chained_errors_are_shown_once(output, shown):
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    lines = [*TRAINING, "KeyError: 1", *between, *OTHER, "ValueError: 1"]
    print_all(output, 0, lines)
    print_all(output, 1, lines)
    assert shown[: len(lines)] == of(0, lines)
    assert shown[len(lines) :] == of(1, [f"KeyError: 1 {SAME}", f"ValueError: 1 {SAME}"])


def test_a_traceback_that_is_not_completed_is_shown_at_the_end(output, shown):
    print_all(output, 0, TRAINING)
    assert shown == []
    output.close()
    assert shown == of(0, TRAINING)


def test_of_a_worker_that_is_ended_while_it_prints_the_same_nothing_is_shown(output, shown):
    print_all(output, 1, TRAINING[:1])
    print_all(output, 0, [*TRAINING, "ValueError: 0", NOTE])
    print_all(output, 2, OTHER[:2])
    output.close()
    assert shown == of(0, [*TRAINING, "ValueError: 0", NOTE]) + of(2, OTHER[:2])


def test_the_log_level_debug_shows_all(monkeypatch, shown):
    monkeypatch.setattr(logging.getLogger("unison"), "level", logging.DEBUG)
    logging.getLogger("unison").manager._clear_cache()
    output = DistinctTracebacks(lambda worker, line: shown.append((worker, line)))
    for worker in range(2):
        print_all(output, worker, [*TRAINING, "ValueError: 1"])
    logging.getLogger("unison").manager._clear_cache()
    assert [line for _, line in shown].count(HEADING) == 2
