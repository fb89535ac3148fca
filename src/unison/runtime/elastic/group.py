"""This worker's group: the view it is in, and the programs that it runs there.

A program that is launched in a group takes effect as a whole or not at all. It is known which when
it has ended, so there is a list of those of which it is not known yet (`settle`). When the view is
over, what has not taken effect has to be done again in the next one (`regroup`).
"""

from __future__ import annotations

import atexit
import collections
import enum
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import jax
import numpy as np

from unison.errors import FailedPreconditionError, UnavailableError, UnimplementedError
from unison.net.addresses import joined_address
from unison.net.listening import listen
from unison.runtime import devices, logs, process_group, uncaught
from unison.runtime.elastic import faults, happenings, history, keeping
from unison.runtime.elastic.communicator import Broken, Communicator
from unison.runtime.elastic.compiler import Compiler
from unison.runtime.elastic.environment import ElasticEnvironment, elastic_environment
from unison.runtime.elastic.keeping import Origin
from unison.runtime.elastic.membership import Membership
from unison.runtime.elastic.options import ElasticOptions
from unison.runtime.elastic.placement import ElasticPlacement
from unison.runtime.elastic.protocol import (
    REFUSED,
    REGISTER_LOST,
    Ended,
    Interrupted,
    View,
)
from unison.runtime.interrupts import signals_held, without_signals
from unison.runtime.memory import keep_freed_memory
from unison.runtime.shared_memory.group import host_identity
from unison.runtime.shared_memory.library import Ticket
from unison.storage.checksummed import header_and_data
from unison.storage.decoding import decoding, plain_list, plain_text, whole_number

logger = logging.getLogger("unison")

T = TypeVar("T")


#: How a communicator says that the members' programs differ.
_DIFFERENT_OPERATIONS = 9


class GroupChanged(UnavailableError):  # noqa: N818 - what happens, not a mistake
    """The view is over in which a program was launched.

    What has not taken effect is to be done again, after `ElasticGroup.regroup`.
    """


class SharedState(Protocol):
    """What all members of a group have in common, and a newcomer gets."""

    @property
    def can_be_resumed(self) -> bool:
        """Whether another run of the job could go on from it."""
        ...

    def pack(self) -> bytes:
        """Returns what all members have in common, for `unpack` or `resume`."""
        ...

    def pack_part(self) -> bytes:
        """Returns what this worker alone has; empty if that is nothing."""
        ...

    def unpack(self, held: bytes, keeps_part: bool) -> None:
        """Takes over the state of another worker.

        Args:
            held: What that one's `pack` has returned.
            keeps_part: Whether what this worker alone has stays; else it has nothing of its own.
        """
        ...

    def resume(self, held: bytes, parts: Sequence[bytes]) -> None:
        """Takes over the state of an earlier run; all members do.

        Args:
            held: What `pack` has returned there.
            parts: What `pack_part` has returned on its workers, in their order.
        """
        ...


class Entry(enum.Enum):
    """How a worker has come to a loop in which others can take part."""

    #: It begins.
    NEW = "new"
    #: An earlier run of the job has been there.
    RESUMED = "resumed"
    #: The others are there.
    JOINED = "joined"
    #: The others, or the earlier run, are in a later one: this one is over.
    EARLY = "early"


class Regrouped(NamedTuple):
    """How this worker has come into a view.

    Attributes:
        place: Its place among the members; the first one has been in the group before.
        has_taken_over: Whether it got its state from another worker.
    """

    place: int
    has_taken_over: bool


class ElasticGroup:
    """The workers of an elastic job that compute together now.

    Args:
        environment: What the launcher has said.

    Attributes:
        placement: The replicas.
        nominal: With how many workers the job began.
        launched: How many programs this worker has launched that have, or may have, taken effect.
        committed: How many are known to have taken effect.
        step: How many of those all members had to take part in: equal states have the same number.
        runs: How many of those that may assign variables were launched.
        view: The present view; None while this worker is alone.
        loops: How many loops this worker has come to in which others can take part.
        latest_view: That, or the one before while the next one is formed; None before this worker
            has first taken part.
    """

    def __init__(self, environment: ElasticEnvironment):
        self._environment = environment
        own = devices.default_devices()
        if own[0].platform != "cpu":
            raise UnimplementedError(
                message="Expected workers that compute on CPUs: groups that may change "
                f"exchange through the host's memory. Received: devices of {own[0].platform}. Set "
                "JAX_PLATFORMS=cpu, or run the program without --min-workers."
            )
        self._own = len(own)
        self.placement = ElasticPlacement(own, self)
        self.launched = self.committed = self.step = self.runs = 0
        self._first_step = 0
        self._has_looked = False  # for what an earlier run has left
        #: `loops`, and whether those who have the state are in a later one.
        self.loops = 0
        self._is_early = False
        #: Whether a signal handler has ended the loop that this worker was in, and the others have
        #: gone on without it.
        self._is_aside = False
        #: How many steps of the loop have taken effect that the first program is without effect.
        self.partly_committed = 0
        self.view: View | None = None
        self.latest_view: View | None = None
        #: In which run of the job, and where there, the state has come about that this worker has;
        #: 0 and None while it has none that a run could go on from.
        self._run = 0
        self._computed_in: tuple[int, str] | None = None
        #: This worker's place there, if it was there: it may have a part of its own.
        self._place: int | None = None
        #: How many members there are, and which of them this one is.
        self.num_members, self.index = 1, 0
        #: Returns the step of this worker's state, for the register.
        self.position: Callable[[], int] = self.count
        self._communicator: Communicator | None = None
        self._ticket: jax.Array | None = None
        self._unsettled: collections.deque[jax.Array] = collections.deque()
        #: How many questions all members have answered, the latest answer as bytes, and one that
        #: another member has handed to this one.
        self._answers = 0
        self._latest_answer: Callable[[], bytes] = bytes
        self._handed: bytes | None = None
        self._asks = False
        #: What brings this worker into the next view, and does again what it has to.
        self.recover: Callable[[], Any] = self.regroup_alone
        self._listener = listen(environment.listen, 0)
        self._address = joined_address(*self._listener.getsockname()[:2])
        #: What stays as it is when the number of replicas changes.
        self.options = ElasticOptions()
        self._membership = self._new_membership()
        self.nominal, self.is_joining = self._ended_by(self._membership.enter)
        self._compiler = Compiler()
        self._has_failed = False
        self._exit_code: Any = None

    def close(self) -> None:
        """Ends this worker's part; to the others it is lost, unless it has said something else."""
        self.leave()
        self._membership.close()
        self._compiler.close()
        self._listener.close()

    def have_process(self) -> None:
        """Makes this the group of the process: it hears how the program ends, and of notices."""
        process_group.agree_through(self)
        uncaught.install()
        self._show_error, sys.excepthook = sys.excepthook, self._note_error
        self._exit, sys.exit = sys.exit, self._note_exit
        atexit.register(self._end)
        self._heed_notices()

    def _new_membership(self) -> Membership:
        own, environment = self.placement.local_devices, self._environment
        about = {
            "name": environment.name,
            "host": host_identity(own) or f"process {os.getpid()} of {socket.gethostname()}",
            "replicas": self._own,
            "slot": environment.slot,
            "software": process_group.software(),
        }
        membership = Membership(
            environment.register,
            environment.token,
            about,
            self._address,
            environment.heartbeat_timeout,
            environment.wait,
        )
        membership.on_interrupt(self._abort)
        return membership

    @property
    def replicas_at_start(self) -> int:
        """With how many replicas the job began, if all workers have as many."""
        return self.nominal * self._own

    # -- programs --------------------------------------------------------------------------

    def launch(self, program: Callable[..., Any], args: Sequence[Any], name: str) -> Any:
        """Launches a transaction, and returns its results.

        Raises:
            GroupChanged: The view is over; it was not launched.
        """
        self.settle(1)
        if self._membership.interrupted is not None:
            self.settle(0)
            raise GroupChanged(message=f"{name} was not run: {self._membership.interrupted}")
        self._membership.begin()
        self._ticket, status, results = program(self._ticket, *args)
        self._unsettled.append(status)
        self.launched += 1
        self._exit_code = None  # it was caught
        return results

    def settle(self, most: int) -> None:
        """Waits until at most `most` programs are left of which it is not known what they did.

        Raises:
            GroupChanged: One has not taken effect, and none that was launched after it.
        """
        while len(self._unsettled) > most:
            self._settle_first()

    @without_signals
    def _settle_first(self) -> None:
        status = np.asarray(self._unsettled.popleft().addressable_data(0))[0]
        before = self.step
        self._count_steps(self._first_step + int(status[Ticket.COMMITTED]))
        if status[Ticket.FAILED]:
            self._unsettled.clear()
            self.partly_committed = self.step - before
            raise self._broken()
        self.committed += 1

    def _count_steps(self, end: int) -> None:
        """Notes that all steps up to `end` have taken effect."""
        while self.step < end:
            self.step += 1
            self._membership.progress(self.step, "trains")
            self.tell("commit")

    def _broken(self) -> Exception:
        """Returns the error of an exchange that has failed; the register hears of it.

        Raises:
            FailedPreconditionError: The members do different things, in any view.
        """
        assert self._communicator is not None
        failure = self._communicator.failure
        about = "an exchange failed" if failure is None else failure.why
        if failure is not None and failure.code == _DIFFERENT_OPERATIONS:
            return FailedPreconditionError(message=about)
        if self._membership.interrupted is None:
            self._membership.suspect(about)
        return GroupChanged(
            message=f"The group of workers has changed: {self._membership.interrupted or about}. "
            "Keras' fit goes on by itself; put a loop of your own into a function that "
            "unison.elastic.run calls."
        )

    def count(self) -> int:
        """Returns `step`, by which states are told apart where a loop has no count of its own."""
        return self.step

    def renumber(self, step: int) -> None:
        """Makes `step` the number of this worker's state, which is that of all members."""
        self._first_step += step - self.step
        self.step = step

    def open(self, is_open: bool) -> None:
        """Says whether newcomers could take part in what this worker is doing from now on."""
        if self.view is not None:
            self._membership.open(is_open)

    def settle_all(self) -> bool:
        """Waits until it is known of all programs what they did; whether all have taken effect."""
        try:
            self.settle(0)
        except GroupChanged:
            return False
        return True

    def launch_alone(self, program: Callable[..., Any], args: Sequence[Any], name: str) -> Any:
        """Runs a program in which no other worker takes part, and returns its results.

        Raises:
            GroupChanged: The view is over; it was not run.
        """
        if self._membership.interrupted is not None and self.view is not None:
            raise GroupChanged(message=f"{name} was not run: {self._membership.interrupted}")
        results = program(*args)
        self.launched += 1
        self.committed += 1
        self.step += 1
        self.tell("commit")
        return results

    def report(self, told: Mapping[str, Any]) -> None:
        """Says something for those who watch the job; any thread may call."""
        self._membership.report(told)

    def compile_ahead(self, compile_it: Callable[[], None]) -> None:
        """Has called, in a thread, what compiles a program that the next group may need."""
        self._compiler.add(compile_it)

    @property
    def is_over(self) -> bool:
        """Whether the present view is over."""
        return self._membership.interrupted is not None

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all members; see `process_group.all_gather_json`."""
        answers = self.all_gather(json.dumps([what, value]).encode())
        found = [json.loads(answer) for answer in answers]
        for member, (other, _) in enumerate(found):
            if other != what:
                raise RuntimeError(
                    f"All workers must do the same. Worker {self.index} is at: {what}. Worker "
                    f"{member} is at: {other}."
                )
        return [given for _, given in found]

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns the bytes of all members, in order; each must call."""
        return self.ask_all(lambda: own)

    def ask_all(self, own: Callable[[], bytes]) -> list[bytes]:
        """Returns what `own` returns on all members, in order; each must call, in the main thread.

        It is called again where the group has changed meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "In a job whose workers may change, they agree in their main threads only. Use "
                "AutoShardPolicy.DATA, under which they need not agree about each batch."
            )
        return self.answer(lambda: self._gathered(own()), _packed_answers, _unpacked_answers)

    def _gathered(self, own: bytes) -> list[bytes]:
        self.settle(0)
        if self._communicator is None:
            return [own]
        self.tell("read")
        if self._membership.interrupted is None:
            self._membership.begin()
            try:
                return self._communicator.all_gather(own)
            except Broken:
                pass
        raise self._broken()

    def answer(
        self,
        ask: Callable[[], T],
        pack: Callable[[T], bytes],
        unpack: Callable[[bytes], T],
    ) -> T:
        """Returns what all members learn together, whatever happens to the group meanwhile.

        They ask again in the next group. Where some have learnt it in the last one, and perhaps
        gone on, the others get it from them.

        Args:
            ask: Asks, together with the others; may raise `GroupChanged`.
            pack: Makes bytes of the answer, which is the same on all members.
            unpack: Makes the answer of such bytes.
        """
        while True:
            try:
                found = ask()
                self.settle(0)
                break
            except GroupChanged:
                self._asks = True
                try:
                    self.recover()
                finally:
                    self._asks = False
                if self._handed is not None:
                    found, self._handed = unpack(self._handed), None
                    break
        self._answers += 1
        self._latest_answer = lambda: pack(found)
        return found

    # -- groups ----------------------------------------------------------------------------

    def tell(self, point: str, **about: Any) -> None:
        """Tells those who look on, if there are any, what this worker has come to."""
        if happenings.listeners:
            number = None if self.view is None else self.view.number
            happenings.happened(point, self.position(), view=number, **about)

    def step_aside(self, loops: int) -> None:
        """Has the others go on without this worker, whose loop a signal handler has ended.

        It computes alone from now on. When it comes to a loop again, it joins them.

        Args:
            loops: What `loops` was before the loop: the next one is that loop again.
        """
        with signals_held:
            self.loops = loops
            is_alone = self.view is not None and self.num_members == 1
            if is_alone or self._is_aside or self.is_joining:
                return
            self._is_aside = True
            self._membership.cut()
            self.leave()

    @without_signals
    def leave(self) -> None:
        """Makes this worker one that is alone: it computes in the view no more."""
        self.tell("left")
        self._unsettled.clear()
        self.partly_committed = 0
        self.launched = self.committed
        self.placement.number(0, self._own)
        self.view = None
        self.num_members, self.index = 1, 0
        logs.say_who(self._environment.name)
        self._ticket = None
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def regroup(self, state: SharedState | None, is_open: bool = False) -> Regrouped:
        """Becomes a member of the next view, with the state that its members have.

        Args:
            state: What newcomers get, or this worker as one. None: there is nothing yet.
            is_open: Whether newcomers could take part in what this worker is doing.

        Raises:
            SystemExit: This worker's part in the job is over.
        """
        begin = time.monotonic()
        # Whoever has stepped aside has a state, but no place in the loop that others are in.
        has_none = self.view is None and (self.is_joining or self._is_aside)
        self.leave()
        step = None if has_none else self.position()
        has_taken_over = False
        while True:
            if self._is_early:  # what it got in the last view was of no use
                self._is_early = has_taken_over = False
            self.tell("recovery", at="stopped")
            ask = functools.partial(self._membership.regroup, step, is_open)
            view = self._ended_by(ask, state)
            self.tell("recovery", at="view proposed")
            try:
                communicator = Communicator(
                    view,
                    self._environment.token,
                    self._listener,
                    self._environment.wait,
                    patience=process_group.TIMEOUT,
                    is_over=lambda: self._membership.interrupted,
                )
                self._communicator = communicator
                if (why := self._membership.interrupted) is not None:
                    communicator.abort(why)
                self.tell("recovery", at="connected")
                self._hand_answer(view, communicator, is_new=step is None)
                if self._take_over(view, communicator, state):
                    has_taken_over = True
                    if not self._is_early:  # it has the state now, whatever becomes of the view
                        step = self.step
                self.tell("recovery", at="formed")
                self._ended_by(self._membership.confirm, state)
            except (Interrupted, Broken) as error:
                if self._membership.interrupted is None:
                    self._membership.suspect(str(error))
                self.leave()
                continue
            self._become_member(view, communicator)
            ids = [member.id for member in view.members]
            self.tell("view", members=ids, member=ids[view.own], has_taken_over=has_taken_over)
            self.is_joining = self._is_aside = False
            logger.debug("View %d with steps %s", view.number, view.steps)
            self._say(view, time.monotonic() - begin)
            return Regrouped(view.own, has_taken_over)

    def enter(self, state: SharedState) -> Entry:
        """Comes to a loop in which others can take part; each worker's program, to all of them.

        Args:
            state: What this loop trains.
        """
        self.loops += 1
        was_aside = self._is_aside
        if not (self.is_joining or was_aside):
            return self._resume(state)
        has_joined = self.regroup(state, is_open=True).has_taken_over
        if self._is_early:
            self._withdraw()
            return Entry.EARLY
        if not has_joined:  # nobody is left who has the state
            if was_aside:
                self._take_latest(state)
            return self._resume(state)
        self._has_looked = True  # as the others have
        return Entry.JOINED

    def _take_latest(self, state: SharedState) -> None:
        """Takes over the latest state where all members have stepped aside; all of them call."""

        def ask(own: Callable[[], bytes]) -> list[bytes]:
            return self.answer(lambda: self._gathered(own()), _packed_answers, _unpacked_answers)

        steps = [int(step) for step in ask(lambda: str(self.position()).encode())]
        latest = max(steps)
        if steps == [latest] * len(steps):
            return
        is_source = self.index == steps.index(latest)
        packed = _first(ask(lambda: self._pack(state) if is_source else b""))
        if self.position() != latest:
            self._unpack(state, packed, is_behind=True)
            self.renumber(latest)

    def _withdraw(self) -> None:
        """Is lost to the others, and comes anew: as one that is alone until it joins."""
        self._membership.close()
        self.leave()
        self.latest_view = None
        self._membership = self._new_membership()
        self.is_joining = self._ended_by(self._membership.enter).is_joining

    def regroup_alone(self) -> None:
        """Enters the next group, where there is no state that others could need."""
        self.settle_all()
        self.regroup(None)

    @property
    def was_cut(self) -> bool:
        """Whether the others may have gone on without this worker since the last view."""
        return self._membership.was_cut

    def _resume(self, state: SharedState) -> Entry:
        """Takes over what an earlier run of the job has left of this loop; all members call.

        Only once: what follows is ahead of it.
        """
        if self._has_looked:
            return Entry.NEW
        self._has_looked = True
        folder = self._environment.folder
        kept = None if folder is None else keeping.kept_state(folder)
        own = None if kept is None else kept.origin
        told = self.all_gather_json(own, "The state of the job")
        origins = [None if origin is None else Origin(*origin) for origin in told]
        latest = max((origin for origin in origins if origin is not None), default=None)
        if latest is None:
            self._run = 1
            return Entry.NEW
        held = b"" if kept is None or own != latest else kept.held
        if any(origin != latest for origin in origins):  # machines that do not share the folder
            held = _first(self.ask_all(lambda: held))
        loops, _, _, packed = _unpacked_state(held)
        if loops > self.loops:
            self._has_looked = False
            return Entry.EARLY
        parts = self._kept_parts(latest)
        with signals_held:
            state.resume(packed, parts)
        self._run = latest.run + 1
        self.renumber(latest.step)
        self.tell("resumed")
        return Entry.RESUMED

    def _kept_parts(self, origin: Origin) -> list[bytes]:
        """Returns what workers of an earlier run had alone, in their order; all members call."""
        folder = self._environment.folder
        own = {} if folder is None else keeping.kept_parts(folder, origin)
        found = self.all_gather_json(sorted(own), "The parts of the job's state")
        places = sorted({place for each in found for place in each})
        if all(each == places for each in found):
            return [own[place] for place in places]

        def own_part(place: int) -> bytes:
            return own.get(place, b"")

        asked = (functools.partial(own_part, place) for place in places)
        return [_first(self.ask_all(ask)) for ask in asked]

    def _pack(self, state: SharedState | None) -> bytes:
        """Returns a state for `_unpack`; None: the loop is over that it was of."""
        about = [self.loops + (state is None), self._run, self._computed_in]
        return json.dumps(about).encode() + b"\n" + (b"" if state is None else state.pack())

    @without_signals
    def _unpack(self, state: SharedState, held: bytes, is_behind: bool) -> None:
        """Takes over a state, unless it is that of a later loop.

        Args:
            state: Where it is taken to.
            held: What another member's `_pack` has returned.
            is_behind: Whether this worker has an earlier one, and not none.
        """
        loops, run, computed_in, packed = _unpacked_state(held)
        self._is_early = loops > self.loops
        if not self._is_early:
            state.unpack(packed, keeps_part=is_behind)
            self._run, self._computed_in = run, computed_in
            self._place = self._place if is_behind else None

    def _take_over(self, view: View, communicator: Communicator, state: SharedState | None) -> bool:
        """Gives members that lack it the state of one that has it; whether this one has got it."""
        steps = [None if s is None else int(s) for s in view.steps]
        if view.source is None:
            return False
        lacks_it = [step != steps[view.source] for step in steps]
        if not any(lacks_it):
            return False
        is_source = view.own == view.source
        self._membership.progress(self.step, "hands over the state")
        packed = self._hand_out(communicator, view.source, self._pack(state) if is_source else None)
        self.tell("recovery", at="state received")
        self._membership.progress(self.step, "has handed over the state")
        if not lacks_it[view.own] or state is None:
            return False
        is_behind = steps[view.own] is not None
        self._unpack(state, packed, is_behind)
        if self._is_early and is_behind:
            self._leave_job("the others have ended the loop that it is in")
        self.step = steps[view.source] or 0
        return True

    def _leave_job(self, why: str) -> NoReturn:
        """Ends the process; the supervisor starts another one, which joins."""
        self.close()
        logger.error("%s ends: %s", self._environment.name, why)
        raise SystemExit(REFUSED)

    def _hand_answer(self, view: View, communicator: Communicator, is_new: bool) -> None:
        """Gives the latest answer to members that have asked for it and do not have it yet."""
        self._handed = None
        own = None if is_new or view.steps[view.own] is None else self._answers
        counts = [json.loads(x) for x in communicator.all_gather(json.dumps(own).encode())]
        most = max((count for count in counts if count is not None), default=self._answers)
        if any(count is not None and count < most for count in counts):
            source = counts.index(most)
            latest = self._latest_answer() if source == view.own else None
            packed = self._hand_out(communicator, source, latest)
            if own == most - 1 and self._asks:
                self._handed = packed
                return  # it is counted by whoever asks
            # Whoever had it may be lost before the view begins.
            self._latest_answer = lambda: packed
        self._answers = most

    def _hand_out(self, communicator: Communicator, source: int, own: bytes | None) -> bytes:
        """Returns the bytes of the member `source`, which gives its own; all members call."""
        sizes = communicator.all_gather(b"" if own is None else str(len(own)).encode())
        buffer = np.empty(int(sizes[source]), np.uint8)
        if own is not None:
            buffer[:] = np.frombuffer(own, np.uint8)
        communicator.broadcast(source, [buffer])
        return buffer.tobytes()

    @without_signals
    def _become_member(self, view: View, communicator: Communicator) -> None:
        self.view = self.latest_view = view
        self._computed_in, self._place = (view.number, view.members[0].id), view.own
        self.num_members, self.index = len(view.members), view.own
        logs.say_who(f"{self._environment.name} (index {view.own})")
        self._first_step = self.step
        first = sum(member.replicas for member in view.members[: view.own])
        self.placement.number(first, sum(member.replicas for member in view.members))
        self._ticket = self.placement.spread(communicator.first_ticket())

    def _ended_by(self, ask: Callable[[], Any], state: SharedState | None = None) -> Any:
        """Returns what the membership answers; ends the process where the job has ended it."""
        try:
            return ask()
        except Ended as ended:
            code, why, saves = ended.code, ended.why, ended.saves
        except UnavailableError as error:
            code, why, saves = REGISTER_LOST, str(error), True
        folder = self._environment.folder
        if saves and folder is not None and state is not None and state.can_be_resumed:
            self._save(state, folder)
        if code:
            logger.error("%s ends: %s", self._environment.name, why)
        raise SystemExit(code)

    def _heed_notices(self) -> None:
        """Has SIGTERM end this worker's part between two steps, unless the program wants it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            own = os.getpid()

            def take_notice(number: int, frame: object) -> None:
                if os.getpid() == own:
                    self._membership.notice()
                else:  # a process that has been forked off
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)

            signal.signal(signal.SIGTERM, take_notice)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Tells the others that the program ends by an error; they do not wait for its end."""
        self._has_failed = True
        if not isinstance(error, UnavailableError):  # who misses others is lost, too
            self._membership.failed(kind.__name__)
        self._membership.close()
        self._show_error(kind, error, traceback)

    def _note_exit(self, code: Any = None) -> NoReturn:
        """Notes that the program ends with an exit code, which says whether it has ended well."""
        if threading.current_thread() is threading.main_thread():
            self._exit_code = code
        self._exit(code)

    def _save(self, state: SharedState, folder: str) -> None:
        """Leaves the state for the next run of the job, if this worker has it."""
        if not self._run or self._computed_in is None:
            return
        view, group = self._computed_in
        origin = Origin(self._run, view, self.position(), group)
        part = b"" if self._place is None else state.pack_part()
        if part and self._place is not None:
            keeping.keep_part(folder, origin, self._place, part)
        keeping.keep_state(folder, origin, lambda: self._pack(state))

    def _end(self) -> None:
        """Ends this worker's part; the others hear that its program has ended."""
        if self._exit_code:
            self._membership.failed(f"exit code {self._exit_code}")
        elif not self._has_failed and self.settle_all():
            self._membership.done()
        self.close()

    def _abort(self, why: str) -> None:
        communicator = self._communicator
        if communicator is not None:
            communicator.abort(why)

    def _say(self, view: View, seconds: float) -> None:
        if view.own == 0:
            logger.info(
                "View %d: %d workers go on together after %.2f s",
                view.number,
                len(view.members),
                seconds,
            )


def _packed_answers(answers: list[bytes]) -> bytes:
    return json.dumps([answer.hex() for answer in answers]).encode()


def _unpacked_answers(packed: bytes) -> list[bytes]:
    return [bytes.fromhex(answer) for answer in json.loads(packed)]


def _unpacked_state(held: bytes) -> tuple[int, int, tuple[int, str] | None, bytes]:
    """Returns of a state in which loop, run and view it has come about, and the state."""
    with decoding("The state of the job", "Remove it to start without it."):
        about, packed = header_and_data(held)
        loops, run, computed_in = plain_list(about, 3)
        if computed_in is not None:
            view, group = plain_list(computed_in, 2)
            computed_in = whole_number(view), plain_text(group)
        return whole_number(loops), whole_number(run), computed_in, packed


def _first(answers: Sequence[bytes]) -> bytes:
    """Returns what those gave who had it.

    Raises:
        UnavailableError: Whoever had it is lost.
    """
    for answer in answers:
        if answer:
            return answer
    raise UnavailableError(
        message="Expected what the last run of the job has left on one of its machines. Received: "
        "nothing; the worker that had it is lost. Start the job again on that machine, or with a "
        "folder that all machines share."
    )


@functools.cache
def elastic_group() -> ElasticGroup | None:
    """Returns the group of this process, which comes to its job now; None outside such jobs."""
    environment = elastic_environment()
    if environment is None:
        return None
    faults.listen()
    history.listen()
    happenings.happened("start", 0)
    logs.say_who(environment.name)
    keep_freed_memory()  # as in every job of several processes
    group = ElasticGroup(environment)
    happenings.happened("start", 0)
    group.have_process()
    if not group.is_joining:
        group.regroup(None)
    return group
