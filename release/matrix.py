"""Runs the tests with each tested set whose Python this machine has.

    python -m release.matrix             `make demo` and `make check` with all of them
    python -m release.matrix --jax 0.12 --quick    `make demo` and `make test` with one of them
    python -m release.matrix --canary    a few tests of everything, with the newest one
    python -m release.matrix --python 3.14    with the newest one and a newer Python than its own

Each set is installed by uv into an environment of its own, in `.matrix`. A set whose Python is not
found is named and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import time

from release.constraints import ROOT, TESTED_SETS, TestedSet
from release.interpreters import UV, interpreter

#: What tells in minutes whether Unison works with a JAX: importing it, `fit` and `run` on two
#: replicas, workers, elastic training, parameter servers, checkpoints.
CANARY = (
    "tests/single/test_imports.py",
    "tests/single/test_private_jax.py",
    "tests/single/test_keras_replicas.py",
    "tests/single/test_run.py",
    "tests/parallel/test_multi_worker.py",
    "tests/parallel/test_shared_memory.py",
    "tests/single/test_elastic_group.py",
    "tests/single/test_parameter_server_keras.py",
    "tests/single/test_checkpoints.py",
)


def install(tested: TestedSet, python: str) -> pathlib.Path:
    """Makes the environment of a tested set as `make check` wants it, and returns its folder."""
    folder = ROOT / ".matrix" / tested.name
    if not (folder / ".created").exists():
        # With pip, by which make installs XLA's GPU compiler.
        _run(*UV, "venv", "--quiet", "--clear", "--seed", "--python", python, str(folder))
        (folder / ".created").touch()
    _run(
        *(*UV, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")),
        *("--constraint", str(tested.path), "--editable", f"{ROOT}[dev]"),
    )
    for extra in ("demo", "dev"):
        (folder / f".installed-{extra}").touch()
    return folder


def run_tests(tested: TestedSet, python: str, target: str) -> bool:
    """Whether the demo and the tests of a target of make pass."""
    folder = install(tested, python).relative_to(ROOT)
    return _succeeds("make", f"VENV={folder}", f"CONSTRAINTS={tested.path}", "demo", target)


def run_canary(tested: TestedSet, python: str) -> bool:
    """Whether a few tests pass."""
    pytest = (str(install(tested, python) / "bin" / "python"), "-m", "pytest")
    return _succeeds(*pytest, "--quiet", "-n", "auto", "--dist", "loadfile", *CANARY)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jax", choices=[each.minor for each in TESTED_SETS], help="only this one")
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    parser.add_argument("--canary", action="store_true", help="a few tests, with the newest JAX")
    parser.add_argument("--python", metavar="3.14", help="the newest JAX, with a newer Python")
    options = parser.parse_args()
    newest = TESTED_SETS[-1]
    if (options.canary and (options.jax or options.quick)) or (options.python and options.jax):
        parser.error("--canary and --python say which tested set: --jax and --quick choose others")
    if options.python:
        if version_of(options.python) < version_of(newest.python):
            parser.error(f"--python must be {newest.python} or newer. Received: {options.python}")
        newest = dataclasses.replace(newest, python=options.python, constraints=newest.path)
    ends = {}
    one = (newest,) if options.canary or options.python else ()
    for tested in one or [each for each in TESTED_SETS if options.jax in (None, each.minor)]:
        name = f"JAX {tested.jax}, Python {tested.python}"
        python = interpreter(tested.python)
        if python is None:
            ends[name] = "not run: this Python was not found on the PATH, by uv, or in pyenv"
            continue
        begin = time.monotonic()
        if options.canary:
            passes = run_canary(tested, python)
        else:
            passes = run_tests(tested, python, "test" if options.quick else "check")
        ends[name] = f"{'passed' if passes else 'FAILED'} in {time.monotonic() - begin:.0f} s"
    for name, end in ends.items():
        print(f"{name}: {end}")
    wrong = ("FAILED", "not run") if options.python else ("FAILED",)
    return 1 if any(end.startswith(wrong) for end in ends.values()) else 0


def version_of(python: str) -> tuple[int, ...]:
    """Returns a version such as "3.14" as numbers, which compare."""
    return tuple(map(int, python.split(".")))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
