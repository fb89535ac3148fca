"""Runs a job in which something goes wrong, and returns what has become of it."""

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

#: Seconds, beyond its own limit, after which a job is ended from outside.
_MORE = 20.0

#: Seconds that workers have to end when a job is stopped.
_GRACE = 5.0

_LINE = re.compile(r"\[worker (\d+)\] ?(.*)")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has become of a job.

    Attributes:
        exit_code: That of `unison run`.
        lines: What was printed: by which worker (None: by `unison run`), and the line.
        events: What happened to the group and its processes, in order: see `events.jsonl` in the
            job's folder.
        faults: What was to go wrong.
        fired: What was written down when it did, by the fault's place in `faults`.
        history: What the workers have written down; see `check`.
        seconds: How long it took.
    """

    exit_code: int
    lines: list[tuple[int | None, str]]
    events: list[dict[str, Any]]
    faults: list[Fault]
    fired: dict[int, dict[str, Any]]
    history: list[list[dict[str, Any]]]
    seconds: float

    def output(self, worker: int | None) -> list[str]:
        """Returns what a worker has printed; of None: what `unison run` has."""
        return [line for who, line in self.lines if who == worker]

    @property
    def exit_codes(self) -> dict[int, list[str]]:
        """How each worker's processes ended: an exit code, or a signal's name."""
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
        """What must never happen, and has; see `check`."""
        return check(self.history)

    def assert_fired(self) -> None:
        """Asserts that each fault has happened.

        Raises:
            AssertionError: One has not: the job never came to that point.
        """
        missing = [fault for place, fault in enumerate(self.faults) if place not in self.fired]
        if missing:
            words = "\n".join(map(str, missing))
            raise AssertionError(f"These faults have not happened:\n{words}\n{self._shown()}")

    def assert_sound(self) -> None:
        """Asserts that nothing has happened that must not.

        Raises:
            AssertionError: It names what has.
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
    """Runs a program by `unison run --min-workers`, with faults, and returns what has become of it.

    The program needs no change. All processes have ended when this returns.

    Args:
        script: The program.
        arguments: Its arguments.
        workers: How many workers are started.
        min_workers: With fewer, the job waits, and stops.
        max_workers: With more, some wait. Default: `workers`.
        faults: What is to go wrong; each fault happens once.
        restarts: How often, in the whole job, a lost worker is started again.
        heartbeat_timeout: Seconds of silence after which a worker counts as lost.
        wait: Seconds for which too few workers wait for others, and a worker that is cut off for
            the job.
        options: More of `unison run`.
        hosts: For `unison run` itself and for each worker, the command before its own that starts
            it elsewhere: `["ip", "netns", "exec", "one"]`. Faults of the kind "cut" need networks
            of their own.
        listen: With `hosts`: the address of the first one that the others reach.
        folder: The job's folder. Default: a temporary one. A job that is run again in its folder
            goes on from what it has saved there.
        environment: What is added to this process's environment.
        timeout: Seconds after which the job is ended.

    Raises:
        InvalidArgumentError: A fault is none of these workers', or needs a network of its own.
        TimeoutError: Processes are left that cannot be ended.
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
                message="A network is cut only where a worker has one of its own. Give `hosts`: "
                'for each worker, a command like ["ip", "netns", "exec", NAME]; or leave out '
                f"faults of this kind. Received: {fault}"
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
    """The commands that make up a job.

    Args:
        place: Where its faults and its history are written down.
        folder: Its folder.
        timeout: Seconds after which it ends itself.
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
        """Starts one of the commands; `worker` is the one that it runs, if it runs only that."""
        command = [*host, sys.executable, "-m", "unison", "run", "--no-color"]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, **environment, HISTORY_VARIABLE: str(self._place / "history")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # apart: in one pipe, the lines of both could be mixed
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
        """Returns what the job has written into a file of its folder, as soon as it has."""
        path = self.folder / name
        while not (path.exists() and path.read_text().strip()):
            if time.monotonic() > self._last or self._commands[0].poll() is not None:
                raise TimeoutError(f"The job has not begun: {self._lines}")
            time.sleep(0.05)
        return path.read_text().strip()

    def outcome(self, faults: Sequence[Fault]) -> Outcome:
        """Waits for the end."""
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
        """Ends the commands that still run, and waits for the end of the workers."""
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
        """Waits until the lock is free that each worker holds as long as it lives."""
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
