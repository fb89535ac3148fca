"""The process of a worker, and the callbacks for what it writes."""

import os

from unison.runtime.launching import ProcessWorker, Program
from unison.runtime.launching.workers import REPORTS_VARIABLE

WRITES_REPORTS = f"""
import os
descriptor = int(os.environ["{REPORTS_VARIABLE}"].split(":")[0])
def report(line):
    while line:
        line = line[os.write(descriptor, line):]
"""


def ended(source, on_line=lambda worker, line: None, on_report=None):
    """A worker that has ended."""
    program = Program(["-c", source], dict(os.environ), on_report=on_report)
    worker = ProcessWorker(0, program, on_line)
    worker.close()
    return worker


def test_a_callback_for_lines_that_raises_does_not_disturb_the_worker(caplog):
    lines = []

    def raises(worker, line):
        lines.append(line)
        raise BrokenPipeError("nobody reads")

    # More than a pipe holds: the worker would wait, or be told that nobody reads.
    worker = ended("for number in range(20_000): print(number, 'is printed')", raises)
    assert worker.exit_code == 0
    assert lines == ["0 is printed"]
    assert worker.last_lines()[-1] == "19999 is printed"
    assert len(caplog.records) == 1
    assert "for worker 0 has failed" in caplog.text


def test_a_callback_for_reports_that_raises_does_not_disturb_the_worker(caplog):
    def raises(report, ahead):
        raise ValueError(report)

    reports = "for number in range(20_000): report(b'a report that is long enough\\n')"
    assert ended(WRITES_REPORTS + reports, on_report=raises).exit_code == 0
    assert len(caplog.records) == 1


def test_a_report_that_is_too_long_is_skipped():
    reports = []
    source = "report(b'one\\n' + b'x' * 5_000_000 + b'\\ntwo\\nnot complete')"
    worker = ended(WRITES_REPORTS + source, on_report=lambda line, ahead: reports.append(line))
    assert worker.exit_code == 0
    assert reports == [b"one\n", b"two\n"]
