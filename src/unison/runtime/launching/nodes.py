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
import time
from collections.abc import Mapping, Sequence

from unison.errors import UnavailableError
from unison.net.addresses import address_towards, host_and_port, own_address
from unison.net.lines import Message
from unison.net.proof import derived_key
from unison.net.secret import key
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import cluster_on_this_machine
from unison.runtime.launching.holdings import Meeting, parsed_holding
from unison.runtime.launching.node_group import NodeCounts, NodeGroup
from unison.runtime.launching.node_registrations import (
    Registrations,
    are_addresses,
    entrance_at,
    register,
)
from unison.runtime.launching.partners import Partners
from unison.runtime.process_group import software
from unison.runtime.rendezvous import Entrance

#: Seconds between two looks at the time.
_LOOK_AFTER = 0.1


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine of a job.

    Attributes:
        rank: Its index among the machines.
        first_worker: The index of its first worker in the cluster.
        cluster: The workers of all machines, in the order of the ranks.
        key: The job's key, in hexadecimal digits.
        machines: The number of machines.
        at_start: The number of workers with which the job began.
    """

    rank: int
    first_worker: int
    cluster: ClusterSpec
    key: str
    machines: int = 1
    at_start: int | None = None


def meet_nodes(
    nodes: int | NodeCounts,
    rendezvous: str,
    workers: int,
    about: Mapping[str, str],
    timeout: float,
    host: str | None = None,
    partners: Partners | None = None,
    group: NodeGroup | None = None,
) -> Node:
    """Waits until all machines of a job have registered at the rendezvous.

    Args:
        nodes: The number of machines, or the least and the most.
        rendezvous: An address of one of them, as host:port, with a free port.
        workers: The number of workers of this machine.
        about: The values that must be the same on all machines.
        timeout: The timeout in seconds.
        host: The address of this machine at which its workers listen. Default: the rendezvous' host
            on the machine to which it belongs, and elsewhere the address from which it is reached.
        partners: The records that this machine holds in memory. Then all machines keep the ranks
            that they had, as far as possible, and fetch what their workers need.
        group: This machine's part in a group of machines that may change.

    Raises:
        ValueError: The rendezvous is not host:port, or a number is less than 1.
        UnavailableError: Machines are missing, they differ in `about` or in the number of machines,
            or the rendezvous cannot be reached.
        UnauthenticatedError: The machine of the rendezvous has another key.
        OSError: The host does not belong to this machine.
    """
    counts = NodeCounts(nodes, nodes) if isinstance(nodes, int) else nodes
    if counts.least < 1:
        raise ValueError(f"Expected at least 1 machine. Received: {counts.least}")
    where = address_of(rendezvous)
    own = host or own_address(where[0]) or address_towards(*where)
    if own is None:
        raise UnavailableError(
            message=f"Expected a reachable address for the rendezvous. Received: {rendezvous!r}, "
            "which cannot be resolved or has no route."
        )
    said: Message = {
        "workers": cluster_on_this_machine(workers, own).as_dict()["worker"],
        "about": dict(about) | {"nnodes": str(counts)} | software(),
    }
    if partners is not None:
        said["about"]["records in memory"] = "copied"
        said["holding"] = partners.announce(own).message()
    last = time.monotonic() + timeout
    if group is not None:
        answer = group.meet(said, last)
    elif (entrance := entrance_at(where, counts.most)) is None:
        line, answer = register(where, said, last)
        line.close()
    else:
        with contextlib.closing(entrance):
            answer = _gather(entrance, counts.most, said, last)
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


def address_of(text: str) -> tuple[str, int]:
    """Returns the host and the port of a rendezvous.

    Raises:
        ValueError: It is not host:port.
    """
    where = host_and_port(text)
    if where is None:
        raise ValueError(
            f"Expected the rendezvous to be HOST:PORT, a free port of one of the machines. "
            f"Received: {text!r}"
        )
    return where


def _gather(entrance: Entrance, nodes: int, own: Message, last: float) -> Message:
    """Waits for the other machines, and answers them; returns this machine's answer."""
    with Registrations(entrance, nodes, own) as registrations:
        while not registrations.are_complete() and (left := last - time.monotonic()) > 0:
            registrations.hear(min(left, _LOOK_AFTER))
        return registrations.answer()


def _node(answer: Message) -> Node:
    workers, rank, nonce = (answer.get(name) for name in ("workers", "rank", "nonce"))
    is_valid = (
        isinstance(workers, list)
        and all(map(are_addresses, workers))
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
        machines=len(workers),
        at_start=answer.get("at_start"),
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
