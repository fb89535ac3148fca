"""The register's decisions: a state machine without sockets and without a clock.

It receives events (one method each), and responds with effects: messages to send, connections to
close, and timers to set. `register` executes them; the tests explore all possible sequences of
events (tests/single/test_elastic_model.py). The rules and their reasons are in
docs/elastic_protocol.md.

Safety depends on three facts that it records about the last view that was started:

- `last`: its members. A step of it is complete only when all of them have committed it.
- `is_over`: whether one of them is known to have stopped computing in it, so that no further step
  of it can become complete. No other view is proposed before that.
- `holders`: the processes whose state includes all complete steps: its members, and every process
  that has formed a view since. The step that any other process reports is ignored. A view is
  proposed only with a holder in it, or when no holder can return. A process that was to receive the
  state in a view proposed since may have it, too, and is queried first. When all holders have
  ended, the processes that formed the latest earlier view become holders.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unison.net.lines import Message
from unison.runtime.elastic.protocol import (
    DONE,
    LEFT_BY_NOTICE,
    REFUSED,
    SAVING,
    TOO_FEW_WORKERS,
    Member,
)

#: Seconds to wait for further newcomers, so that they join together.
TOGETHER = 0.2

#: After this many failed views in a row, a worker is excluded for a time.
MOST_FRUITLESS = 2


class Limits(NamedTuple):
    """The limits of a job.

    Attributes:
        min_workers: With fewer, the job does not continue.
        max_workers: With more, some wait until one is lost.
        slots: The number of processes that the supervisor starts, in the slots 0, 1, ...
        answer: Seconds for a worker to report that it has stopped.
        wait: Seconds that too few workers wait for others, and within which a view must make
            progress while it is formed.
        start: Seconds for the workers to connect at the start.
        ends_after_errors: Whether the supervisor ends the job when a program that it has started
            ends with an error.
    """

    min_workers: int
    max_workers: int
    slots: int
    answer: float
    wait: float
    start: float
    ends_after_errors: bool = True


class Phase(enum.Enum):
    """The phase of the group."""

    #: The workers that start the job are not known yet.
    STARTING = "starting"
    #: There is no view: the members of the last one have to report that they have stopped.
    GATHERING = "gathering"
    #: A view is proposed; its members connect and take over the state.
    FORMING = "forming"
    #: The members of a view compute.
    ACTIVE = "active"
    #: The job has ended.
    ENDED = "ended"


class Tell(NamedTuple):
    """A message for a worker."""

    worker: str
    message: Message


class Drop(NamedTuple):
    """Close the connection to a worker, once its messages have been sent."""

    worker: str


class Wake(NamedTuple):
    """Set a timer that calls `Roster.wake`, replacing one of the same name. None: cancel it."""

    timer: str
    seconds: float | None


class Report(NamedTuple):
    """An event to report to users."""

    event: dict[str, Any]


Effect = Tell | Drop | Wake | Report


@dataclasses.dataclass
class Worker:
    """A connected process.

    Attributes:
        member: Its description.
        slot: Its slot among the supervisor's processes; None for another process.
        arrival: Its position in the order of arrival.
        is_welcome: Whether it has been sent its `welcome`.
        view: The number of the last view proposed to it; 0 if none.
        is_awaited: Whether the next view waits for its report that it has stopped.
        is_ready: Whether it has stopped and waits for the next view.
        step: The step of its state, as it has reported it.
        is_open: Whether others could join what its program is doing.
        has_formed: Whether it has formed the proposed view.
        is_leaving: Whether it is to end soon.
        is_done: Whether its program has ended successfully.
    """

    member: Member
    slot: int | None
    arrival: int
    is_welcome: bool = False
    view: int = 0
    is_awaited: bool = False
    is_ready: bool = False
    step: int | None = None
    is_open: bool = False
    has_formed: bool = False
    is_leaving: bool = False
    is_done: bool = False


class _State(NamedTuple):
    """A process that has a state.

    Attributes:
        slot: Its slot among the supervisor's processes; None for another process.
        formed: The last view that it formed.
    """

    slot: int | None
    formed: int


class Roster:
    """Decides which workers compute together.

    Attributes:
        phase: The phase of the group.
        number: The number of the last view that was proposed.
        members: Its members' ids.
        workers: The connected workers, by id.
        nominal: The number of workers with which the job began; None before that.
        outcome: The job's exit code and the reason, once it has ended.
        effects: The effects to execute; the caller that executes them empties the list.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self.phase = Phase.STARTING
        self.number = 0
        self.members: tuple[str, ...] = ()
        self.workers: dict[str, Worker] = {}
        self.nominal: int | None = None
        self.outcome: tuple[int, str] | None = None
        self.effects: list[Effect] = []
        #: See the module docstring; ids, with their slots.
        self.last: dict[str, int | None] = {}
        self.is_over = True
        self._states: dict[str, _State] = {}
        self._started = 0  # the number of the last view that was started, or fallen back to
        #: Processes that were to receive the state in a view, possibly never started, and have not
        #: reported whether they did.
        self._heirs: dict[str, _State] = {}
        self._software: Mapping[str, Any] | None = None
        self._arrivals = 0
        self._lost_slots: set[int] = set()
        #: Members of the last views that are done, by name: from then on, no worker joins.
        self._finished: tuple[str, ...] = ()
        self._timers: set[str] = set()
        #: The greatest step with which the last view was proposed, whether that view ended because
        #: it did not work, and the number of views in a row that failed so without a step in
        #: between.
        self._base: int | None = None
        self._has_failed = False
        self._fruitless = 0
        #: The workers accused since the last step, each with its accusers.
        self._accused: dict[str, set[str]] = {}
        #: The workers that are excluded for a time, and how often each has been.
        self._benched: set[str] = set()
        self._times_benched: dict[str, int] = {}
        self._wake("start", limits.start)

    @property
    def holders(self) -> frozenset[str]:
        """See the module docstring."""
        states = self._states.items()
        return frozenset(id_ for id_, state in states if state.formed >= self._started)

    # Events

    def hello(self, member: Member, slot: int | None, software: Mapping[str, Any]) -> None:
        """Handles a process that connects, for the first time or again."""
        if slot is not None:  # the supervisor only starts a process in an empty slot
            self._end_all_in(slot, other_than=member.id)
        worker = Worker(member, slot, self._arrivals)
        self._arrivals += 1
        if self.outcome is not None:
            self._refuse(worker, *self.outcome)
            return
        if self._software is not None and self._software != software:
            why = f"other software than the job's: {dict(software)}, not {dict(self._software)}"
            self._refuse(worker, REFUSED, why)
            return
        self._software = software
        self.workers[member.id] = worker
        if slot is not None:
            self._lost_slots.discard(slot)
        self._report("came", worker=member.name)
        if self.phase is Phase.STARTING:
            self._begin_if_complete()
        else:
            self._go_on()

    def ready(self, id_: str, view: int, step: int | None, formed: int, is_open: bool) -> None:
        """Handles a worker that has stopped computing in `view`, and waits for the next one.

        It has the state of `step`, from which the view `formed` began or to which it led.
        """
        worker = self.workers.get(id_)
        if worker is None or not worker.is_welcome or worker.view != view:
            return
        worker.is_ready, worker.is_awaited = True, False
        worker.step, worker.is_open = step, is_open
        if id_ in self.last:
            self.is_over = True
        self._heirs.pop(id_, None)
        if step is None:
            self._states.pop(id_, None)
        elif formed:
            self._states[id_] = _State(worker.slot, formed)
        if worker.is_leaving:
            self._let_go(worker)
        elif self._is_member(id_):
            self._interrupt(f"{worker.member.name} has requested a new view")
        else:
            self._go_on()

    def formed(self, id_: str, view: int) -> None:
        """Handles a worker that has formed the proposed view, and has its state."""
        worker = self.workers.get(id_)
        if worker is None or self.phase is not Phase.FORMING or worker.view != view:
            return
        if view != self.number:
            return
        worker.has_formed = True
        self._states[id_] = _State(worker.slot, view)
        self._heirs.pop(id_, None)
        if all(self.workers[member].has_formed for member in self.members):
            self._start()

    def opened(self, id_: str, is_open: bool) -> None:
        """Handles a change of whether others can join what a worker is doing."""
        if id_ in self.workers:
            self.workers[id_].is_open = is_open
            self._go_on()

    def advanced(self, id_: str) -> None:
        """Handles the progress of a worker that is forming a view."""
        if self.phase is Phase.FORMING and self._is_member(id_):
            self._wake("form", self._limits.wait)

    def suspect(self, id_: str, view: int, accused: Iterable[str], about: str) -> None:
        """Handles a worker's report that the view does not work."""
        if self._is_member(id_) and view == self.number:
            for other in accused:
                self._accused.setdefault(other, set()).add(id_)
            self._has_failed = True
            self._interrupt(f"{self.workers[id_].member.name}: {about}")

    def leaving(self, id_: str) -> None:
        """Handles a worker that is to end soon."""
        worker = self.workers.get(id_)
        if worker is None or worker.is_leaving:
            return
        worker.is_leaving, worker.is_awaited = True, False
        self._report("leaving", worker=worker.member.name)
        if worker.is_ready:
            self._let_go(worker)
        elif self._is_member(id_):
            self._interrupt(f"{worker.member.name} leaves")
        else:
            self._go_on()

    def done(self, id_: str) -> None:
        """Handles the successful end of a worker's program."""
        worker = self.workers.get(id_)
        if worker is None or worker.is_done:
            return
        worker.is_done, worker.is_awaited, worker.is_ready = True, False, False
        self._report("done", worker=worker.member.name)
        if id_ in self.last:
            self._finished = tuple(sorted({*self._finished, worker.member.name}))
        self._forget(id_)
        if self.phase is Phase.FORMING and self._is_member(id_):
            self._interrupt(f"{worker.member.name} is done")
            return
        if self.phase is Phase.ACTIVE and self._is_member(id_):
            # The others should be done soon, too; otherwise their programs differ, and they wait
            # for it.
            self._wake("done", self._limits.answer)
        self._go_on()

    def failed(self, id_: str, about: str) -> None:
        """Handles an error of a worker's program, which the others would encounter, too.

        No worker continues before the supervisor has had time to end the job.
        """
        worker = self.workers.get(id_)
        if worker is None or worker.slot is None or not self._limits.ends_after_errors:
            return
        self._report("failed", worker=worker.member.name, why=about)
        self._wake("failed", self._limits.answer)
        self._remove(id_, f"its program has failed: {about}")
        self._go_on()

    def gone(self, id_: str, why: str) -> None:
        """Handles a worker whose connection was closed, or that was silent for too long."""
        if id_ in self.workers:
            self._remove(id_, why)
            self._go_on()

    def ended(self, slot: int) -> None:
        """Handles the end of a process in a slot, as seen by the supervisor."""
        self._lost_slots.add(slot)
        self._end_all_in(slot)
        if self.phase is Phase.STARTING:
            self._begin_if_complete()
        else:
            self._go_on()

    def wake(self, timer: str) -> None:
        """Handles a timer that an effect `Wake` has set."""
        self._timers.discard(timer)
        if timer == "start":
            self._start_is_late()
        elif timer == "answer":
            self._answer_is_late()
        elif timer == "form" and self.phase is Phase.FORMING:
            for id_ in self.members:
                if not self.workers[id_].has_formed:
                    self._accused.setdefault(id_, set()).add("")
            self._has_failed = True
            self._interrupt(f"the proposed view has made no progress for {self._limits.wait:g} s")
        elif timer == "done" and self.phase is Phase.ACTIVE:
            done = f"{', '.join(self._finished)} {'is' if len(self._finished) == 1 else 'are'} done"
            self._interrupt(f"{done}, and others are not after {self._limits.answer:g} s")
        elif timer == "together" and self.phase is Phase.ACTIVE:
            names = [worker.member.name for worker in self._newcomers()]
            if names:
                self._interrupt(f"{', '.join(names)} {'joins' if len(names) == 1 else 'join'}")
        elif timer == "short" and self.phase is Phase.GATHERING:
            self._end_as_too_few()
        elif timer == "failed":
            self._go_on()
        elif timer.startswith("bench "):
            self._benched.discard(timer.removeprefix("bench "))
            self._go_on()

    def end(self, code: int, why: str) -> None:
        """Ends the job."""
        if self.outcome is not None:
            return
        self.outcome = (code, why)
        self.phase = Phase.ENDED
        self._report("ended", code=code, why=why)
        for worker in self.workers.values():
            if not worker.is_done:
                self._end_part_of(worker.member.id, code, why)
        for timer in sorted(self._timers):
            self._wake(timer, None)

    # The start

    def _begin_if_complete(self) -> None:
        known = self._lost_slots | {worker.slot for worker in self.workers.values()}
        count = len(self.workers)
        if count >= self._limits.max_workers or (
            count >= self._limits.min_workers and known >= set(range(self._limits.slots))
        ):
            self._begin()

    def _begin(self) -> None:
        self.nominal = min(len(self.workers), self._limits.max_workers)
        self.phase = Phase.GATHERING
        self._go_on()

    def _start_is_late(self) -> None:
        if self.phase is Phase.STARTING and len(self.workers) >= self._limits.min_workers:
            self._begin()
        elif self.phase is Phase.STARTING:
            self.end(
                TOO_FEW_WORKERS,
                f"{self._limits.min_workers} workers are needed to begin, and within "
                f"{self._limits.start:g} s {_count(self.workers.values())} connected",
            )
        elif self.phase is Phase.GATHERING and not self.last:
            self._expel(f"it has not begun within {self._limits.start:g} s")

    def _welcome(self) -> None:
        """Sends `welcome` to the workers that wait for it."""
        starting = sum(worker.is_welcome for worker in self.workers.values())
        for worker in sorted(self.workers.values(), key=_at_start):
            is_joining = bool(self.last)
            if worker.is_welcome or (not is_joining and self.phase is not Phase.GATHERING):
                continue
            if not is_joining:
                has_state = worker.member.id in self._states or worker.member.id in self._heirs
                if starting >= self._limits.max_workers and not has_state:
                    continue
                starting += 1
                worker.is_awaited = True
                self._wake("start", self._limits.start)
            worker.is_welcome = True
            self._tell(worker.member.id, "welcome", nominal=self.nominal, is_joining=is_joining)

    # From one view to the next

    def _go_on(self) -> None:
        """Takes the next possible action."""
        if self.outcome is not None or self.phase is Phase.STARTING:
            return
        if not (self._has_holders() or self._finished):
            self._fall_back()
        self._welcome()
        self._send_away()
        if self._finished and not self.holders:
            self.end(DONE, "all workers are done")
        elif self.phase is Phase.ACTIVE and self._newcomers():
            if "together" not in self._timers:
                self._wake("together", TOGETHER)
        elif self.phase is Phase.GATHERING:
            if "failed" in self._timers or any(w.is_awaited for w in self.workers.values()):
                return
            if self._has_failed:
                self._has_failed = False
                self._note_failure()
            candidates = self._candidates()
            if self._may_begin(candidates):
                self._propose(candidates)
            elif "short" not in self._timers:
                self._wake("short", self._limits.wait)

    def _fall_back(self) -> None:
        """Makes holders of the processes with the latest formed view, among those that may return.

        For processes that the supervisor has not started, their end cannot be observed.
        """
        states = [*self._states.items(), *self._heirs.items()]
        may_come = (own for id_, own in states if own.slot is not None or id_ in self.workers)
        self._started = max((own.formed for own in may_come), default=self._started)

    def _has_holders(self) -> bool:
        """Returns whether there are holders, or may be."""
        return any(
            own.formed >= self._started for own in (*self._states.values(), *self._heirs.values())
        )

    def _candidates(self) -> list[Worker]:
        """Returns the workers that can be in the next view, in its order."""
        able, holders = self._able(), self.holders
        place = {id_: place for place, id_ in enumerate(self.members)}

        def order(worker: Worker) -> tuple[Any, ...]:
            id_ = worker.member.id
            since = (worker.arrival,) if self.last else _at_start(worker)
            return id_ not in holders, place.get(id_, len(place)), since

        insiders = [worker for worker in able if worker.member.id in holders]
        if self._finished or not all(worker.is_open for worker in insiders):
            able = insiders
        return sorted(able, key=order)[: self._limits.max_workers]

    def _able(self) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.is_ready and worker.member.id not in self._benched
        ]

    def _may_begin(self, candidates: list[Worker]) -> bool:
        """Returns whether their view keeps all complete steps, and is the only active one."""
        is_enough = len(candidates) >= (1 if self._finished else self._limits.min_workers)
        has_state = any(worker.member.id in self.holders for worker in candidates)
        return is_enough and self.is_over and (has_state or not self._has_holders())

    def _propose(self, candidates: list[Worker]) -> None:
        self.number += 1
        self.members = tuple(worker.member.id for worker in candidates)
        self.phase = Phase.FORMING
        steps = [w.step if w.member.id in self.holders else None for w in candidates]
        self._base = max((step for step in steps if step is not None), default=None)
        source = None if self._base is None else steps.index(self._base)
        for worker in candidates:
            if source is not None and worker.member.id not in self.holders:
                self._heirs[worker.member.id] = _State(worker.slot, self.number)
            worker.view = self.number
            worker.is_ready = worker.has_formed = False
            self._tell(
                worker.member.id,
                "view",
                number=self.number,
                members=[other.member._asdict() for other in candidates],
                steps=steps,
                source=source,
            )
        self._wake("answer", None)
        self._wake("short", None)
        self._wake("form", self._limits.wait)
        names = [worker.member.name for worker in candidates]
        self._report("proposed", view=self.number, workers=names, step=self._base)

    def _start(self) -> None:
        self.phase = Phase.ACTIVE
        self.last = {id_: self.workers[id_].slot for id_ in self.members}
        self._started = self.number
        self.is_over = False
        self._wake("form", None)
        self._wake("start", None)
        for id_ in self.members:
            self._tell(id_, "start", number=self.number)
        names = [self.workers[id_].member.name for id_ in self.members]
        self._report("started", view=self.number, workers=names, step=self._base)
        self._go_on()

    def _interrupt(self, why: str) -> None:
        """Ends the present view, and tells its members to stop."""
        self.phase = Phase.GATHERING
        self._report("interrupted", view=self.number, why=why)
        for id_ in self.members:
            worker = self.workers.get(id_)
            if worker is None or worker.is_done:
                continue
            self._tell(id_, "interrupt", view=self.number, why=why)
            worker.is_awaited = not worker.is_ready and not worker.is_leaving
        for timer in ("form", "together", "done"):
            self._wake(timer, None)
        self._wake("answer", self._limits.answer)
        self._go_on()

    def _newcomers(self) -> list[Worker]:
        """Returns the workers for which the active view should be interrupted."""
        here = [worker for worker in map(self.workers.get, self.members) if worker is not None]
        if self._finished or not all(worker.is_open for worker in here):
            return []
        room = max(self._limits.max_workers - len(here), 0)
        return sorted(self._able(), key=lambda worker: worker.arrival)[:room]

    def _send_away(self) -> None:
        """Refuses workers that return at a point of their program where they cannot join."""
        if not self.last or not self.holders:
            return
        for id_, worker in list(self.workers.items()):
            if worker.is_ready and not worker.is_open and id_ not in self.holders:
                why = "the others have continued without it, and it cannot join them at its step"
                self._refuse(worker, REFUSED, why)
                del self.workers[id_]

    def _note_failure(self) -> None:
        """Excludes a worker for a time, after several failed views."""
        steps = [
            worker.step
            for worker in self.workers.values()
            if worker.is_ready and worker.member.id in self.holders and worker.step is not None
        ]
        if max(steps, default=None) != self._base:
            self._fruitless = 0
            self._accused = {}
        self._fruitless += 1
        if self._fruitless < MOST_FRUITLESS:
            return
        here = [id_ for id_ in self.members if id_ in self.workers and self.workers[id_].is_ready]
        if len(here) > 1:
            self._bench(self._culprit(here))
        self._fruitless = 0
        self._accused = {}

    def _culprit(self, here: list[str]) -> str:
        """Returns the worker that is most likely the cause of the failures.

        If a link is broken, either end may be at fault: newcomers first, as the others have worked
        before; then the worker that is accused by most; then the last one in the view.
        """
        involved = set(self._accused).union(*self._accused.values())
        place = {id_: place for place, id_ in enumerate(here)}

        def guilt(id_: str) -> tuple[bool, int, int]:
            return id_ not in self.holders, len(self._accused.get(id_, ())), place[id_]

        return max([id_ for id_ in here if id_ in involved] or here, key=guilt)

    def _bench(self, id_: str) -> None:
        self._benched.add(id_)
        times = self._times_benched[id_] = self._times_benched.get(id_, 0) + 1
        seconds = self._limits.answer * 2 ** min(times, 10)
        self._wake(f"bench {id_}", seconds)
        self._report("benched", worker=self.workers[id_].member.name, seconds=seconds)

    # Leaving workers

    def _is_member(self, id_: str) -> bool:
        """Returns whether a worker is in the present view, proposed or active."""
        has_view = self.phase in (Phase.FORMING, Phase.ACTIVE)
        return has_view and id_ in self.members and id_ in self.workers

    def _remove(self, id_: str, why: str) -> None:
        """Counts a worker as lost; it may reconnect."""
        was_member = self._is_member(id_)
        worker = self.workers.pop(id_)
        self._drop(id_)
        if worker.is_done or self.outcome is not None:
            return
        self._report("lost", worker=worker.member.name, slot=worker.slot, why=why)
        if was_member:
            self._fruitless = 0
            self._interrupt(f"{worker.member.name} is lost: {why}")

    def _let_go(self, worker: Worker) -> None:
        """Ends the part of a worker that is leaving, and has stopped.

        If no other worker is known to have the state, it saves the state for those that continue.
        They wait for the end of its process, which the supervisor sees.
        """
        id_ = worker.member.id
        is_last = self.holders == {id_} and not self._finished
        why = "it has announced that it leaves (SIGTERM)"
        self._end_part_of(id_, LEFT_BY_NOTICE, why, saves=is_last)
        del self.workers[id_]
        self._drop(id_)
        if is_last and worker.slot is not None:
            self.is_over = True
        else:
            self._forget(id_)
        self._go_on()

    def _answer_is_late(self) -> None:
        """Continues without the workers that have not stopped, if any could continue."""
        could_go_on = [id_ for id_, worker in self.workers.items() if worker.is_ready]
        if self.holders:
            could_go_on = [id_ for id_ in could_go_on if id_ in self.holders]
        if could_go_on:
            self._expel(f"it has not stopped within {self._limits.answer:g} s")
        elif any(worker.is_awaited for worker in self.workers.values()):
            self._wake("answer", self._limits.answer)  # all of them are compiling or saving

    def _expel(self, why: str) -> None:
        """Counts the workers that all others wait for as lost."""
        for id_ in [id_ for id_, worker in self.workers.items() if worker.is_awaited]:
            self._remove(id_, why)
        self._go_on()

    def _end_all_in(self, slot: int, other_than: str | None = None) -> None:
        """Notes that the processes in a slot have ended."""
        states = self._heirs | self._states
        known = self.last | {id_: own for id_, (own, _) in states.items()}
        for id_ in [id_ for id_ in known if known[id_] == slot and id_ != other_than]:
            self._forget(id_)
        for id_ in [id_ for id_, worker in self.workers.items() if worker.slot == slot]:
            self._remove(id_, "its process has ended")

    def _forget(self, id_: str) -> None:
        """Notes that a process has stopped computing, and that its state is lost."""
        self._states.pop(id_, None)
        self._heirs.pop(id_, None)
        if id_ in self.last:
            self.is_over = True

    def _refuse(self, worker: Worker, code: int, why: str) -> None:
        self._end_part_of(worker.member.id, code, why)
        self._drop(worker.member.id)
        self._report("refused", worker=worker.member.name, why=why)

    def _end_as_too_few(self) -> None:
        if self._finished:
            self.end(DONE, "all remaining workers are done")
            return
        able, candidates = self._able(), self._candidates()
        if len(candidates) >= self._limits.min_workers:
            why = (
                "no worker that is left has the state, and those that had it may still compute: "
                "their connections are lost, but the end of their processes was not observed"
            )
        elif len(able) >= self._limits.min_workers:
            why = (
                f"{_count(able)} workers are ready, but those that have the state are at a point "
                "of their program where no worker can join"
            )
        else:
            why = (
                f"{self._limits.min_workers} workers are needed to continue, and there "
                f"{'is' if len(able) == 1 else 'are'} {_count(able)}"
            )
        self.end(TOO_FEW_WORKERS, f"{why} (after {self._limits.wait:g} s)")

    # Effects

    def _tell(self, id_: str, what: str, **fields: Any) -> None:
        self.effects.append(Tell(id_, {"is": what} | fields))

    def _end_part_of(self, id_: str, code: int, why: str, saves: bool = False) -> None:
        self._tell(id_, "end", code=code, why=why, saves=saves or code in SAVING)

    def _drop(self, id_: str) -> None:
        self.effects.append(Drop(id_))

    def _wake(self, timer: str, seconds: float | None) -> None:
        if seconds is None and timer not in self._timers:
            return
        self._timers.discard(timer)
        if seconds is not None:
            self._timers.add(timer)
        self.effects.append(Wake(timer, seconds))

    def _report(self, event: str, **fields: Any) -> None:
        self.effects.append(Report({"event": event} | fields))


def _at_start(worker: Worker) -> tuple[Any, ...]:
    """Returns a sort key: by slot; workers without one are last, in the order of arrival."""
    return worker.slot is None, worker.slot or 0, worker.arrival


def _count(workers: Iterable[Worker]) -> str:
    names = sorted(worker.member.name for worker in workers)
    return f"{len(names)} ({', '.join(names)})" if names else "none"
