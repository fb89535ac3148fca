"""`make gpu` on logical CPU devices, and the wheels with which it runs without a network."""

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmark_runs import ROOT
from release import gpu_bundle
from release.gpu_bundle import PYTHONS, BundleError, install


def check(tmp_path, *names, seconds):
    written, page = tmp_path / "gpu.json", tmp_path / "gpu.html"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", f"--seconds={seconds}"]
    command += [f"--checks={','.join(names)}", f"--json={written}", f"--page={page}"]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert page.read_text().startswith("<!doctype html>")
    outcomes = json.loads(written.read_text())["checks"]
    assert {outcome["state"] for outcome in outcomes} == {"passed"}, finished.stdout
    return {outcome["name"]: outcome["findings"] for outcome in outcomes}


def rows_of(findings):
    return [finding["cells"] for finding in findings if finding["kind"] == "Row"]


@pytest.mark.timeout(300)
def test_a_contest_and_an_interrupted_job_are_checked_on_cpus(tmp_path):
    found = check(tmp_path, "run", "interrupt", seconds=1000)  # which doubles the checks' limits
    contestants = [row[""] for row in rows_of(found["run"])]
    assert contestants == [
        f"run, {n}: {c}" for n in ("1 variable", "20 variables") for c in ("unison", "hand")
    ]
    [job] = rows_of(found["interrupt"])
    assert (job["exit code"], job["left behind"]) == (130, 0)


@pytest.fixture
def bundle(tmp_path):
    """A folder with a pip, and a wheel that is called Unison."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    [pip] = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, folder)
    about = "Metadata-Version: 2.1\nName: unison\nVersion: 99.0\nRequires-Dist: jax>=0.10\n"
    with zipfile.ZipFile(folder / "unison-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("unison_of_the_bundle.py", "")
        wheel.writestr("unison-99.0.dist-info/METADATA", about)
        wheel.writestr(
            "unison-99.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("unison-99.0.dist-info/RECORD", "")
    return folder


def test_the_wheels_are_installed_beside_the_interpreters_own_packages(bundle, tmp_path):
    environment = tmp_path / "environment"
    install(bundle, environment)
    program = "import jax, unison_of_the_bundle; print(unison_of_the_bundle.__file__)"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [environment / "bin" / "python", "-c", program],
        env=bare,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.startswith(str(environment))
    made = environment.stat().st_ino
    install(bundle, environment)
    assert environment.stat().st_ino == made, "made anew of the same wheels"


def test_without_wheels_the_error_says_how_to_get_them(tmp_path):
    with pytest.raises(BundleError, match="make gpu-bundle"):
        install(tmp_path, tmp_path / "environment")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheels_are_those_of_the_newest_tested_set(python):
    assert gpu_bundle.tested_set(python).jax >= "0.11"


def test_of_what_is_required_only_jaxs_own_requirements_are_left_out(monkeypatch, tmp_path):
    """Nothing is downloaded here: the versions are those of the tested set."""
    commands = []

    def run(command, **options):
        commands.append(command)
        pinned = "jax==0.11.2\nnumpy==2.5.5\n"
        if "keras" in options.get("input", ""):
            pinned += "keras==3.15.1\nh5py==3.16.0\n"
        return subprocess.CompletedProcess(command, 0, stdout=pinned)

    def build(folder):
        folder.mkdir()
        paths = [folder / name for name in ("s.tar.gz", "compiled.whl", "pure.whl")]
        for path in paths:
            path.write_bytes(b"0123456789")
        return tuple(paths)

    monkeypatch.setattr(gpu_bundle.subprocess, "run", run)
    monkeypatch.setattr(gpu_bundle, "build", build)
    assert gpu_bundle.fill(tmp_path / "bundle", ["3.12"], "aarch64") == 10
    download = commands[-1]
    assert download[-3:] == ["keras==3.15.1", "h5py==3.16.0", "pip"]
    assert "--platform=manylinux_2_28_aarch64" in download
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 9)
    with pytest.raises(BundleError, match="10 bytes"):
        gpu_bundle.fill(tmp_path / "bundle", ["3.12"], "aarch64")
