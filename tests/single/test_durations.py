"""Slow tests are known by how long they took, and left out of `make test`."""

import re
from types import SimpleNamespace

import durations
from durations import Durations, Recorder
from import_graph import PACKAGE

ROOT = PACKAGE.parents[1]


def report(test, seconds, when="call", passed=True):
    return SimpleNamespace(nodeid=test, duration=seconds, when=when, passed=passed)


def recorded(monkeypatch, tmp_path, *reports):
    monkeypatch.setattr(durations, "RECORD", tmp_path / "durations.txt")
    recorder = Recorder()
    for each in reports:
        recorder.pytest_runtest_logreport(each)
    recorder.pytest_sessionfinish()
    return Durations.read()


def test_a_function_is_slow_by_the_mean_over_its_parameters_and_one_parameter_by_itself(
    monkeypatch, tmp_path
):
    found = recorded(
        monkeypatch,
        tmp_path,
        report("a.py::test_mostly_fast[1]", 0.7),
        report("a.py::test_mostly_fast[2-x::y]", 0.0),
        report("a.py::test_slow[1]", 0.7),
        report("a.py::test_slow[2]", 0.5),
        report("b.py::test_fast", 0.1),
    )
    assert found.slow == {"a.py::test_slow": 0.6, "a.py::test_mostly_fast[1]": 0.7}
    assert found.is_slow("a.py::test_slow[3]")
    assert found.is_slow("a.py::test_mostly_fast[1]")
    assert not found.is_slow("a.py::test_mostly_fast[2-x::y]")
    assert found.seconds("a.py::test_mostly_fast[1]") == 0.7
    assert found.seconds("a.py::test_slow[2]") == 0.6
    assert not found.is_slow("a.py::test_new")


def test_a_test_that_fails_is_not_recorded(monkeypatch, tmp_path):
    failed = report("a.py::test_fails", 240.0, passed=False)
    assert not recorded(monkeypatch, tmp_path, failed).slow


def test_slow_tests_are_marked(request):
    slow = [item for item in request.session.items if item.get_closest_marker("slow")]
    known = Durations.read()
    assert all(known.is_slow(item.nodeid) or "pytestmark" in vars(item.module) for item in slow), (
        "Only what was recorded, or a whole file, is slow."
    )


def test_the_record_names_tests_that_are_there():
    gone = []
    for test in map(durations.function_of, Durations.read().slow):
        path, _, name = test.partition("::")
        source = ROOT / path
        last = re.escape(name.split(".")[-1].split("::")[-1])
        if not source.exists() or not re.search(rf"\b{last}\b", source.read_text()):
            gone.append(test)
    assert gone == [], "Rename or delete their lines in tests/durations.txt."
