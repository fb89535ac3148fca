"""A machine is measured by processes that compute and exchange, and plans are made from that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unison.cli import main
from unison.planning import cluster_named, read_calibration

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(360)
def test_the_command_measures_this_machine_and_plans_from_that(tmp_path, capsys):
    path = str(tmp_path / "here.json")
    assert main(["plan", "--calibrate", path]) == 0
    measured = read_calibration(path)
    assert measured.device.is_measured
    assert 1e8 < measured.device.flops < 1e14
    assert 1e8 < measured.device.memory_rate < 1e13
    sizes, rates = zip(*measured.device.cache_rates, strict=True)
    assert list(sizes) == sorted(sizes)
    assert all(1e8 < rate < 1e13 for rate in rates)
    for link in (measured.link, measured.shared_link):
        assert 0 <= link.latency < 1
        assert 1e6 < link.rate < 1e12
    assert measured.cores == len(os.sched_getaffinity(0))
    assert "GFLOP/s" in capsys.readouterr().out
    assert cluster_named("cpu:4", calibration=measured).turns == 4 / measured.cores


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_benchmark_compares_plans_with_what_was_measured(tmp_path):
    told = tmp_path / "compared.json"
    command = [sys.executable, "-m", "benchmarks.planned", "--quick", "--rounds", "1"]
    subprocess.run(
        [*command, "--model", "mlp", "--json", str(told)], cwd=ROOT, check=True, timeout=580
    )
    compared = json.loads(told.read_text())["compared"]
    assert [one["name"].split(",")[2].strip() for one in compared] == ["1 process", "2 processes"]
    assert all(one["planned"] > 0 and one["measured"] > 0 for one in compared)
