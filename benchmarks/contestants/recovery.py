"""Jobs of several workers of which one is killed: what starts them, and looks at what they do.

A round is a job from its start. The programs of the workers are `recovery_unison`, ...: each tells
by a `StepLog` which steps it has done.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cluster import Cluster, free_addresses
from benchmarks.protocol import Contestant
from benchmarks.steps_done import Step, killed_at, steps_in
from benchmarks.workloads import RecoveryWork, to_json

#: Seconds between two looks at what the workers have done, and at whether they live.
_INTERVAL = 0.02

_SECONDS_TO_END = 10.0
_LINES_OF_ERRORS = 15

#: Starts the processes of a job; told the folder for what they write, and where that is done.
_Start = Callable[[pathlib.Path, RecoveryWork, Any], Sequence[subprocess.Popen]]


#: The options of a job whose workers all start again, from the state in memory.
_FROM_MEMORY = ("--restarts", "1", "--in-memory-checkpoints")


def unison_loop(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_unison("loop", *_elastic(work)), ["unison", "jax", "keras"])


def unison_fit(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_unison("fit", *_elastic(work)), ["unison", "jax", "keras"])


def restarts_loop(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_unison("loop", *_FROM_MEMORY), ["unison", "jax", "keras"])


def restarts_fit(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_unison("fit", *_FROM_MEMORY), ["unison", "jax", "keras"])


def torch(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_torch, ["torch"])


def tf(work: RecoveryWork) -> Contestant:
    return _Recovery(work, _start_tf, ["tensorflow"], starts_all_again=True)


class _Recovery(Contestant):
    """Starts a job in every round.

    Args:
        work: The workload.
        start: Starts its processes.
        packages: The libraries that matter.
        starts_all_again: Whether all processes are started again here when one has been lost.
    """

    def __init__(
        self,
        work: RecoveryWork,
        start: _Start,
        packages: Sequence[str],
        starts_all_again: bool = False,
    ):
        self._work = work
        self._start = start
        self._packages = packages
        self._starts_all_again = starts_all_again
        self._facts: dict[str, Any] = {}

    @property
    def versions(self) -> dict[str, str]:
        return {package: importlib.metadata.version(package) for package in self._packages}

    def round(self) -> float:
        with tempfile.TemporaryDirectory(prefix="unison-recovery-") as name:
            folder = pathlib.Path(name)
            with open(folder / "output", "w+") as output:
                try:
                    self._run(folder, output)
                except RuntimeError as error:
                    output.seek(0)
                    lines = output.read().splitlines()[-_LINES_OF_ERRORS:]
                    raise RuntimeError("\n".join([str(error), *lines])) from None
            killed = killed_at(folder)
            assert killed is not None
            steps = steps_in(folder)
        value, self._facts = outcome(self._work, killed, steps)
        return value

    def facts(self) -> dict[str, Any]:
        return self._facts

    def _run(self, folder: pathlib.Path, output: Any) -> None:
        """Runs a job until all workers have gone on, or none can."""
        deadline = time.monotonic() + self._work.seconds
        processes = self._start(folder, self._work, output)
        try:
            while not self._is_over(folder):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"The job has not gone on within {self._work.seconds} s.")
                ended = [process for process in processes if process.poll() is not None]
                if ended and not self._starts_all_again:
                    raise RuntimeError(f"The job has ended: {ended[0].returncode}")
                if ended:
                    if killed_at(folder) is None:
                        raise RuntimeError(f"A worker has ended: {ended[0].returncode}")
                    _end(processes, gently=False)
                    processes = self._start(folder, self._work, output)
                time.sleep(_INTERVAL)
        finally:
            _end(processes, gently=not self._starts_all_again)

    def _is_over(self, folder: pathlib.Path) -> bool:
        """Whether all workers have done steps that nobody had done before the loss."""
        killed = killed_at(folder)
        if killed is None:
            return False
        further = (step for step in steps_in(folder) if step.number > killed.number)
        return len({step.worker for step in further}) == self._work.workers


def _after(killed: Step, steps: Sequence[Step]) -> list[Step]:
    """Returns what was done after the loss by those who went on.

    Without the end of the lost worker's last step, and what processes had begun that then ended.
    """
    goes_on = {step.worker: step.process for step in steps}
    before = {step.worker: step.process for step in steps if step.seconds <= killed.seconds}
    return [
        step
        for step in steps
        if step.seconds > killed.seconds
        and step.process == goes_on[step.worker]
        and (step.number != killed.number or step.process != before.get(step.worker))
    ]


def outcome(
    work: RecoveryWork, killed: Step, steps: Sequence[Step]
) -> tuple[float, dict[str, float]]:
    """Returns the milliseconds to the next step, and what else there is to tell."""
    after = _after(killed, steps)
    further = [step for step in after if step.number > killed.number]
    of_lost = [step for step in after if step.worker == work.lost_worker]
    survivor = [step for step in steps if step.worker == (work.lost_worker + 1) % work.workers]
    before = [step.seconds for step in survivor if step.seconds < killed.seconds]

    def seconds_to(found: Sequence[Step]) -> float:
        return found[0].seconds - killed.seconds

    facts = {
        "done again": len(survivor) - len({step.number for step in survivor}),
        "new step s": seconds_to(further),
        "all back s": seconds_to(of_lost),
        "ms/step": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(before)),
    }
    return 1e3 * seconds_to(after), facts


def _elastic(work: RecoveryWork) -> tuple[str, ...]:
    """Returns the options of a job whose other workers continue."""
    return ("--min-workers", str(work.workers - 1))


def _start_unison(kind: str, *options: str) -> _Start:
    """Returns the start of a job with the options of `unison run`, for as many workers."""

    def start(folder: pathlib.Path, work: RecoveryWork, output: Any) -> list[subprocess.Popen]:
        command = [sys.executable, "-m", "unison", "run", "--no-color", "-n", str(work.workers)]
        program = [*_program("recovery_unison", folder, work), kind]
        return [subprocess.Popen([*command, *options, *program], stdout=output, stderr=output)]

    return start


def _start_torch(folder: pathlib.Path, work: RecoveryWork, output: Any) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
    command += ["--nproc-per-node", str(work.workers), "--max-restarts", "3"]
    program = _program("recovery_torch", folder, work)
    # Otherwise gloo finds the addresses of the processes before (pytorch/pytorch#135712).
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [subprocess.Popen([*command, *program], env=environment, stdout=output, stderr=output)]


def _start_tf(folder: pathlib.Path, work: RecoveryWork, output: Any) -> list[subprocess.Popen]:
    addresses = free_addresses(work.workers)
    command = [sys.executable, *_program("recovery_tf", folder, work)]
    return [
        subprocess.Popen(
            command,
            env=os.environ | Cluster(addresses, rank).environment(),
            stdout=output,
            stderr=output,
        )
        for rank in range(work.workers)
    ]


def _program(module: str, folder: pathlib.Path, work: RecoveryWork) -> list[str]:
    return ["-m", f"benchmarks.contestants.{module}", str(folder), json.dumps(to_json(work))]


def _end(processes: Sequence[subprocess.Popen], gently: bool) -> None:
    """Ends the processes of a job; those that have started others are to end these first."""
    for process in processes:
        process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
    for process in processes:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
