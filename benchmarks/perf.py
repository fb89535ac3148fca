"""Ratios for a review: what a change does to the speed of what most programs do.

    python -m benchmarks.perf            some two minutes; beside the stored ratios
    python -m benchmarks.perf --store    stores what it measures, for the commits that follow

Each ratio is that of two programs that took turns in this run, so it says more than seconds do on a
machine that is not the one of the stored ratios. How many times as fast as a loop in plain JAX
`fit` and `run` are; and by how much a retrace and an import take longer than JAX's own.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

STORED = pathlib.Path(__file__).with_suffix(".json")

#: A change of a ratio that a quiet machine does not show by itself.
NOTABLE = 0.07


class Measurement(NamedTuple):
    """A program that writes ratios as JSON, and what they are called.

    Attributes:
        arguments: The module and its arguments, but for `--json`.
        ratios: Returns the ratios by name, given what it wrote.
        more_is_better: Whether a higher ratio is faster.
    """

    arguments: Sequence[str]
    ratios: Callable[[Any], dict[str, float]]
    more_is_better: bool


def _of_contest(written: Any) -> dict[str, float]:
    return {
        f"{work['name']}: times as fast as plain JAX": work["unison_times_as_fast_as"]["hand"]
        for work in written["workloads"]
    }


def _of_retraces(written: Any) -> dict[str, float]:
    return {f"retrace of {name}: Python, to jax.jit": written[name] for name in ("run", "fit")}


def _of_imports(written: Any) -> dict[str, float]:
    programs = ("import unison", "import unison.tf")
    return {f"{program}: to import jax": written[program] for program in programs}


_BESIDE_JAX = ("--contestants", "unison,hand")

MEASUREMENTS = (
    Measurement(
        ("benchmarks", "fit", *_BESIDE_JAX, "--model", "mlp", "--batch", "256", "--rounds", "5"),
        _of_contest,
        more_is_better=True,
    ),
    Measurement(
        ("benchmarks", "fit", *_BESIDE_JAX, "--model", "cnn", "--batch", "64", "--rounds", "3"),
        _of_contest,
        more_is_better=True,
    ),
    Measurement(
        ("benchmarks", "run", *_BESIDE_JAX, "--rounds", "7"), _of_contest, more_is_better=True
    ),
    Measurement(("benchmarks.retraces", "--rounds", "12"), _of_retraces, more_is_better=False),
    Measurement(("benchmarks.imports", "--rounds", "7"), _of_imports, more_is_better=False),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help=f"write {STORED.name}")
    options = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    found: dict[str, float] = {}
    print("| ratio | stored | now | |\n| --- | --- | --- | --- |", flush=True)
    for measurement in MEASUREMENTS:
        for name, ratio in _measured(measurement).items():
            found[name] = round(ratio, 3)
            print(row(name, stored.get(name), ratio, measurement.more_is_better), flush=True)
    if options.store:
        STORED.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _measured(measurement: Measurement) -> dict[str, float]:
    """Runs a measurement in a process of its own.

    Raises:
        RuntimeError: It failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "ratios.json"
        command = [sys.executable, "-m", *measurement.arguments, "--json", str(written)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return measurement.ratios(json.loads(written.read_text()))


def row(name: str, before: float | None, now: float, more_is_better: bool) -> str:
    """Returns a row of the table, which says whether it has become slower or faster."""
    if before is None:
        return f"| {name} | | {now:.2f} | new |"
    speed = now / before if more_is_better else before / now
    change = ""
    if abs(speed - 1) > NOTABLE:
        change = f"{'faster' if speed > 1 else 'slower'}: {speed:.2f} x"
    return f"| {name} | {before:.2f} | {now:.2f} | {change} |"


if __name__ == "__main__":
    sys.exit(main())
