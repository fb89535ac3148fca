"""`NodeGroup`: the machines of a job of which some may be lost, and to which others may come.

The machine to which the rendezvous' address belongs keeps listening while the workers run, and has
an open connection to each of the others. When one of these ends, a machine registers again because
it has lost a worker, or another machine comes, all machines end their workers and meet again. As
many as are there then go on with the job.

Before another machine takes part, the workers first keep their state once more, so that few steps
are repeated.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self

from unison.errors import UnavailableError
from unison.net.lines import Line, Message
from unison.runtime.launching.node_registrations import (
    SECONDS_TO_SPEAK,
    Registrations,
    entrance_at,
    register,
)
from unison.runtime.rendezvous import Entrance

logger = logging.getLogger("unison")

#: Seconds between two looks at the time.
_LOOK_AFTER = 0.1

#: Seconds that a machine whose connection is open has to end its workers and register again; and
#: that the workers have to keep their state once more before another machine takes part.
_SECONDS_TO_RETURN = 60.0
_SECONDS_TO_KEEP = 60.0


class NodeCounts(NamedTuple):
    """The numbers of machines that a job may have.

    Attributes:
        least: With fewer it does not run.
        most: Further ones wait until one is lost.
    """

    least: int
    most: int

    @property
    def may_change(self) -> bool:
        """Whether machines may be lost, and others may come, while it runs."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.may_change else str(self.most)


class NodeGroup:
    """This machine's part in the group, as a context manager.

    Args:
        counts: The numbers of machines.
        where: The address of the rendezvous.
        last_call: Seconds for which the first meeting waits for more than the least machines.
        newest: Returns the step of the newest state that this machine's workers have kept.
    """

    def __init__(
        self,
        counts: NodeCounts,
        where: tuple[str, int],
        last_call: float,
        newest: Callable[[], int | None] = lambda: None,
    ):
        self._counts = counts
        self._where = where
        self._last_call = last_call
        self._newest = newest
        self._entrance: Entrance | None = None
        self._gathering: _Gathering | None = None
        self._line: Line | None = None
        self._watching: threading.Thread | None = None
        self._is_meeting = threading.Event()
        self._over = threading.Event()
        self._has_ended = threading.Event()
        #: The number of workers with which the job began, and that of the machines of the last
        #: meeting; None before the first one.
        self.at_start: int | None = None
        self._machines: int | None = None
        self._hosts: list[str] = []
        #: Whether the last meeting was one of other machines than that before.
        self.has_changed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def is_over(self) -> bool:
        """Whether the workers are to end, since the machines meet again."""
        return self._over.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended for the machine of the rendezvous: nobody meets again."""
        return self._has_ended.is_set()

    def meet(self, said: Message, last: float) -> Message:
        """Waits until the machines of the next run have registered, and returns the answer.

        Args:
            said: This machine's registration.
            last: When to give up, by `time.monotonic`.

        Raises:
            UnavailableError: The rendezvous cannot be reached.
            UnauthenticatedError: The machine of the rendezvous has another key.
        """
        self._stop_watching()
        said = {**said, "at_start": self.at_start, "machines": self._machines}
        answer = self._met(said, last)
        if answer.get("complaint") is None:
            self.at_start, self._machines = answer.get("at_start"), len(answer["workers"])
            addresses = (address for each in answer["workers"] for address in each)
            now = sorted(address.rpartition(":")[0] for address in addresses)
            self.has_changed, self._hosts = now != self._hosts, now
            self._over.clear()
        return answer

    def watch(self) -> None:
        """Watches the other machines from now on, until the next meeting."""
        self._is_meeting.clear()
        self._watching = threading.Thread(target=self._watch_all, name="unison-nodes", daemon=True)
        self._watching.start()

    def leave(self, has_failed: bool = True) -> None:
        """Takes part no longer, and tells the others."""
        self._stop_watching()
        if self._gathering is not None and self._entrance is not None:
            self._gathering.tell({"is": "ended"}, also_others=True)
            self._gathering.close()
            self._entrance.close()
            self._gathering = self._entrance = None
        if self._line is not None:
            self._line.send({"is": "leaves", "has_failed": has_failed})
            self._line.flush_within(SECONDS_TO_SPEAK)
            self._line.close()
            self._line = None

    # Meeting.

    def _met(self, said: Message, last: float) -> Message:
        if self._gathering is None and self._line is None:
            self._entrance = entrance_at(self._where, self._counts.most)
            if self._entrance is not None:
                self._gathering = _Gathering(self._entrance, self._counts, self._last_call, said)
        if self._gathering is not None:
            return self._gathering.meet(said, last)
        if self._line is not None:
            answer = _answered(self._line, said, last)
            if answer is not None:
                return answer
            self._line.close()
            self._line = None
            return self._met(said, last)  # possibly this machine has that address
        self._line, answer = register(self._where, said, last)
        self._line.end_if_unanswered()
        _require_a_job(answer)
        return answer

    # While the workers run.

    def _stop_watching(self) -> None:
        self._is_meeting.set()
        if self._watching is not None:
            self._watching.join()
            self._watching = None

    def _watch_all(self) -> None:
        try:
            self._watch()
        except Exception:  # without this, a lost machine would not be noticed any more
            logger.exception("Watching the other machines has failed.")
            self._over.set()

    def _watch(self) -> None:
        """Watches the other machines until they meet again."""
        if self._gathering is None:
            assert self._line is not None
            self._watch_line(self._line)
            return
        while not self._is_meeting.is_set():
            self._gathering.hear(_LOOK_AFTER)
            if not self._over.is_set() and self._gathering.must_meet(self._newest):
                self._gathering.tell({"is": "over"})
                self._over.set()

    def _watch_line(self, line: Line) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(line.stream, selectors.EVENT_READ)
            while line.is_open and not self._is_meeting.is_set():
                if not selector.select(_LOOK_AFTER):
                    continue
                for told in line.receive():
                    if told.get("is") == "over":
                        self._over.set()
                    elif told.get("is") == "ended":
                        self._has_ended.set()
                        return  # the workers end by themselves
            if not line.is_open:
                self._over.set()  # that machine is lost, with its workers


def _answered(line: Line, said: Message, last: float) -> Message | None:
    """Registers again on an open connection; returns the answer, None if the connection ends.

    Raises:
        UnavailableError: The job has ended.
    """
    if not line.is_open:
        return None
    line.send(said)
    with selectors.DefaultSelector() as selector:
        selector.register(line.stream, selectors.EVENT_READ)
        while line.is_open and (left := last + SECONDS_TO_SPEAK - time.monotonic()) > 0:
            line.flush()
            selector.select(min(left, _LOOK_AFTER))
            for told in line.receive():
                _require_a_job(told)
                if "is" not in told:
                    return told
    return None


def _require_a_job(told: Message) -> None:
    """Raises an UnavailableError if the job has ended."""
    if told.get("is") == "ended":
        raise UnavailableError(message="The job has ended on the machine of the rendezvous.")


class _Gathering(Registrations):
    """The machines that come to this one, before and while workers run.

    Args:
        entrance: Where this machine listens for them.
        counts: The numbers of machines.
        last_call: Seconds for which the first meeting waits for more than the least machines.
        own: This machine's registration.
    """

    def __init__(self, entrance: Entrance, counts: NodeCounts, last_call: float, own: Message):
        super().__init__(entrance, counts.most, own)
        self._counts = counts
        self._last_call = last_call
        #: The connections to the machines of the last meeting; None before the first one.
        self._members: list[Line] | None = None
        self._has_lost = False
        self._leaving: set[Line] = set()
        #: Whether a machine has left since its program is done: so will be those of the others.
        self._is_ending = False
        self._begun = 0.0
        #: The time at which enough machines had registered, and that at which another one has come
        #: while workers run, with the newest state then.
        self._enough_since: float | None = None
        self._came: tuple[float, int | None] | None = None

    def meet(self, own: Message, last: float) -> Message:
        """Waits for the machines of the next run, and answers them; returns this one's answer."""
        self._own = own
        self._begun, self._enough_since = time.monotonic(), None
        self.tell({"is": "over"})
        while not self.are_complete() and (left := last - time.monotonic()) > 0:
            self.hear(min(left, _LOOK_AFTER))
        answer = self.answer()
        if answer.get("complaint") is None:
            chosen = self._chosen()
            self._members = [*chosen]
            for line in chosen:
                line.end_if_unanswered()
            self._lines |= dict.fromkeys(chosen)
            self._has_lost, self._came = False, None
        return answer

    def tell(self, message: Message, also_others: bool = False) -> None:
        """Sends a message to the machines of the last meeting, or to all that have registered."""
        for line in self._lines if also_others else self._members or ():
            line.send(message)
            if line.num_waiting:
                line.flush_within(SECONDS_TO_SPEAK)

    def must_meet(self, newest: Callable[[], int | None]) -> bool:
        """Returns whether the machines have to meet again.

        Args:
            newest: Returns the step of the newest state that this machine's workers have kept.
        """
        members, registered = self._members or [], self._registered()
        if self._has_lost or any(line in registered for line in members):
            return True
        is_full = len(members) + 1 >= self._counts.most
        if not registered or is_full or self._is_ending:
            self._came = None
            return False
        now, step = time.monotonic(), newest()
        if self._came is None:
            self._came = now, step
        since, at = self._came
        is_newer = step is not None and (at is None or step > at)
        return is_newer or now - since > _SECONDS_TO_KEEP

    def are_complete(self) -> bool:
        """Returns whether those have registered that the next run can begin with."""
        now = time.monotonic()
        count = 1 + len(self._registered())
        if count < self._counts.least:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        awaited = [line for line in self._members or () if self._lines.get(line) is None]
        if awaited and now - self._begun < _SECONDS_TO_RETURN:
            return False
        if count >= self._counts.most or self._members is not None:
            return True
        return count >= self._expected() or now - self._enough_since >= self._last_call

    def _expected(self) -> float:
        """Returns the number of machines of a job that goes on after that of the rendezvous was
        lost, which this machine stands in for, or is again.
        """
        told = [said.get("machines") for said in (self._own, *self._registered().values())]
        known = [machines for machines in told if type(machines) is int]
        return max(known, default=math.inf) - (self._own.get("machines") is not None)

    @property
    def _needed(self) -> int:
        return self._counts.least

    def _chosen(self) -> dict[Line, Message]:
        """Returns those of the last meeting, then the others in the order of their arrival."""
        registered = self._registered()
        members = [line for line in self._members or () if line in registered]
        others = [line for line in registered if line not in members]
        chosen = [*members, *others][: self._counts.most - 1]
        return {line: registered[line] for line in chosen}

    def _is_registration(self, line: Line, said: Message) -> bool:
        if said.get("is") == "leaves":
            self._leaving.add(line)
            self._is_ending = self._is_ending or said.get("has_failed") is False
        return "is" not in said and super()._is_registration(line, said)

    def _refuse(self, line: Line, complaint: str) -> None:
        """Sends away a machine that cannot take part: the others can."""
        line.send({"complaint": complaint})
        line.flush_within(SECONDS_TO_SPEAK)
        line.is_open = False

    def _drop(self, line: Line) -> None:
        super()._drop(line)
        if line in (self._members or ()):
            self._members = [each for each in self._members or () if each is not line]
            self._has_lost = self._has_lost or line not in self._leaving
        self._leaving.discard(line)
