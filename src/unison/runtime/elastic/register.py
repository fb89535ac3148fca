"""The register of an elastic job: a small service in the process that starts the workers.

It executes the decisions of `roster`. A worker connects to it, both prove that they know the job's
secret, and the worker stays connected; a worker that closes the connection, or is silent for too
long, is lost. Peers that do not know the secret get no answer.
"""

from __future__ import annotations

import collections
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from unison.net.acceptor import Acceptor
from unison.net.addresses import joined_address
from unison.net.handshake import server_handshake
from unison.net.lines import Line, Message
from unison.net.listening import listen
from unison.net.waker import Waker
from unison.runtime.elastic.lateness import Lateness
from unison.runtime.elastic.protocol import BEAT, REGISTER_CHANNEL, Member
from unison.runtime.elastic.roster import (
    Drop,
    Effect,
    Limits,
    Phase,
    Report,
    Roster,
    Tell,
    Wake,
)

logger = logging.getLogger("unison")

#: Seconds within which an authenticated worker must send its `hello`.
_SECONDS_TO_SPEAK = 5.0

#: Seconds before a connection that is being closed is dropped, if the peer does not read.
_SECONDS_TO_READ = 1.0

#: The maximum length of a worker's stack trace; longer ones are truncated.
_MOST_TOLD = 20_000

#: The exit code of the job if the register fails.
_FAILED = 1


class Register:
    """Decides which workers compute together; a context manager with its own thread.

    Args:
        min_workers: With fewer, the job does not continue.
        max_workers: With more, some wait until one is lost.
        host: The address at which it listens. The default only accepts processes on this machine.
        port: The port; 0 for a free one.
        token: The job's secret, which each worker must know.
        heartbeat_timeout: Seconds of silence after which a worker is lost, and within which it must
            stop when the group changes.
        wait: Seconds that too few workers wait for others before the job ends, and within which a
            group must make progress while it is formed.
        start_timeout: Seconds after which the job begins with the workers that have connected.
        on_event: Called with each event, in the register's thread: a dictionary whose `event` is
            "came", "proposed", "started", "interrupted", "lost", "leaving", "done", "failed",
            "benched", "refused", "late", "goes on" or "ended".
        on_report: Called with the values that workers report for monitoring, in the register's
            thread: a worker's name, and the reported value, which is not validated.
        slots: The number of workers that the supervisor starts initially, in the slots 0, 1, ...;
            by default `max_workers`. The job begins when each of them is connected or known to be
            lost.
        ends_after_errors: Whether the supervisor ends the job when a program that it has started
            ends with an error: the others wait for that, instead of continuing as after a loss.

    Attributes:
        address: The address at which it listens, as host:port.

    Raises:
        OSError: It cannot listen at the address.
    """

    def __init__(
        self,
        min_workers: int,
        max_workers: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str,
        heartbeat_timeout: float,
        wait: float,
        start_timeout: float,
        on_event: Callable[[dict[str, Any]], None],
        slots: int | None = None,
        ends_after_errors: bool = True,
        on_report: Callable[[str, Any], None] | None = None,
    ):
        if not 1 <= min_workers <= max_workers:
            raise ValueError(
                "Expected 1 <= min_workers <= max_workers. Received: "
                f"min_workers={min_workers}, max_workers={max_workers}."
            )
        if not token:
            raise ValueError("Expected a token that cannot be guessed. Received: an empty one.")
        secret = token.encode()
        self._listener = listen(host, port)
        self.address = joined_address(host, self._listener.getsockname()[1])
        self._acceptor = Acceptor(
            [self._listener], lambda own: server_handshake(own, secret, [REGISTER_CHANNEL])
        )
        self._silence = heartbeat_timeout
        self._on_event = on_event
        self._on_report = on_report
        self._roster = Roster(
            Limits(
                min_workers=min_workers,
                max_workers=max_workers,
                slots=max_workers if slots is None else slots,
                answer=heartbeat_timeout,
                wait=wait,
                start=start_timeout,
                ends_after_errors=ends_after_errors,
            )
        )
        self._guests: set[_Guest] = set()
        self._workers: dict[str, _Guest] = {}
        self._timers: dict[str, float] = {}
        self._lateness: Lateness | None = None
        self._compares_at = 0.0
        self._wishes: collections.deque[Callable[[], None]] = collections.deque()
        self._has_ended = threading.Event()
        self._is_closing = False
        self._is_carrying_out = False
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="unison-register", daemon=True)
        self._thread.start()

    # For the supervisor, from any thread

    @property
    def outcome(self) -> tuple[int, str] | None:
        """The exit code of the job and the reason, once it has ended."""
        return self._roster.outcome

    def lost(self, slot: int) -> None:
        """Notes that the process in a slot has ended; must be called before another is started."""
        self._wish(lambda: self._roster.ended(slot))

    def end(self, code: int, why: str) -> None:
        """Ends the job: every worker's next `Membership.regroup` raises `Ended`."""
        self._wish(lambda: self._roster.end(code, why))

    def wait(self, timeout: float) -> int | None:
        """Returns the exit code of the job; None if it has not ended within `timeout` seconds."""
        self._has_ended.wait(timeout)
        return None if self.outcome is None else self.outcome[0]

    def close(self) -> None:
        """Stops the service. Workers that are still computing lose their connections."""
        self._is_closing = True
        self._waker.wake()
        self._thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the register's thread

    def _wish(self, wish: Callable[[], None]) -> None:
        self._wishes.append(wish)
        self._waker.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._look()
        except Exception:
            logger.exception("The register has failed.")
            self._roster.end(_FAILED, "the register has failed")
        finally:
            self._has_ended.set()
            self._see_off()
            for own in (self._selector, self._acceptor, self._listener, self._waker):
                own.close()

    def _see_off(self) -> None:
        """Closes the connections, once the workers have read their messages."""
        self._workers.clear()
        last = time.monotonic() + _SECONDS_TO_READ
        for guest in list(self._guests):
            guest.closes_at = last
            self._attend(guest)
        while self._guests and time.monotonic() < last:
            for key, events in self._selector.select(BEAT):
                if isinstance(key.data, _Guest):
                    self._serve(key.data, events)
                else:
                    self._selector.unregister(key.fileobj)
        for guest in self._guests:
            guest.line.close()

    def _look(self) -> None:
        """Waits for events, and handles them."""
        begin = time.monotonic()
        for key, events in self._selector.select(self._seconds_to_sleep(begin)):
            if key.fileobj is self._acceptor:
                self._accept()
            elif key.fileobj is self._waker:
                self._waker.clear()
            else:
                self._serve(key.data, events)
        now = time.monotonic()
        if now - begin > BEAT + self._silence / 2:
            self._forgive(now - begin)
        # After the received messages: a process may have sent some before it ended.
        while self._wishes:
            self._wishes.popleft()()
            self._carry_out()
        self._miss(now)
        for timer in list(self._timers):
            if self._timers.get(timer, math.inf) <= now:
                del self._timers[timer]
                self._roster.wake(timer)
                self._carry_out()
        self._carry_out()
        if now >= self._compares_at:  # not for every message of a thousand workers
            self._compares_at = now + BEAT
            self._accept()  # handshakes have deadlines
            self._compare_members(now)

    def _compare_members(self, now: float) -> None:
        """Asks members that keep the others waiting where their programs are."""
        roster = self._roster
        if roster.phase is not Phase.ACTIVE:
            self._lateness = None
            return
        present = {id_: self._workers[id_] for id_ in roster.members if id_ in self._workers}
        if self._lateness is None or self._lateness.view != roster.number:
            names = {id_: guest.name for id_, guest in present.items()}
            self._lateness = Lateness(roster.number, names, self._ask_where, self._say_of)
        done = {id_ for id_, worker in roster.workers.items() if worker.is_done}
        begun = {
            id_: (guest.begun, guest.doing)
            for id_, guest in present.items()
            if guest.view == roster.number and id_ not in done
        }
        self._lateness.look(begun, now)

    def _ask_where(self, id_: str) -> None:
        if (guest := self._workers.get(id_)) is not None:
            self._tell(guest, {"is": "where"})

    def _say_of(self, name: str, is_late: bool, text: str) -> None:
        what = "late" if is_late else "goes on"
        self._do(Report({"event": what, "worker": name, "about": text}))

    def _seconds_to_sleep(self, now: float) -> float:
        return max(min([BEAT, *(when - now for when in self._timers.values())]), 0.0)

    def _forgive(self, seconds: float) -> None:
        """Extends all deadlines by the time for which this process itself was stopped."""
        for guest in self._guests:
            guest.heard_at = min(guest.heard_at + seconds, time.monotonic())
        self._timers = {timer: when + seconds for timer, when in self._timers.items()}
        self._lateness = None

    def _accept(self) -> None:
        for accepted in self._acceptor.accept():
            guest = _Guest(Line(accepted.stream), time.monotonic())
            self._guests.add(guest)
            self._selector.register(guest.line.stream, selectors.EVENT_READ, guest)

    def _serve(self, guest: _Guest, events: int) -> None:
        if guest not in self._guests:  # closed while another connection was served
            return
        if events & selectors.EVENT_WRITE:
            guest.line.flush()
        why = "its connection has closed"
        try:
            for message in guest.line.receive() if events & selectors.EVENT_READ else ():
                self._obey(guest, message)
                self._carry_out()
        except (KeyError, TypeError, ValueError) as error:
            why = f"it has sent an invalid message ({type(error).__name__}: {error})"
            guest.line.is_open = False
        self._attend(guest, why)

    def _attend(self, guest: _Guest, why: str = "it does not read its messages") -> None:
        """Closes a connection that has ended; otherwise updates which events it waits for."""
        if guest not in self._guests:
            return
        if not guest.line.is_open:
            self._close(guest, why)
            return
        writes = selectors.EVENT_WRITE if guest.line.num_waiting else 0
        self._selector.modify(guest.line.stream, selectors.EVENT_READ | writes, guest)
        if guest.closes_at is not None and not writes:
            # Closing it now would discard data that the peer has not read yet.
            guest.line.shutdown_sending()

    def _close(self, guest: _Guest, why: str) -> None:
        self._guests.discard(guest)
        self._selector.unregister(guest.line.stream)
        guest.line.close()
        if guest.id is not None and self._workers.get(guest.id) is guest:
            del self._workers[guest.id]
            self._roster.gone(guest.id, why)
            self._carry_out()

    def _miss(self, now: float) -> None:
        """Closes the connections of workers that have been silent for too long."""
        for guest in list(self._guests):
            if guest.id is None and now - guest.heard_at > _SECONDS_TO_SPEAK:
                self._close(guest, "it has not sent its hello")
            elif guest.closes_at is not None and now > guest.closes_at:
                self._close(guest, "it was dropped")
            elif guest.id is not None and now - guest.heard_at > self._silence:
                self._close(guest, f"it has sent nothing for {self._silence:g} s")

    def _obey(self, guest: _Guest, message: Message) -> None:
        """Handles a message from a worker.

        Raises:
            KeyError, TypeError, ValueError: The message does not follow the protocol.
        """
        guest.heard_at = time.monotonic()
        id_, what, roster = guest.id, message["is"], self._roster
        if id_ is None:
            self._greet(guest, message)
        elif self._workers.get(id_) is not guest:
            pass  # it was dropped
        elif what == "beat":
            guest.view, guest.begun = _number(message["view"]), _number(message["begun"])
            state = _step(message["step"]), str(message["doing"])
            if guest.state != state:
                guest.state = state
                roster.advanced(id_)
            self._tell(guest, {"is": "beat"})
        elif what == "ready":
            step, formed = _step(message["step"]), _number(message["formed"])
            view, is_open = _number(message["view"]), bool(message["is_open"])
            roster.ready(id_, view, step, formed, is_open)
        elif what == "formed":
            roster.formed(id_, _number(message["view"]))
        elif what == "open":
            roster.opened(id_, bool(message["is_open"]))
        elif what == "suspect":
            accused = [str(other) for other in message["accused"]]
            roster.suspect(id_, _number(message["view"]), accused, str(message["about"]))
        elif what == "leaving":
            roster.leaving(id_)
        elif what == "done":
            roster.done(id_)
        elif what == "failed":
            roster.failed(id_, str(message["about"]))
        elif what == "stack":
            if self._lateness is not None:
                stack = str(message["stack"])[:_MOST_TOLD]
                self._lateness.hear(id_, stack, time.monotonic())
        elif what == "report":
            if self._on_report is not None:
                self._on_report(guest.name, message["told"])
        else:
            raise ValueError(what)

    def _greet(self, guest: _Guest, message: Message) -> None:
        """Registers a process that knows the secret as a worker."""
        if message["is"] != "hello":
            raise ValueError(f"expected hello, received {message['is']!r}")
        member = Member(
            id=str(message["id"]),
            name=str(message["name"]),
            host=str(message["host"]),
            address=str(message["address"]),
            replicas=_number(message["replicas"]),
        )
        slot, software = message["slot"], dict(message["software"])
        if (before := self._workers.get(member.id)) is not None:
            self._close(before, "it has connected again")
        guest.id, guest.name = member.id, member.name
        self._workers[member.id] = guest
        self._roster.hello(member, None if slot is None else _number(slot), software)

    def _carry_out(self) -> None:
        """Executes the roster's effects."""
        roster = self._roster
        if self._is_carrying_out:  # the outer call executes the new effects in order
            return
        self._is_carrying_out = True
        while roster.effects:
            effects, roster.effects = roster.effects, []
            for effect in effects:
                self._do(effect)
        self._is_carrying_out = False
        if roster.outcome is not None:
            self._has_ended.set()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Tell):
            if (guest := self._workers.get(effect.worker)) is not None:
                self._tell(guest, effect.message)
        elif isinstance(effect, Drop):
            if (guest := self._workers.pop(effect.worker, None)) is not None:
                guest.closes_at = time.monotonic() + _SECONDS_TO_READ
                self._attend(guest)
        elif isinstance(effect, Wake):
            if effect.seconds is None:
                self._timers.pop(effect.timer, None)
            else:
                self._timers[effect.timer] = time.monotonic() + effect.seconds
        elif isinstance(effect, Report):
            try:
                self._on_event(effect.event)
            except Exception:
                logger.exception("The listener for the event %s has failed.", effect.event)

    def _tell(self, guest: _Guest, message: Message) -> None:
        guest.line.send(message)
        if guest.line.num_waiting:
            self._attend(guest)


class _Guest:
    """A connected process.

    Attributes:
        line: The connection.
        heard_at: When the last message was received.
        id: The id of the process; None if it has not sent it yet.
        name: Its name.
        closes_at: The deadline for closing the connection; None if it is not being closed.
        state: The step and activity that it has reported.
        view: The last view that it formed.
        begun: The number of exchanges that it has begun in the view.
    """

    def __init__(self, line: Line, now: float):
        self.line = line
        self.heard_at = now
        self.id: str | None = None
        self.name = ""
        self.closes_at: float | None = None
        self.state: tuple[int | None, str] | None = None
        self.view = self.begun = 0

    @property
    def doing(self) -> str:
        """A description of what it is doing."""
        step, doing = self.state or (None, "")
        return f"{doing} (step {step})"


def _number(value: Any) -> int:
    """Returns a value that must be a non-negative integer."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number, received {value!r}")
    return value


def _step(value: Any) -> int | None:
    return None if value is None else _number(value)
