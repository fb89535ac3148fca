"""`Jobs`: the jobs that one server serves, and what they share."""

from __future__ import annotations

import logging
import pathlib
import threading
import time

from unison.errors import DataLossError
from unison.parameter_server import snapshots
from unison.parameter_server.messages import Message
from unison.parameter_server.servers import Answer, VariableServer
from unison.parameter_server.shared import SharedVariables

logger = logging.getLogger("unison")

#: For how many seconds a restarted server keeps a job for workers that come back to it.
_KEPT_SECONDS = 600.0


class Jobs:
    """The jobs on one server.

    Args:
        snapshot: What the names of its snapshots begin with. None: it writes none.
        is_lasting: Whether it outlives jobs, and serves several at once. Else it has one job; what
            an earlier one has left is dropped.
    """

    def __init__(self, snapshot: pathlib.Path | None, is_lasting: bool):
        self._snapshot = snapshot
        self._is_lasting = is_lasting
        self._jobs: dict[str, VariableServer] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._shared = SharedVariables()
        #: Set when a snapshot should be written soon.
        self.wants_snapshot = threading.Event()
        #: When what was restored and not asked for is dropped.
        self._forgetting_at = time.monotonic() + _KEPT_SECONDS
        self._unclaimed: set[str] = set()
        if snapshot is not None:
            self._restore(snapshot)

    @property
    def writes_snapshots(self) -> bool:
        """Whether it writes snapshots."""
        return self._snapshot is not None

    def begin(self, message: Message) -> tuple[VariableServer, Answer]:
        """Returns the variables of the job that somebody introduces, and what is answered."""
        job = message["job"]
        with self._lock:
            self._unclaimed.discard(job)
            if message["is_new"] and not self._is_lasting:
                for other in list(self._jobs):
                    self._forget(other)
            variables = self._jobs.get(job)
            if variables is None:
                variables = VariableServer(self._path(job), self._shared, self.wants_snapshot)
                if message["is_new"]:
                    self._jobs[job] = variables
        return variables, variables.answer(message)

    def leave(self, job: str) -> None:
        """Forgets a job that has ended; what it shares with others stays."""
        with self._lock:
            self._forget(job)

    def write_snapshots(self) -> None:
        """Writes what is needed to come back, where something has changed."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._lock:
            if time.monotonic() > self._forgetting_at:
                for job in self._unclaimed:
                    self._forget(job)
                self._unclaimed = set()
            jobs = dict(self._jobs)
        # Shared variables first: a job's updates of them count as applied only in its own.
        self._write_shared()
        for job, variables in jobs.items():
            variables.write_snapshot()
            with self._lock:
                path = self._path(job)
                if job not in self._jobs and path is not None:  # it has ended meanwhile
                    path.unlink(missing_ok=True)

    def _forget(self, job: str) -> None:
        variables = self._jobs.pop(job, None)
        path = self._path(job)
        if variables is not None and path is not None:
            path.unlink(missing_ok=True)
        with self._shared.lock:
            self._shared.leave(job)

    def _path(self, job: str) -> pathlib.Path | None:
        return self._snapshot and self._snapshot.with_name(f"{self._snapshot.name}.{job}.job")

    def _write_shared(self) -> None:
        if self._snapshot is None:
            return
        with self._shared.lock:
            if not self._shared.has_changed:
                return
            self._shared.has_changed = False
            facts, values = self._shared.facts(), self._shared.copies()
        snapshots.write(self._snapshot.with_name(f"{self._snapshot.name}.shared"), facts, values)

    def _restore(self, snapshot: pathlib.Path) -> None:
        shared = snapshot.with_name(f"{snapshot.name}.shared")
        if shared.exists():
            try:
                self._shared.restore(*snapshots.read(shared))
            except DataLossError as error:
                logger.warning("%s The server begins without it.", error)
        for path in sorted(snapshot.parent.glob(f"{snapshot.name}.*.job")):
            variables = VariableServer(path, self._shared, self.wants_snapshot)
            if variables.job:
                self._jobs[variables.job] = variables
                self._unclaimed.add(variables.job)
