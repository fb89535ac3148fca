"""The processes of an elastic job: a worker that is lost is started again, and the others go on.

Who is in the group is the business of the register (`unison.runtime.elastic`).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from unison.errors import UnavailableError
from unison.runtime.elastic.protocol import DONE, REGISTER_LOST, TOO_FEW_WORKERS
from unison.runtime.launching.ends import End, end_of
from unison.runtime.launching.jobs import Failure
from unison.runtime.launching.restarts import GivenUpError, Restarts
from unison.runtime.launching.workers import OnLine, Program, Start, Worker

#: The exit code of a job that took too long.
TIMEOUT_EXIT_CODE = 124

#: Called with what happens: `event` says what, `worker` to which one.
OnEvent = Callable[[Mapping[str, Any]], None]

#: Seconds between two looks at the workers.
_LOOK_EVERY = 0.05


class Group(Protocol):
    """What the processes of a job know of the group that they make up.

    Attributes:
        final_codes: The exit codes with which a worker ends when it is through.
    """

    final_codes: frozenset[int]

    def lost(self, worker: int) -> None:
        """Hears that the process of a worker has ended."""

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code of the job as soon as it is over; None after `seconds`."""

    def has_others(self) -> bool:
        """Whether there are workers that another process has started."""

    def end(self, why: str) -> None:
        """Has all workers save what they have, and end."""


class ForeignGroup:
    """The group of a job that another process runs: its register tells the workers, not us."""

    final_codes = frozenset({DONE, TOO_FEW_WORKERS, REGISTER_LOST})

    def lost(self, worker: int) -> None:
        """The register sees that the connection is closed."""

    def wait(self, seconds: float) -> None:
        """The workers hear of the end."""
        time.sleep(seconds)

    def has_others(self) -> bool:
        """None for whose end this process waits."""
        return False

    def end(self, why: str) -> None:
        """The others go on."""


@dataclasses.dataclass
class _Place:
    """A worker's place, which one process takes after the other."""

    index: int
    program: Program
    worker: Worker | None = None
    starts_at: float | None = 0.0  # None: it runs, or does not start again
    started_at: float = 0.0
    has_joined: bool = False
    is_known_lost: bool = False
    is_called_off: bool = False  # it was not in the group when that ended
    dies_at: float | None = None  # when a process that nobody hears of is killed
    exit_code: int | None = None  # of the last process

    @property
    def is_over(self) -> bool:
        return self.worker is None and self.starts_at is None


class ElasticJob:
    """The workers that one process starts for an elastic job; they end with a `with` block.

    What may happen to a worker:
    - It is lost: killed, or ended because it misses others. It is started again.
    - It fails: its program raises, or exits with a code of its own. It would do so again, so this
      ends the job.
    - It is through: it ends with 0, or because the register has said so.

    Args:
        programs: What the workers run.
        group: What is known of the group.
        on_line: Called for every line that a worker prints, in threads.
        on_event: Called with what happens to the workers.
        start: Starts a worker.
        restarts: Says who is started again.
        grace: Seconds that workers have to save and end when the job is stopped.
        patience: Seconds for a worker that hangs, or is cut off, to come back to the group; then it
            is killed, and so lost.
        is_error_a_loss: Whether a worker that fails is started again, too.
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
        self._has_cut_short = False  # a member of a group that was done has not ended well
        self._stops = 0
        self._last_given_up: Failure | None = None
        #: How a worker failed, if that has ended the job.
        self.failure: Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    @property
    def running(self) -> int:
        """How many of the workers run."""
        return sum(place.worker is not None for place in self._places)

    @property
    def is_done(self) -> bool:
        """Whether the group is done, and its workers have ended well: nothing is left to stop."""
        return self._outcome == DONE and self.failure is None and not self._has_cut_short

    def joined(self, worker: int) -> None:
        """Hears, in any thread, that a worker has joined the group."""
        self._places[worker].has_joined = self._has_begun = True

    def missed(self, worker: int) -> None:
        """Hears, in any thread, that nothing is heard of a member of the group any more."""
        place = self._places[worker]
        if place.has_joined and not place.is_known_lost and self._outcome is None:
            place.dies_at = time.monotonic() + self._patience

    def back(self, worker: int) -> None:
        """Hears, in any thread, that a worker has come to the group, for the first time or anew."""
        self._places[worker].dies_at = None

    def stop(self) -> None:
        """Has `run` end the job; for signal handlers.

        The workers may save what they have; when this is called twice, they are killed.
        """
        self._stops += 1

    def run(self, timeout: float | None = None) -> int:
        """Runs the job until it is over or stopped.

        Args:
            timeout: Seconds after which it is stopped; None: none.

        Returns:
            The job's exit code: the group's, or that of `failure`, or 124 after `timeout`. Where
            it is done when it is stopped, or the time is up: 0.
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
            # Nobody is left. Those that have been a group may come back, others failed to start.
            if self._last_given_up is not None and self._has_begun:
                return TOO_FEW_WORKERS
            self.failure = self._last_given_up
        if self._stops:
            self._on_event({"event": "stopping"})
        if self._stops or self._outcome or self.failure is not None:
            self._wind_up("the job is stopped" if self.failure is None else str(self.failure))
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
        # A job without a worker of its own waits for those that others start.
        others_go_on = self._group.has_others() or not self._places
        return self._outcome is not None or not others_go_on

    def _wait_a_moment(self) -> None:
        if self._outcome is not None:
            time.sleep(_LOOK_EVERY)
            return
        self._outcome = self._group.wait(_LOOK_EVERY)
        if self._outcome is not None:
            self._call_off_those_to_come()

    def _look(self) -> None:
        """Deals with the workers that have ended, and starts those whose time has come."""
        for place in self._places:
            worker = place.worker
            if worker is not None:
                if worker.ended_at and not place.is_known_lost:
                    place.is_known_lost = True
                    self._group.lost(place.index)  # its last words are still being read
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
        except (OSError, UnavailableError) as error:  # no more processes, no such node
            self._start_again(place, Failure(place.index, 1, [str(error)]), lived=0.0)
        else:
            self._on_event({"event": "process started", "worker": place.index})

    def _bury(self, place: _Place, worker: Worker, exit_code: int) -> None:
        """Notes how a worker has ended, and what follows from it."""
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
            has_lost_another=has_lost_another or worker.is_cut_off,
            is_error_a_loss=self._is_error_a_loss,
        )
        failure = Failure(place.index, exit_code, worker.last_lines())
        if end is End.FINAL:
            self._on_event({"event": "process ended", "worker": place.index, "code": exit_code})
        elif end is End.LOSS:
            lived = worker.ended_at - place.started_at
            because = ", since it misses another worker" if has_lost_another else ""
            self._start_again(place, failure, lived, because)
        elif self.failure is None:
            self.failure = failure

    def _note_end(self, place: _Place, exit_code: int | None) -> None:
        """Notes whether a member of a group that is done has ended otherwise."""
        if self._outcome == DONE and not place.is_called_off and exit_code != DONE:
            self._has_cut_short = True

    def _start_again(
        self, place: _Place, failure: Failure, lived: float, because: str = ""
    ) -> None:
        told = {"event": "process lost", "worker": place.index, "why": failure.how + because}
        try:
            pause = self._restarts.pause(place.index, lived, place.has_joined)
        except GivenUpError as error:
            self._last_given_up = failure
            self._on_event({**told, "given_up": str(error)})
        else:
            place.starts_at = time.monotonic() + pause
            self._on_event({**told, "again_in": pause, "restart": self._restarts.used})

    def _call_off_those_to_come(self) -> None:
        """Starts nobody any more, and ends those that are not in the group."""
        for place in self._places:
            place.starts_at = None
            is_in = place.has_joined and place.dies_at is None
            if place.worker is not None and not is_in:
                place.is_called_off = True
                place.worker.signal(signal.SIGTERM)
                place.dies_at = time.monotonic() + self._grace

    def _wind_up(self, why: str) -> None:
        """Lets the workers save what they have and end, and kills those that take too long."""
        if self._outcome is None:
            self._outcome = self._group.wait(0.0)  # it may have ended just now
        self._is_winding_up = True
        self._call_off_those_to_come()
        if self._outcome is None:
            self._group.end(why)
        last = time.monotonic() + self._grace
        while self.running and self._stops < 2 and time.monotonic() < last:
            time.sleep(_LOOK_EVERY)
            self._look()
        self._kill()

    def _kill(self) -> None:
        """Kills the workers that still run, and waits until they have ended."""
        left = [(place, place.worker) for place in self._places if place.worker is not None]
        for _, worker in left:
            worker.signal(signal.SIGKILL)
        for place, worker in left:
            worker.close()
            place.worker = None
            self._note_end(place, worker.exit_code)
