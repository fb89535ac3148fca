"""The number of cores that a process may use, in control groups of either version."""

import os

import pytest

from unison.runtime import cores
from unison.runtime.launching import Job, Program


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Returns `are(groups, **files)`: from then on this process is in those control groups."""

    def are(of_process, **files):
        (tmp_path / "cgroup").write_text(of_process)
        for name, content in files.items():
            path = tmp_path / "fs" / name.replace("__", "/").replace("_max", ".max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.setattr(cores, "_CGROUPS_OF_PROCESS", tmp_path / "cgroup")
        monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "fs")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    return are


def test_without_a_limit_all_cores_of_the_affinity_are_available(groups):
    groups("0::/\n", cpu_max="max 100000\n")
    assert cores.available_cores() == 16


def test_a_container_gets_whole_cores_of_its_limit(groups):
    groups("0::/\n", cpu_max="350000 100000\n")
    assert cores.available_cores() == 3


def test_a_limit_below_one_core_leaves_one(groups):
    groups("0::/\n", cpu_max="50000 100000\n")
    assert cores.available_cores() == 1


def test_the_groups_above_limit_too(groups):
    groups("0::/pod/own\n", pod__cpu_max="200000 100000\n", pod__own__cpu_max="max 100000\n")
    assert cores.available_cores() == 2


def test_groups_of_the_first_version_limit_as_well(groups, tmp_path):
    groups("5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    folder = tmp_path / "fs/cpu/job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("400000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.available_cores() == 4
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores.available_cores() == 16


def test_a_worker_runs_on_the_cores_of_its_program():
    core = max(os.sched_getaffinity(0))
    said = []
    wait = "import time, os\nwhile len(os.sched_getaffinity(0)) > 1: time.sleep(0.01)\n"
    show = "print(sorted(os.sched_getaffinity(0)))"
    program = Program(["-c", wait + show], {}, cores=[core])
    with Job([program], lambda index, line: said.append(line)) as job:
        assert job.wait(60) is None
    assert said == [f"[{core}]"]
