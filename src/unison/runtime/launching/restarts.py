"""The restart policy for lost workers of an elastic job."""

from __future__ import annotations

import dataclasses

#: A worker that ends within this time, this many times in a row, before joining, is given up.
_SOON = 10.0
_SOON_IN_A_ROW = 3

#: The backoff in seconds after a worker ended before it had joined; it doubles each time.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class GivenUpError(Exception):
    """A worker is not restarted; the message states why."""


@dataclasses.dataclass
class Restarts:
    """The restarts of a job's workers.

    Args:
        at_most: The maximum number of restarts in the whole job.

    Examples:
        >>> restarts = Restarts(at_most=10)
        >>> restarts.pause(worker=0, lived=60.0, has_joined=True)
        0.0
        >>> [restarts.pause(worker=0, lived=20.0, has_joined=False) for _ in range(3)]
        [0.5, 1.0, 2.0]
        >>> restarts.used
        4
    """

    at_most: int
    #: The number of restarts so far.
    used: int = 0

    def __post_init__(self) -> None:
        #: How often in a row each worker ended before it had joined, and how often it did so soon.
        self._in_vain: dict[int, int] = {}
        self._soon: dict[int, int] = {}

    def pause(self, worker: int, lived: float, has_joined: bool) -> float:
        """Counts a restart, and returns the seconds to wait before it.

        Args:
            worker: The worker that was lost.
            lived: Seconds for which it ran.
            has_joined: Whether it had joined the job.

        Raises:
            GivenUpError: It is not to be restarted.
        """
        in_vain = 0 if has_joined else self._in_vain.get(worker, 0) + 1
        soon = 0 if has_joined or lived > _SOON else self._soon.get(worker, 0) + 1
        self._in_vain[worker], self._soon[worker] = in_vain, soon
        if soon >= _SOON_IN_A_ROW:
            raise GivenUpError(
                f"it ended {soon} times in a row within {_SOON:g} s, before it had joined"
            )
        if self.used >= self.at_most:
            raise GivenUpError(f"all {self.at_most} restarts are used (--restarts)")
        self.used += 1
        return min(_FIRST_PAUSE * 2 ** (in_vain - 1), _LONGEST_PAUSE) if in_vain else 0.0
