"""A worker's view of its part in the job: a state machine without sockets.

Its methods are called for the program's actions and the register's messages, and it puts the
messages to send into `outbox`. `membership` sends them; the tests explore it together with
`roster`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unison.net.lines import Message
from unison.runtime.elastic.protocol import (
    DONE,
    LEFT_BY_NOTICE,
    End,
    Member,
    View,
    Welcome,
)


class Participant:
    """A worker's state in the protocol.

    Args:
        id_: The id of the process.

    Attributes:
        welcome: The register's welcome; None before it was received.
        view: The view that the program forms, or computes in; None before the first.
        has_started: Whether the members of that view compute.
        interrupted: Why that view or the whole part is over; None while neither is.
        ended: How this worker's part has ended, once it has.
        is_leaving: Whether it is to end soon.
        is_open: Whether others can join what it is doing.
        outbox: The messages to send to the register; the sender empties the list.
    """

    def __init__(self, id_: str):
        self._id = id_
        #: Whether the connection was lost since the last view: others may have continued since.
        self.was_cut = False
        self.welcome: Welcome | None = None
        self.view: View | None = None
        self.has_started = False
        self.interrupted: str | None = None
        self.ended: End | None = None
        self.is_leaving = False
        self.outbox: list[Message] = []
        self._is_welcome = False  # on the present connection
        self._number = 0  # of the view last proposed on this connection
        self._proposed: View | None = None  # that view, until the program takes it
        self._formed = 0  # the last view that it formed, whose state it has
        self._is_waiting = False  # for a view
        self._step: int | None = None
        self.is_open = False
        self._asks_again = False  # reconnects once more to ask how to end

    # Actions of the program

    def regroup(self, step: int | None, is_open: bool) -> None:
        """Notes that it has stopped, has the state of `step`, and waits for the next view."""
        self._is_waiting, self._step, self.is_open = True, step, is_open
        self._say_ready()

    def take(self) -> View | None:
        """Returns the proposed view, which the program forms now.

        None if there is none yet, or if its part has ended.
        """
        if self._proposed is None or self.ended is not None:
            return None
        self.view, self._proposed = self._proposed, None
        self._is_waiting, self.has_started, self.interrupted = False, False, None
        self.was_cut = False
        return self.view

    def confirm(self) -> None:
        """Notes that it has formed the view and has its state, even if the view is over by now."""
        if self.view is not None:
            self._formed = self.view.number
        if self.interrupted is None:
            self.outbox.append({"is": "formed", "view": self._number})

    def open(self, is_open: bool) -> None:
        """Notes whether others can join what the program is doing now."""
        is_new = self.is_open != is_open
        self.is_open = is_open
        if is_new and self._is_welcome:
            self.outbox.append({"is": "open", "is_open": is_open})

    def suspect(self, accused: Sequence[str], about: str) -> None:
        """Reports that the view does not work."""
        if self.interrupted is None and self.view is not None:
            message = {"is": "suspect", "view": self._number, "accused": [*accused], "about": about}
            self.outbox.append(message)

    def notice(self) -> None:
        """Notes that it is to end soon: its view is over immediately.

        The register knows whether others need its state. A worker that is not connected tries to
        reach it once more, if it has a state.
        """
        self.is_leaving = True
        self._interrupt("this worker is to end soon")
        if self._is_welcome:
            self.outbox.append({"is": "leaving"})
        elif not self._formed:
            self._leave()

    def done(self) -> None:
        """Notes that the program has ended successfully."""
        self.ended = End(DONE, "this worker is done", saves=False)
        self.outbox.append({"is": "done"})

    def failed(self, about: str) -> None:
        """Reports that the program ends with an error of its own."""
        self.outbox.append({"is": "failed", "about": about})

    # Messages from the register

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handles a message from the register.

        Raises:
            KeyError, TypeError, ValueError: The message does not follow the protocol.
        """
        what = message["is"]
        if self.ended is not None:
            return
        if what == "welcome":
            self._is_welcome = True
            if self.welcome is None:
                self.welcome = Welcome(int(message["nominal"]), bool(message["is_joining"]))
            if self.is_leaving:
                self.outbox.append({"is": "leaving"})
            if self._is_waiting:
                self._say_ready()
        elif what == "view":
            self._consider(message)
        elif what == "interrupt" and message["view"] == self._number:
            if self._proposed is None:
                self._interrupt(str(message["why"]))
            else:
                self._proposed = None
                self._say_ready()
        elif what == "start" and message["number"] == self._number:
            self.has_started = True
        elif what == "end":
            self.ended = End(int(message["code"]), str(message["why"]), bool(message["saves"]))
            self._interrupt(self.ended.why)

    def cut(self, why: str) -> None:
        """Notes that the connection is lost, or could not be made.

        The view is over, whatever the register has recorded.
        """
        self._is_welcome, self._number, self._proposed = False, 0, None
        self.outbox.clear()
        if self.view is not None:
            self.was_cut = True
            self._interrupt(why)
        if self.is_leaving and (self._asks_again or not self._formed):
            self._leave()
        self._asks_again = self.is_leaving

    def give_up(self, why: str) -> None:
        """Notes that the register cannot be reached any more."""
        self._interrupt(why)

    # Implementation

    def _say_ready(self) -> None:
        if self._is_welcome:
            state = {"step": self._step, "formed": self._formed}
            said = {"view": self._number, "is_open": self.is_open}
            self.outbox.append({"is": "ready"} | said | state)

    def _consider(self, message: Mapping[str, Any]) -> None:
        members = tuple(Member(**member) for member in message["members"])
        own = [member.id for member in members].index(self._id)
        self._number = int(message["number"])
        steps = tuple(message["steps"])
        self._proposed = View(self._number, members, own, steps, message["source"])

    def _interrupt(self, why: str) -> None:
        if self.interrupted is None:
            self.interrupted = why

    def _leave(self) -> None:
        if self.ended is None:
            why = "it will be terminated soon, and the register cannot be reached"
            self.ended = End(LEFT_BY_NOTICE, why, saves=True)
