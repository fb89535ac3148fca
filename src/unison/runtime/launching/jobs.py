"""A job: its workers, from the start of the first to the end of the last one."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Start, Worker

#: Seconds between two looks at the workers.
_LOOK_EVERY = 0.05

#: Seconds for which a job waits for the failure of another worker, of which a worker speaks that
#: has failed: errors may travel faster than processes end.
_CULPRIT_GRACE = 5.0


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

    @property
    def how(self) -> str:
        """The name of the signal that ended it, or its exit code.

        Examples:
            >>> Failure(0, 137, []).how, Failure(0, 3, []).how
            ('SIGKILL', 'exit code 3')
        """
        if self.exit_code > 128:
            with contextlib.suppress(ValueError):
                return signal.Signals(self.exit_code - 128).name
        return f"exit code {self.exit_code}"

    @property
    def error(self) -> str:
        """The class of the error that ended it, and the first line of its message; else empty.

        Examples:
            >>> Failure(0, 1, ["Traceback (most recent call last):", "  ...", "KeyError: 3"]).error
            'KeyError: 3'
        """
        starts = [i for i, line in enumerate(self.last_lines) if line.startswith("Traceback (")]
        after = self.last_lines[starts[-1] + 1 :] if starts else []
        return next((line for line in after if line and not line.startswith(" ")), "")

    def __str__(self) -> str:
        """Says in one line what happened."""
        ended = "was ended by" if self.how.startswith("SIG") else "failed with"
        return f"worker {self.worker} {ended} {self.how}"


class Job:
    """The workers of a job; they run from the start of a `with` block.

    The block's end ends those that still run: first asked by SIGTERM, then killed.

    Args:
        programs: What the workers run.
        on_line: Called for every line that a worker prints, in threads.
        grace: Seconds between asking and killing.
        start: Starts a worker. Default: on this machine.

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
    ):
        self._programs = programs
        self._on_line = on_line
        self._grace = grace
        self._start = start
        self._workers: list[Worker] = []
        #: How the first worker failed that did; None while all is well.
        self.failure: Failure | None = None

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
        """How many workers run."""
        return len(self._running())

    def wait(self, timeout: float | None = None) -> Failure | None:
        """Waits until all workers are through, or one has failed; then ends the others.

        Args:
            timeout: Seconds, at most; None: as long as it takes.

        Returns:
            How the first one failed, or None. Where one fails because another one has, the other
            one counts.

        Raises:
            TimeoutError: They took longer. Those that run are ended.
        """
        last = None if timeout is None else time.monotonic() + timeout
        while self.running and not self._has_failed():
            if last is not None and time.monotonic() > last:
                waiting = [worker.index for worker in self._running()]
                self.end()
                raise TimeoutError(
                    f"Expected {len(self._workers)} workers to end within {timeout:g} s. Still "
                    f"running: {waiting}. They have been ended."
                )
            time.sleep(_LOOK_EVERY)
        failed = self._culprit()
        self.end()
        if failed is not None:
            self.failure = Failure(failed.index, failed.exit_code or 0, failed.last_lines())
        return self.failure

    def results(self) -> list[bytes]:
        """Returns what the workers, which have ended, have sent back."""
        return [worker.result() for worker in self._workers]

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

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.exit_code is None]

    def _has_failed(self) -> bool:
        """Whether a worker has failed by itself, or long enough ago because another one has."""
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
