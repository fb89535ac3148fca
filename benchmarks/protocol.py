"""What the driver and a contestant say to each other: one JSON object a line.

A contestant announces itself when it is built and warmed up; then, for every line it gets, it
works one round and answers with one line. Of a contestant of several processes, each does so.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ready:
    """A contestant is built and warmed up."""

    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one contestant.

    Attributes:
        value: The result, in the workload's unit.
        cpu: CPU seconds a second, of all threads together.
        rss: Bytes of the process in memory after the round; None where the system hides it.
        peak_rss: The most bytes that it ever had.
        facts: What else the contestant tells: losses, bytes of live arrays.
    """

    value: float
    cpu: float
    rss: int | None
    peak_rss: int
    facts: dict[str, Any]


def of_all_processes(rounds: Sequence[Round], slowest: Callable[..., float]) -> Round:
    """Returns the round of a contestant of several processes: they are done when the last one is.

    Args:
        rounds: Those of the processes. The first one's facts are kept.
        slowest: `min` or `max` of values.
    """
    known = [done.rss for done in rounds if done.rss is not None]
    return Round(
        value=slowest(done.value for done in rounds),
        cpu=sum(done.cpu for done in rounds),
        rss=sum(known) if len(known) == len(rounds) else None,
        peak_rss=sum(done.peak_rss for done in rounds),
        facts=rounds[0].facts,
    )


class Contestant(abc.ABC):
    """A program that was built for a workload and can work a round of it."""

    @property
    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that matter."""

    @abc.abstractmethod
    def round(self) -> float:
        """Works one round and returns its result in the workload's unit."""

    def facts(self) -> dict[str, Any]:
        """What is worth telling of the latest round."""
        return {}
