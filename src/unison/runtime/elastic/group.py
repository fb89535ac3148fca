"""This worker's group: its current view, and the programs that it runs in the view.

A program that is launched in a group takes effect as a whole or not at all. Which of the two is
known only when it has finished, so there is a queue of programs whose outcome is pending
(`settle`). When the view is over, programs that have not taken effect have to be repeated in the
next one (`regroup`).
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
from unison.interrupts import signals_held, without_signals
from unison.net.addresses import joined_address
from unison.net.listening import listen
from unison.runtime import devices, logs, process_group, uncaught
from unison.runtime.elastic import faults, history, lifecycle, persisted_state
from unison.runtime.elastic.communicator import Broken, Communicator
from unison.runtime.elastic.compiler import Compiler
from unison.runtime.elastic.environment import ElasticEnvironment, elastic_environment
from unison.runtime.elastic.membership import Membership
from unison.runtime.elastic.options import ElasticOptions
from unison.runtime.elastic.persisted_state import Origin
from unison.runtime.elastic.placement import ElasticPlacement
from unison.runtime.elastic.protocol import (
    REFUSED,
    REGISTER_LOST,
    STOPPED,
    Ended,
    Interrupted,
    View,
)
from unison.runtime.memory import keep_freed_memory
from unison.runtime.shared_memory.group import host_identity
from unison.runtime.shared_memory.library import Ticket
from unison.storage.checksummed import header_and_data
from unison.storage.decoding import decoding, plain_list, plain_text, whole_number

logger = logging.getLogger("unison")

T = TypeVar("T")


#: A communicator's error code for different programs on the members.
_DIFFERENT_OPERATIONS = 9


class GroupChanged(UnavailableError):  # noqa: N818 - an event, not an error
    """The view in which a program was launched is over.

    Programs that have not taken effect are to be repeated, after `ElasticGroup.regroup`.
    """


class SharedState(Protocol):
    """The state that all members of a group share, and that newcomers receive."""

    @property
    def can_be_resumed(self) -> bool:
        """Whether another run of the job could resume from it."""
        ...

    def pack(self) -> bytes:
        """Returns the state that all members share, for `unpack` or `resume`."""
        ...

    def pack_part(self) -> bytes:
        """Returns the state that only this worker has; empty if there is none."""
        ...

    def unpack(self, held: bytes, keeps_part: bool) -> None:
        """Takes over the state of another worker.

        Args:
            held: The result of that worker's `pack`.
            keeps_part: Whether this worker keeps the state that only it has; otherwise, that is
                reset.
        """
        ...

    def resume(self, held: bytes, parts: Sequence[bytes]) -> None:
        """Takes over the state of an earlier run; all members call this.

        Args:
            held: The result of `pack` in that run.
            parts: The results of `pack_part` on its workers, in their order.
        """
        ...


class Entry(enum.Enum):
    """The state with which a worker enters a loop that others can join."""

    #: The loop starts from the beginning.
    NEW = "new"
    #: The loop resumes the state of an earlier run of the job.
    RESUMED = "resumed"
    #: The worker joins others that are in the loop.
    JOINED = "joined"
    #: The others, or the earlier run, are in a later loop: this one is over.
    EARLY = "early"


class Regrouped(NamedTuple):
    """The state with which this worker has entered a view.

    Attributes:
        place: Its index among the members; the first member has been in the group before.
        has_taken_over: Whether it received its state from another worker.
    """

    place: int
    has_taken_over: bool


class ElasticGroup:
    """The workers of an elastic job that currently compute together.

    Args:
        environment: The settings from the launcher.

    Attributes:
        placement: The replicas.
        nominal: The number of workers with which the job began.
        launched: The number of programs launched by this worker that have taken effect, or may
            have.
        committed: The number of these that are known to have taken effect.
        step: The number of steps known to have taken effect: equal states have the same number.
        runs: The number of launched programs that may assign variables.
        view: The present view; None while this worker is alone.
        loops: The number of loops that this worker has entered and others can join.
        latest_view: The present view, or the previous one while the next one is formed; None before
            this worker's first view.
    """

    def __init__(self, environment: ElasticEnvironment):
        self._environment = environment
        own = devices.default_devices()
        if own[0].platform != "cpu":
            raise UnimplementedError(
                message="Expected workers that compute on CPUs: a group whose workers go on in the "
                f"same processes exchanges through the host's memory. Received: devices of "
                f"{own[0].platform}. Let new processes form the next group, from checkpoints in "
                "memory: --min-workers M --in-memory-checkpoints. Or set JAX_PLATFORMS=cpu."
            )
        self._own = len(own)
        self.placement = ElasticPlacement(own, self)
        self.launched = self.committed = self.step = self.runs = 0
        self._first_step = 0
        self._has_looked = False  # for the state of an earlier run
        #: The number of loops, and whether the workers that have the state are in a later one.
        self.loops = 0
        self._is_early = False
        #: Whether a signal handler has ended the loop that this worker was in, and the others have
        #: continued without it.
        self._is_aside = False
        #: The number of steps that took effect in the first program that failed, if it is a loop.
        self.partly_committed = 0
        self.view: View | None = None
        self.latest_view: View | None = None
        #: The run of the job, and the view in it, in which this worker's state was computed; 0 and
        #: None while it has no state that a run could resume from.
        self._run = 0
        self._computed_in: tuple[int, str] | None = None
        #: This worker's index in that view, if it was a member: it may have state that only it has.
        self._place: int | None = None
        #: The number of members, and the index of this one.
        self.num_members, self.index = 1, 0
        #: Returns the step of this worker's state, which is sent to the register.
        self.position: Callable[[], int] = self.count
        self._communicator: Communicator | None = None
        self._ticket: jax.Array | None = None
        self._unsettled: collections.deque[jax.Array] = collections.deque()
        #: The number of questions that all members have answered, the latest answer as bytes, and
        #: an answer that this worker has received from another member.
        self._answers = 0
        self._latest_answer: Callable[[], bytes] = bytes
        self._handed: bytes | None = None
        self._asks = False
        #: Brings this worker into the next view, and repeats what has not taken effect.
        self.recover: Callable[[], Any] = self.regroup_alone
        self._listener = listen(environment.listen, 0)
        self._address = joined_address(*self._listener.getsockname()[:2])
        #: The quantity that is constant when the number of replicas changes.
        self.options = ElasticOptions()
        self._membership = self._new_membership()
        self.nominal, self.is_joining = self._ended_by(self._membership.enter)
        self._compiler = Compiler()
        self._has_failed = False
        self._exit_code: Any = None

    def close(self) -> None:
        """Ends this worker's part; the others see it as lost, unless it has reported its end."""
        self.leave()
        self._membership.close()
        self._compiler.close()
        self._listener.close()

    def have_process(self) -> None:
        """Makes this the group of the process: it handles the program's end, errors and SIGTERM."""
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
        """The number of replicas with which the job began, if all workers have equally many."""
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
        self._exit_code = None  # an earlier `sys.exit` was caught
        return results

    def settle(self, most: int) -> None:
        """Waits until the outcome of at most `most` programs is pending.

        Raises:
            GroupChanged: A program has not taken effect, nor have those launched after it.
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
        """Returns the error of a failed exchange, and reports it to the register.

        Raises:
            FailedPreconditionError: The members run different operations, which a new view would
                not change.
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
            "Keras' fit continues by itself; put a loop of your own into a function that "
            "unison.elastic.run calls."
        )

    def count(self) -> int:
        """Returns `step`, which identifies states if a loop does not count its steps itself."""
        return self.step

    def renumber(self, step: int) -> None:
        """Makes `step` the number of this worker's state, which all members share."""
        self._first_step += step - self.step
        self.step = step

    def open(self, is_open: bool) -> None:
        """Reports whether newcomers could join what this worker is doing from now on."""
        if self.view is not None:
            self._membership.open(is_open)

    def settle_all(self) -> bool:
        """Waits for the outcome of all programs; returns whether all have taken effect."""
        try:
            self.settle(0)
        except GroupChanged:
            return False
        return True

    def launch_alone(self, program: Callable[..., Any], args: Sequence[Any], name: str) -> Any:
        """Runs a program without the other workers, and returns its results.

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
        """Reports a value to those who monitor the job; any thread may call this."""
        self._membership.report(told)

    def compile_ahead(self, compile_it: Callable[[], None]) -> None:
        """Calls a function in a thread; it compiles a program that the next group may need."""
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
                    f"The workers' programs differ. Worker {self.index} is at: {what}. Worker "
                    f"{member} is at: {other}."
                )
        return [given for _, given in found]

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns the bytes of all members, in order; each member must call this."""
        return self.ask_all(lambda: own)

    def ask_all(self, own: Callable[[], bytes]) -> list[bytes]:
        """Returns the results of `own` on all members, in order; each calls, in the main thread.

        `own` is called again if the group has changed in the meantime.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "In elastic jobs, workers exchange values in their main threads only. Use "
                "AutoShardPolicy.DATA, which needs no exchange for each batch."
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
        """Returns an answer on which all members agree, even if the group changes meanwhile.

        If the group changes, they ask again in the next one. If some members already got the answer
        in the old group, and possibly continued, the others receive it from them.

        Args:
            ask: Computes the answer together with the other members; may raise `GroupChanged`.
            pack: Serializes the answer, which is the same on all members.
            unpack: Deserializes the answer.
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
        """Notifies the listeners, if any, that this worker has reached a point."""
        if lifecycle.listeners:
            number = None if self.view is None else self.view.number
            lifecycle.happened(point, self.position(), view=number, **about)

    def step_aside(self, loops: int) -> None:
        """Lets the others continue without this worker, whose loop a signal handler has ended.

        It computes alone from now on. When it enters a loop again, it rejoins them.

        Args:
            loops: The value of `loops` before the loop: the next loop counts as the same one.
        """
        with signals_held:
            self.loops = loops
            is_alone = self.view is not None and self.num_members == 1
            is_outside = self._is_aside or self.is_joining
            if is_alone or (is_outside and self._communicator is None):
                return
            # Where it was about to enter a view, the others give that view up.
            self._is_aside = not self.is_joining
            self._membership.cut()
            self.leave()

    @without_signals
    def leave(self) -> None:
        """Makes this worker compute alone: it leaves the view."""
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
        """Joins the next view, with the state that its members share.

        Args:
            state: The state that newcomers receive, or this worker if it is one. None: there is
                none yet.
            is_open: Whether newcomers could join what this worker is doing.

        Raises:
            SystemExit: This worker's part in the job is over.
        """
        begin = time.monotonic()
        # A worker that has stepped aside has a state, but is not in the loop that the others are
        # in.
        has_none = self.view is None and (self.is_joining or self._is_aside)
        self.leave()
        step = None if has_none else self.position()
        has_taken_over = False
        while True:
            if self._is_early:  # the state received in the last view was discarded
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
                    if not self._is_early:  # it has the state now, even if the view fails
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
            logger.debug("View %d with steps %s", view.number, view.steps)
            self._say(view, time.monotonic() - begin)
            return Regrouped(view.own, has_taken_over)

    def enter(self, state: SharedState) -> Entry:
        """Enters a loop that others can join; every worker's program must enter all of them.

        Args:
            state: The state that this loop trains.
        """
        self.loops += 1
        was_aside = self._is_aside
        if not (self.is_joining or was_aside):
            return self._resume(state)
        has_joined = self.regroup(state, is_open=True).has_taken_over
        if self._is_early:
            self._withdraw()
            return Entry.EARLY
        if not has_joined:  # no worker with the state is left
            if was_aside:
                self._take_latest(state)
            return self._resume(state)
        self._has_looked = True  # as the others have looked, too
        return Entry.JOINED

    def _take_latest(self, state: SharedState) -> None:
        """Takes over the latest state if all members have stepped aside; all of them call this."""

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
        """Disconnects, so that the others see a loss, and reconnects: alone until it joins."""
        self._membership.close()
        self.leave()
        self.latest_view = None
        self._membership = self._new_membership()
        self.is_joining = self._ended_by(self._membership.enter).is_joining

    def regroup_alone(self) -> None:
        """Enters the next group when there is no state that others could need."""
        self.settle_all()
        self.regroup(None)

    @property
    def was_cut(self) -> bool:
        """Whether the others may have continued without this worker since the last view."""
        return self._membership.was_cut

    def _resume(self, state: SharedState) -> Entry:
        """Takes over this loop's state from an earlier run of the job; all members call this.

        Done only once: later loops are ahead of that state.
        """
        if self._has_looked:
            return Entry.NEW
        self._has_looked = True
        folder = self._environment.folder
        kept = None if folder is None else persisted_state.kept_state(folder)
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
        """Returns the parts of an earlier run's workers, in their order; all members call this."""
        folder = self._environment.folder
        own = {} if folder is None else persisted_state.kept_parts(folder, origin)
        found = self.all_gather_json(sorted(own), "The parts of the job's state")
        places = sorted({place for each in found for place in each})
        if all(each == places for each in found):
            return [own[place] for place in places]

        def own_part(place: int) -> bytes:
            return own.get(place, b"")

        asked = (functools.partial(own_part, place) for place in places)
        return [_first(self.ask_all(ask)) for ask in asked]

    def _pack(self, state: SharedState | None) -> bytes:
        """Returns a state for `_unpack`; None: the loop that it belonged to is over."""
        about = [self.loops + (state is None), self._run, self._computed_in]
        return json.dumps(about).encode() + b"\n" + (b"" if state is None else state.pack())

    @without_signals
    def _unpack(self, state: SharedState, held: bytes, is_behind: bool) -> None:
        """Takes over a state, unless it belongs to a later loop.

        Args:
            state: The object that takes it over.
            held: The result of another member's `_pack`.
            is_behind: Whether this worker has an earlier state, rather than none.
        """
        loops, run, computed_in, packed = _unpacked_state(held)
        self._is_early = loops > self.loops
        if not self._is_early:
            state.unpack(packed, keeps_part=is_behind)
            self._run, self._computed_in = run, computed_in
            self._place = self._place if is_behind else None

    def _take_over(self, view: View, communicator: Communicator, state: SharedState | None) -> bool:
        """Sends the state to members that lack it; returns whether this one has received it."""
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
        """Ends the process; the supervisor starts another one, which joins the group."""
        self.close()
        logger.error("%s ends: %s", self._environment.name, why)
        raise SystemExit(REFUSED)

    def _hand_answer(self, view: View, communicator: Communicator, is_new: bool) -> None:
        """Sends the latest answer to members that asked for it and do not have it yet."""
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
                return  # `answer` counts it
            # The member that had it may be lost before the view starts.
            self._latest_answer = lambda: packed
        self._answers = most

    def _hand_out(self, communicator: Communicator, source: int, own: bytes | None) -> bytes:
        """Returns the bytes that the member `source` passes as `own`; all members call this."""
        sizes = communicator.all_gather(b"" if own is None else str(len(own)).encode())
        buffer = np.empty(int(sizes[source]), np.uint8)
        if own is not None:
            buffer[:] = np.frombuffer(own, np.uint8)
        communicator.broadcast(source, [buffer])
        return buffer.tobytes()

    @without_signals
    def _become_member(self, view: View, communicator: Communicator) -> None:
        self.view = self.latest_view = view
        self.is_joining = self._is_aside = False
        self._computed_in, self._place = (view.number, view.members[0].id), view.own
        self.num_members, self.index = len(view.members), view.own
        logs.say_who(f"{self._environment.name} (index {view.own})")
        self._first_step = self.step
        first = sum(member.replicas for member in view.members[: view.own])
        self.placement.number(first, sum(member.replicas for member in view.members))
        self._ticket = self.placement.spread(communicator.first_ticket())

    def _ended_by(self, ask: Callable[[], Any], state: SharedState | None = None) -> Any:
        """Returns the membership's answer; exits if this worker's part in the job has ended."""
        try:
            return ask()
        except Ended as ended:
            code, why, saves = ended.code, ended.why, ended.saves
        except UnavailableError as error:
            code, why, saves = REGISTER_LOST, str(error), True
        folder = self._environment.folder
        if saves and folder is not None and state is not None and state.can_be_resumed:
            self._save(state, folder)
        if code and why != STOPPED:
            logger.error("%s ends: %s", self._environment.name, why)
        raise SystemExit(code)

    def _heed_notices(self) -> None:
        """Makes SIGTERM end this worker's part between two steps, unless the program handles it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            own = os.getpid()

            def take_notice(number: int, frame: object) -> None:
                if os.getpid() == own:
                    self._membership.notice()
                else:  # a forked process
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)

            signal.signal(signal.SIGTERM, take_notice)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Reports that the program ends with an error; the others do not wait for its end."""
        self._has_failed = True
        if not isinstance(error, UnavailableError):  # a worker that misses others is lost, too
            self._membership.failed(kind.__name__)
        self._membership.close()
        self._show_error(kind, error, traceback)

    def _note_exit(self, code: Any = None) -> NoReturn:
        """Notes the program's exit code, which shows whether it has ended successfully."""
        if threading.current_thread() is threading.main_thread():
            self._exit_code = code
        self._exit(code)

    def _save(self, state: SharedState, folder: str) -> None:
        """Saves the state for the next run of the job, if this worker has it."""
        if not self._run or self._computed_in is None:
            return
        view, group = self._computed_in
        origin = Origin(self._run, view, self.position(), group)
        part = b"" if self._place is None else state.pack_part()
        if part and self._place is not None:
            persisted_state.keep_part(folder, origin, self._place, part)
        persisted_state.keep_state(folder, origin, lambda: self._pack(state))

    def _end(self) -> None:
        """Ends this worker's part, and reports how its program has ended."""
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
                "View %d: %d workers continue after %.2f s",
                view.number,
                len(view.members),
                seconds,
            )


def _packed_answers(answers: list[bytes]) -> bytes:
    return json.dumps([answer.hex() for answer in answers]).encode()


def _unpacked_answers(packed: bytes) -> list[bytes]:
    return [bytes.fromhex(answer) for answer in json.loads(packed)]


def _unpacked_state(held: bytes) -> tuple[int, int, tuple[int, str] | None, bytes]:
    """Returns the loop, the run and the view in which a state was computed, and the state."""
    with decoding("The state of the job", "Remove it to start without it."):
        about, packed = header_and_data(held)
        loops, run, computed_in = plain_list(about, 3)
        if computed_in is not None:
            view, group = plain_list(computed_in, 2)
            computed_in = whole_number(view), plain_text(group)
        return whole_number(loops), whole_number(run), computed_in, packed


def _first(answers: Sequence[bytes]) -> bytes:
    """Returns the first answer that is not empty.

    Raises:
        UnavailableError: The worker that had it is lost.
    """
    for answer in answers:
        if answer:
            return answer
    raise UnavailableError(
        message="The state that the last run of the job saved on one of its machines is missing: "
        "the worker that had it is lost. Start the job again on that machine, or with a folder "
        "that all machines share."
    )


@functools.cache
def elastic_group() -> ElasticGroup | None:
    """Returns the group of this process, which joins its job now; None outside elastic jobs."""
    environment = elastic_environment()
    if environment is None:
        return None
    faults.listen()
    history.listen()
    lifecycle.happened("start", 0)
    logs.say_who(environment.name)
    keep_freed_memory()  # as in every job of several processes
    group = ElasticGroup(environment)
    lifecycle.happened("start", 0)
    group.have_process()
    if not group.is_joining:
        group.regroup(None)
    return group
