"""Monitoring of `launch` jobs: implemented in a higher layer, which registers itself here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from unison.runtime.launching.workers import Program


class Watched(Protocol):
    """A job that can be monitored, as a context manager; see `unison.monitoring.launcher`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def programs(self, programs: Sequence[Program]) -> list[Program]:
        """Returns the workers' programs, which report to this process."""

    def ended(self, exit_code: int) -> None:
        """Reports the job's exit code to those who monitor it."""


#: Creates one from a program's name, the kind of the job and its workers' names.
Watch = Callable[[str, str, Sequence[str]], Watched]

_watch: Watch


def watch_by(watch: Watch) -> None:
    """Registers the implementation of monitoring."""
    global _watch
    _watch = watch


def watched(program: str, kind: str, workers: Sequence[str]) -> Watched:
    """Returns a job that can be monitored."""
    return _watch(program, kind, workers)
