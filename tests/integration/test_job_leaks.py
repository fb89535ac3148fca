"""Workers of an elastic job are killed again and again: its other processes hold no more after it.

`tests/soak` kills 50, and those of a training, too.
"""

import sys
from pathlib import Path

import pytest

from elastic_commands import Command
from job_leaks import kill_workers

WORKER = Path(__file__).with_name("elastic_worker.py")

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_supervisor_and_the_other_worker_are_as_before_when_workers_are_killed(tmp_path):
    with Command("--min-workers", 1, "-n", 2, "--restarts", 4, WORKER, tmp_path) as job:
        assert kill_workers(job, warm_up=1, kills=2) == []
        (tmp_path / "end").touch()
        assert job.ends() == 0
