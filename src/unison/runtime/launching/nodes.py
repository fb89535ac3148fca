"""The meeting of the machines of a job on which `unison run --nnodes` is called one by one.

The machine to which the rendezvous' address belongs listens there. The others register with it, and
it gives out ranks in the order in which they arrive, itself first; but a machine that holds records
in memory (`partners`) keeps the rank that it had. Each learns the addresses of all workers. Both
ends of a connection prove before that they know the same key of the user (`unison.net`), and
traffic between machines is encrypted. The job's key is new, and not sent: each machine derives it
from the user's key and a nonce of the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unison.errors import UnavailableError
from unison.net.addresses import address_towards, host_and_port, own_address
from unison.net.lines import Line, Message
from unison.net.proof import derived_key, new_nonce
from unison.net.secret import KEY_VARIABLE, key
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import cluster_on_this_machine
from unison.runtime.launching.holdings import Meeting, parsed_holding, ranks
from unison.runtime.launching.partners import Partners
from unison.runtime.process_group import software
from unison.runtime.rendezvous import Entrance, opened_entrance, registered

#: The channel of these connections.
CHANNEL = b"nodes-1"

#: Seconds between two looks at the time, and to send the answers.
_LOOK_AFTER = 0.1
_SECONDS_TO_SPEAK = 5.0

#: The largest number of a node's workers.
_MOST_WORKERS = 1 << 12


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine of a job.

    Attributes:
        rank: Its index among the machines.
        first_worker: The index of its first worker in the cluster.
        cluster: The workers of all machines, in the order of the ranks.
        key: The job's key, in hexadecimal digits.
    """

    rank: int
    first_worker: int
    cluster: ClusterSpec
    key: str


def meet_nodes(
    nodes: int,
    rendezvous: str,
    workers: int,
    about: Mapping[str, str],
    timeout: float,
    host: str | None = None,
    partners: Partners | None = None,
) -> Node:
    """Waits until all machines of a job have registered at the rendezvous.

    Args:
        nodes: The number of machines.
        rendezvous: An address of one of them, as host:port, with a free port.
        workers: The number of workers of this machine.
        about: The values that must be the same on all machines.
        timeout: The timeout in seconds.
        host: The address of this machine at which its workers listen. Default: the rendezvous' host
            on the machine to which it belongs, and elsewhere the address from which it is reached.
        partners: The records that this machine holds in memory. Then all machines keep the ranks
            that they had, as far as possible, and fetch what their workers need.

    Raises:
        ValueError: The rendezvous is not host:port, or a number is less than 1.
        UnavailableError: Machines are missing, they differ in `about` or in the number of machines,
            or the rendezvous cannot be reached.
        UnauthenticatedError: The machine of the rendezvous has another key.
        OSError: The host does not belong to this machine.
    """
    if nodes < 1:
        raise ValueError(f"Expected at least 1 machine. Received: {nodes}")
    where = _address(rendezvous)
    own = host or own_address(where[0]) or address_towards(*where)
    if own is None:
        raise UnavailableError(
            message=f"Expected a reachable address for the rendezvous. Received: {rendezvous!r}, "
            "which cannot be resolved or has no route."
        )
    said: Message = {
        "workers": cluster_on_this_machine(workers, own).as_dict()["worker"],
        "about": dict(about) | {"nnodes": str(nodes)} | software(),
    }
    if partners is not None:
        said["about"]["records in memory"] = "copied"
        said["holding"] = partners.announce(own).message()
    last = time.monotonic() + timeout
    entrance = _entrance(where, nodes)
    if entrance is None:
        answer = _register(where, said, last, rendezvous, timeout)
    else:
        with contextlib.closing(entrance):
            answer = _gather(entrance, nodes, said, last)
    complaint = answer.get("complaint")
    if complaint is not None:
        raise UnavailableError(
            message=f"{complaint} (after {timeout:g} s at most, at {rendezvous})"
        )
    node = _node(answer)
    if partners is not None:
        partners.begin(_meeting(answer, node))
    return node


def about_program(script: str, is_module: bool) -> dict[str, str]:
    """Returns what identifies a program: its name, and for a file the checksum of its content."""
    if is_module:
        return {"program": f"-m {script}"}
    path = pathlib.Path(script)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"program": path.name, "program's sha256": digest[:16]}


def _address(text: str) -> tuple[str, int]:
    where = host_and_port(text)
    if where is None:
        raise ValueError(
            f"Expected the rendezvous to be HOST:PORT, a free port of one of the machines. "
            f"Received: {text!r}"
        )
    return where


def _entrance(where: tuple[str, int], nodes: int) -> Entrance | None:
    """Returns this machine's entrance; None if another machine or process listens there."""
    host = own_address(where[0])
    if host is None:
        return None
    try:
        return opened_entrance(host, where[1], key(), nodes, [CHANNEL])
    except OSError:
        return None


def _register(
    where: tuple[str, int], said: Message, last: float, rendezvous: str, timeout: float
) -> Message:
    outcome = registered(where, key(), CHANNEL, said, last)
    if isinstance(outcome, Exception):
        raise UnavailableError(
            message=f"Could not reach the rendezvous at {rendezvous} within {timeout:g} s: "
            f"{outcome}. Start the same command on the machine to which that address belongs, "
            "and check that its port can be reached and no other program listens there"
        ) from outcome
    line, answer = outcome
    line.close()
    return answer


def _gather(entrance: Entrance, nodes: int, own: Message, last: float) -> Message:
    """Waits for the other machines, and answers them; returns this machine's answer."""
    with _Registrations(entrance, nodes, own) as registrations:
        while not registrations.are_complete() and (left := last - time.monotonic()) > 0:
            registrations.hear(min(left, _LOOK_AFTER))
        return registrations.answer()


class _Registrations:
    """The machines that have registered, in the order of their ranks."""

    def __init__(self, entrance: Entrance, nodes: int, own: Message):
        self._acceptor = entrance.acceptor
        self._nodes = nodes
        self._own = own
        #: The connections, with what was received on them; None: nothing yet.
        self._lines: dict[Line, Message | None] = {}
        self._difference: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)

    def __enter__(self) -> _Registrations:
        return self

    def __exit__(self, *error: object) -> None:
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
        registered = self._registered()
        missing = self._nodes - 1 - len(registered)
        complaint = self._difference
        if complaint is None and missing > 0:
            refused = self._acceptor.last_refusal
            because = f". The latest connection that failed: {refused}" if refused else ""
            complaint = (
                f"Timed out waiting for {missing} of {self._nodes} machines. Start the same command"
                f" on each of them, with the same {KEY_VARIABLE}{because}"
            )
        machines = [self._own, *registered.values()]
        holdings = [parsed_holding(said.get("holding")) for said in machines]
        given = ranks([None if holding is None else holding.rank for holding in holdings])
        by_rank = [said for _, said in sorted(zip(given, machines, strict=True), key=_rank)]
        job: Message = {"workers": [said["workers"] for said in by_rank], "nonce": new_nonce()}
        if "holding" in self._own:
            job["holdings"] = [said.get("holding") for said in by_rank]
        for rank, line in zip(given[1:], registered, strict=True):
            line.send({"complaint": complaint} if complaint else job | {"rank": rank})
            line.flush_within(_SECONDS_TO_SPEAK)
        return {"complaint": complaint} if complaint else job | {"rank": given[0]}

    def _registered(self) -> dict[Line, Message]:
        return {line: said for line, said in self._lines.items() if said is not None}

    def _is_registration(self, said: Message) -> bool:
        about = said.get("about")
        if not _are_addresses(said.get("workers")) or not isinstance(about, dict):
            return False
        # Only one of two that differ may have it.
        is_needed = "holding" in self._own and about == self._own["about"]
        return not is_needed or parsed_holding(said.get("holding")) is not None

    def _receive(self, line: Line) -> None:
        for said in line.receive(most=1):
            if self._lines[line] is not None or not self._is_registration(said):
                line.is_open = False
                break
            self._lines[line] = said
            theirs, ours = said["about"], self._own["about"]
            if theirs != ours and self._difference is None:
                self._difference = (
                    f"The machines of the job differ: {_difference(ours, theirs)}. Start the same "
                    "program, with the same --nnodes and versions, on all of them"
                )
        if not line.is_open:
            self._selector.unregister(line.stream)
            line.close()
            del self._lines[line]


def _rank(machine: tuple[int, Message]) -> int:
    return machine[0]


def _are_addresses(workers: Any) -> bool:
    return (
        isinstance(workers, list)
        and 0 < len(workers) <= _MOST_WORKERS
        and all(isinstance(address, str) for address in workers)
    )


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describes the values that are not the same."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {ours.get(name)!r} and {theirs.get(name)!r}" for name in names)


def _node(answer: Message) -> Node:
    workers, rank, nonce = (answer.get(name) for name in ("workers", "rank", "nonce"))
    is_valid = (
        isinstance(workers, list)
        and all(map(_are_addresses, workers))
        and isinstance(rank, int)
        and 0 <= rank < len(workers)
        and isinstance(nonce, str)
    )
    if not is_valid:
        raise UnavailableError(message=f"The rendezvous has sent an invalid answer: {answer!r}")
    assert isinstance(workers, list)
    return Node(
        rank=int(rank or 0),
        first_worker=sum(map(len, workers[: int(rank or 0)])),
        cluster=ClusterSpec({"worker": _flat(workers)}),
        key=derived_key(key(), str(nonce)),
    )


def _meeting(answer: Message, node: Node) -> Meeting:
    """Returns what this machine's records are prepared by."""
    said = answer.get("holdings")
    found = [parsed_holding(each) for each in said] if isinstance(said, list) else []
    holdings = [each for each in found if each is not None]
    if not len(holdings) == len(found) == len(answer["workers"]):
        raise UnavailableError(message=f"The rendezvous has sent an invalid answer: {answer!r}")
    run = hashlib.sha256(f"run {node.key}".encode()).hexdigest()[:16]
    return Meeting(run, node.rank, [len(each) for each in answer["workers"]], holdings)


def _flat(lists: Sequence[Sequence[str]]) -> list[str]:
    return [each for part in lists for each in part]
