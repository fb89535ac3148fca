"""Writers of checkpoints killed at 200 random instants; about three minutes for each format."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "integration" / "killed_writers.py"
KILLS = os.environ.get("UNISON_SOAK_KILLS", "200")
LIMIT = 900  # seconds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 30)]


@pytest.mark.parametrize("format", ["archive", "orbax", "tensorflow"])
def test_no_complete_checkpoint_is_lost(tmp_path, format):
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, KILLS, "0", format],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
