"""What a worker keeps in mind of its part in the job: a state machine without sockets.

It is told what the program does and what the register says, and puts into `outbox` what is to be
said. `membership` carries it out; the tests explore it together with `roster`.
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
    """A worker, as it takes part.

    Args:
        id_: The process.

    Attributes:
        welcome: How it begins; None before the register has said it.
        view: The view that the program forms, or computes in; None before the first.
        has_started: Whether the members of that view compute.
        interrupted: Why that view is over, or all; None while neither is.
        ended: How this worker's part has ended, once it has.
        is_leaving: Whether it is to end soon.
        is_open: Whether others can take part in what it does.
        outbox: What is to be said to the register; whoever says it empties the list.
    """

    def __init__(self, id_: str):
        self._id = id_
        #: Whether the connection was lost since the last view: others may have gone on since.
        self.was_cut = False
        self.welcome: Welcome | None = None
        self.view: View | None = None
        self.has_started = False
        self.interrupted: str | None = None
        self.ended: End | None = None
        self.is_leaving = False
        self.outbox: list[Message] = []
        self._is_welcome = False  # on the present connection
        self._number = 0  # of the view that was last proposed on it
        self._proposed: View | None = None  # and that the program has not taken yet
        self._formed = 0  # the view that it has formed last, whose state it has
        self._is_waiting = False  # for a view
        self._step: int | None = None
        self.is_open = False
        self._asks_again = False  # for the register, which it has lost when it is to end

    # What the program does

    def regroup(self, step: int | None, is_open: bool) -> None:
        """It computes no more, has the state of `step`, and awaits the next view."""
        self._is_waiting, self._step, self.is_open = True, step, is_open
        self._say_ready()

    def take(self) -> View | None:
        """It forms the view that is proposed, which is returned.

        None: there is none yet, or none is formed any more, as its part has ended.
        """
        if self._proposed is None or self.ended is not None:
            return None
        self.view, self._proposed = self._proposed, None
        self._is_waiting, self.has_started, self.interrupted = False, False, None
        self.was_cut = False
        return self.view

    def confirm(self) -> None:
        """It has formed the view, and has its state, also where the view is over by now."""
        if self.view is not None:
            self._formed = self.view.number
        if self.interrupted is None:
            self.outbox.append({"is": "formed", "view": self._number})

    def open(self, is_open: bool) -> None:
        """It has come to where others can take part, or away from there."""
        is_new = self.is_open != is_open
        self.is_open = is_open
        if is_new and self._is_welcome:
            self.outbox.append({"is": "open", "is_open": is_open})

    def suspect(self, accused: Sequence[str], about: str) -> None:
        """It finds that the view does not work."""
        if self.interrupted is None and self.view is not None:
            message = {"is": "suspect", "view": self._number, "accused": [*accused], "about": about}
            self.outbox.append(message)

    def notice(self) -> None:
        """It is to end soon: its view is over at once.

        The register knows whether others need its state. One that is not connected asks for it once
        more, if it has a state.
        """
        self.is_leaving = True
        self._interrupt("this worker is to end soon")
        if self._is_welcome:
            self.outbox.append({"is": "leaving"})
        elif not self._formed:
            self._leave()

    def done(self) -> None:
        """It has ended well."""
        self.ended = End(DONE, "this worker is done", saves=False)
        self.outbox.append({"is": "done"})

    def failed(self, about: str) -> None:
        """It ends by an error of its own."""
        self.outbox.append({"is": "failed", "about": about})

    # What comes from the register

    def hear(self, message: Mapping[str, Any]) -> None:
        """The register has said something.

        Raises:
            KeyError, TypeError, ValueError: It is no register of ours.
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
        """The connection is lost, or there was none to be had.

        The view is over, whatever the register knows.
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
        """The register is not to be found any more."""
        self._interrupt(why)

    # How

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
            why = "it is to end soon, and the register is not to be found"
            self.ended = End(LEFT_BY_NOTICE, why, saves=True)
