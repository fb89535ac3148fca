"""Writers of checkpoints that are killed: the last complete checkpoint is there."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_writers.py")


@pytest.mark.parametrize("format", ["archive", "orbax", "tensorflow"])
def test_writer_that_is_killed_leaves_what_it_has_saved(tmp_path, format):
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, "12", "1", format],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 kills")
