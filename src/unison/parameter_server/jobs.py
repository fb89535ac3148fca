"""`Jobs`: the jobs that one server serves, and the variables that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from unison.net.array_messages import Message
from unison.parameter_server.servers import Answer, VariableServer
from unison.parameter_server.shared import SharedVariables
from unison.parameter_server.snapshots import Part, Snapshots

#: The names of a snapshot's parts: the variables that jobs share, and the prefix of each job's own.
_SHARED = "shared"
_JOB = "job "

#: Seconds for which a restarted server keeps a job for workers that reconnect.
_KEPT_SECONDS = 600.0


class Jobs:
    """The jobs on one server.

    Args:
        snapshots: The snapshots that it writes and restores. None: no snapshots.
        is_lasting: Whether it outlives jobs, and serves several concurrently. Otherwise it has one
            job, and drops the state of an earlier one.
    """

    def __init__(self, snapshots: Snapshots | None, is_lasting: bool):
        self._snapshots = snapshots
        self._is_lasting = is_lasting
        self._jobs: dict[str, VariableServer] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._shared = SharedVariables()
        #: Set when a snapshot should be written soon.
        self.wants_snapshot = threading.Event()
        #: The time at which restored jobs are dropped unless they were claimed.
        self._forgetting_at = time.monotonic() + _KEPT_SECONDS
        self._unclaimed: set[str] = set()
        if snapshots is not None and snapshots.latest(self._restore) is None:
            self._shared, self._jobs, self._unclaimed = SharedVariables(), {}, set()

    @property
    def writes_snapshots(self) -> bool:
        """Whether it writes snapshots."""
        return self._snapshots is not None

    def begin(self, message: Message) -> tuple[VariableServer, Answer]:
        """Returns the variables of the job that a client introduces, and the answer to it."""
        job = message["job"]
        with self._lock:
            self._unclaimed.discard(job)
            if message["is_new"] and not self._is_lasting:
                with self._shared.lock:
                    for other in list(self._jobs):
                        self._forget(other)
            variables = self._jobs.get(job)
            if variables is None:
                variables = self._new_job()
                if message["is_new"]:
                    self._jobs[job] = variables
        return variables, variables.answer(message)

    def leave(self, job: str) -> None:
        """Deletes a job that has ended, but not the variables that it shares with others."""
        with self._lock, self._shared.lock:
            self._forget(job)

    def write_snapshot(self) -> None:
        """Writes a snapshot, if something has changed since the last one.

        Raises:
            OSError: It cannot be written; the last one is kept.
        """
        if self._snapshots is None:
            return
        with self._writing:
            with self._lock, self._shared.lock:
                self._forget_unclaimed()
                if not self._shared.has_changed:
                    return
                self._shared.has_changed = False
                parts = self._parts()
            try:
                self._snapshots.write(parts)
            except BaseException:
                self._shared.has_changed = True
                raise

    def _parts(self) -> dict[str, Part]:
        """Returns a consistent copy of all state; both locks must be held."""
        jobs = {f"{_JOB}{job}": variables.part() for job, variables in self._jobs.items()}
        return {_SHARED: self._shared.part(), **jobs}

    def _restore(self, parts: Mapping[str, Part]) -> None:
        """Loads the parts of a snapshot, and discards those of an earlier call."""
        self._shared, self._jobs, self._unclaimed = SharedVariables(), {}, set()
        for name, part in parts.items():
            if name == _SHARED:
                self._shared.restore(part)
            elif not name.startswith(_JOB):
                raise ValueError(f"there is no part {name!r}")
            else:
                job = name.removeprefix(_JOB)
                self._jobs[job] = self._new_job()
                self._jobs[job].restore(job, part)
                self._unclaimed.add(job)

    def _new_job(self) -> VariableServer:
        return VariableServer(self._shared, self.writes_snapshots, self.wants_snapshot)

    def _forget_unclaimed(self) -> None:
        if time.monotonic() > self._forgetting_at:
            for job in self._unclaimed:
                self._forget(job)
            self._unclaimed = set()

    def _forget(self, job: str) -> None:
        """Deletes a job; both locks must be held."""
        if self._jobs.pop(job, None) is not None:
            self._shared.has_changed = True
            self.wants_snapshot.set()
        self._shared.leave(job)
