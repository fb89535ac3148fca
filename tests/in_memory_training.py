"""Trainings with in-memory checkpoints, and what must be true of them; see `in_memory_program`."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subprocess_program import environment_of_program, kill_group, unison_run

PROGRAM = Path(__file__).parent / "integration" / "in_memory_program.py"

#: Seconds that a job may take; the machine may be busy.
LIMIT = 200


def keeping(restarts: int = 4, overhead: int = 100) -> tuple[str, ...]:
    """The options with which a job keeps its state.

    At an overhead of 100 % all steps cost about as much as keeping the state, so that it is kept
    every few steps.
    """
    return (
        *("--restarts", str(restarts)),
        *("--in-memory-checkpoints", "--checkpoint-overhead", str(overhead)),
    )


def environment() -> dict[str, str]:
    return environment_of_program({"KERAS_BACKEND": "jax", "UNISON_LOG": "info"})


def run(*arguments: object) -> str:
    """Returns the output of a job that ends well."""
    done = subprocess.run(
        unison_run(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def report(output: str) -> dict[str, Any]:
    (line,) = re.findall(r"^(?:\[worker 0\] )REPORT (.*)$", output, re.MULTILINE)
    return json.loads(line)


@functools.cache
def undisturbed(options: tuple[object, ...], given: tuple[str, ...]) -> dict[str, Any]:
    """Returns the report of a training to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        return report(run(*options, PROGRAM, folder, *given))


def resumed_steps(output: str) -> list[int]:
    """Returns after which steps the training has resumed."""
    return [int(step) for step in re.findall(r"Training resumes after step (\d+)", output)]


class Machine:
    """A machine of a job: its command, with one worker, at an address.

    Args:
        address: The address; on this machine, another one for each.
        nnodes: How many machines the job has, as for `unison run`.
        rendezvous: Where they meet.
        folder: Where the program writes; the output is a file there.
        given: The program's arguments.
        inside: What stands before a command to run it on that machine.
    """

    def __init__(
        self,
        address: str,
        nnodes: int | str,
        rendezvous: str,
        folder: Path,
        given: Sequence[object],
        inside: Sequence[str] = (),
    ):
        options = ("--nnodes", nnodes, "--rendezvous", rendezvous, "--host", address, "-n", 1)
        self.output = folder / f"machine-{address}-{time.monotonic_ns()}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*inside, *unison_run(*options, *keeping(), PROGRAM, folder, *given)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )

    def text(self) -> str:
        return self.output.read_text()

    def lose(self) -> None:
        """Kills its command, with which its workers end, and its memory."""
        self.process.kill()
        self.process.wait()
        kill_group(self.process.pid)


def train_until(step: int, folder: Path, machines: Sequence[Machine]) -> None:
    """Waits until the first worker has done so many steps."""
    steps = folder / "steps-0"
    deadline = time.monotonic() + LIMIT
    while not steps.exists() or len(steps.read_text().splitlines()) < step:
        texts = [machine.text() for machine in machines]
        assert time.monotonic() < deadline, texts
        assert all(machine.process.poll() is None for machine in machines), texts
        time.sleep(0.05)


def end_well(machines: Sequence[Machine]) -> str:
    """Waits for the ends of the machines' commands, and returns their outputs together."""
    for machine in machines:
        machine.process.wait(LIMIT)
    texts = [machine.text() for machine in machines]
    assert [machine.process.returncode for machine in machines] == [0] * len(machines), texts
    return "".join(texts)
