"""Monitoring of `launch` jobs: implemented in a higher layer, which registers itself here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from unison.runtime.launching.workers import OnLine, Program


class Progress(Protocol):
    """A line about how far a job is, as a context manager; see `unison.monitoring.progress`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def above(self, on_line: OnLine) -> OnLine:
        """Returns a function that passes on the workers' lines, above this one."""


class Watched(Protocol):
    """A job that can be monitored, as a context manager; see `unison.monitoring.launcher`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def programs(self, programs: Sequence[Program]) -> list[Program]:
        """Returns the workers' programs, which report to this process."""

    def ended(self, exit_code: int) -> None:
        """Reports the job's exit code to those who monitor it."""

    def progress(self) -> Progress:
        """Returns a line about how far the job is."""


#: Creates one from a program's name, the kind of the job, its workers' names, and whether `unison
#: top` may monitor it, and `progress` is called.
Watch = Callable[[str, str, Sequence[str], bool, bool], Watched]

_watch: Watch


def watch_by(watch: Watch) -> None:
    """Registers the implementation of monitoring."""
    global _watch
    _watch = watch


def watched(
    program: str, kind: str, workers: Sequence[str], is_wanted: bool, has_progress: bool
) -> Watched:
    """Returns a job that can be monitored.

    Args:
        program: The program's name.
        kind: The kind of the job.
        workers: The workers' names.
        is_wanted: Whether `unison top` may monitor it.
        has_progress: Whether `progress` is called.
    """
    return _watch(program, kind, workers, is_wanted, has_progress)
