"""Long training on 2, 4 and 8 logical CPU devices: it must end, whatever the batch.

`pytest -m soak tests/soak`; about 20 minutes on two idle cores. `UNISON_SOAK_STEPS=50` shortens
it. The program is the one of the short test in tests/single/test_devices.py.
"""

import os

import pytest

from subprocess_program import (
    EXCHANGING,
    PREPARED,
    TRAINING,
    UNPREPARED,
    run_program,
)

STEPS = int(os.environ.get("UNISON_SOAK_STEPS", "2000"))
LIMIT = 900  # seconds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 30)]


@pytest.mark.parametrize("sums", [PREPARED, EXCHANGING], ids=["XLA", "buffers"])
@pytest.mark.parametrize("batch", [16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_training_ends(count, batch, sums):
    env = {"UNISON_CPU_DEVICES": str(count)}
    done = run_program(sums + TRAINING, batch, STEPS, 1, env=env, timeout=LIMIT)
    assert done.stdout.startswith(f"trained {count} {batch} {STEPS}"), done.stderr[-2000:]


@pytest.mark.parametrize("sums", [PREPARED, EXCHANGING], ids=["XLA", "buffers"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_training_in_eight_threads_ends(count, sums):
    env = {"UNISON_CPU_DEVICES": str(count)}
    steps = max(1, STEPS // 8)
    done = run_program(sums + TRAINING, 256, steps, 8, env=env, timeout=LIMIT)
    assert done.stdout.startswith(f"trained {count} 256 {steps}"), done.stderr[-2000:]


def test_the_same_training_is_stuck_when_the_backend_is_not_prepared():
    """If this fails, XLA no longer needs what `runtime.launches` does."""
    env = {
        "NPROC": "1",
        "XLA_FLAGS": "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=6",
    }
    done = run_program(UNPREPARED + TRAINING, 256, 300, 1, env=env, timeout=LIMIT)
    assert done.returncode < 0
    assert "all reduce RendezvousKey" in done.stderr
