"""The transport of one view: shared memory within a machine, sockets between machines.

It forms two groups of `exchange.cc`: the *programs'*, whose ranks are the replicas, and the
*members'*, in which the workers themselves exchange values. When the view is over, for any reason,
both are aborted; the next view has a new communicator, and nothing of the old one is reused.

The memory has no name in any file system: the first member of a machine creates it (`memfd_create`)
and passes it to the others through a Unix socket. So nothing is left behind when processes are
killed, at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.errors import FailedPreconditionError
from unison.net.addresses import split_address
from unison.net.listening import listen_locally
from unison.runtime.cores import available_cores
from unison.runtime.elastic.meeting import Broken, Call, Meeting
from unison.runtime.elastic.protocol import Member, View
from unison.runtime.shared_memory.library import CHUNK_BYTES, SPINS, Kind, Ticket, library

__all__ = ["Broken", "Communicator", "Failure"]

#: The purposes of connections.
_PROGRAMS, _MEMBERS, _MEMORY = range(3)

#: Values up to this size are gathered as blocks of the largest one's size.
_PADDED_BYTES = 2**16

#: XLA's enum value of the dtype uint8.
_U8 = 6

#: The timeout in seconds of operations that wait for a member that has not arrived and is not known
#: to be lost.
_PATIENCE = 3600.0


class Failure(NamedTuple):
    """The reason why a view's exchanges have ended.

    Attributes:
        code: The code of an `OpError`: 14, a member is lost or the view was aborted; 4, a member
            did not arrive in time; 9, members perform different operations (a bug in the program,
            which would recur in the next view).
        why: The reason as text.
    """

    code: int
    why: str


class Communicator:
    """Connects the members of a view. All members create one, at the same time.

    Args:
        view: The view.
        token: The job's secret, which only its members know.
        listener: The socket at which this member listens for others, bound to the member's address
            in the view. The caller keeps ownership.
        seconds: How long connecting may take, in seconds.
        patience: How long an operation waits for a member that is silent, in seconds.
        is_over: Returns the reason why the view is over, which ends connecting, or None while it is
            not.

    Raises:
        Broken: The members could not be connected.
        FailedPreconditionError: The package was built without its native extension.
    """

    def __init__(
        self,
        view: View,
        token: str,
        listener: socket.socket,
        seconds: float,
        *,
        patience: float = _PATIENCE,
        is_over: Callable[[], str | None] = lambda: None,
    ):
        compiled = library()
        if compiled is None:
            raise FailedPreconditionError(
                message="Elastic jobs need Unison's native extension, which was not built. "
                "Reinstall unison on a machine with a C++ compiler."
            )
        self._library = compiled
        self._view = view
        self._last: Failure | None = None
        team = _Team(view)
        meeting = Meeting(token, seconds, is_over)
        with contextlib.ExitStack() as stack:
            files = _memory(compiled, team, meeting, stack)
            links = _links(team, meeting, listener, stack)
            labels = [[member.name] for member in view.members]
            self._members = _group(compiled, team, labels, files[1], links[1], 0, patience)
            labels = [_labels(member) for member in view.members]
            spins = SPINS if available_cores() >= team.replicas else 0
            try:
                self._programs = _group(compiled, team, labels, files[0], links[0], spins, patience)
            except BaseException:
                compiled.unison_exchange_close(self._members)
                raise
        self._ticket = np.zeros(len(Ticket), np.uint32)
        self._ticket[Ticket.RANK] = view.own
        self._ticket[Ticket.GROUP] = self._members

    @property
    def failure(self) -> Failure | None:
        """Why exchanges have failed; None if none has. After `close`, the last known value."""
        for number in (self._programs, self._members):
            reason = ctypes.create_string_buffer(2**12)
            code = self._library.unison_exchange_reason(number, reason, len(reason))
            if code != 0:
                self._last = Failure(code, reason.value.decode(errors="replace"))
                break
        return self._last

    def first_ticket(self) -> np.ndarray[Any, Any]:
        """Returns the tickets for the first programs of this member's replicas: an array of shape
        `(replicas, len(Ticket))`.
        """
        members, own = self._view.members, self._view.own
        first = sum(member.replicas for member in members[:own])
        ticket = np.zeros((members[own].replicas, len(Ticket)), np.uint32)
        ticket[:, Ticket.RANK] = np.arange(first, first + len(ticket))
        ticket[:, Ticket.GROUP] = self._programs
        return ticket

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns the values of all members, in their order. All members must call this.

        Raises:
            Broken: The view is over.
        """
        count = len(self._view.members)
        length = np.array([len(own)], np.uint64)
        lengths = np.empty(count, np.uint64)
        self._run(Kind.GATHER, "gather of lengths", [length], [lengths])
        most = int(lengths.max())
        if most > _PADDED_BYTES:
            values = [np.empty(int(size), np.uint8) for size in lengths]
            values[self._view.own] = np.frombuffer(own, np.uint8)
            for source, value in enumerate(values):
                self.broadcast(source, [value])
            return [value.tobytes() for value in values]
        padded = np.zeros(most, np.uint8)
        padded[: len(own)] = np.frombuffer(own, np.uint8)
        blocks = np.empty((count, most), np.uint8)
        self._run(Kind.GATHER, f"gather of {most} bytes", [padded], [blocks])
        return [block[: int(size)].tobytes() for block, size in zip(blocks, lengths, strict=True)]

    def broadcast(self, source: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills the other members' arrays with those of member `source`. All members must call.

        Args:
            source: The index of that member in the view.
            arrays: C-contiguous arrays, of the same shapes and dtypes on all members.

        Raises:
            Broken: The view is over, or the members' arrays differ in number or size.
        """
        is_source = source == self._view.own
        for array in arrays:
            if not array.flags.c_contiguous or not (is_source or array.flags.writeable):
                raise ValueError(
                    "Expected arrays that are C-contiguous and, where they are filled, writable. "
                    f"Received: one of shape {array.shape} and strides {array.strides}, "
                    f"writable: {array.flags.writeable}"
                )
        size = sum(array.nbytes for array in arrays)
        words = f"broadcast of {len(arrays)} arrays, {size} bytes, from member {source}"
        self._run(Kind.BROADCAST, words, arrays, arrays, source)

    def abort(self, reason: str) -> None:
        """Aborts all present and future waits of programs and members. Any thread may call this."""
        for number in (self._programs, self._members):
            self._library.unison_exchange_abort(number, reason.encode())

    def close(self) -> None:
        """Ends the group in this process. Its memory and its sockets are released when the last
        program has left it; in later programs, exchanges fail. Other members can still complete
        their current operation.
        """
        self.failure  # noqa: B018 - the property stores it
        for number in (self._programs, self._members):
            self._library.unison_exchange_close(number)

    def _run(
        self,
        kind: Kind,
        words: str,
        operands: Sequence[np.ndarray[Any, Any]],
        results: Sequence[np.ndarray[Any, Any]],
        source: int = -1,
    ) -> None:
        code = self._library.unison_exchange_run(
            kind,
            words.encode(),
            ctypes.byref(ctypes.c_int64(source)),
            self._ticket.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
            _U8,
            len(operands),
            *_pointers(operands),
            *_pointers(results),
        )
        assert code == 0, code
        if self._ticket[Ticket.FAILED]:
            failure = self.failure
            raise Broken(failure.why if failure else "The communicator is closed.")


class _Team:
    """The distribution of a view's members over machines.

    Attributes:
        view: The members.
        host_of: The machine of every member; machines are numbered in the order of their first
            members.
        leaders: The first member of every machine.
        own_host: The machine of this member.
        members: The members on it.
        replicas: The number of their replicas.
        leads: Whether this member is the first one on its machine.
    """

    def __init__(self, view: View):
        self.view = view
        names = [member.host for member in view.members]
        hosts = list(dict.fromkeys(names))
        self.host_of = [hosts.index(name) for name in names]
        self.leaders = [names.index(host) for host in hosts]
        self.own_host = self.host_of[view.own]
        self.members = [i for i, host in enumerate(self.host_of) if host == self.own_host]
        self.replicas = sum(view.members[i].replicas for i in self.members)
        self.leads = self.members[0] == view.own

    def name(self, member: int) -> str:
        return self.view.members[member].name

    def call(self, caller: int, called: int, purpose: int) -> Call:
        return Call(self.view.number, caller, called, purpose)


def _memory(
    compiled: ctypes.CDLL, team: _Team, meeting: Meeting, stack: contextlib.ExitStack
) -> tuple[int, int]:
    """Returns the file descriptors of the shared memory of the programs' and the members' groups;
    -1 for a group with a single rank on this machine.
    """
    leader, own = team.members[0], team.view.own
    sizes = [size for size in (team.replicas, len(team.members)) if size > 1]
    address = b"\0unison-" + meeting.name(f"{team.view.number} {leader}").encode()
    if team.leads:
        files = [_new_memory(compiled.unison_exchange_bytes(n, CHUNK_BYTES), stack) for n in sizes]
        if len(team.members) > 1:
            with listen_locally(address) as listener:
                calls = [team.call(member, own, _MEMORY) for member in team.members[1:]]
                accepted = meeting.accept(listener, calls, lambda call: team.name(call.caller))
            for call, connection in accepted.items():
                with connection:
                    try:
                        socket.send_fds(connection, [b"m"], files)
                    except OSError as error:
                        member = team.name(call.caller)
                        raise Broken(f"the connection to {member} is closed: {error}") from error
    else:
        who = team.name(leader)
        with meeting.connect(team.call(own, leader, _MEMORY), address, who) as connection:
            files = meeting.receive_files(connection, len(sizes), who)
        for file in files:
            stack.callback(os.close, file)
        if len(files) != len(sizes):
            raise Broken(f"{who} sent {len(files)} files instead of {len(sizes)}.")
    files += [-1] * (2 - len(files))
    return files[0], files[1]


def _new_memory(num_bytes: int, stack: contextlib.ExitStack) -> int:
    """Returns an unnamed file, filled with zeros."""
    file = os.memfd_create("unison", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    # Unlike `truncate`, this fails here if there is not enough memory, not later on a write.
    os.posix_fallocate(file, 0, num_bytes)
    return file


def _links(
    team: _Team, meeting: Meeting, listener: socket.socket, stack: contextlib.ExitStack
) -> tuple[list[int] | None, list[int] | None]:
    """Returns the sockets that connect the machines' leaders, one for each machine (-1 for this
    one), for the programs' group and the members'; None if this member does not need any.
    """
    if not team.leads or len(team.leaders) == 1:
        return None, None
    own, host = team.view.own, team.own_host
    found: dict[Call, socket.socket] = {}
    for leader in team.leaders[:host]:
        address = split_address(team.view.members[leader].address)
        for purpose in (_PROGRAMS, _MEMBERS):
            call = team.call(own, leader, purpose)
            found[call] = stack.enter_context(meeting.connect(call, address, team.name(leader)))
    later = team.leaders[host + 1 :]
    calls = [team.call(leader, own, purpose) for leader in later for purpose in (0, 1)]
    found |= meeting.accept(listener, calls, lambda call: team.name(call.caller))
    for connection in found.values():
        stack.enter_context(connection)
    lists = [[-1] * len(team.leaders) for _ in range(2)]
    for call, connection in found.items():
        other = call.caller if call.called == own else call.called
        lists[call.purpose][team.host_of[other]] = connection.fileno()
    return lists[0], lists[1]


def _group(
    compiled: ctypes.CDLL,
    team: _Team,
    labels: Sequence[Sequence[str]],
    file: int,
    links: Sequence[int] | None,
    spins: int,
    patience: float,
) -> int:
    """Returns the number of a new group; `labels` are the names of every member's ranks."""
    hosts = [host for host, names in zip(team.host_of, labels, strict=True) for _ in names]
    # The group closes its sockets, so it gets duplicates.
    sockets = None if links is None else [link if link < 0 else os.dup(link) for link in links]
    number: int = compiled.unison_exchange_form(
        file,
        (ctypes.c_uint32 * len(hosts))(*hosts),
        len(hosts),
        team.own_host,
        len(labels[team.view.own]),
        None if sockets is None else (ctypes.c_int * len(sockets))(*sockets),
        len(team.leaders),
        CHUNK_BYTES,
        spins,
        patience,
        "\n".join(name.replace("\n", " ") for names in labels for name in names).encode(),
    )
    if number < 0:
        for link in sockets or []:
            if link >= 0:
                os.close(link)
        raise Broken("The memory that members share could not be mapped.")
    return number


def _labels(member: Member) -> list[str]:
    if member.replicas == 1:
        return [member.name]
    return [f"replica {index} of {member.name}" for index in range(member.replicas)]


def _pointers(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
    count = len(arrays)
    return (
        (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays)),
        (ctypes.c_size_t * count)(*(array.nbytes for array in arrays)),
    )
