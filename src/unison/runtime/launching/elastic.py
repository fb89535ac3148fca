"""The processes of an elastic job: a lost worker is restarted, and the others continue.

The register decides on the membership of the group (`unison.runtime.elastic`).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from typing import Protocol, Self

from unison.errors import UnavailableError
from unison.runtime.elastic.protocol import DONE, REGISTER_LOST, STOPPED, TOO_FEW_WORKERS
from unison.runtime.launching.ends import End, end_of
from unison.runtime.launching.jobs import Failure
from unison.runtime.launching.restarts import Restarts
from unison.runtime.launching.workers import (
    POLL_INTERVAL,
    NoRoomError,
    OnEvent,
    OnLine,
    Program,
    Start,
    Worker,
)

#: The exit code of a job that has timed out.
TIMEOUT_EXIT_CODE = 124

#: Seconds after which a worker for which there was no room is tried again.
_SECONDS_BETWEEN_TRIES = 1.0


class Group(Protocol):
    """The group that the processes of a job form.

    Attributes:
        final_codes: The exit codes of a worker whose part is over.
    """

    final_codes: frozenset[int]

    def lost(self, worker: int) -> None:
        """Notes that the process of a worker has ended."""

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code of the job once it is over; None after `seconds`."""

    def has_others(self) -> bool:
        """Returns whether there are workers that another process has started."""

    def end(self, why: str) -> None:
        """Makes all workers save their state, and end."""


class ForeignGroup:
    """The group of a job that another process runs; its register notifies only the workers."""

    final_codes = frozenset({DONE, TOO_FEW_WORKERS, REGISTER_LOST})

    def lost(self, worker: int) -> None:
        """Does nothing: the register sees that the connection is closed."""

    def wait(self, seconds: float) -> None:
        """Only sleeps: the register notifies the workers of the end."""
        time.sleep(seconds)

    def has_others(self) -> bool:
        """Returns False: this process does not wait for other workers."""
        return False

    def end(self, why: str) -> None:
        """Does nothing: the other workers continue."""


@dataclasses.dataclass
class _Place:
    """A worker's slot, which successive processes fill."""

    index: int
    program: Program
    worker: Worker | None = None
    starts_at: float | None = 0.0  # None: it is running, or is not restarted
    waits_for: str = ""  # what was missing when it was tried to start it
    started_at: float = 0.0
    has_joined: bool = False
    is_known_lost: bool = False
    is_called_off: bool = False  # it was not in the group when that ended
    dies_at: float | None = None  # when a process that is out of contact is killed
    exit_code: int | None = None  # of the last process

    @property
    def is_over(self) -> bool:
        return self.worker is None and self.starts_at is None


class ElasticJob:
    """The workers that one process starts for an elastic job, as a context manager.

    A worker can end in three ways:
    - It is lost: killed, or it exits because others are lost. It is restarted.
    - It fails: its program raises, or exits with its own error code. It would fail again, so this
      ends the job.
    - It is done: it exits with 0, or because the register has ended its part.

    A worker for which there is no room waits until there is, and the others continue meanwhile.

    Args:
        programs: The workers' programs.
        group: The group.
        on_line: Called for every line that a worker prints, in threads.
        on_event: Called with the workers' events.
        start: Starts a worker.
        restarts: Decides whether a worker is restarted.
        grace: Seconds for workers to save their state and end when the job is stopped.
        patience: Seconds for a worker that hangs, or is disconnected, to rejoin the group; then it
            is killed, and so lost.
        is_error_a_loss: Whether a worker that fails is restarted, too.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        group: Group,
        on_line: OnLine,
        on_event: OnEvent,
        start: Start,
        restarts: Restarts,
        grace: float,
        patience: float,
        is_error_a_loss: bool = False,
    ):
        self._places = [_Place(index, program) for index, program in enumerate(programs)]
        self._group = group
        self._on_line = on_line
        self._on_event = on_event
        self._start = start
        self._restarts = restarts
        self._grace = grace
        self._patience = patience
        self._is_error_a_loss = is_error_a_loss
        self._outcome: int | None = None
        self._has_begun = False
        self._is_winding_up = False
        self._has_cut_short = False  # a member of a finished group has not ended successfully
        self._stops = 0
        self._last_given_up: Failure | None = None
        #: The failure that has ended the job, if any.
        self.failure: Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    @property
    def running(self) -> int:
        """The number of running workers."""
        return sum(place.worker is not None for place in self._places)

    @property
    def is_done(self) -> bool:
        """Whether the group is done, and its workers have ended successfully."""
        return self._outcome == DONE and self.failure is None and not self._has_cut_short

    def joined(self, worker: int) -> None:
        """Notes that a worker has joined the group; any thread may call this."""
        self._places[worker].has_joined = self._has_begun = True

    def missed(self, worker: int) -> None:
        """Notes that a member of the group is out of contact; any thread may call this."""
        place = self._places[worker]
        if place.has_joined and not place.is_known_lost and self._outcome is None:
            place.dies_at = time.monotonic() + self._patience

    def back(self, worker: int) -> None:
        """Notes that a worker has (re)connected to the group; any thread may call this."""
        self._places[worker].dies_at = None

    def stop(self) -> None:
        """Makes `run` end the job; for signal handlers.

        The workers may save their state; on a second call, they are killed.
        """
        self._stops += 1

    def run(self, timeout: float | None = None) -> int:
        """Runs the job until it is over or stopped.

        Args:
            timeout: Seconds after which it is stopped; None for no limit.

        Returns:
            The job's exit code: the group's, or that of `failure`, or 124 after `timeout`. If it is
            done when it is stopped, or when the time is up: 0.
        """
        last = None if timeout is None else time.monotonic() + timeout
        while not self._is_over():
            if last is not None and time.monotonic() > last:
                self._on_event({"event": "timeout", "seconds": timeout, "running": self.running})
                self._wind_up("the time is up")
                return DONE if self.is_done else TIMEOUT_EXIT_CODE
            self._wait_a_moment()
            self._look()
        if self.failure is None and not self._stops and self._outcome is None:
            # No worker is left. If they have formed a group, another run may continue; otherwise,
            # starting failed.
            if self._last_given_up is not None and self._has_begun:
                return TOO_FEW_WORKERS
            self.failure = self._last_given_up
        if self._stops:
            self._on_event({"event": "stopping"})
        if self._stops or self._outcome or self.failure is not None:
            self._wind_up(STOPPED if self.failure is None else str(self.failure))
        if self.failure is not None:
            return self.failure.exit_code
        if self._outcome is not None:
            return self._outcome
        return next((place.exit_code for place in self._places if place.exit_code), 0)

    def _is_over(self) -> bool:
        if self._stops or self._outcome or self.failure is not None:
            return True
        if any(not place.is_over for place in self._places):
            return False
        # A job without its own workers waits for those that other processes start.
        others_go_on = self._group.has_others() or not self._places
        return self._outcome is not None or not others_go_on

    def _wait_a_moment(self) -> None:
        if self._outcome is not None:
            time.sleep(POLL_INTERVAL)
            return
        self._outcome = self._group.wait(POLL_INTERVAL)
        if self._outcome is not None:
            self._call_off_those_to_come()

    def _look(self) -> None:
        """Handles workers that have ended, and starts those that are due."""
        for place in self._places:
            worker = place.worker
            if worker is not None:
                if worker.ended_at and not place.is_known_lost:
                    place.is_known_lost = True
                    self._group.lost(place.index)  # its last output is still being read
                if worker.exit_code is not None:
                    self._bury(place, worker, worker.exit_code)
                elif place.dies_at is not None and time.monotonic() >= place.dies_at:
                    worker.signal(signal.SIGKILL)
            elif place.starts_at is not None and time.monotonic() >= place.starts_at:
                self._start_at(place)

    def _start_at(self, place: _Place) -> None:
        place.starts_at = None
        place.has_joined = place.is_known_lost = place.is_called_off = False
        place.dies_at = None
        place.started_at = time.monotonic()
        try:
            place.worker = self._start(place.index, place.program, self._on_line)
        except NoRoomError as error:
            self._wait_for_room(place, str(error))
        except (OSError, UnavailableError) as error:  # out of processes, or the node is lost
            self._start_again(place, Failure(place.index, 1, [str(error)]), str(error), lived=0.0)
        else:
            place.waits_for = ""
            where = {"where": place.worker.where} if place.worker.where else {}
            self._on_event({"event": "process started", "worker": place.index, **where})

    def _wait_for_room(self, place: _Place, why: str) -> None:
        """Tries again later, which is no restart; the group does not wait for the worker."""
        place.starts_at = time.monotonic() + _SECONDS_BETWEEN_TRIES
        if place.waits_for != why:
            place.waits_for = why
            self._group.lost(place.index)
            self._on_event({"event": "process waits", "worker": place.index, "why": why})

    def _bury(self, place: _Place, worker: Worker, exit_code: int) -> None:
        """Handles the end of a worker."""
        worker.signal(signal.SIGKILL)  # its children
        worker.close()
        place.worker = None
        place.exit_code = exit_code
        self._note_end(place, exit_code)
        has_lost_another = worker.has_lost_another()
        end = end_of(
            exit_code,
            final_codes=self._group.final_codes,
            is_job_over=self._outcome is not None,
            is_called_off=place.is_called_off or self._is_winding_up,
            has_joined=place.has_joined,
            has_lost_another=has_lost_another or bool(worker.lost_with),
            is_error_a_loss=self._is_error_a_loss,
        )
        failure = Failure(place.index, exit_code, worker.last_lines(), lost_with=worker.lost_with)
        if end is End.FINAL:
            self._on_event({"event": "process ended", "worker": place.index, "code": exit_code})
        elif end is End.LOSS:
            lived = worker.ended_at - place.started_at
            because = ", because it had lost another worker" if has_lost_another else ""
            self._start_again(place, failure, failure.how + because, lived)
        elif self.failure is None:
            self.failure = failure

    def _note_end(self, place: _Place, exit_code: int | None) -> None:
        """Notes if a member of a finished group has not ended successfully."""
        if self._outcome == DONE and not place.is_called_off and exit_code != DONE:
            self._has_cut_short = True

    def _start_again(self, place: _Place, failure: Failure, why: str, lived: float) -> None:
        event = self._restarts.lost(place.index, why, lived, place.has_joined)
        if "given_up" in event:
            self._last_given_up = failure
        else:
            place.starts_at = time.monotonic() + event["again_in"]
        self._on_event(event)

    def _call_off_those_to_come(self) -> None:
        """Cancels pending starts, and terminates the workers that are not in the group."""
        for place in self._places:
            place.starts_at = None
            is_in = place.has_joined and place.dies_at is None
            if place.worker is not None and not is_in:
                place.is_called_off = True
                place.worker.signal(signal.SIGTERM)
                place.dies_at = time.monotonic() + self._grace

    def _wind_up(self, why: str) -> None:
        """Lets the workers save their state and end, and kills those that take too long."""
        if self._outcome is None:
            self._outcome = self._group.wait(0.0)  # it may just have ended
        self._is_winding_up = True
        self._call_off_those_to_come()
        if self._outcome is None:
            self._group.end(why)
        last = time.monotonic() + self._grace
        while self.running and self._stops < 2 and time.monotonic() < last:
            time.sleep(POLL_INTERVAL)
            self._look()
        self._kill()

    def _kill(self) -> None:
        """Kills the workers that are still running, and waits until they have ended."""
        left = [(place, place.worker) for place in self._places if place.worker is not None]
        for _, worker in left:
            worker.signal(signal.SIGKILL)
        for place, worker in left:
            worker.close()
            place.worker = None
            self._note_end(place, worker.exit_code)
