"""The pieces of `make gpu`: checks run, are bounded, and are recorded."""

import json
import time

import numpy as np
import pytest
from benchmarks.gpu import page, plan, running
from benchmarks.gpu.answers import PARITY_PROGRAMS, parity_programs, read_seen, write_seen
from benchmarks.gpu.findings import Note, Row, Setting, Wrong, environment, from_json, to_json
from benchmarks.gpu.jobs import _largest, _steps_by_process
from benchmarks.gpu.numbers import FEW, _summary, parts_of
from benchmarks.gpu.plan import Check
from benchmarks.gpu.record import FAILED, LATE, LEFT_OUT, PASSED, WRONG, Outcome, Record

MACHINE = {"gpus": "", "cpu": "a CPU", "cores": 2, "system": "Linux", "python": "3", "day": "today"}

#: Checks of a few lines, which run in processes as the real ones do.
CHECKS = """
import os, subprocess, sys, time
from benchmarks.gpu.findings import DEVICES, MACHINE, Note, Row, Wrong

def machine(setting):
    yield Row(MACHINE, {"": DEVICES, "value": 3})

def passes(setting):
    print("not a finding")
    yield Row("numbers", {"": "devices", "value": setting.devices})

def is_wrong(setting):
    yield Wrong("2 is not 3")

def fails(setting):
    yield Note("before")
    raise ValueError("no luck")

def hangs(setting):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield Note(str(child.pid))
    time.sleep(300)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs checks of `CHECKS`, and returns the outcomes by name."""
    (tmp_path / "given_checks.py").write_text(CHECKS)
    with_checks = f"{environment('cpu', 2)['PYTHONPATH']}:{tmp_path}"
    monkeypatch.setattr(
        running,
        "environment",
        lambda device, devices: environment(device, devices) | {"PYTHONPATH": with_checks},
    )

    def given(name, seconds=20.0, least_devices=1):
        return Check(name, name, f"given_checks:{name}", seconds, least_devices)

    def run(*checks, seconds=480.0):
        monkeypatch.setattr(plan, "MACHINE", given("machine"))
        record, kept = Record(MACHINE, "cpu"), []
        of_names = [given(each) if isinstance(each, str) else given(*each) for each in checks]
        setting = Setting("cpu", 2, seconds)
        running.run_all(of_names, setting, record, lambda: kept.append(record.status), print)
        assert kept
        return record, {outcome.name: outcome for outcome in record.outcomes}

    return run


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_checks_run_with_the_devices_that_were_found(run):
    record, outcomes = run("passes")
    assert outcomes["passes"].findings == [Row("numbers", {"": "devices", "value": 3})]
    assert (outcomes["passes"].state, record.status, record.is_complete) == (PASSED, 0, True)


def test_a_check_that_fails_does_not_stop_the_others(run):
    record, outcomes = run("fails", "is_wrong", "passes")
    assert [outcome.state for outcome in outcomes.values()] == [PASSED, FAILED, WRONG, PASSED]
    assert outcomes["fails"].findings == [Note("before")]
    assert "ValueError: no luck" in outcomes["fails"].reason
    assert record.status == 1


def test_a_check_that_hangs_is_ended_with_what_it_started(run):
    begin = time.monotonic()
    record, outcomes = run(("hangs", 8.0), "passes")
    assert outcomes["hangs"].state == LATE
    [note] = outcomes["hangs"].findings
    assert not is_alive(int(note.text))
    assert outcomes["passes"].state == PASSED
    assert record.status == 3
    assert time.monotonic() - begin < 100


def test_a_check_for_which_there_is_no_time_is_left_out_and_named(run):
    record, outcomes = run(("passes", 4_000.0), seconds=480.0)
    assert outcomes["passes"].state == LEFT_OUT
    assert "s left" in outcomes["passes"].reason
    assert record.status == 0


def test_a_check_that_needs_more_devices_is_left_out(run):
    _, outcomes = run(("passes", 20.0, 4))
    assert outcomes["passes"].state == LEFT_OUT
    assert "4 devices" in outcomes["passes"].reason


def test_without_a_device_no_check_runs(run, monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    record, outcomes = run("passes")
    assert list(outcomes) == ["machine"]
    assert (record.status, record.is_complete) == (2, False)


def test_every_check_of_the_plan_exists():
    import importlib

    for check in (plan.MACHINE, *plan.CHECKS):
        module, function = check.function.split(":")
        assert callable(getattr(importlib.import_module(module), function))
    names = [check.name for check in plan.CHECKS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("finding", [Row("t", {"": 1.5, "is": True}), Note("n"), Wrong("w")])
def test_a_finding_survives_json(finding):
    assert from_json(json.loads(json.dumps(to_json(finding)))) == finding


@pytest.fixture
def record():
    rows = [Row("speed", {"": "a | b", "steps/s": 1234.5}), Row("speed", {"": "c", "MiB": 0.5})]
    passed = Outcome("fit", "fit of an MLP", PASSED, 3.21, "", [*rows, Note("as it was")])
    wrong = Outcome("random", "Random programs", WRONG, 1.0, "", [Wrong("1 <\n 2")])
    late = Outcome("killed", "A killed worker", LATE, 9.0, "not done in 9 s\n  at line 3")
    return Record(MACHINE, "gpu", [passed, wrong, late], is_complete=True)


def test_a_record_survives_its_file(record, tmp_path):
    record.write(tmp_path / "deep" / "gpu.json")
    read = Record.from_json(json.loads((tmp_path / "deep" / "gpu.json").read_text()))
    assert [o.findings for o in read.outcomes] == [o.findings for o in record.outcomes]
    assert (read.status, read.is_complete) == (1, True)


def test_the_page_shows_tables_notes_and_what_is_wrong(record):
    shown = page.html(record)
    assert "<td>1,234</td>" in shown
    assert "<p>1 &lt;\n 2</p>" in shown
    assert "<p>as it was</p>" in shown


def test_results_are_a_section_of_the_page_of_the_benchmarks(record, tmp_path):
    from benchmarks import results

    (tmp_path / "results").mkdir()
    record.write(tmp_path / "results" / "gpu.json")
    [written] = results.write(tmp_path / "results")
    text = written.read_text()
    assert "## Checks on GPUs" in text
    assert "| a / b | 1,234 |  |" in text
    assert "| c |  | 0.5 |" in text
    assert "- **Wrong** (Random programs): 1 < 2" in text
    assert "| A killed worker | out of time | 9 | not done in 9 s at line 3 |" in text


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_programs_of_the_parity_set_are_chosen_that_the_devices_can_run(replicas):
    chosen = parity_programs(replicas, PARITY_PROGRAMS)
    assert len(chosen) == len({(fact.topic, fact.name) for fact in chosen}) == PARITY_PROGRAMS
    needed = {"two": 2, "four": 4}
    code = [fact.program.__code__ for fact in chosen]
    used = [needed.get(name, 1) for each in code for name in each.co_varnames[: each.co_argcount]]
    assert max(used) <= replicas
    assert len({fact.topic for fact in chosen}) > 8


def test_what_was_seen_survives_its_file(tmp_path):
    import ml_dtypes

    seen = {"0 fit, loss": np.float32(0.5), "weight": np.ones((2, 3), ml_dtypes.bfloat16)}
    write_seen(tmp_path / "0.npz", seen)
    read, failed = read_seen(tmp_path / "0.npz")
    assert list(read) == list(seen)
    assert failed == ""
    np.testing.assert_array_equal(read["weight"], np.ones((2, 3), np.float32))


def kinds_of(tf32, compared, differing):
    found = list(_summary("Programs", f"TF32 {tf32}", tf32, compared, ["x"] * differing))
    return [type(finding) for finding in found[1:]]


def test_every_difference_without_tf32_is_wrong():
    assert kinds_of("off", 40, 1) == [Wrong]


def test_few_differences_with_tf32_are_rounding():
    assert kinds_of("on", 4 * FEW, 4) == [Note] * 4
    assert kinds_of("on", 4 * FEW, 5) == [Wrong] * 5


def test_processes_share_programs_but_not_the_collectives_of_several_gpus():
    found = [parts_of(*each) for each in (("cpu", 1, 16), ("gpu", 1, 16), ("gpu", 2, 16))]
    assert found == [4, 4, 1]
    assert parts_of("cpu", 2, 2) == 1


def test_without_a_program_in_time_the_check_has_failed():
    with pytest.raises(RuntimeError, match="no program ended in time"):
        kinds_of("off", 0, 0)


def test_a_weight_that_is_not_a_number_differs():
    assert _largest([np.array([1.0, np.nan])], [np.array([1.0, 2.0])]) == np.inf
    assert _largest([np.array([1.0, 2.5])], [np.array([1.0, 2.0])]) == 0.5


def test_the_steps_of_a_job_are_told_apart_by_its_starts(tmp_path):
    lines = ["process 7", "step 1 0.5", "step 2 0.75", "process 8", "step 2 3.5", "end", "step 3 4"]
    (tmp_path / "steps-0").write_text("\n".join(lines))  # the last line is not complete
    assert _steps_by_process(tmp_path) == [[(1, 0.5), (2, 0.75)], [(2, 3.5)]]


def test_checks_on_gpus_do_not_fall_back_to_cpus():
    from benchmarks.machine import expect_device

    expect_device("cpu")
    with pytest.raises(RuntimeError, match=r"compute on gpus\. Received: cpu"):
        expect_device("gpu")


def test_gpus_do_not_get_the_flags_of_cpus(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder")
    of_cpus = environment("cpu", 2)
    assert of_cpus["XLA_FLAGS"] != "--xla_dump_to=folder"
    monkeypatch.setenv("XLA_FLAGS", of_cpus["XLA_FLAGS"])
    assert environment("gpu", 1)["XLA_FLAGS"] == "--xla_dump_to=folder"


def test_an_unknown_check_is_refused(capsys):
    from benchmarks.gpu.__main__ import main

    with pytest.raises(SystemExit):
        main(["--checks", "fit-mlp,speed"])
    assert "Received: speed" in capsys.readouterr().err


def test_groups_are_measured_on_the_path_of_accelerators():
    from benchmarks.gpu.grouping import threshold

    rows = [found.cells for found in threshold(Setting("cpu", 2, 60)) if isinstance(found, Row)]
    assert [row[""] for row in rows] == ["3 layers of 16, batch 32", "3 layers of 64, batch 64"]
    for row in rows:
        assert 1 <= row["fit chooses groups of"] <= 16
        assert all(row[how] > 0 for how in ("one by one", "groups of 16", "as fit chooses"))
