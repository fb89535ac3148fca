"""The benchmarks that take longest run."""

import json

import pytest

from benchmark_runs import run_benchmarks

pytestmark = pytest.mark.soak


def test_the_aggregation_methods_are_measured_beside_a_hand_written_psum(tmp_path):
    written = tmp_path / "aggregation.json"
    finished = run_benchmarks("aggregation", "--quick", "--rounds=1", "--json", written)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "x as fast as TREE" in finished.stdout
    workloads = json.loads(written.read_text())["workloads"]
    assert [workload["work"]["processes"] for workload in workloads] == [1, 2]
    for workload in workloads:
        assert set(workload["rounds"]) == {"unison", "ADD_N", "TREE", "ACCUMULATE_N", "hand"}
        for [measured] in workload["rounds"].values():
            assert measured["value"] > 0
            assert measured["facts"]["temporary_bytes"] > 0


def test_weak_scaling_is_set_beside_a_model_of_its_costs():
    finished = run_benchmarks("weak_scaling", "--quick", "--rounds=1", "--model=mlp")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "unison: a sum of B bytes over n processes takes" in finished.stdout
    assert "mlp, 2 processes, batch 256:" in finished.stdout
    assert "efficiency" in finished.stdout


def test_what_the_input_adds_to_a_step_is_measured(tmp_path):
    written = tmp_path / "input.json"
    finished = run_benchmarks("data", "--quick", "--rounds=1", "--task=input", "--json", written)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    workloads = json.loads(written.read_text())["workloads"]
    assert [workload["work"]["way"] for workload in workloads] == ["fit", "run"]
    for workload in workloads:
        [measured] = workload["rounds"]["unison"]
        assert measured["value"] > 0
        assert measured["facts"]["without"] > 0
        assert {"added %", "added CPU %"} < set(measured["facts"])


@pytest.mark.timeout(330)
def test_going_on_without_a_lost_worker_is_measured_and_being_prepared_for_it(tmp_path):
    written = tmp_path / "recovery.json"
    finished = run_benchmarks(
        "recovery",
        "--quick",
        "--rounds=1",
        "--model=mlp",
        "--batch=64",
        "--json",
        written,
        seconds=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "torch is left out" in finished.stdout
    assert "unison elastic" in finished.stdout
    recovery, protection = json.loads(written.read_text())["workloads"]
    assert set(recovery["rounds"]) == {"unison", "unison fit"}
    for [measured] in recovery["rounds"].values():
        assert measured["facts"]["done again"] == 0
        assert 0 < measured["value"] <= 1e3 * measured["facts"]["all back s"]
    ways = {"unison", "unison fit", "unison elastic", "unison elastic fit"}
    assert set(protection["rounds"]) == ways
    norms = [done["facts"]["norm"] for [done] in protection["rounds"].values()]
    assert max(norms) - min(norms) < 1e-3


@pytest.mark.timeout(330)
def test_parameter_servers_are_measured_with_what_they_move(tmp_path):
    written = tmp_path / "servers.json"
    finished = run_benchmarks(
        "parameter_servers", "--quick", "--rounds=1", "--json", written, seconds=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    works = json.loads(written.read_text())["workloads"]
    assert [work["work"]["load"] for work in works] == ["mlp", "mlp", "embedding"]
    moved = []
    for work in works:
        [done] = work["rounds"]["unison"]
        assert done["value"] > 0
        assert 0 < done["facts"]["servers"] < 1
        moved.append(done["facts"]["step_bytes"])
    # Parameters and gradients, whatever the batch; of a table, much less than all of it.
    weights = 4 * (784 * 512 + 512 + 512 * 10 + 10)
    assert moved[:2] == pytest.approx([2 * weights] * 2, rel=0.01)
    assert moved[2] < 4 * 1_000_000 * 32 / 50
