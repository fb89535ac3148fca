"""A worker's membership in an elastic job: a thread that communicates with the register.

The thread sends heartbeats whatever the program does, reconnects when the connection is lost, and
signals immediately that a view is over. `participant` decides which messages are sent when.
"""

from __future__ import annotations

import logging
import re
import selectors
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from unison.errors import OpError, UnauthenticatedError, UnavailableError
from unison.interrupts import signals_held, wait_until
from unison.net.acceptor import HANDSHAKE_SECONDS
from unison.net.addresses import split_address
from unison.net.connecting import connect
from unison.net.lines import Line, Message
from unison.net.waker import Waker
from unison.runtime.elastic.environment import TOKEN_VARIABLE
from unison.runtime.elastic.participant import Participant
from unison.runtime.elastic.protocol import (
    BEAT,
    REGISTER_CHANNEL,
    Ended,
    Interrupted,
    View,
    Welcome,
)
from unison.runtime.liveness.stragglers import where_the_program_is

logger = logging.getLogger("unison")

#: Seconds between two attempts to reach the register, and the minimum timeout of one.
_RETRY_AFTER = 0.1
_SECONDS_TO_CONNECT = 2.0

#: Seconds for sending a worker's last messages.
_SECONDS_TO_CLOSE = 2.0


class Membership:
    """A worker's connection to the register of its job.

    All methods are called by the program's thread, except for `notice`, which a signal handler may
    call, and `report`, which any thread may call. Another thread calls the callbacks of
    `on_interrupt`.

    Args:
        address: The register's address, as host:port.
        token: The job's secret.
        about: A description of this worker: its `name`, its `host` (equal for processes that can
            share memory), its number of `replicas`, its `slot` (None: the supervisor has not
            started it), and its `software`, a dictionary that must be the same on all workers.
        listen_address: The address at which it listens for other members, as host:port.
        heartbeat_timeout: Seconds of silence after which the register counts as lost.
        wait: Seconds during which reconnecting is attempted then.

    Examples:
        >>> from unison.runtime.elastic.register import Register
        >>> waits = dict(heartbeat_timeout=10.0, wait=10.0)
        >>> events = []
        >>> about = dict(name="worker 0", host="here", replicas=1, slot=0, software={})
        >>> with Register(
        ...     1, 1, token="s", start_timeout=10.0, on_event=events.append, **waits
        ... ) as register:
        ...     worker = Membership(register.address, "s", about, "127.0.0.1:5000", **waits)
        ...     worker.enter()
        ...     view = worker.regroup(step=None)
        ...     worker.confirm()  # and compute, until `interrupted` is not None
        ...     worker.done()
        ...     register.wait(10.0)
        ...     worker.close()
        Welcome(nominal=1, is_joining=False)
        0
        >>> view.number, [member.name for member in view.members]
        (1, ['worker 0'])
    """

    def __init__(
        self,
        address: str,
        token: str,
        about: Mapping[str, Any],
        listen_address: str,
        heartbeat_timeout: float,
        wait: float,
    ):
        id_ = uuid.uuid4().hex
        self._address = address
        self._secret = token.encode()
        self._hello = {"is": "hello", "id": id_, "address": listen_address} | {
            key: about[key] for key in ("name", "host", "replicas", "slot", "software")
        }
        self._silence = heartbeat_timeout
        self._wait = wait
        self._participant = Participant(id_)
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[str], None]] = []
        self._progress: tuple[int, str] = (0, "begins")
        self._begun = 0
        self._report: Mapping[str, Any] | None = None
        self._has_notice = False
        self._is_to_cut = False
        self._is_closing = False
        self._heard_at = time.monotonic()
        self._lost: str | None = None  # why reconnecting was given up
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="unison-membership", daemon=True)
        self._thread.start()

    # For the program

    def enter(self) -> Welcome:
        """Joins the job. A worker that starts it waits until the other initial workers are known.

        Raises:
            Ended: The register rejects this worker.
            UnavailableError: The register cannot be reached.
        """
        return self._await(lambda: self._participant.welcome)

    def regroup(self, step: int | None, is_open: bool = False) -> View:
        """Reports that this worker has stopped computing in its view, and waits for the next one.

        Args:
            step: The number of its last step that took effect; None if it has no state.
            is_open: Whether newcomers could join what its program is doing. Members that already
                have the state take part in any case.

        Raises:
            Ended: This worker's part in the job is over.
            UnavailableError: The register cannot be reached.
        """
        with signals_held, self._changed:
            self._begun = 0
            self._participant.regroup(step, is_open)
        self._waker.wake()
        return self._await(self._participant.take)

    def confirm(self) -> None:
        """Reports that this worker has formed the view, and has its state; waits for all others.

        Raises:
            Interrupted: The view is already over; `regroup` leads to the next one.
            Ended: This worker's part in the job is over.
            UnavailableError: The register cannot be reached.
        """
        with signals_held, self._changed:
            self._participant.confirm()
        self._waker.wake()
        participant = self._participant
        self._await(lambda: participant.interrupted is not None or participant.has_started)
        if (why := participant.interrupted) is not None:
            raise Interrupted(why)

    @property
    def interrupted(self) -> str | None:
        """Why the present view is over; None while it is not. To be checked before every step."""
        return self._participant.interrupted

    @property
    def was_cut(self) -> bool:
        """Whether the connection was lost since the last view: others may have continued since."""
        return self._participant.was_cut

    def on_interrupt(self, callback: Callable[[str], None]) -> None:
        """Registers a function that another thread calls with the reason when a view is over."""
        self._callbacks.append(callback)

    def open(self, is_open: bool) -> None:
        """Reports whether newcomers could join what the program does from now on."""
        if self._participant.is_open == is_open:  # called in every step
            return
        with signals_held, self._changed:
            self._participant.open(is_open)
        self._waker.wake()

    def suspect(self, about: str) -> None:
        """Reports that the view does not work.

        Args:
            about: A description of the failure. Members that are named in it are suspected; if
                failures continue, one of them is excluded for a time.
        """
        with signals_held, self._changed:
            view = self._participant.view
            members = () if view is None else view.members
            accused = [
                member.id
                for place, member in enumerate(members)
                if view is not None and place != view.own and _names(about, member.name)
            ]
            self._participant.suspect(accused, about)
        self._waker.wake()

    def progress(self, step: int, doing: str) -> None:
        """Sets this worker's progress, for the next heartbeat.

        While a view is formed, `doing` must change as long as there is progress.
        """
        self._progress = (step, doing)

    def begin(self) -> None:
        """Notes that this worker begins an operation of all members of the view."""
        self._begun += 1

    def report(self, told: Mapping[str, Any]) -> None:
        """Reports a value to those who monitor the job; any thread may call this.

        The report is dropped if the register cannot be reached or does not accept data now: it must
        not delay the messages that the job needs.
        """
        self._report = told
        self._waker.wake()

    def notice(self) -> None:
        """Reports that this worker is to end soon; its view is over, `regroup` raises `Ended`."""
        self._has_notice = True
        self._waker.wake()

    def cut(self) -> None:
        """Closes the connection, and reconnects: the others continue without this worker.

        They see a lost connection; the worker rejoins by `regroup`.
        """
        self._is_to_cut = True
        self._waker.wake()

    def done(self) -> None:
        """Reports that this worker's program has ended successfully."""
        with signals_held, self._changed:
            self._participant.done()
        self._waker.wake()

    def failed(self, about: str) -> None:
        """Reports that this worker's program ends with an error, which does not count as a loss."""
        with signals_held, self._changed:
            self._participant.failed(about)
        self._waker.wake()

    def close(self) -> None:
        """Ends the connection and the thread, once pending messages have been sent."""
        self._is_closing = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SECONDS_TO_CONNECT + _SECONDS_TO_CLOSE)

    def _await(self, look: Callable[[], Any]) -> Any:
        """Waits until `look` returns a true value; the register's timeouts bound the wait."""
        found: list[Any] = []

        def is_over() -> bool:
            found[:] = [look()]
            return bool(found[0]) or self._participant.ended is not None or self._lost is not None

        def result() -> Any:
            if found[0]:
                return found[0]
            if self._participant.ended is not None:
                raise Ended(*self._participant.ended)
            raise UnavailableError(message=self._lost or "")

        return wait_until(self._changed, is_over, result)

    # In the thread

    def _run(self) -> None:
        try:
            while not self._has_ended():
                self._seek()
        except Exception as error:
            logger.exception("The connection to the register has failed.")
            self._give_up(f"The connection to the register has failed: {error}")
        finally:
            with self._changed:
                self._lost = self._lost or "The connection to the register has been closed."
                self._changed.notify_all()
            self._waker.close()

    def _has_ended(self) -> bool:
        return self._is_closing or self._lost is not None or self._participant.ended is not None

    def _seek(self) -> None:
        """Connects to the register, and exchanges messages until the connection is lost."""
        why = "it closed the connection, or sent nothing"
        try:
            stream = connect(
                split_address(self._address),
                self._secret,
                REGISTER_CHANNEL,
                seconds=max(_SECONDS_TO_CONNECT, min(self._silence, HANDSHAKE_SECONDS)),
                look=self._check_wanted,
            )
        except UnauthenticatedError:
            why = f"a register with another token ({TOKEN_VARIABLE})"
        except (OSError, ValueError, OpError) as error:
            why = str(error)
        else:
            line = Line(stream)
            try:
                self._talk(line)
            except (KeyError, TypeError, ValueError) as error:
                why = f"an invalid message ({type(error).__name__}: {error})"
            finally:
                line.close()
        if self._has_ended():
            return
        self._tell(self._participant.cut, "the connection to the register is lost")
        if time.monotonic() - self._heard_at > self._wait:
            self._give_up(
                f"The register of the job at {self._address} could not be reached for "
                f"{self._wait:g} s. Last error: {why}. Check that the process that started the "
                "workers is running, and that this machine can reach it."
            )
            return
        with selectors.DefaultSelector() as selector:  # sleeps, unless it is woken
            selector.register(self._waker, selectors.EVENT_READ)
            selector.select(_RETRY_AFTER)
        self._listen()

    def _check_wanted(self) -> None:
        """Stops waiting for a connection that is no longer needed."""
        if self._has_ended():
            raise ConnectionAbortedError("this worker's part in the job is over")

    def _talk(self, line: Line) -> None:
        """Exchanges messages with the register until the connection is lost or no longer needed."""
        line.send(self._hello)
        beat_at = heard_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            selector.register(line.stream, selectors.EVENT_READ)
            while line.is_open:
                if (now := time.monotonic()) >= beat_at:
                    line.send(self._beat())
                    beat_at = now + BEAT
                writes = selectors.EVENT_WRITE if line.num_waiting else 0
                selector.modify(line.stream, selectors.EVENT_READ | writes)
                for key, events in selector.select(max(beat_at - time.monotonic(), 0.0)):
                    if key.fileobj is self._waker:
                        self._listen()
                    elif events & selectors.EVENT_READ:
                        for message in line.receive():
                            heard_at = self._heard_at = time.monotonic()
                            if message["is"] == "where":
                                line.send({"is": "stack", "stack": where_the_program_is()})
                            self._tell(self._participant.hear, message)
                report, self._report = self._report, None
                if report is not None and not line.num_waiting:
                    line.send({"is": "report", "told": report})
                self._say_all(line)
                line.flush()
                if self._is_closing:
                    self._say_all(line)  # also messages added since the call above
                    self._say_last(line)
                    return
                if self._is_to_cut:
                    self._is_to_cut = False
                    return
                if time.monotonic() - heard_at > self._patience:
                    return

    @property
    def _patience(self) -> float:
        """Seconds of silence after which the register counts as lost."""
        is_leaving = self._participant.is_leaving  # the worker is killed if it takes too long
        return min(self._silence, _SECONDS_TO_CONNECT) if is_leaving else self._silence

    def _beat(self) -> Message:
        step, doing = self._progress
        view = self._participant.view
        begun = {"view": 0 if view is None else view.number, "begun": self._begun}
        return {"is": "beat", "step": step, "doing": doing} | begun

    def _listen(self) -> None:
        """Handles notifications from the program."""
        self._waker.clear()
        if self._has_notice:
            self._has_notice = False
            self._tell(self._participant.notice)

    def _tell(self, tell: Callable[..., None], *args: Any) -> None:
        """Passes an event to the participant, and its consequences to the program."""
        with self._changed:
            before = self._participant.interrupted
            tell(*args)
            after = self._participant.interrupted
            self._changed.notify_all()
        if before is None and after is not None:
            for callback in self._callbacks:
                try:
                    callback(after)
                except Exception:
                    logger.exception("A callback of Membership.on_interrupt has failed.")

    def _say_all(self, line: Line) -> None:
        with self._changed:
            said, self._participant.outbox = self._participant.outbox, []
        for message in said:
            line.send(message)

    def _say_last(self, line: Line) -> None:
        """Sends the remaining messages, if the register accepts them."""
        last = time.monotonic() + _SECONDS_TO_CLOSE
        while line.num_waiting and time.monotonic() < last:
            time.sleep(0.01)
            line.flush()

    def _give_up(self, why: str) -> None:
        self._lost = why
        self._tell(self._participant.give_up, "the register of the job cannot be reached")


def _names(text: str, name: str) -> bool:
    """Returns whether a name occurs in a text, and not only as part of another name."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
