"""All that can happen to a small elastic job, one state after the other.

A `World` is the register's `Roster`, some workers (each a `Participant` and a program), and what is
on its way between them. `explore` visits every state that can be reached from the beginning with a
bounded number of faults, breadth first, and says how the first comes about that breaks a rule.

Where the order of moves of one process makes no difference to anything else, one order stands for
all (`Setting.is_fine` tells them apart all the same): a process says its part of a step as soon as
it can, as a part that nobody has looked at is none; and it does at once what follows from what it
has heard, as it could have heard it later. Numbers of views and of arrivals are only compared:
states that differ in them, and not in their order, are equal.

A program's step takes two moves: it says its part, and it commits once all members of its view have
said theirs. A state is the list of the views in which its steps were computed: two states are equal
if, and only if, they come of the same computation.

The rules:

- A step that all members of its view have committed is in the state with which any later view
  begins, unless every process that had it has ended.
- No step becomes complete in a view after a later one has begun without it, and none twice.
- The members of a view begin with equal states.
- Once the job is done, no process leaves a state for another run, also if it is told to end then.
- No process ends in a way that the supervisor takes for a mistake in the program.
- Without further faults, a view of at least the least number of workers is active in the end, or
  the job ends where there are fewer: no state without a way on, no circle, and not view after view.
"""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from unison.runtime.elastic.participant import Participant
from unison.runtime.elastic.protocol import DONE, REGISTER_LOST, TOO_FEW_WORKERS, Member, View
from unison.runtime.elastic.roster import Drop, Limits, Phase, Roster, Tell, Worker
from unison.runtime.launching.ends import End, end_of


class BrokenRule(Exception):  # noqa: N818
    """A rule does not hold; the message says which."""


class Setting(NamedTuple):
    """What is explored.

    Attributes:
        workers: How many processes the supervisor starts.
        newcomers: How many more come at any time.
        least, most: The limits on the number of workers.
        steps: How many steps a program takes.
        faults: How many faults happen, of the kinds that are given.
        kinds: "crash", "cut" (the connection is lost), "silence" (the register thinks so), "late"
            (a timer goes off early), "suspect", "notice", "failure" (of the program), "stop" (the
            supervisor ends the job).
        restarts: How many processes the supervisor starts again.
        is_finite: Whether the programs end after their steps.
        shorter: How many steps fewer the program in slot 0 takes: it is a wrong one.
        apart: Pairs of slots whose processes cannot reach each other.
        is_fine: Whether moves of one process between which others could notice nothing are told
            apart all the same.
        roster, participant: What is explored.
    """

    workers: int = 2
    newcomers: int = 0
    least: int = 1
    most: int = 2
    steps: int = 1
    faults: int = 1
    kinds: tuple[str, ...] = ("crash", "cut", "silence", "late", "suspect", "notice")
    restarts: int = 0
    is_finite: bool = False
    shorter: int = 0
    apart: tuple[tuple[int, int], ...] = ()
    is_fine: bool = False
    roster: type[Roster] = Roster
    participant: type[Participant] = Participant


#: Where a program is that computes in a view, or may come to.
_IN_A_VIEW = ("forming", "received", "formed", "computing")

#: What stands for the view of a program that is in none any more.
_SOME_VIEW = View(0, (), 0)

#: Attributes of a participant in which states do not differ: those that are for the program only.
_NO_STATE_OF_A_PARTICIPANT = ("was_cut", "outbox")


@dataclasses.dataclass
class Process:
    """A process of a worker.

    Attributes:
        id: Its slot, and how many were there before it.
        program: Where its program is.
        state: The view in which each of its steps was computed; None: it has no state.
        said: The step for which it has said its part in the present view.
        link: Its end of the connection: "none", "open", or "half" (the register has closed it).
        up, down: What is on its way to the register, and from it.
        is_known: Whether the register has its end of a connection.
        is_told: Whether the supervisor has told the register that it has ended.
    """

    slot: int
    id: str
    participant: Participant
    program: str = "unborn"
    state: tuple[int, ...] | None = None
    said: int = 0
    link: str = "none"
    up: list[Any] = dataclasses.field(default_factory=list)
    down: list[Any] = dataclasses.field(default_factory=list)
    is_known: bool = False
    is_told: bool = False
    frozen: Any = None

    @property
    def is_alive(self) -> bool:
        return self.program not in ("unborn", "over")

    @property
    def is_joined(self) -> bool:
        """Whether its end of the connection belongs to the register's, and not to a new one."""
        return self.link == "open" and self.up[:1] != [HELLO]

    def copy(self) -> Process:
        new = _copy(self)
        new.participant = _copy(self.participant)
        new.frozen = None
        return new

    def key(self) -> tuple[int, tuple[int, ...]]:
        """What tells states apart but for the numbers of views, and these numbers.

        It is computed once for a process that does not change.
        """
        if self.frozen is None:
            about = {
                name: value
                for name, value in self.participant.__dict__.items()
                if name not in _NO_STATE_OF_A_PARTICIPANT
            }
            view, proposed = about.pop("view"), about.pop("_proposed")
            own_numbers = about.pop("_number"), about.pop("_formed")
            ended = about.pop("ended")
            about["interrupted"] = about["interrupted"] is not None
            # What is set anew before it is looked at.
            if self.program not in _IN_A_VIEW:
                view = None if view is None else _SOME_VIEW
                about["interrupted"] = about["has_started"] = False
            if not about["_is_waiting"]:
                about["_step"] = None
            messages = (*self.up, *self.down)
            shape = (
                self.id,
                self.program,
                None if self.state is None else len(self.state),
                self.said,
                self.link,
                len(self.up),
                self.is_known,
                self.is_told,
                tuple([message.shape for message in messages]),
                tuple([own and own._replace(number=0) for own in (view, proposed)]),
                None if ended is None else (ended.code, ended.saves),
                _frozen(about),
            )
            numbers = [*(self.state or ()), *own_numbers]
            numbers += [own.number for own in (view, proposed) if own]
            for message in messages:
                numbers += message.numbers
            self.frozen = hash(shape), tuple(numbers)
        return self.frozen


class World:
    """A state of everything."""

    def __init__(self, setting: Setting):
        self.setting = setting
        limits = Limits(setting.least, setting.most, setting.workers, 1.0, 1.0, 1.0)
        self._roster = setting.roster(limits)
        self._roster_key: Any = None
        self._processes: dict[str, Process] = {}
        self._owned: set[str] = set()  # what this world has changed; all else belongs to others
        for slot in range(setting.workers + setting.newcomers):
            self._add(slot, 0)
        self.faults = setting.faults
        self.restarts = setting.restarts
        #: (step, view) -> who has committed it; those that all members have; and the number of
        #: the last view that has begun, with the state of its members then.
        self.committed: dict[tuple[int, int], frozenset[str]] = {}
        self.complete: frozenset[tuple[int, int]] = frozenset()
        self.begun: tuple[int, tuple[int, ...]] = (0, ())
        self._carry_out()

    def _add(self, slot: int, generation: int) -> None:
        id_ = f"{slot}.{generation}"
        self._processes[id_] = Process(slot, id_, self.setting.participant(id_))
        if not self.setting.is_fine:
            self._begin(self._processes[id_])

    def process(self, id_: str) -> Process | None:
        """Returns a process, to be changed."""
        process = self._processes.get(id_)
        if process is not None and id_ not in self._owned:
            process = self._processes[id_] = process.copy()
            self._owned.add(id_)
        return process

    @property
    def roster(self) -> Roster:
        """The register, to be changed."""
        if "" not in self._owned:
            self._owned.add("")
            workers = {id_: _copy(worker) for id_, worker in self._roster.workers.items()}
            self._roster = _copy(self._roster)
            self._roster.workers = workers
            self._roster_key = None
        return self._roster

    # Moves: (label, function). They change a copy.

    def moves(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """What can happen without a fault."""
        for process in self._processes.values():
            for label, move in self._moves_of(process):
                yield f"{process.id} {label}", _on(process.id, move)
        if "together" in self._roster._timers:
            yield "timer together", _wakes("together")

    def late_moves(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """What happens where nothing else can."""
        for timer in sorted(self._roster._timers):
            # Who is left out again and again is left out for as long as all this takes.
            if self._roster._times_benched.get(timer.removeprefix("bench "), 0) < 2:
                yield f"timer {timer}, nothing else happening", _wakes(timer)

    def fault_moves(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """The faults that can happen."""
        if not self.faults:
            return
        kinds = self.setting.kinds
        for process in self._processes.values():
            for kind in ("crash", "cut", "silence", "notice", "failure"):
                if kind in kinds and getattr(self, f"_can_{kind}")(process):
                    move = _on(process.id, getattr(World, f"_{kind}"))
                    yield f"FAULT {process.id} {kind}", _counted(move)
            if "suspect" in kinds and process.program in ("forming", "formed", "computing"):
                for other in self._others(process):
                    suspect = _on(process.id, _suspects(other))
                    yield f"FAULT {process.id} suspects {other}", _counted(suspect)
        if "stop" in kinds and self._roster.outcome is None:
            yield "FAULT the job is stopped", _counted(_stop)
        if "late" in kinds:
            for timer in sorted(self._roster._timers):
                if timer != "together":
                    yield f"FAULT timer {timer} early", _counted(_wakes(timer))

    def _moves_of(self, process: Process) -> Iterator[tuple[str, Callable[..., None]]]:
        participant = process.participant
        if process.program == "unborn":
            yield "is started", World._begin
            return
        if process.is_known and process.link != "half" and not process.is_joined:
            yield "is found to be gone", World._find
        if process.program == "over":
            if not process.is_told:
                yield "is seen to have ended", World._tell_of_end
            elif self.restarts:
                yield "is started again", World._restart
            return
        if process.link == "none" and participant.ended is None:
            yield "connects", World._connect
        if self._roster.outcome is not None and self._can_notice(process):
            yield "is called off", World._notice
        if process.link == "open" and process.up:
            yield f"is heard: {process.up[0]['is']}", World._hear_up
        if process.down and process.link != "none":
            yield f"hears: {process.down[0]['is']}", World._hear_down
        yield from self._program_moves(process)

    def _program_moves(self, process: Process) -> Iterator[tuple[str, Callable[..., None]]]:
        participant, program = process.participant, process.program
        if participant.ended is not None and not self._is_in_a_step(process):
            yield "ends", World._exit
            return
        if program == "outside" and participant.welcome is not None:
            yield "regroups", World._regroup
        elif program == "waiting" and participant._proposed is not None:
            yield "takes the view", World._take
        elif program in ("forming", "received", "formed") and participant.interrupted is not None:
            yield "regroups", World._regroup
        elif program == "forming":
            if blocked := self._unreachable_from(process):
                yield f"suspects {blocked}", _suspects(blocked)
            elif self._source_of(process) is not None:
                yield "gets the state", World._receive
        elif program == "received":
            yield "has formed the view", World._confirm
        elif program == "formed" and participant.has_started:
            yield "begins", World._start
        elif program == "computing":
            yield from self._step_moves(process)

    def _step_moves(self, process: Process) -> Iterator[tuple[str, Callable[..., None]]]:
        is_over = process.participant.interrupted is not None
        assert process.state is not None
        if process.said and self._all_have_said(process):
            yield f"commits step {process.said}", World._commit
        if is_over:
            yield "regroups", World._regroup
        elif not process.said and len(process.state) < self._steps(process):
            yield f"says its part of step {len(process.state) + 1}", World._say
        elif self.setting.is_finite and len(process.state) == self._steps(process):
            yield "is done", World._finish

    # What they do

    def _begin(self, process: Process) -> None:
        process.program = "outside"
        if not self.setting.is_fine:
            self._connect(process)

    def _connect(self, process: Process) -> None:
        process.link = "open"
        process.up, process.down = [HELLO], []

    def _hear_up(self, process: Process) -> None:
        message, roster, id_ = process.up.pop(0), self.roster, process.id
        what = message["is"]
        if what == "hello":
            if process.is_known:
                self._find(process)
            process.is_known = True
            roster.hello(Member(id_, id_, "host", "", 1), process.slot, {})
        elif what == "ready":
            state = message["step"], message["formed"]
            roster.ready(id_, message["view"], *state, message["is_open"])
        elif what == "formed":
            roster.formed(id_, message["view"])
        elif what == "suspect":
            roster.suspect(id_, message["view"], message["accused"], message["about"])
        elif what == "leaving":
            roster.leaving(id_)
        elif what == "done":
            roster.done(id_)
        elif what == "failed":
            roster.failed(id_, message["about"])
        self._carry_out()

    def _hear_down(self, process: Process) -> None:
        message = process.down.pop(0)
        if message is END:
            process.link = "none"
            process.up, process.down = [], []
            process.participant.cut("the connection is lost")
            if not self.setting.is_fine and process.participant.ended is None:
                self._connect(process)
            return
        process.participant.hear(message)
        self._post(process)
        if self.setting.is_fine or process.participant.ended is not None:
            return
        if message["is"] == "welcome" and process.program == "outside":
            self._regroup(process)
        elif message["is"] == "start" and "begins" in dict(self._program_moves(process)):
            self._start(process)
        elif message["is"] == "interrupt" and self._may_hurry(process):
            self._regroup(process)

    def _find(self, process: Process) -> None:
        process.is_known = False
        self.roster.gone(process.id, "its connection has closed")
        self._carry_out()

    def _tell_of_end(self, process: Process) -> None:
        process.is_told = True
        self.roster.ended(process.slot)
        self._carry_out()

    def _restart(self, process: Process) -> None:
        self.restarts -= 1
        slot, generation = map(int, process.id.split("."))
        del self._processes[process.id]
        self._add(slot, generation + 1)

    def _regroup(self, process: Process) -> None:
        if process.program == "received":
            process.participant.confirm()
        process.program, process.said = "waiting", 0
        step = None if process.state is None else len(process.state)
        process.participant.regroup(step, True)
        self._post(process)

    def _take(self, process: Process) -> None:
        process.participant.take()
        process.program = "forming"

    def _receive(self, process: Process) -> None:
        before, process.state = process.state, self._source_of(process)
        process.program = "received"
        could_leave = "notice" in self.setting.kinds and before != process.state
        if not self.setting.is_fine and not could_leave:
            self._confirm(process)

    def _confirm(self, process: Process) -> None:
        process.participant.confirm()
        process.program = "formed"
        self._post(process)

    def _may_hurry(self, process: Process) -> bool:
        """Whether nothing can come between that a view is over and what its member does then."""
        is_forming = process.program in ("forming", "received", "formed")
        return is_forming and process.participant.interrupted is not None

    def _start(self, process: Process) -> None:
        process.program = "computing"
        if not self.setting.is_fine:
            self._say_early(process)
        assert process.state is not None
        assert process.participant.view is not None
        number, state = process.participant.view.number, process.state
        if number < self.begun[0]:
            return  # it is late: the others have stopped since
        if number == self.begun[0] and state != self.begun[1]:
            raise BrokenRule(f"the members of view {number} begin with different states")
        self.begun = number, state
        for step, view in sorted(self.complete):
            if view < number and state[step - 1 : step] != (view,):
                self._lose(step, view, number)

    def _lose(self, step: int, view: int, number: int) -> None:
        """Checks that a complete step was only lost with all processes that had it."""
        for other in self._processes.values():
            has_it = other.state is not None and other.state[step - 1 : step] == (view,)
            if has_it and other.is_alive:
                raise BrokenRule(
                    f"step {step}, complete in view {view}, is lost in view {number}, and "
                    f"{other.id} has it"
                )
        self.complete -= {(step, view)}

    def _steps(self, process: Process) -> int:
        """How many steps the process's program takes."""
        return self.setting.steps - (self.setting.shorter if process.slot == 0 else 0)

    def _say(self, process: Process) -> None:
        assert process.state is not None
        process.said = len(process.state) + 1

    def _say_early(self, process: Process) -> None:
        assert process.state is not None
        is_over = process.participant.interrupted is not None
        if not is_over and len(process.state) < self._steps(process):
            self._say(process)

    def _is_in_a_step(self, process: Process) -> bool:
        """Whether others count on what a process has said."""
        if process.program != "computing" or not process.said:
            return False
        view = process.participant.view
        assert view is not None
        return self.setting.is_fine or (process.said, view.number) in self.committed

    def _commit(self, process: Process) -> None:
        view = process.participant.view
        assert view is not None
        assert process.state is not None
        key = (process.said, view.number)
        process.state, process.said = (*process.state, view.number), 0
        self.committed[key] = self.committed.get(key, frozenset()) | {process.id}
        if self.committed[key] >= {member.id for member in view.members}:
            number, state = self.begun
            if number > view.number and state[key[0] - 1 : key[0]] != (view.number,):
                raise BrokenRule(f"{key} (step, view) is complete after view {number} has begun")
            if any(step == key[0] for step, _ in self.complete):
                raise BrokenRule(f"step {key[0]} is complete twice: {self.complete}, {key}")
            self.complete |= {key}
        if not self.setting.is_fine:
            self._say_early(process)

    def _finish(self, process: Process) -> None:
        process.participant.done()
        self._post(process)

    def _exit(self, process: Process) -> None:
        """Its last words are on their way, or lost: `FAULT crash` does the latter."""
        ended, outcome = process.participant.ended, self._roster.outcome
        if ended is not None and self._is_failure(ended.code):
            raise BrokenRule(f"{process.id} ends with {ended.code}, and nothing has failed")
        waits = process.program == "waiting" and ended is not None
        if waits and process.participant.take() is not None:
            raise BrokenRule(f"{process.id} takes a view although its part has ended")
        is_done = outcome is not None and outcome[0] == DONE
        if is_done and ended is not None and ended.saves and process.state:
            raise BrokenRule(f"{process.id} leaves a state although the job is done")
        if process.link == "open" and process.up:
            while process.up:
                self._hear_up(process)
        self._end(process)

    def _is_failure(self, code: int) -> bool:
        end = end_of(
            code,
            final_codes={DONE, TOO_FEW_WORKERS},
            is_job_over=self._roster.outcome is not None,
            is_called_off=False,
            has_joined=True,
        )
        return end is End.FAILURE

    def _end(self, process: Process) -> None:
        process.program, process.state, process.said = "over", None, 0
        process.link, process.up, process.down = "none", [], []
        process.participant = self.setting.participant(process.id)

    # Faults

    def _can_crash(self, process: Process) -> bool:
        return process.is_alive

    def _crash(self, process: Process) -> None:
        self._end(process)

    def _can_cut(self, process: Process) -> bool:
        return process.is_alive and process.link == "open"

    def _cut(self, process: Process) -> None:
        process.link, process.up, process.down = "none", [], []
        process.participant.cut("the connection is lost")
        if not self.setting.is_fine and process.participant.ended is None:
            self._connect(process)

    def _can_silence(self, process: Process) -> bool:
        return process.is_alive and process.is_known

    def _silence(self, process: Process) -> None:
        self._hang_up(process)
        self.roster.gone(process.id, "nothing was heard of it")
        self._carry_out()

    def _can_notice(self, process: Process) -> bool:
        return process.is_alive and not process.participant.is_leaving

    def _notice(self, process: Process) -> None:
        process.participant.notice()
        self._post(process)

    def _can_failure(self, process: Process) -> bool:
        return process.is_alive and process.program != "outside"

    def _failure(self, process: Process) -> None:
        process.participant.failed("an error")
        self._post(process)
        self._exit(process)

    # What follows

    def _others(self, process: Process) -> list[str]:
        view = process.participant.view
        return [] if view is None else [m.id for m in view.members if m.id != process.id]

    def _unreachable_from(self, process: Process) -> str | None:
        for other in self._others(process):
            pair = tuple(sorted((process.slot, int(other.split(".")[0]))))
            if pair in self.setting.apart:
                return other
        return None

    def _source_of(self, process: Process) -> tuple[int, ...] | None:
        """The state with which a member is to begin; None if it is not to be had (yet)."""
        view = process.participant.view
        assert view is not None
        if view.source is None:
            return ()
        if view.steps[view.own] == view.steps[view.source]:
            return process.state
        source = self._processes.get(view.members[view.source].id)
        if source is None or source.program not in ("forming", "received", "formed"):
            return None
        its_view = source.participant.view
        return source.state if its_view is not None and its_view.number == view.number else None

    def _all_have_said(self, process: Process) -> bool:
        view = process.participant.view
        assert view is not None
        for member in view.members:
            key = (process.said, view.number)
            if member.id in self.committed.get(key, ()):
                continue
            other = self._processes.get(member.id)
            if other is None or other.said != process.said or other.program != "computing":
                return False
            if other.participant.view is None or other.participant.view.number != view.number:
                return False
        return True

    def _post(self, process: Process) -> None:
        said, process.participant.outbox = process.participant.outbox, []
        if process.link == "open":
            process.up += map(Said, said)

    def _hang_up(self, process: Process) -> None:
        """The register closes its end."""
        process.is_known = False
        if process.is_joined:
            process.link, process.up = "half", []
            process.down.append(END)

    def _carry_out(self) -> None:
        roster = self.roster
        while roster.effects:
            effects, roster.effects = roster.effects, []
            for effect in effects:
                if isinstance(effect, Tell | Drop):
                    process = self.process(effect.worker)
                    if process is None or not process.is_known:
                        continue
                    if isinstance(effect, Drop):
                        self._hang_up(process)
                    elif process.is_joined:
                        process.down.append(Said(effect.message))

    # What is looked at

    @property
    def is_active(self) -> bool:
        """Whether a view computes as a whole, or the job has ended."""
        roster = self._roster
        if roster.outcome is not None:
            return True
        return roster.phase is Phase.ACTIVE and all(
            (process := self._processes.get(id_)) is not None
            and process.program == "computing"
            and process.participant.view is not None
            and process.participant.view.number == roster.number
            for id_ in roster.members
        )

    def check(self) -> None:
        """Checks what must hold in each state."""
        number, begun = self._roster.number, self.begun[0]
        benched = sum(self._roster._times_benched.values())
        if number > begun + 5 + 3 * self.setting.faults + 2 * benched:
            raise BrokenRule(f"view after view does not begin: {begun + 1} to {number}")

    def stuck(self, has_timers: bool) -> str | None:
        """Says what is wrong with a state in which nothing happens until a timer goes off."""
        roster = self._roster
        if roster.phase is Phase.FORMING or any(w.is_awaited for w in roster.workers.values()):
            return "the register waits for a worker that has nothing to say"
        return None if has_timers or self.is_active else "nothing can happen any more"

    def check_outcome(self) -> None:
        """Checks how the job ends where nothing else can happen."""
        outcome = self._roster.outcome
        if outcome is not None and outcome[0] == REGISTER_LOST:  # it was stopped
            return
        able = [
            process.id
            for process in self._processes.values()
            if process.is_alive and not process.participant.is_leaving
        ]
        slots = {int(id_.split(".")[0]) for id_ in able}
        count = len(able) - sum(set(pair) <= slots for pair in self.setting.apart)
        if outcome is not None and outcome[0] != DONE and count >= self.setting.least:
            raise BrokenRule(f"the job has ended ({outcome}) although there are {able}")

    def copy(self) -> World:
        """Returns a world to go on from."""
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        new._owned = set()
        new._processes = dict(self._processes)
        new.committed = dict(self.committed)
        return new

    def key(self) -> int:
        """Tells states apart."""
        if self._roster_key is None:
            self._roster_key = _roster_key(self._roster)
        number, begun = self._roster.number, self.begun
        computed = {
            process.participant.view.number
            for process in self._processes.values()
            if process.program in _IN_A_VIEW and process.participant.view is not None
        }
        # What was committed matters as long as somebody may commit it, too.
        committed = sorted(key for key in self.committed if key[1] in computed)
        keys = [self._roster_key, *[process.key() for process in self._processes.values()]]
        shape = [own for own, _ in keys]
        shape += [self.faults, self.restarts, number - begun[0], len(begun[1])]
        shape += [(step, self.committed[step, view]) for step, view in committed]
        shape += [step for step, _ in sorted(self.complete)]
        numbers = [0, begun[0], *begun[1]]
        numbers += [view for _, view in (*committed, *sorted(self.complete))]
        for _, own in keys:
            numbers += own
        place = {number: place for place, number in enumerate(sorted(set(numbers)))}
        return hash((*shape, *[place[number] for number in numbers]))


def _roster_key(roster: Roster) -> tuple[int, tuple[int, ...]]:
    """See `Process.key`."""
    fields = {name: value for name, value in roster.__dict__.items() if name not in _NO_STATE}
    workers = sorted(roster.workers.values(), key=lambda worker: worker.arrival)
    states = roster._states, roster._heirs
    fields |= {"_states": sorted(states[0]), "_heirs": sorted(states[1])}
    shape = _frozen(fields), tuple([_worker_key(worker) for worker in workers])
    numbers = [roster.number, roster._started, *(worker.view for worker in workers)]
    numbers += [own[id_].formed for own in states for id_ in sorted(own)]
    return hash(shape), tuple(numbers)


def _worker_key(worker: Worker) -> tuple[Any, ...]:
    about = [value for name, value in worker.__dict__.items() if name not in _NO_STATE]
    # What it has said of its state is of no interest any more when it has gone on.
    return (*about, worker.step if worker.is_ready else None)


#: Attributes of the roster and its workers in which states do not differ, or that are looked at
#: apart: what is counted up, where only the order matters.
_NO_STATE = (
    *("_limits", "effects", "_software", "number", "_started", "workers", "_arrivals"),
    *("arrival", "view", "step"),
)


class Found(NamedTuple):
    """What an exploration has found.

    Attributes:
        states: How many states there are.
        broken: Which rule is broken; None: none.
        way: What happened until then.
    """

    states: int
    broken: str | None
    way: list[str]


def explore(setting: Setting, most_states: int = 10**7) -> Found:
    """Visits all states, and returns what was found."""
    first = World(setting)
    keys = {first.key(): 0}
    graph = _Graph()
    graph.add(0, "")
    queue = collections.deque([(0, first)])
    while queue:
        index, world = queue.popleft()
        moves = list(world.moves())
        is_still = not moves
        if is_still:
            moves = list(world.late_moves())
            if (stuck := world.stuck(bool(moves))) is not None:
                return Found(len(keys), stuck, graph.way(index))
        goes_on = not world.is_active
        for place, (label, move) in enumerate([*moves, *world.fault_moves()]):
            after = world.copy()
            try:
                move(after)
                after.check()
                if is_still and place < len(moves):
                    after.check_outcome()
            except BrokenRule as broken:
                return Found(len(keys), str(broken), [*graph.way(index), label])
            except Exception as error:
                return Found(len(keys), f"it raises {error!r}", [*graph.way(index), label])
            key = after.key()
            if key not in keys:
                keys[key] = len(keys)
                graph.add(index, label)
                queue.append((keys[key], after))
            if goes_on and place < len(moves):
                graph.ways_on.append(keys[key])
        graph.ends.append(len(graph.ways_on))
        if len(keys) > most_states:
            raise RuntimeError(f"more than {most_states} states")
    circle = graph.circle()
    if circle is not None:
        return Found(len(keys), "it can go on in circles without an active view", graph.way(circle))
    return Found(len(keys), None, [])


class _Graph:
    """How states follow on each other, in some bytes for each.

    Attributes:
        ways_on: To where the states without an active view lead, without faults: those of one
            after those of the other.
        ends: Where those of each end.
    """

    def __init__(self) -> None:
        self.ways_on = array.array("I")
        self.ends = array.array("Q")
        self._before = array.array("I")
        self._labels = array.array("I")
        self._numbers: dict[str, int] = {}

    def add(self, before: int, label: str) -> None:
        """Adds a state that was found by a move from another one."""
        self._before.append(before)
        self._labels.append(self._numbers.setdefault(label, len(self._numbers)))

    def way(self, index: int) -> list[str]:
        """Returns the moves by which a state was found."""
        words = list(self._numbers)
        labels = []
        while index > 0:
            labels.append(words[self._labels[index]])
            index = self._before[index]
        return labels[::-1]

    def circle(self) -> int | None:
        """Returns a state from which there is a way that never comes to an active view."""
        count = len(self.ends)
        left = array.array("I", bytes(4 * count))
        firsts = array.array("Q", bytes(8 * (count + 1)))
        for after in self.ways_on:
            firsts[after + 1] += 1
        for index in range(count):
            firsts[index + 1] += firsts[index]
        ways_back = array.array("I", bytes(4 * len(self.ways_on)))
        free = array.array("Q", firsts)
        start = 0
        for index, end in enumerate(self.ends):
            left[index] = end - start
            for after in self.ways_on[start:end]:
                ways_back[free[after]] = index
                free[after] += 1
            start = end
        good = [index for index in range(count) if not left[index]]
        while good:
            own = good.pop()
            for before in ways_back[firsts[own] : firsts[own + 1]]:
                left[before] -= 1
                if not left[before]:
                    good.append(before)
        return next((index for index, number in enumerate(left) if number), None)


def _on(id_: str, move: Callable[..., None]) -> Callable[[World], None]:
    return lambda world: move(world, world.process(id_))


def _suspects(other: str) -> Callable[..., None]:
    def suspect(world: World, process: Process) -> None:
        process.participant.suspect([other], f"{other} cannot be reached")
        world._post(process)
        world._regroup(process)

    return suspect


def _wakes(timer: str) -> Callable[[World], None]:
    def wake(world: World) -> None:
        world.roster.wake(timer)
        world._carry_out()

    return wake


def _stop(world: World) -> None:
    world.roster.end(REGISTER_LOST, "the job is stopped")
    world._carry_out()


def _counted(move: Callable[[World], None]) -> Callable[[World], None]:
    def counted(world: World) -> None:
        world.faults -= 1
        move(world)

    return counted


def _copy(thing: Any) -> Any:
    """Returns a copy that has its own lists, sets and dictionaries."""
    new = object.__new__(type(thing))
    fields = new.__dict__
    for key, value in thing.__dict__.items():
        fields[key] = value.copy() if type(value) in (dict, set, list) else value
    return new


def _frozen(value: Any) -> Any:
    """Returns what can be hashed, and is equal for equal values."""
    kind = type(value)
    if kind is dict:
        return tuple([(key, _frozen(value[key])) for key in sorted(value)])
    if kind is list:
        return tuple([_frozen(item) for item in value])
    if kind is set:
        return frozenset(value)
    return value


class Said(dict):
    """A message on its way, without the reason in it, by which states would differ.

    Attributes:
        numbers: Those of views in it.
        shape: What else it says, hashed.
    """

    _NUMBERS = ("number", "view", "formed")

    def __init__(self, message: dict[str, Any]):
        super().__init__(message)
        if "why" in message:
            self["why"] = ""
        about = {name: value for name, value in self.items() if name not in self._NUMBERS}
        self.numbers: list[int] = [self[name] for name in self._NUMBERS if name in self]
        self.shape = hash(_frozen(about))


#: The first message on a connection, and what is heard behind the last one.
HELLO = Said({"is": "hello"})
END = Said({"is": "(end of the connection)"})
