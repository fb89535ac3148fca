"""Lets contestants work in turn, A B C D B C D A ..., each a process of its own.

Every wait has a bound. A contestant that fails or is late is ended and left out of the rest of
its workload; none outlives the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.contestants import Entry
from benchmarks.protocol import Ready, Round
from benchmarks.workloads import Work, to_json

_ROOT = pathlib.Path(__file__).resolve().parents[1]

#: Environment variables that would change a contestant's devices, threads or backend.
_NOT_INHERITED = ("NPROC", "XLA_FLAGS", "UNISON_CPU_DEVICES", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")

_LINES_OF_ERRORS = 15

#: TensorFlow with logical devices was seen to crash now and then while it starts.
_ATTEMPTS_TO_START = 2


class ContestantError(RuntimeError):
    """A contestant ended, or did not answer in time."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that a contestant may take."""

    start: float = 180
    round: float = 60


@dataclasses.dataclass
class Result:
    """What was measured of one workload.

    Attributes:
        work: The workload.
        rounds: For every contestant that finished, its rounds, in order.
        versions: For every contestant, the versions of its libraries.
        failures: For every contestant that did not finish, why.
    """

    work: Work
    rounds: dict[str, list[Round]] = dataclasses.field(default_factory=dict)
    versions: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


class ContestantProcess:
    """A running contestant.

    Args:
        entry: What to run.
        python: The interpreter that runs it.
        work: The workload that it builds for.
        limits: How long it may take.
    """

    def __init__(self, entry: Entry, python: str, work: Work, limits: Limits):
        self.name = entry.name
        self._limits = limits
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`
        builder = f"benchmarks.contestants.{entry.module}:{entry.function}"
        # It ends by itself a little later than we would end it: if we are killed, say.
        own_limit = str(max(limits.start, limits.round) + 10)
        command = [python, "-m", "benchmarks.worker", builder, json.dumps(to_json(work)), own_limit]
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment(entry),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the driver; and it may have children
        )

    def wait_until_ready(self) -> Ready:
        return Ready(**self._answer(self._limits.start))

    def work_round(self, index: int) -> Round:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` says more
            self._process.stdin.write(json.dumps({"round": index}).encode() + b"\n")
            self._process.stdin.flush()
        return Round(**self._answer(self._limits.round))

    def end(self) -> None:
        """Kills the process and what it started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise ContestantError(f"no answer in {seconds:.0f} s{self._last_errors()}")
            read = os.read(descriptor, 65536)
            if not read:
                status = self._process.wait()
                raise ContestantError(f"ended with status {status}{self._last_errors()}")
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _last_errors(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in lines[-_LINES_OF_ERRORS:])


def measure(
    work: Work,
    contestants: Sequence[tuple[Entry, str]],
    rounds: int,
    limits: Limits,
    say: Callable[[str], None],
) -> Result:
    """Measures a workload: `rounds` rounds of every contestant, in turn.

    Args:
        work: The workload.
        contestants: The entries, each with the interpreter that runs it.
        rounds: How often each contestant works; whose turn is first changes from round to round.
        limits: How long a contestant may take.
        say: Told what goes on, a line at a time.
    """
    result = Result(work)
    running: list[ContestantProcess] = []
    with contextlib.ExitStack() as stack:
        for entry, python in contestants:
            for _ in range(_ATTEMPTS_TO_START):
                with _signals_deferred():
                    process = ContestantProcess(entry, python, work, limits)
                    stack.callback(process.end)
                try:
                    result.versions[process.name] = process.wait_until_ready().versions
                except ContestantError as error:
                    _give_up(process, result, str(error), say)
                    continue
                result.failures.pop(process.name, None)
                result.rounds[process.name] = []
                running.append(process)
                break
        for index in range(rounds):
            first = index % max(1, len(running))
            for process in running[first:] + running[:first]:
                try:
                    result.rounds[process.name].append(process.work_round(index))
                except ContestantError as error:
                    _give_up(process, result, str(error), say)
                    running.remove(process)
            if running:
                say(_round_line(index, rounds, result))
    return result


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Lets Ctrl-C and the like wait, so that no process is started and then not remembered."""
    arrived: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def _give_up(
    process: ContestantProcess, result: Result, reason: str, say: Callable[[str], None]
) -> None:
    process.end()
    result.rounds.pop(process.name, None)
    result.failures[process.name] = reason
    say(f"  {process.name} is out: {reason}")


def _round_line(index: int, rounds: int, result: Result) -> str:
    values = (f"{name} {done[-1].value:,.0f}" for name, done in result.rounds.items() if done)
    return f"  round {index + 1}/{rounds}: {', '.join(values)}"


def _environment(entry: Entry) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return kept | {
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **entry.environment,
    }
