"""The offsets between the clocks of the workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from unison.runtime import process_group

#: The number of messages between workers for it. The shortest round trips determine the precision.
_ROUNDS = 12


class Clock(NamedTuple):
    """A worker's clock relative to that of the first worker.

    Attributes:
        ahead: The seconds by which it is ahead; below 0 if it is behind.
        error: The maximum error in seconds.
    """

    ahead: float
    error: float


def compare_clocks() -> list[Clock]:
    """Returns the clocks of all workers; all of them must call this.

    In each round, every worker records when it sends its message, and when it has received those
    of all. No message is received before it was sent; applied in both directions between the first
    worker and another one, this bounds the difference of their clocks from both sides.

    Raises:
        DeadlineExceededError: A worker did not take part in time.
    """
    if process_group.count() == 1:
        return [Clock(0.0, 0.0)]
    rounds: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        sent = time.time()
        process_group.all_gather_json(None, "The clocks")
        rounds.append((sent, time.time()))
    return clocks_of(process_group.all_gather_json(rounds, "The times of the clocks"))


def clocks_of(of_workers: Sequence[Sequence[Sequence[float]]]) -> list[Clock]:
    """Returns the workers' clocks, by when each sent its word and when it had those of all.

    Examples:
        >>> clocks_of([[(10.0, 10.5), (11.0, 11.25)], [(13.0, 13.5), (14.0, 14.25)]])
        [Clock(ahead=0.0, error=0.0), Clock(ahead=3.0, error=0.25)]
    """
    clocks = []
    first = of_workers[0]
    for worker, own in enumerate(of_workers):
        if worker == 0:
            clocks.append(Clock(0.0, 0.0))
            continue
        pairs = list(zip(own, first, strict=True))
        least = max(sent - had_all for (sent, _), (_, had_all) in pairs)
        most = min(had_all - sent for (_, had_all), (sent, _) in pairs)
        clocks.append(Clock((least + most) / 2, (most - least) / 2))
    return clocks
