"""Runs the benchmarks, as a user does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def command(*arguments):
    return [sys.executable, "-m", "benchmarks", *map(str, arguments)]


def run_benchmarks(*arguments, seconds=200):
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
