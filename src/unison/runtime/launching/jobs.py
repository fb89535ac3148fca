"""A job: its workers, from the start of the first to the end of the last one."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from unison.runtime.exit_codes import OF_SIGNALS, PREEMPTED
from unison.runtime.launching.workers import (
    POLL_INTERVAL,
    OnLine,
    ProcessWorker,
    Program,
    Start,
    Worker,
)

#: Seconds to wait for the failure of another worker that a failed worker has reported: errors may
#: be reported before the process that caused them has ended.
_CULPRIT_GRACE = 5.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a worker.

    Attributes:
        worker: Its index.
        exit_code: The exit code as in a shell: the program's, or 128 plus the signal's number.
        last_lines: Its last output: the traceback, if there is one, else some lines.
        has_lost_another: Whether it failed because another worker, which is not among these, or
            its own machine is lost.
        ended_at: When it ended, by this process's monotonic clock.
        lost_with: What it was lost with, its machine; empty if that is not lost.
    """

    worker: int
    exit_code: int
    last_lines: Sequence[str]
    has_lost_another: bool = False
    ended_at: float = 0.0
    lost_with: str = ""

    @property
    def how(self) -> str:
        """The loss of its machine, the name of the signal that terminated it, or its exit code.

        Examples:
            >>> Failure(0, 137, []).how, Failure(0, 3, []).how
            ('SIGKILL', 'exit code 3')
            >>> Failure(0, 1, [], lost_with="its node 10.0.0.2").how
            'its node 10.0.0.2 is lost'
        """
        if self.lost_with:
            return f"{self.lost_with} is lost"
        if self.exit_code > 128:
            with contextlib.suppress(ValueError):
                return signal.Signals(self.exit_code - 128).name
        return f"exit code {self.exit_code}"

    @property
    def is_loss(self) -> bool:
        """Whether the worker was lost, and its program has not failed: it can be started again."""
        return self.has_lost_another or self.exit_code in (*OF_SIGNALS, PREEMPTED)

    @property
    def error(self) -> str:
        """The class of its final error, and the first line of the message; empty if there is none.

        Examples:
            >>> Failure(0, 1, ["Traceback (most recent call last):", "  ...", "KeyError: 3"]).error
            'KeyError: 3'
        """
        starts = [i for i, line in enumerate(self.last_lines) if line.startswith("Traceback (")]
        after = self.last_lines[starts[-1] + 1 :] if starts else []
        return next((line for line in after if line and not line.startswith(" ")), "")

    @property
    def ending(self) -> str:
        """The signal, exit code or loss with which it ended, as text."""
        if self.lost_with:
            return f"was lost with {self.lost_with}"
        ended = "was ended by" if self.how.startswith("SIG") else "failed with"
        return f"{ended} {self.how}"

    def __str__(self) -> str:
        """Describes the failure in one line."""
        return f"worker {self.worker} {self.ending}"


class Job:
    """The workers of a job, as a context manager that starts them.

    Its exit terminates those that are still running: first by SIGTERM, then by SIGKILL.

    Args:
        programs: The workers' programs.
        on_line: Called for every line that a worker prints, in threads.
        grace: Seconds between the two signals.
        start: Starts a worker. Default: on this machine.
        is_over: Returns whether the workers are to end, though none has failed; see `was_over`.

    Examples:
        >>> program = Program(["-c", "print('hello')"], {})
        >>> with Job([program], on_line=lambda worker, line: print(worker, line)) as job:
        ...     job.wait(timeout=60)
        0 hello
    """

    def __init__(
        self,
        programs: Sequence[Program],
        on_line: OnLine = lambda worker, line: None,
        grace: float = 10.0,
        start: Start = ProcessWorker,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self._programs = programs
        self._on_line = on_line
        self._grace = grace
        self._start = start
        self._is_over = is_over
        self._workers: list[Worker] = []
        #: The failure of the first worker that failed; None if none has.
        self.failure: Failure | None = None
        #: Whether `wait` has ended the workers because of `is_over`.
        self.was_over = False

    def __enter__(self) -> Self:
        try:
            for index, program in enumerate(self._programs):
                self._workers.append(self._start(index, program, self._on_line))
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
        """The number of running workers."""
        return len(self._running())

    def wait(self, timeout: float | None = None, of: float | None = None) -> Failure | None:
        """Waits until all workers are done, or one has failed; then terminates the others.

        Args:
            timeout: The timeout in seconds; None for no limit.
            of: The timeout of the whole job, which the error names, if this is the rest of it.

        Returns:
            The first failure, or None. If a worker fails because another one has failed, the other
            one's failure is returned.

        Raises:
            TimeoutError: They took longer. Those that are still running are terminated.
        """
        last = None if timeout is None else time.monotonic() + timeout
        while self.running and not self._has_failed():
            if self._is_over():
                self.was_over = True
                self.end()
                return None
            if last is not None and time.monotonic() > last:
                waiting = [worker.index for worker in self._running()]
                self.end()
                raise TimeoutError(
                    f"Timed out: expected {len(self._workers)} workers to end within "
                    f"{timeout if of is None else of:g} s. Still running: {waiting}. They have "
                    "been ended. Give them a longer timeout, or see in their output what they were "
                    "waiting for."
                )
            time.sleep(POLL_INTERVAL)
        failed = self._culprit()
        self.end()
        if failed is not None:
            self.failure = Failure(
                failed.index,
                failed.exit_code or 0,
                failed.last_lines(),
                failed.has_lost_another() or bool(failed.lost_with),
                failed.ended_at,
                failed.lost_with,
            )
        return self.failure

    def results(self) -> list[bytes]:
        """Returns the results that the workers, which have ended, have sent back."""
        return [worker.result() for worker in self._workers]

    def signal(self, number: int) -> None:
        """Sends a signal to all workers and their children."""
        for worker in self._workers:
            worker.signal(number)

    def end(self) -> None:
        """Terminates the running workers, and waits until they have ended."""
        if self.running:
            self.signal(signal.SIGTERM)
            last = time.monotonic() + self._grace
            while self.running and time.monotonic() < last:
                time.sleep(POLL_INTERVAL)
        # A worker's children may outlive it, for example if it was killed.
        self.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.close()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.exit_code is None]

    def _has_failed(self) -> bool:
        """Returns whether a worker failed by itself, or long enough ago because of another one."""
        failed = [worker for worker in self._workers if worker.exit_code]
        return any(
            time.monotonic() - worker.ended_at > _CULPRIT_GRACE or not worker.has_lost_another()
            for worker in failed
        )

    def _culprit(self) -> Worker | None:
        """Returns the first worker that failed by itself; else the first that failed."""
        failed = [worker for worker in self._workers if worker.exit_code]
        by_themselves = [worker for worker in failed if not worker.has_lost_another()]
        return min(by_themselves or failed, key=lambda worker: worker.ended_at, default=None)
