"""What the workers of a job have done, of which one is killed: in files, which outlive them."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import NamedTuple

from benchmarks.worker import end_after
from benchmarks.workloads import RecoveryWork

_KILLED = "killed"


class Step(NamedTuple):
    """A step that a worker has done.

    Attributes:
        worker: The worker's number.
        number: That of the step, from 1.
        seconds: When, on the clock that all processes of the machine share.
        process: The process that was the worker then.
    """

    worker: int
    number: int
    seconds: float
    process: int = 0


class StepLog:
    """Writes down what a worker has done; kills the worker whose turn it is.

    It is told by the work. One that takes its place lives.

    Args:
        folder: Where the files are.
        worker: The worker's number.
        work: The workload.
    """

    def __init__(self, folder: pathlib.Path, worker: int, work: RecoveryWork):
        end_after(work.seconds)
        self._folder, self._worker, self._work = folder, worker, work
        name = f"steps-{worker}-{os.getpid()}"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._begin: float | None = None

    def done(self, number: int) -> None:
        """Says that a step has been done, whose results are there."""
        now = time.monotonic()
        # One call: of a process that is killed, the file ends with a whole line.
        os.write(self._file, f"{number} {now}\n".encode())
        self._begin = self._begin or now
        work = self._work
        is_its_turn = (
            self._worker == work.lost_worker
            and now - self._begin >= work.seconds_before
            and number % work.checkpoint_every == work.steps_after_checkpoint
        )
        if is_its_turn and not (self._folder / _KILLED).exists():
            (self._folder / _KILLED).write_text(f"{number} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(folder: pathlib.Path) -> Step | None:
    """Returns the last step of the worker that was killed, and when that happened."""
    try:
        number, seconds = (folder / _KILLED).read_text().split()
    except (FileNotFoundError, ValueError):  # it is being written
        return None
    return Step(-1, int(number), float(seconds))


def steps_in(folder: pathlib.Path) -> list[Step]:
    """Returns what all workers have done, in the order of time."""
    steps = []
    for path in folder.glob("steps-*"):
        worker, process = map(int, path.name.split("-")[1:])
        for line in path.read_text().splitlines():
            number, seconds = line.split()
            steps.append(Step(worker, int(number), float(seconds), process))
    return sorted(steps, key=lambda step: step.seconds)
