"""A worker of a job: one process, which leads its own process group.

So Ctrl-C only reaches the job, which forwards it, and a worker's children end with the worker. On
Linux, a worker ends with the process that started it: see `guards`.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unison.errors import UnavailableError
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.launching.guards import Guard, ending_with_this_process
from unison.runtime.launching.output import printed_lines

logger = logging.getLogger("unison")

#: Called with a worker's index and a line that it has printed, without the line terminator.
OnLine = Callable[[int, str], None]

#: Called with each event of a job's processes: `event` is its type, `worker` the worker's index.
OnEvent = Callable[[Mapping[str, Any]], None]

#: Called with a report of a worker, a line of JSON, and with the seconds by which the clock of its
#: machine is ahead of the local one.
OnReport = Callable[[bytes, float], None]

#: The variable with the pipe to which a worker may write such lines: the file descriptor and its
#: inode, which identifies the pipe.
REPORTS_VARIABLE = "UNISON_REPORTS"

#: Seconds between two polls of a job's workers.
POLL_INTERVAL = 0.05

#: The maximum length of a report; longer lines are skipped.
_MOST_BYTES = 1 << 20

#: The number of a worker's last lines that are kept, to show why it failed.
_LINES_KEPT = 200

#: Seconds for which the output of an ended worker is still read, before and after its children are
#: killed: they may keep the pipe open.
_LAST_WORDS = 0.5
_OUTPUT_GRACE = 2.0

#: The first line of Python's tracebacks.
TRACEBACK = "Traceback (most recent call last):"

#: The endings of Python's sentence between the tracebacks of two errors.
BETWEEN_ERRORS = ("direct cause of the following exception:", "another exception occurred:")

#: The error of a worker that has lost another one, however it was propagated.
MISSES_ANOTHER = re.compile(
    r"^(unison\.errors\.|unison\.runtime\.elastic\.group\.)?(UnavailableError|GroupChanged): ",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of a worker.

    Attributes:
        arguments: The arguments of Python: the program's file, and its arguments.
        environment: Additions to the environment of the process that starts it.
        call: The data sent to the program, which replies with its result: its standard input is a
            socket for both. None: its standard input is empty.
        holds_input: Whether that input stays open until this process ends, instead of ending after
            the data.
        on_report: Called, in a thread, with the program's reports while it runs. None: it does not
            report.
        cores: The cores on which it runs. None: those of the process that starts it.
        inherited: The file descriptors that the process of a worker on this machine inherits, under
            the same numbers.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    call: bytes | None = None
    on_report: OnReport | None = None
    cores: Sequence[int] | None = None
    holds_input: bool = False
    inherited: Sequence[int] = ()


class Worker(abc.ABC):
    """A worker that is running or has ended.

    Attributes:
        index: Its index.
        ended_at: When it ended, by this process's monotonic clock; 0 while it is running.
        exit_code: The exit code as in a shell: the program's, or 128 plus the signal's number. None
            while it is running.
        lost_with: What it is lost with, its machine; empty if that is not lost.
        where: The address of its machine; empty for this one.
    """

    def __init__(self, index: int, on_line: OnLine):
        self.index = index
        self.ended_at = 0.0
        self.exit_code: int | None = None
        self.lost_with = ""
        self.where = ""
        self._on_line = on_line
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        #: The callbacks that have raised.
        self._failed: list[Callable[..., None]] = []

    @abc.abstractmethod
    def signal(self, number: int) -> None:
        """Sends a signal to the worker and its children."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for the end of the worker, which has exited by itself or been killed."""

    @abc.abstractmethod
    def result(self) -> bytes:
        """Returns the result that the worker, which has ended, has sent back."""

    def hear(self, line: str) -> None:
        """Records a line that the worker has printed, and passes it on.

        A callback that raises, as where nobody reads this process's output any more, is not called
        again: the worker continues, and its output is still read.
        """
        self._lines.append(line)
        self._call(self._on_line, self.index, line)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        if callback in self._failed:
            return
        try:
            callback(*args)
        except Exception:
            self._failed.append(callback)
            logger.exception(
                "The callback %s for worker %d has failed. It is not called again for this worker.",
                callback,
                self.index,
            )

    def has_lost_another(self) -> bool:
        """Returns whether it has failed because another worker is lost."""
        said = "\n".join(self.last_lines())
        is_code = self.exit_code == LOST_ANOTHER
        return is_code or MISSES_ANOTHER.search(said) is not None

    def last_lines(self) -> list[str]:
        """Returns its last traceback, including chained ones; else its last lines."""
        lines = list(self._lines)
        starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
        if not starts:
            return lines[-10:]
        start = starts.pop()
        # A chained error has both tracebacks, with a sentence between them.
        while starts and any(line.endswith(BETWEEN_ERRORS) for line in lines[starts[-1] : start]):
            start = starts.pop()
        return lines[start:]


class NoRoomError(UnavailableError):
    """No machine has room for a worker now; it can be started when one has."""


#: Starts a worker, given its index, its program, and the callback for its lines.
Start = Callable[[int, Program, OnLine], Worker]


class ProcessWorker(Worker):
    """A worker on this machine: its process, and threads that read its output and wait for its end.

    Args:
        index: Its index.
        program: Its program.
        on_line: Called for every line that it prints, in a thread.
        guard: Terminates it when this process dies. None: it is killed immediately.
    """

    def __init__(self, index: int, program: Program, on_line: OnLine, guard: Guard | None = None):
        super().__init__(index, on_line)
        self._result = b""
        self._on_report = program.on_report
        own_end, end_of_worker = socket.socketpair()
        for end in (own_end, end_of_worker):
            end.settimeout(None)  # whatever the program's default is
        output, end_of_output = os.pipe()
        reports, end_of_reports = os.pipe()  # closed immediately if the worker does not report
        self._pipe_of_reports = f"{end_of_reports}:{os.fstat(end_of_reports).st_ino}"
        of_guard = () if guard is None else guard.inherited(output)
        command = [sys.executable, *program.arguments]
        passed = [*of_guard, *program.inherited]
        if program.on_report is not None:
            passed.append(end_of_reports)
        try:
            self._process = self._open(
                ending_with_this_process(command, guard, of_guard),
                env=self._environment(program),
                stdin=subprocess.DEVNULL if program.call is None else end_of_worker.fileno(),
                stdout=end_of_output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=passed,
            )
        except BaseException:
            own_end.close()
            os.close(output)
            os.close(reports)
            raise
        finally:
            end_of_worker.close()
            os.close(end_of_output)
            os.close(end_of_reports)
        if program.cores is not None:
            # Before it starts threads, which run where the first one does.
            with contextlib.suppress(OSError):  # it has ended, or may not run there any more
                os.sched_setaffinity(self._process.pid, program.cores)
        self._readers = [
            in_thread(self._read_output, output),
            in_thread(self._exchange, own_end, program.call or b"", program.holds_input),
        ]
        self._waiter = in_thread(self._wait)
        self._reader_of_reports = in_thread(self._read_reports, reports)

    def signal(self, number: int) -> None:
        if self._process.returncode is None:  # not reaped: the group's id is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._waiter.join()
        self._process.wait()
        for reader in (*self._readers, self._reader_of_reports):
            reader.join(_OUTPUT_GRACE)

    def result(self) -> bytes:
        return self._result

    def _environment(self, program: Program) -> dict[str, str]:
        """Returns the environment in which its process runs a program."""
        environment = {**os.environ, **program.environment}
        environment.pop(REPORTS_VARIABLE, None)
        if program.on_report is not None:
            environment[REPORTS_VARIABLE] = self._pipe_of_reports
        return environment

    def _open(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts the process, given the arguments of `Popen`."""
        return subprocess.Popen(command, **options)

    def _wait(self) -> None:
        # Not reaped, so that the group's id is not reused.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self.ended_at = time.monotonic()
        for reader in self._readers:
            reader.join(_LAST_WORDS)
        has_exited = ended.si_code == os.CLD_EXITED
        self.exit_code = ended.si_status + (0 if has_exited else 128)

    def _read_output(self, output: int) -> None:
        with open(output, "rb"), contextlib.suppress(OSError):
            for line in printed_lines(output):
                self.hear(line)

    def _read_reports(self, reports: int) -> None:
        """Passes on complete lines; a worker that is killed may leave an incomplete one."""
        is_continued = False
        with open(reports, "rb") as lines:
            while line := lines.readline(_MOST_BYTES):
                is_complete = line.endswith(b"\n") and not is_continued
                is_continued = not line.endswith(b"\n")
                if is_complete and self._on_report is not None:
                    self._call(self._on_report, line, 0.0)

    def _exchange(self, connection: socket.socket, call: bytes, holds_input: bool) -> None:
        """Sends the call, and reads the result."""
        with connection:
            with contextlib.suppress(OSError):  # it has ended without reading it
                connection.sendall(call)
                if not holds_input:
                    connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError), connection.makefile("rb") as answer:
                self._result = answer.read()


def in_thread(work: Callable[..., None], *args: object) -> threading.Thread:
    """Starts a daemon thread that does some work."""
    thread = threading.Thread(target=work, args=args, name="unison-worker", daemon=True)
    thread.start()
    return thread
