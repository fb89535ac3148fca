"""Kills workers of a running job, and compares what its other processes hold."""

from __future__ import annotations

import os
import signal
import time

from elastic_commands import Command, soon
from leaks import Census, census, settled

#: How much more memory both processes may have, beside what a killed worker may add. The supervisor
#: remembers each event (some 2 KB); JAX compiles for each group.
BYTES_KEPT = 24 << 20
BYTES_A_KILL = 40_000


def kill_workers(
    job: Command, warm_up: int, kills: int, bytes_a_kill: int = BYTES_A_KILL
) -> list[str]:
    """Kills worker 1 of two, and waits until it has joined again, so many times.

    Returns:
        What the supervisor and worker 0 hold after it and did not hold after the warm-up.
    """
    job.says(r"^\[unison\] the job runs: 2 workers")
    survivor = job.pid(0)

    def taken() -> Census:
        return census(job.process.pid, survivor)

    for _ in range(warm_up):
        kill_one(job)
    before = taken()
    start = time.monotonic()
    for _ in range(kills):
        kill_one(job)
    seconds = time.monotonic() - start
    after, found = settled(taken, before, BYTES_KEPT + bytes_a_kill * kills)
    print(f"{kills} kills, {seconds / max(kills, 1):.2f} s each")
    for when, what in (("before", before), ("after", after)):
        print(f"{when}: {what.memory / 2**20:.1f} MiB, {dict(sorted(what.counts.items()))}")
    return found


def kill_one(job: Command) -> None:
    killed = job.pid(1)
    told = len(job.messages)
    os.kill(killed, signal.SIGKILL)
    job.says(r"^\[unison\] regrouped: 2 workers ", told)
    soon(lambda: job.pid(1) != killed)
