"""A job: the processes of its workers, from their start to the end of the last one.

Each worker leads a process group of its own, so that Ctrl-C reaches only the job, which passes it
on, and so that a worker's children end with it. On Linux, the workers of a job whose process is
killed are killed as well.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

#: Called with a worker's index and a line that it has printed, without its end.
OnLine = Callable[[int, str], None]

#: How many of a worker's last lines are kept, to show why it failed.
_LINES_KEPT = 200

#: Seconds between two looks at the processes.
_LOOK_EVERY = 0.05

#: Seconds for which the output of a worker that has ended is still read: its children, whom nobody
#: waits for, may hold it open.
_OUTPUT_GRACE = 2.0

#: How Python's sentence between the tracebacks of two errors ends.
_BETWEEN_ERRORS = ("direct cause of the following exception:", "another exception occurred:")

#: Has the kernel kill a process when its parent dies, and then becomes the program.
_DYING_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a worker runs.

    Attributes:
        arguments: The program's file, and its arguments.
        environment: What is added to this process's environment.
        inherited: The open files, by number, that it shares with this process.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    inherited: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Failure:
    """How the first worker failed that did.

    Attributes:
        worker: Its index.
        exit_code: As shells give it: what the program returned, or 128 and the signal's number.
        last_lines: What it printed last: the traceback, if there is one, else some lines.
    """

    worker: int
    exit_code: int
    last_lines: Sequence[str]

    def __str__(self) -> str:
        """Says in one line what happened."""
        if self.exit_code > 128:
            with contextlib.suppress(ValueError):
                name = signal.Signals(self.exit_code - 128).name
                return f"worker {self.worker} was ended by {name}"
        return f"worker {self.worker} failed with exit code {self.exit_code}"


class Job:
    """The workers of a job, one process each; they run from the start of a `with` block.

    The block's end ends those that still run: first asked by SIGTERM, then killed.

    Args:
        programs: What the workers run.
        on_line: Called for every line that a worker prints, in threads.
        grace: Seconds between asking and killing.

    Examples:
        >>> program = Program([sys.executable, "-c", "print('hello')"], {})
        >>> with Job([program], on_line=lambda worker, line: print(worker, line)) as job:
        ...     job.wait(timeout=60)
        0 hello
    """

    def __init__(
        self,
        programs: Sequence[Program],
        on_line: OnLine = lambda worker, line: None,
        grace: float = 10.0,
    ):
        self._programs = programs
        self._on_line = on_line
        self._grace = grace
        self._workers: list[_Worker] = []
        #: How the first worker failed that did; None while all is well.
        self.failure: Failure | None = None

    def __enter__(self) -> Self:
        try:
            for index, program in enumerate(self._programs):
                self._workers.append(_Worker(index, program, self._on_line))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def running(self) -> int:
        """How many workers run."""
        return sum(worker.exit_code() is None for worker in self._workers)

    def wait(self, timeout: float | None = None) -> Failure | None:
        """Waits until all workers are through, or one has failed; then ends the others.

        Args:
            timeout: Seconds, at most; None: as long as it takes.

        Returns:
            How the first one failed, or None.

        Raises:
            TimeoutError: They took longer. Those that run are ended.
        """
        last = None if timeout is None else time.monotonic() + timeout
        while self.running and self._first_failed() is None:
            if last is not None and time.monotonic() > last:
                waiting = [w.index for w in self._workers if w.exit_code() is None]
                self.end()
                raise TimeoutError(
                    f"Expected {len(self._workers)} workers to end within {timeout:g} s. Still "
                    f"running: {waiting}. They have been ended."
                )
            time.sleep(_LOOK_EVERY)
        failed = self._first_failed()
        self.end()
        if failed is not None:
            self.failure = Failure(failed.index, failed.exit_code() or 0, failed.last_lines())
        return self.failure

    def signal(self, number: int) -> None:
        """Sends a signal to all workers and their children."""
        for worker in self._workers:
            worker.signal(number)

    def end(self) -> None:
        """Ends the workers that run, and waits until they have ended."""
        if self.running:
            self.signal(signal.SIGTERM)
            last = time.monotonic() + self._grace
            while self.running and time.monotonic() < last:
                time.sleep(_LOOK_EVERY)
        # A worker's children outlive it where it was killed, or forgot them.
        self.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.close()

    def _first_failed(self) -> _Worker | None:
        failed = [worker for worker in self._workers if worker.exit_code()]
        return min(failed, key=lambda worker: worker.ended_at, default=None)


class _Worker:
    """One process, and the thread that reads what it prints."""

    def __init__(self, index: int, program: Program, on_line: OnLine):
        self.index = index
        self.ended_at = 0.0
        self._exit_code: int | None = None
        self._on_line = on_line
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        command = list(program.arguments)
        if sys.platform == "linux":
            shim = [sys.executable, "-S", "-E", "-c", _DYING_WITH_PARENT, str(os.getpid())]
            command = shim + command
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=program.inherited,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read,
            args=(self._process.stdout,),
            name="unison-worker-output",
            daemon=True,
        )
        self._reader.start()

    def exit_code(self) -> int | None:
        """Returns how the process ended, as shells say it; None while it runs."""
        if self._exit_code is None and self._process.returncode is None:
            # It is looked at and not reaped, so that nobody else gets the group's number.
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self._process.pid, look)
            if ended is not None:
                has_exited = ended.si_code == os.CLD_EXITED
                self._exit_code = ended.si_status + (0 if has_exited else 128)
                self.ended_at = time.monotonic()
        return self._exit_code

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        if self._exit_code is None and self._process.returncode is None:
            # Its own end, or ours: it has just been killed.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self.exit_code()
        self._process.wait()
        self._reader.join(_OUTPUT_GRACE)

    def last_lines(self) -> list[str]:
        lines = list(self._lines)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        if not starts:
            return lines[-10:]
        start = starts.pop()
        # An error that came of another one has both tracebacks, with a sentence between them.
        while starts and any(line.endswith(_BETWEEN_ERRORS) for line in lines[starts[-1] : start]):
            start = starts.pop()
        return lines[start:]

    def _read(self, output: IO[bytes]) -> None:
        with output, contextlib.suppress(ValueError, OSError):
            for written in output:
                line = written.decode(errors="replace").rstrip("\r\n")
                self._lines.append(line)
                self._on_line(self.index, line)
