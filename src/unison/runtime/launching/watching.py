"""Monitoring of jobs of `launch`, which lies on a floor above and is registered here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from unison.runtime.launching.workers import Program


class Watched(Protocol):
    """A job that others may watch, in a `with` block; see `unison.monitoring.launcher`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def programs(self, programs: Sequence[Program]) -> list[Program]:
        """Returns the workers' programs, which report to this process."""

    def ended(self, exit_code: int) -> None:
        """Says how the job has ended, to those who watch."""


#: Makes it of a program's name, the kind of the job and its workers' names.
Watch = Callable[[str, str, Sequence[str]], Watched]

_watch: Watch


def watch_by(watch: Watch) -> None:
    """Registers what lets others watch jobs."""
    global _watch
    _watch = watch


def watched(program: str, kind: str, workers: Sequence[str]) -> Watched:
    """Returns a job as others may watch it."""
    return _watch(program, kind, workers)
