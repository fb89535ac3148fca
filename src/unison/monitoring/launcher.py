"""`Monitored`: the monitoring of a job in the process that serves its state.

This is the process that has started the workers, or the first worker (`first_worker`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Self

from unison.errors import UnavailableError
from unison.monitoring.collector import Collector
from unison.monitoring.job import WatchedJob
from unison.monitoring.metrics_endpoint import MetricsEndpoint, MetricsPlace
from unison.monitoring.otlp import OpenTelemetryExport
from unison.monitoring.progress import ProgressLine, facts_of, workers_running
from unison.monitoring.running_jobs import RunningJob, published
from unison.runtime.launching import Program
from unison.runtime.launching.elastic import TIMEOUT_EXIT_CODE

logger = logging.getLogger("unison")

#: The errors that reading an invalid report may raise.
_NO_REPORT = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


class Monitored:
    """A job whose reports this process receives and serves, as a context manager.

    A job that cannot be monitored (listening fails, or there is no folder) runs nevertheless.

    Args:
        program: The workers' program, as in the user's command.
        kind: See `WatchedJob`.
        workers: The workers' names.
        is_wanted: Whether `unison top` may monitor the job.
        metrics: Where its metrics are served, too.
        is_exported: Whether OpenTelemetry gets them, too.
        has_progress: Whether `progress` is called, and shows them.

    Attributes:
        job: The job's state.

    Raises:
        UnavailableError: The metrics cannot be served there.
        ImportError: OpenTelemetry's SDK is not installed.
        ValueError: One of its variables is malformed.

    Examples:
        >>> with Monitored("train.py", "workers", ["worker 0"]) as monitored:
        ...     (program,) = monitored.programs([Program(["train.py"], {})])
        >>> program.on_report(b"what a worker writes", 0.0)
    """

    def __init__(
        self,
        program: str,
        kind: str,
        workers: Sequence[str],
        is_wanted: bool = True,
        metrics: MetricsPlace | None = None,
        is_exported: bool = False,
        has_progress: bool = False,
    ):
        self._program = program
        self._workers = list(workers)
        self.job = WatchedJob(program, kind, workers)
        self._is_wanted = is_wanted
        self._has_progress = has_progress
        self._metrics = metrics
        self._export = OpenTelemetryExport(self.job) if is_exported else None
        self._collector: Collector | None = None
        self._end = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._metrics is not None:
            try:
                self._end.enter_context(MetricsEndpoint(self.job, self._metrics))
            except OSError as error:
                raise UnavailableError(
                    message=f"Cannot serve metrics at {self._metrics.host}:{self._metrics.port}: "
                    f"{error}. Give an address of this machine and a free port"
                ) from error
        if self._export is not None:  # nothing below raises
            self._end.enter_context(self._export)
        if self._is_wanted:
            try:
                with contextlib.ExitStack() as undoing:
                    collector = undoing.enter_context(Collector(self.job))
                    job = RunningJob(os.getpid(), self._program, collector.address, collector.token)
                    undoing.enter_context(published(job))
                    self._end.push(undoing.pop_all())
                    self._collector = collector
            except OSError as error:
                logger.warning("`unison top` cannot watch this job: %s", error)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    @property
    def is_watched(self) -> bool:
        """Whether it is being served, or shown."""
        receivers = (self._collector, self._metrics, self._export)
        return self._has_progress or any(each is not None for each in receivers)

    def progress(self) -> ProgressLine:
        """Returns a line about how far the job is."""

        def line() -> str:
            state = self.job.as_dict()
            about = [workers_running(state), f"{state['seconds']:.0f} s"]
            return ", ".join([*about, *facts_of(state)])

        return ProgressLine(line)

    def starts_again(self, workers: Sequence[str], line: str) -> None:
        """Takes note that all workers are started again; `line` says so."""
        self._workers = list(workers)
        self.job.happened({"event": "all start again", "workers": workers}, line)

    def programs(self, programs: Sequence[Program]) -> list[Program]:
        """Returns the workers' programs, which report to this process."""
        if not self.is_watched:
            return list(programs)
        return [
            dataclasses.replace(program, on_report=functools.partial(self._read, worker))
            for program, worker in zip(programs, self._workers, strict=True)
        ]

    def hear(self, worker: str, told: Any, ahead: float = 0.0) -> None:
        """Handles a worker's report, and ignores invalid ones; any thread may call this.

        Args:
            worker: The worker's name.
            told: The report.
            ahead: The seconds by which the clock of its times is ahead of this process's.
        """
        with contextlib.suppress(*_NO_REPORT):
            marks = [[step, at - ahead, has_paused] for step, at, has_paused in told["marks"]]
            now = told["now"] - ahead
            self.job.hear({**told, "worker": worker, "now": now, "marks": marks})

    def _read(self, worker: str, line: bytes, ahead: float) -> None:
        with contextlib.suppress(*_NO_REPORT):
            self.hear(worker, json.loads(line), ahead)

    def happened(self, event: Mapping[str, Any], line: str | None) -> None:
        """Handles an event of an elastic job; any thread may call this."""
        self.job.happened(event, line)

    def ended(self, exit_code: int) -> None:
        """Publishes how the job has ended."""
        if self._collector is not None:
            self._collector.end(_how(exit_code))


def _how(exit_code: int) -> str:
    """Describes how a job has ended.

    Examples:
        >>> _how(0), _how(3), _how(137)
        ('the job is done', 'exit code 3', 'exit code 137 (SIGKILL)')
        >>> _how(124)
        'exit code 124 (the time is up)'
    """
    if exit_code == 0:
        return "the job is done"
    name = " (the time is up)" if exit_code == TIMEOUT_EXIT_CODE else ""
    if exit_code > 128:
        with contextlib.suppress(ValueError):
            name = f" ({signal.Signals(exit_code - 128).name})"
    return f"exit code {exit_code}{name}"
