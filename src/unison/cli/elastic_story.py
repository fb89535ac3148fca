"""The messages of `unison run` about an elastic job: one line for each important event."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unison.runtime.elastic.protocol import DONE, REGISTER_LOST


def lost_task(name: str, event: Mapping[str, Any], restarts: int) -> str:
    """Returns the message about a lost task of a job.

    Args:
        name: The task's name.
        event: The event; see `Restarts.lost`.
        restarts: The maximum number of restarts.
    """
    lost = f"{name} was lost ({event['why']})"
    if "given_up" in event:
        return f"{lost}; it is not started again: {event['given_up']}"
    after = f" in {event['again_in']:g} s" if event["again_in"] else ""
    return f"{lost}; it is started again{after} ({event['restart']} of {restarts})"


class Story:
    """Turns events of a job's register and processes into lines.

    Args:
        restarts: The maximum number of restarts.
        now: Returns the time in seconds.

    Examples:
        >>> story = Story(restarts=10)
        >>> story.told({"event": "started", "view": 1, "workers": ["worker 0", "worker 1"]})
        'the job runs: 2 workers (worker 0, worker 1)'
        >>> story.told({"event": "lost", "worker": "worker 1", "why": "it is silent"})
        'worker 1 is out of the group: it is silent'
        >>> story.told({"event": "process lost", "worker": 1, "why": "SIGKILL", "again_in": 0.0,
        ...             "restart": 1})
        'worker 1 was lost (SIGKILL); it is started again (1 of 10)'
    """

    def __init__(self, restarts: int, now: Callable[[], float] = time.monotonic):
        self._restarts = restarts
        self._now = now
        self._members: Sequence[str] = ()
        self._interrupted_at: float | None = None
        self._is_stopping = False

    def told(self, event: Mapping[str, Any]) -> str | None:
        """Returns the message about an event; None if there is none."""
        what = event["event"]
        if what == "interrupted" and self._members and self._interrupted_at is None:
            self._interrupted_at = self._now()
        tell = getattr(self, "_" + what.replace(" ", "_"), None)
        return None if tell is None else tell(event)

    def _process_started(self, event: Mapping[str, Any]) -> str:
        where = f" on node {event['where']}" if "where" in event else ""
        return f"worker {event['worker']} is started{where}"

    def _process_waits(self, event: Mapping[str, Any]) -> str:
        return f"worker {event['worker']} waits to be started: {event['why']}"

    def _process_lost(self, event: Mapping[str, Any]) -> str:
        return lost_task(f"worker {event['worker']}", event, self._restarts)

    def _process_ended(self, event: Mapping[str, Any]) -> str | None:
        if self._is_stopping and event["code"] == REGISTER_LOST:
            return None  # as is expected
        code = f" with exit code {event['code']}" if event["code"] else ""
        return f"worker {event['worker']} has ended{code}"

    def _stopping(self, event: Mapping[str, Any]) -> str:
        self._is_stopping = True
        return "stopping: the workers save what they have (at the second Ctrl-C they are killed)"

    def _timeout(self, event: Mapping[str, Any]) -> str:
        return (
            f"Timed out: expected the job to end within {event['seconds']:g} s. "
            f"{event['running']} workers still run, and are ended. Give it more time (--timeout), "
            "or see in the output what they wait for."
        )

    def _started(self, event: Mapping[str, Any]) -> str:
        members = event["workers"]
        count = f"{len(members)} {'worker' if len(members) == 1 else 'workers'}"
        if not self._members:
            self._members = members
            return f"the job runs: {count} ({', '.join(members)})"
        joined = [name for name in members if name not in self._members]
        self._members = members
        since = self._interrupted_at
        self._interrupted_at = None
        new = f"; {', '.join(joined)} joined" if joined else ""
        at = f", from step {event['step']}" if event.get("step") is not None else ""
        after = f" after {self._now() - since:.2f} s" if since is not None else ""
        return f"regrouped: {count} ({', '.join(members)}){at}{after}{new}"

    def _lost(self, event: Mapping[str, Any]) -> str:
        return f"{event['worker']} is out of the group: {event['why']}"

    def _leaving(self, event: Mapping[str, Any]) -> str:
        return f"{event['worker']} leaves: it is to end soon"

    def _late(self, event: Mapping[str, Any]) -> str:
        return str(event["about"])

    _goes_on = _late

    def _failed(self, event: Mapping[str, Any]) -> str:
        return f"the program of {event['worker']} has failed: {event['why']}"

    def _refused(self, event: Mapping[str, Any]) -> str:
        return f"{event['worker']} is refused: {event['why']}"

    def _benched(self, event: Mapping[str, Any]) -> str:
        return f"{event['worker']} is left out for {event['seconds']:g} s: groups with it failed"

    def _ended(self, event: Mapping[str, Any]) -> str | None:
        if event["code"] == DONE:
            return "the job is done"
        if event["code"] == REGISTER_LOST:  # this process has ended it, and prints why
            return None
        return f"the job ends: {event['why']} (exit code {event['code']})"
