"""The restart policy for the lost workers of a job, and for jobs whose workers start together."""

from __future__ import annotations

import dataclasses
from typing import Any

#: A worker that ends within this time, this many times in a row, before joining, is given up.
_SOON = 10.0
_SOON_IN_A_ROW = 3

#: The backoff in seconds after a worker ended before it had joined; it doubles each time.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


@dataclasses.dataclass
class Restarts:
    """The restarts of a job's workers.

    Args:
        at_most: The maximum number of restarts in the whole job.

    Examples:
        >>> restarts = Restarts(at_most=2)
        >>> restarts.lost(worker=1, why="SIGKILL", lived=60.0, has_joined=True)
        {'event': 'process lost', 'worker': 1, 'why': 'SIGKILL', 'again_in': 0.0, 'restart': 1}
        >>> [restarts.lost(0, "SIGTERM", lived=60.0, has_joined=False)["again_in"]]
        [0.5]
        >>> restarts.lost(0, "SIGTERM", lived=60.0, has_joined=False)["given_up"]
        'all 2 restarts are used (--restarts)'
    """

    at_most: int
    #: The number of restarts so far.
    used: int = 0

    def __post_init__(self) -> None:
        #: The number of consecutive ends of each worker before it had joined, and of those within
        #: `_SOON`.
        self._in_vain: dict[int, int] = {}
        self._soon: dict[int, int] = {}
        #: The number of consecutive times that all workers ended within `_SOON`.
        self._soon_together = 0

    def lost(self, worker: int, why: str, lived: float, has_joined: bool) -> dict[str, Any]:
        """Counts a restart, and returns the event of the loss.

        Args:
            worker: The worker that was lost.
            why: How its process ended.
            lived: Seconds for which it ran.
            has_joined: Whether it had joined the job.

        Returns:
            The event: with the seconds until the worker is restarted as `again_in`, and the
            number of the restart; or, if it is not restarted, with the reason as `given_up`.
        """
        event = {"event": "process lost", "worker": worker, "why": why}
        in_vain = 0 if has_joined else self._in_vain.get(worker, 0) + 1
        soon = 0 if has_joined or lived > _SOON else self._soon.get(worker, 0) + 1
        self._in_vain[worker], self._soon[worker] = in_vain, soon
        if soon >= _SOON_IN_A_ROW:
            reason = f"it ended {soon} times in a row within {_SOON:g} s, before it had joined"
            return {**event, "given_up": reason}
        return event | self._again(in_vain)

    def all_ended(self, lived: float) -> dict[str, Any]:
        """Counts a restart of all workers together, and returns the rest of the event of `lost`.

        Args:
            lived: Seconds for which they ran.

        Examples:
            >>> restarts = Restarts(at_most=1)
            >>> restarts.all_ended(lived=3600.0)
            {'again_in': 0.0, 'restart': 1}
            >>> restarts.all_ended(lived=3600.0)
            {'given_up': 'all 1 restarts are used (--restarts)'}
        """
        self._soon_together = 0 if lived > _SOON else self._soon_together + 1
        return self._again(self._soon_together)

    def undo(self) -> None:
        """Counts the last restart no longer: it was not for a lost worker."""
        self.used = max(self.used - 1, 0)

    def _again(self, in_vain: int) -> dict[str, Any]:
        """Counts a restart after so many attempts in vain; returns when it is, or why it is not."""
        if self.used >= self.at_most:
            return {"given_up": f"all {self.at_most} restarts are used (--restarts)"}
        self.used += 1
        pause = min(_FIRST_PAUSE * 2 ** (in_vain - 1), _LONGEST_PAUSE) if in_vain else 0.0
        return {"again_in": pause, "restart": self.used}
