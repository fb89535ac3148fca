"""One run of a job's workers, from their start to the end of the last one, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator

from unison.cli.interrupted_output import InterruptedOutput
from unison.cli.terminal import Terminal
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.launching import Failure, Job, Program, Start
from unison.runtime.launching.distinct_tracebacks import DistinctTracebacks

#: The exit status of a program that Ctrl-C has ended, as in shells.
INTERRUPTED = 128 + signal.SIGINT

#: The exit status of a job whose `--timeout` has passed, and of `ssh` without a connection.
TIMED_OUT = 124
_SSH_FAILED = 255


class JobRun:
    """A job whose output is printed to the terminal.

    Args:
        programs: The programs.
        start: Starts one.
        options: The command's options.
        first: The index of the first worker, if others are on other machines.
        hosts: The machines, if each program is the command of one, whose lines have the names of
            workers already.
        is_over: Returns whether the workers are to end, since the machines of the job meet again.

    Attributes:
        failure: The failure of the job; None if it is done, was interrupted, or took too long.
        lived: Seconds from the start of the workers to that failure.
        was_over: Whether the machines of the job meet again.
    """

    def __init__(
        self,
        programs: list[Program],
        start: Start,
        options: argparse.Namespace,
        first: int = 0,
        hosts: list[str] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self._programs = programs
        self._start = start
        self._noun = "worker" if hosts is None else "machine"
        if hosts is None:
            self._names = [f"worker {first + index}" for index in range(len(programs))]
        else:
            self._names = [f"a worker of {host}" for host in hosts]
        self._timeout = options.timeout
        self._terminal = Terminal(options.no_color)
        self._is_over = is_over
        self.failure: Failure | None = None
        self.lived = 0.0
        self.was_over = False
        if hosts is None:
            self._tracebacks = DistinctTracebacks(
                lambda worker, line: self._terminal.show(first + worker, line)
            )
        else:
            self._tracebacks = DistinctTracebacks(lambda _, line: self._terminal.pass_on(line))
        self._output = InterruptedOutput(self._tracebacks)
        self._interrupts = 0

    def wait(self, ends: float) -> int:
        """Runs the job until a time at most, and returns the exit code."""
        left = None if ends == math.inf else max(0.0, ends - time.monotonic())
        begin = time.monotonic()
        job = Job(self._programs, self._output, start=self._start, is_over=self._is_over)
        with job, self._interrupting(job):
            try:
                with self._terminal.progress(job, len(self._programs), self._noun):
                    failure = job.wait(left, of=self._timeout)
            except TimeoutError as error:
                self.complain(str(error))
                return TIMED_OUT
        self._output.end()
        self._tracebacks.close()
        if self._interrupts:
            count = len(self._programs)
            ended = f"the {count} workers were" if count > 1 else "the worker was"
            if self._noun == "machine":
                ended = f"the workers of {count} machine{'s' if count > 1 else ''} were"
            self.complain(f"interrupted (SIGINT); {ended} ended")
            return INTERRUPTED
        self.failure = failure
        if failure is None:
            self.was_over = job.was_over
            return 0 if not job.was_over else LOST_ANOTHER
        self.lived = failure.ended_at - begin
        self._explain(failure)
        return LOST_ANOTHER if failure.has_lost_another else failure.exit_code

    @property
    def has_lost(self) -> bool:
        """Whether workers were lost, or the connection to a machine."""
        failure = self.failure
        if failure is None:
            return False
        is_cut = self._noun == "machine" and failure.exit_code == _SSH_FAILED
        return failure.is_loss or is_cut

    def complain(self, text: str) -> None:
        """Prints a line about the job."""
        self._terminal.complain(f"unison run: {text}")

    def _explain(self, failure: Failure) -> None:
        others = len(self._programs) - 1
        if self._noun == "worker":
            ended = f"the other {'workers were' if others > 1 else 'one was'} ended"
        else:
            ended = f"those of the other {'machines' if others > 1 else 'one'} were ended"
        error = f": {failure.error}" if failure.error else ""
        name = self._names[failure.worker]
        self.complain(f"{name} {failure.ending}{error}{f'; {ended}' if others else ''}")

    @contextlib.contextmanager
    def _interrupting(self, job: Job) -> Iterator[None]:
        """Forwards Ctrl-C to the workers; on the second one, kills them."""

        def interrupted(number: int, frame: object) -> None:
            self._interrupts += 1
            self._output.interrupt()
            job.signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

        before = signal.signal(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
