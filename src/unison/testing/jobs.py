"""Runs a job with injected faults, and returns the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from unison.errors import InvalidArgumentError
from unison.runtime.elastic import faults as injection
from unison.runtime.elastic.environment import TOKEN_VARIABLE
from unison.runtime.elastic.faults import Fault
from unison.runtime.elastic.history import VARIABLE as HISTORY_VARIABLE
from unison.runtime.launching import Failure
from unison.storage.temporary_folders import temporary_folder
from unison.testing.checking import Finding, check, read_history

#: Seconds, beyond its own timeout, after which a job is terminated from outside.
_MORE = 20.0

#: Seconds for workers to end when a job is stopped.
_GRACE = 5.0

_LINE = re.compile(r"\[worker (\d+)\] ?(.*)")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        exit_code: The exit code of `unison run`.
        lines: The output: the worker that printed it (None: `unison run`), and the line.
        events: The events of the group and its processes, in order: see `events.jsonl` in the job's
            folder.
        faults: The configured faults.
        fired: The records of the faults that happened, by the fault's index in `faults`.
        history: The workers' records; see `check`.
        seconds: The duration of the job.
    """

    exit_code: int
    lines: list[tuple[int | None, str]]
    events: list[dict[str, Any]]
    faults: list[Fault]
    fired: dict[int, dict[str, Any]]
    history: list[list[dict[str, Any]]]
    seconds: float

    def output(self, worker: int | None) -> list[str]:
        """Returns the output of a worker; with None, that of `unison run` itself."""
        return [line for who, line in self.lines if who == worker]

    @property
    def exit_codes(self) -> dict[int, list[str]]:
        """The ends of each worker's processes: exit codes, or signal names."""
        found: dict[int, list[str]] = {}
        for event in self.events:
            if event["event"] == "process lost":
                found.setdefault(event["worker"], []).append(event["why"])
            elif event["event"] == "process ended":
                how = Failure(event["worker"], event["code"], []).how
                found.setdefault(event["worker"], []).append(how)
        return found

    @property
    def findings(self) -> list[Finding]:
        """The violations of invariants; see `check`."""
        return check(self.history)

    def assert_fired(self) -> None:
        """Asserts that each fault has happened.

        Raises:
            AssertionError: A fault has not happened: the job never reached that point.
        """
        missing = [fault for place, fault in enumerate(self.faults) if place not in self.fired]
        if missing:
            words = "\n".join(map(str, missing))
            raise AssertionError(f"These faults have not happened:\n{words}\n{self._shown()}")

    def assert_sound(self) -> None:
        """Asserts that no invariant was violated.

        Raises:
            AssertionError: The violations.
        """
        if findings := self.findings:
            raise AssertionError("\n".join(map(str, findings)) + "\n" + self._shown())

    def assert_ended(self, exit_code: int = 0) -> None:
        """Asserts that the job has ended with an exit code.

        Raises:
            AssertionError: It has ended with another one; its last lines are shown.
        """
        if self.exit_code != exit_code:
            raise AssertionError(
                f"Expected a job that ends with {exit_code}. Received: {self.exit_code}\n"
                + self._shown()
            )

    def _shown(self) -> str:
        return "\n".join(f"[{who}] {line}" for who, line in self.lines[-60:])


def run(
    script: str | os.PathLike[str],
    *arguments: object,
    workers: int,
    min_workers: int = 1,
    max_workers: int | None = None,
    faults: Sequence[Fault] = (),
    restarts: int = 10,
    heartbeat_timeout: float = 5.0,
    wait: float = 30.0,
    options: Sequence[object] = (),
    hosts: Sequence[Sequence[str]] | None = None,
    listen: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Outcome:
    """Runs a program with `unison run --min-workers` and faults, and returns the outcome.

    The program does not have to be changed. All processes have ended when this returns.

    Args:
        script: The program.
        arguments: Its arguments.
        workers: The number of workers to start.
        min_workers: With fewer, the job waits, and stops.
        max_workers: With more, some wait. Default: `workers`.
        faults: The faults to inject; each one happens once.
        restarts: The maximum number of restarts of lost workers in the whole job.
        heartbeat_timeout: Seconds of silence after which a worker counts as lost.
        wait: Seconds for which too few workers wait for others, and a disconnected worker for the
            job.
        options: Further options of `unison run`.
        hosts: For `unison run` itself and for each worker, the command prefix that starts it
            elsewhere: `["ip", "netns", "exec", "one"]`. Faults of the kind "cut" need separate
            network namespaces.
        listen: With `hosts`: the address at which the others reach the first one.
        folder: The job's folder. Default: a temporary one. A job that is run again in its folder
            resumes from the state saved there.
        environment: Additions to this process's environment.
        timeout: Seconds after which the job is terminated.

    Raises:
        InvalidArgumentError: A fault is not for one of these workers, or needs a separate network
            namespace.
        TimeoutError: Some processes cannot be terminated.
    """
    if hosts is not None and len(hosts) != workers + 1:
        raise InvalidArgumentError(
            message=f"Expected {workers + 1} hosts: that of `unison run`, and one for each worker. "
            f"Received: {len(hosts)}"
        )
    for fault in faults:
        if fault.worker >= workers:
            raise InvalidArgumentError(
                message=f"Expected faults of the workers 0 to {workers - 1}. Received: {fault}"
            )
        if fault.kind == "cut" and hosts is None:
            raise InvalidArgumentError(
                message='Faults of the kind "cut" need workers in network namespaces of their own. '
                'Pass `hosts`: for each worker, a command like ["ip", "netns", "exec", NAME]; or '
                f"leave these faults out. Received: {fault}"
            )
    with contextlib.ExitStack() as ends:
        place = Path(ends.enter_context(temporary_folder("testing")))
        job = _Job(place, Path(folder) if folder is not None else place / "job", timeout)
        ends.callback(job.end)
        command = [
            *("--min-workers", min_workers, "--max-workers", max_workers or workers),
            *("--folder", job.folder, "--heartbeat-timeout", heartbeat_timeout, "--wait", wait),
            *("--restarts", restarts, "--timeout", timeout, "--grace", _GRACE, *options),
        ]
        program = [script, *arguments]
        given = dict(environment or {})
        if hosts is None:
            told = injection.told(faults, place)
            job.start([], ["--workers", workers, *command, *program], given | told, worker=None)
        else:
            command = ["--workers", 0, "--listen", listen or "127.0.0.1", *command]
            job.start(hosts[0], [*command, *program], given, worker=None)
            given[TOKEN_VARIABLE] = job.published("token")
            join = ["--join", job.published("address"), "--restarts", restarts]
            join += ["--heartbeat-timeout", heartbeat_timeout, "--wait", wait]
            join += ["--timeout", timeout]
            for worker, host in enumerate(hosts[1:]):
                told = injection.told(faults, place, worker)
                job.start(host, [*join, *program], given | told, worker)
        return job.outcome(faults)


class _Job:
    """The commands of a job.

    Args:
        place: The folder for the records of its faults and its history.
        folder: Its folder.
        timeout: Seconds after which it ends by itself.
    """

    def __init__(self, place: Path, folder: Path, timeout: float):
        self._place = place
        self.folder = folder
        self._begin = time.monotonic()
        self._timeout = timeout
        self._last = self._begin + timeout + _MORE
        self._commands: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._lines: list[tuple[int | None, str]] = []

    def start(
        self,
        host: Sequence[str],
        arguments: Sequence[object],
        environment: Mapping[str, str],
        worker: int | None,
    ) -> None:
        """Starts one of the commands; `worker` is its worker, if it runs a single one."""
        command = [*host, sys.executable, "-m", "unison", "run", "--no-color"]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, **environment, HISTORY_VARIABLE: str(self._place / "history")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # separate, as lines could be mixed in one pipe
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._commands.append(process)
        for output in (process.stdout, process.stderr):
            reader = threading.Thread(target=self._read, args=(output, worker), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, output: IO[str], worker: int | None) -> None:
        for line in output:
            told = _LINE.fullmatch(line.rstrip("\n"))
            if told is None:
                self._lines.append((None, line.rstrip("\n")))
            else:
                self._lines.append((int(told[1]) if worker is None else worker, told[2]))

    def published(self, name: str) -> str:
        """Waits until the job has written a file of its folder, and returns the content."""
        path = self.folder / name
        while not (path.exists() and path.read_text().strip()):
            if time.monotonic() > self._last or self._commands[0].poll() is not None:
                raise TimeoutError(f"The job has not begun: {self._lines}")
            time.sleep(0.05)
        return path.read_text().strip()

    def outcome(self, faults: Sequence[Fault]) -> Outcome:
        """Waits for the end, and returns the outcome."""
        for process in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(self._last - time.monotonic(), 0.1))
        self.end()
        for reader in self._readers:
            reader.join(_GRACE)
        history = self._place / "history"
        return Outcome(
            exit_code=self._commands[0].returncode,
            lines=self._lines,
            events=_journal(self.folder / "events.jsonl"),
            faults=list(faults),
            fired=injection.fired(self._place),
            history=read_history(history),
            seconds=time.monotonic() - self._begin,
        )

    def end(self) -> None:
        """Terminates the running commands, and waits for the end of the workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._commands if process.poll() is None]
            for process in running:
                process.send_signal(number)
            last = time.monotonic() + 2 * _GRACE
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(last - time.monotonic(), 0.1))
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Waits until the lock that every living worker holds is free."""
        path = self.folder / "workers.lock"
        last = time.monotonic() + 4 * _GRACE
        while path.exists():
            with path.open("ab") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > last:
                raise TimeoutError(f"Workers of the job of {self.folder} have not ended.")
            time.sleep(0.05)


def _journal(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
