"""`Registrations`: the machines that come to the one at the address of a job's rendezvous."""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping
from typing import Any, Self

from unison.errors import UnavailableError
from unison.net.addresses import joined_address, own_address
from unison.net.lines import Line, Message
from unison.net.proof import new_nonce
from unison.net.secret import KEY_VARIABLE, key
from unison.runtime.launching.holdings import parsed_holding, ranks
from unison.runtime.rendezvous import Entrance, opened_entrance, registered

#: The channel of these connections.
CHANNEL = b"nodes-1"

#: Seconds to send an answer.
SECONDS_TO_SPEAK = 5.0

#: The largest number of a node's workers.
_MOST_WORKERS = 1 << 12


def entrance_at(where: tuple[str, int], nodes: int) -> Entrance | None:
    """Returns this machine's entrance for so many machines at the rendezvous' address.

    None if that is not one of this machine, or another process listens there.
    """
    host = own_address(where[0])
    if host is None:
        return None
    try:
        return opened_entrance(host, where[1], key(), nodes, [CHANNEL])
    except OSError:
        return None


def register(where: tuple[str, int], said: Message, last: float) -> tuple[Line, Message]:
    """Registers with the machine of the rendezvous; returns the connection and its answer.

    Args:
        where: The rendezvous' address.
        said: The registration.
        last: When to give up, by `time.monotonic`.

    Raises:
        UnavailableError: It cannot be reached.
        UnauthenticatedError: It has another key.
    """
    begun = time.monotonic()
    outcome = registered(where, key(), CHANNEL, said, last)
    if isinstance(outcome, Exception):
        raise UnavailableError(
            message=f"Could not reach the rendezvous at {joined_address(*where)} within "
            f"{last - begun:.3g} s: {outcome}. Start the same command on the machine to which that "
            "address belongs, and check that its port can be reached and no other program listens "
            "there"
        ) from outcome
    return outcome


class Registrations:
    """The machines that have registered with this one.

    Args:
        entrance: Where this machine listens for them.
        nodes: The number of the job's machines.
        own: This machine's registration.
    """

    def __init__(self, entrance: Entrance, nodes: int, own: Message):
        self._acceptor = entrance.acceptor
        self._nodes = nodes
        self._own = own
        #: The connections, with what was received on them; None: nothing yet.
        self._lines: dict[Line, Message | None] = {}
        self._difference: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._selector.close()
        for line in self._lines:
            line.close()

    def are_complete(self) -> bool:
        """Returns whether all have registered, or one cannot take part."""
        return len(self._registered()) == self._nodes - 1 or self._difference is not None

    def hear(self, seconds: float) -> None:
        """Accepts connections and receives registrations; waits for at most `seconds`."""
        for event, _ in self._selector.select(seconds):
            if event.data is not None:
                self._receive(event.data)
        for accepted in self._acceptor.accept():
            line = Line(accepted.stream, most_waiting=None)
            self._lines[line] = None
            self._selector.register(line.stream, selectors.EVENT_READ, line)

    def answer(self) -> Message:
        """Sends each machine its answer, and returns this machine's."""
        registered = self._chosen()
        missing = self._needed - 1 - len(registered)
        complaint = self._difference
        if complaint is None and missing > 0:
            refused = self._acceptor.last_refusal
            because = f". The latest connection that failed: {refused}" if refused else ""
            complaint = (
                f"Timed out waiting for {missing} of {self._needed} machines. Start the same "
                f"command on each of them, with the same {KEY_VARIABLE}{because}"
            )
        machines = [self._own, *registered.values()]
        holdings = [parsed_holding(said.get("holding")) for said in machines]
        given = ranks([None if holding is None else holding.rank for holding in holdings])
        by_rank = [said for _, said in sorted(zip(given, machines, strict=True), key=_rank)]
        job: Message = {"workers": [said["workers"] for said in by_rank], "nonce": new_nonce()}
        if "holding" in self._own:
            job["holdings"] = [said.get("holding") for said in by_rank]
        job["at_start"] = next(
            (said["at_start"] for said in machines if said.get("at_start")),
            sum(len(said["workers"]) for said in machines),
        )
        for rank, line in zip(given[1:], registered, strict=True):
            line.send({"complaint": complaint} if complaint else job | {"rank": rank})
            line.flush_within(SECONDS_TO_SPEAK)
        return {"complaint": complaint} if complaint else job | {"rank": given[0]}

    @property
    def _needed(self) -> int:
        """The number of machines without which there is no job."""
        return self._nodes

    def _chosen(self) -> dict[Line, Message]:
        """Returns the registrations of those that take part."""
        return self._registered()

    def _registered(self) -> dict[Line, Message]:
        return {line: said for line, said in self._lines.items() if said is not None}

    def _is_registration(self, line: Line, said: Message) -> bool:
        """Returns whether a machine registers with what it has said."""
        about, at_start = said.get("about"), said.get("at_start")
        if not are_addresses(said.get("workers")) or not isinstance(about, dict):
            return False
        if not (at_start is None or (type(at_start) is int and at_start > 0)):
            return False
        # Only one of two that differ may have it.
        is_needed = "holding" in self._own and about == self._own["about"]
        return not is_needed or parsed_holding(said.get("holding")) is not None

    def _receive(self, line: Line) -> None:
        for said in line.receive(most=1):
            if self._lines[line] is not None or not self._is_registration(line, said):
                line.is_open = False
                break
            self._lines[line] = said
            theirs, ours = said["about"], self._own["about"]
            if theirs != ours:
                self._refuse(
                    line,
                    f"The machines of the job differ: {_difference(ours, theirs)}. Start the same "
                    "program, with the same --nnodes and versions, on all of them",
                )
        if not line.is_open:
            self._drop(line)

    def _refuse(self, line: Line, complaint: str) -> None:
        """Notes that a machine cannot take part: neither can the others."""
        self._difference = self._difference or complaint

    def _drop(self, line: Line) -> None:
        """Forgets a machine whose connection has ended."""
        self._selector.unregister(line.stream)
        line.close()
        del self._lines[line]


def _rank(machine: tuple[int, Message]) -> int:
    return machine[0]


def are_addresses(workers: Any) -> bool:
    """Returns whether a machine has said addresses of workers."""
    return (
        isinstance(workers, list)
        and 0 < len(workers) <= _MOST_WORKERS
        and all(isinstance(address, str) for address in workers)
    )


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describes the values that are not the same."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {ours.get(name)!r} and {theirs.get(name)!r}" for name in names)
