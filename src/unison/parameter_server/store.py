"""`Store`: access to the variables on all servers, for a worker or the coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unison import errors
from unison.errors import OpError, UnavailableError
from unison.interrupts import signals_held
from unison.net.array_messages import Connection, Message, NoRoomError
from unison.parameter_server.compressed import Encoding, received
from unison.parameter_server.messages import connect
from unison.parameter_server.pulse import Pulse

#: Seconds after which a main thread that waits for an answer delivers pending signals.
_SECONDS_OF_A_WAIT = 0.05


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows of a variable on one server.

    Attributes:
        server: The server's index.
        key: The rows' key on the server.
        start: The first row.
        stop: The end row (exclusive).
    """

    server: int
    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


#: A request to one server: the kind of a message, its arrays and its fields.
Request = tuple[str, Sequence[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The variables, and rows of variables, to read.

    Attributes:
        variables: The shards of the variables of which all rows are read.
        tables: The shards of other variables, with the indices of the rows to read, in order.
        encodings: The encodings of shards, by key; other shards are not encoded.
    """

    variables: Sequence[Sequence[Shard]]
    tables: Sequence[tuple[Sequence[Shard], np.ndarray]] = ()
    encodings: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)

    def parts(self) -> dict[int, tuple[list[np.ndarray], dict[str, Any]]]:
        """Returns the request to each server: the row indices, and the keys."""
        keys: dict[int, list[str]] = {}
        rows: dict[int, list[tuple[str, np.ndarray]]] = {}
        for shards in self.variables:
            for shard in shards:
                keys.setdefault(shard.server, []).append(shard.key)
        for shards, ids in self.tables:
            for shard in shards:
                own = (shard.key, _own(ids, shard) - shard.start)
                rows.setdefault(shard.server, []).append(own)
        parts: dict[int, tuple[list[np.ndarray], dict[str, Any]]] = {}
        for server in sorted({*keys, *rows}):
            whole_keys, row_keys = keys.get(server, []), [key for key, _ in rows.get(server, [])]
            fields: dict[str, Any] = {"keys": whole_keys, "rows": row_keys}
            if self.encodings:
                own_keys = [key for key in (*whole_keys, *row_keys) if key in self.encodings]
                fields["encodings"] = {key: self.encodings[key] for key in own_keys}
            parts[server] = [numbers for _, numbers in rows.get(server, [])], fields
        return parts

    def found(self, answers: Mapping[int, Message]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the variables and the rows from the servers' answers."""
        left = {server: iter(message.arrays) for server, message in answers.items()}

        def piece(shard: Shard) -> np.ndarray:
            array = next(left[shard.server])
            encoding = self.encodings.get(shard.key)
            return array if encoding is None else received(array, encoding)

        dense = [whole([piece(shard) for shard in shards]) for shards in self.variables]
        # The row indices are sorted, and so are the shards.
        rows = [whole([piece(shard) for shard in shards]) for shards, _ in self.tables]
        return dense, rows


class ServerLostError(UnavailableError):
    """A parameter server does not respond any more.

    Attributes:
        server: Its index.
        address: Its address.
        why: How the loss was detected.
    """

    def __init__(self, server: int, address: str, why: object):
        super().__init__(
            message=f"Parameter server {server} ({address}) is lost, and the variables on it: "
            f"{why}. Start the job again from its last checkpoint; with `unison run "
            "--ps-checkpoints FOLDER` lost servers are restarted."
        )
        self.server = server
        self.address = address
        self.why = str(why)

    def __reduce__(self) -> Any:
        return ServerLostError, (self.server, self.address, self.why)


class Store:
    """Connections to all servers.

    A lost server may restart with the state of its last snapshot. Pending requests to it still
    raise an error, and have to be repeated.

    Args:
        addresses: The servers' addresses, by index.
        within: Seconds to wait for the servers to start or restart.
        role: The role of this process: "coordinator", which begins the job, or "worker".
        job: The job's name.

    Raises:
        DeadlineExceededError: A server does not start in time.
    """

    def __init__(self, addresses: Sequence[str], within: float, role: str, job: str):
        self.addresses = list(addresses)
        self.job = job
        #: Timeout in seconds for servers, for their heartbeats, and for shared variables.
        self.patience = within
        #: The stores whose variables this job uses, and its rights.
        self._attached: dict[str, str] = {}
        self._role = role
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._pulses: list[Pulse] = []
        self._returns: list[bool] = []
        #: The number of outstanding answers of each server, to interrupted requests.
        self._unheard = [0] * len(self.addresses)
        #: The total time spent waiting for the servers.
        self.waited_seconds = 0.0
        #: The number of pushes that each server had applied when it started or restarted.
        self.restored: list[int] = []
        with contextlib.ExitStack() as undoing:
            for server in range(len(self.addresses)):
                connection, pulse, begun = self._connected(server, role == "coordinator")
                undoing.callback(connection.close)
                undoing.callback(pulse.close)
                self._connections.append(connection)
                self._pulses.append(pulse)
                self._returns.append(begun["keeps_snapshots"])
                self.restored.append(begun["restored"])
            undoing.pop_all()

    def _connected(self, server: int, is_new: bool) -> tuple[Connection, Pulse, Message]:
        address = self.addresses[server]
        what = f"Parameter server {server}"
        connection = connect(address, self.patience, what, role=self._role, job=self.job)
        with contextlib.ExitStack() as undoing:
            undoing.callback(connection.close)
            pulse = Pulse(f"ps {server}", address, connection, lambda: self.patience)
            undoing.callback(pulse.close)
            begun = connection.ask("begin", job=self.job, is_new=is_new)
            if not is_new and not begun["has_state"]:
                raise ServerLostError(server, address, "it has restarted without a snapshot")
            undoing.pop_all()
        return connection, pulse, begun

    def reconnect(self, server: int, why: str) -> None:
        """Waits for a lost server to restart from its snapshot.

        Args:
            server: The server's index.
            why: How the loss was detected.

        Raises:
            ServerLostError: It does not write snapshots, or does not restart in time.
        """
        self._connections[server].close()
        self._pulses[server].close()
        if not self._returns[server]:
            raise ServerLostError(server, self.addresses[server], why)
        try:
            with self._lock:
                self._connections[server], self._pulses[server], begun = self._connected(
                    server, is_new=False
                )
                self._unheard[server] = 0
        except (OpError, RuntimeError) as error:
            if isinstance(error, ServerLostError):
                raise
            raise ServerLostError(server, self.addresses[server], error) from error
        self.restored[server] = begun["restored"]

    def is_alive(self, server: int) -> bool:
        """Returns whether the server answers."""
        try:
            self.ask({server: ("status", (), {})})
        except ServerLostError:
            return False
        return True

    def farewell(self) -> None:
        """Tells the servers that they may end."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(UnavailableError):
                    connection.send("goodbye")
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        for pulse in self._pulses:
            pulse.close()
        for connection in self._connections:
            connection.close()

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Message]:
        """Sends requests to several servers concurrently, and returns their answers.

        Raises:
            ServerLostError: One of them is lost.
            ResourceExhaustedError: One of them, or this process, has not enough memory for an
                array.
            OpError: One of them answers with an error of this type.
            RuntimeError: One of them answers with another error.
        """
        answers: dict[int, Message] = {}
        lost: list[ServerLostError] = []
        refused: list[NoRoomError] = []
        begin = time.perf_counter()
        with self._lock:
            for server in requests:
                self._receive_unheard(server)
            asked = []
            # Either all servers receive their part of a request, or none.
            with signals_held:
                for server, (kind, arrays, fields) in requests.items():
                    with self._noting(server, lost):
                        self._connections[server].send(kind, arrays, **fields)
                        asked.append(server)
                        self._unheard[server] += 1
                # For most requests, signals are held only once, which takes as long as a short
                # answer.
                asked = self._receive_soon(asked, answers, lost, refused)
            # All answers are received, even if a server is lost: a leftover would be taken for the
            # next answer.
            while True:  # not with a condition here: see `SignalsHeld`
                if not asked:
                    break
                with signals_held:
                    asked = self._receive_soon(asked, answers, lost, refused)
        self.waited_seconds += time.perf_counter() - begin
        if lost:
            raise lost[0]
        if refused:
            raise refused[0]
        for server, answer in answers.items():
            if answer.kind == "error":
                text = f"Parameter server {server}: {answer['text']}"
                of_kind = getattr(errors, answer["kind_of_error"], None)
                raise RuntimeError(text) if of_kind is None else of_kind(message=text)
        return answers

    def _receive_soon(
        self,
        servers: Sequence[int],
        answers: dict[int, Message],
        lost: list[ServerLostError],
        refused: list[NoRoomError],
    ) -> list[int]:
        """Receives servers' answers while signals are held.

        Returns:
            The servers that have not answered within a short time: in the main thread, signals must
            be delivered before waiting for them again.
        """
        seconds = None
        if threading.current_thread() is threading.main_thread():
            seconds = _SECONDS_OF_A_WAIT
        for place, server in enumerate(servers):
            connection = self._connections[server]
            if not connection.wait(seconds):
                return list(servers[place:])
            self._unheard[server] -= 1
            with self._noting(server, lost):
                try:
                    answers[server] = connection.receive()
                except NoRoomError as error:
                    refused.append(error)
        return []

    def _receive_unheard(self, server: int) -> None:
        """Drops the answers to requests that were interrupted."""
        while self._unheard[server]:
            lost: list[ServerLostError] = []
            with signals_held:
                self._receive_soon([server], {}, lost, [])
                if lost:  # the next request raises the error
                    self._unheard[server] = 0

    @contextlib.contextmanager
    def _noting(self, server: int, lost: list[ServerLostError]) -> Any:
        """Adds the server to `lost` if it is lost inside the context."""
        try:
            yield
        except UnavailableError as error:
            why = self._pulses[server].verdict or error
            lost.append(ServerLostError(server, self.addresses[server], why))

    def ask_all(self, kind: str, **fields: Any) -> dict[int, Message]:
        """Sends the same request to all servers."""
        return self.ask(dict.fromkeys(range(len(self.addresses)), (kind, (), fields)))

    def attach(self, store: str, rights: str) -> None:
        """Lets the job use variables that it shares with others; see `VariableStore`."""
        known = self._attached.get(store)
        if known == rights or known == "update":
            return
        servers = len(self.addresses)
        about = {"store": store, "rights": rights, "servers": servers}
        self.ask({index: ("attach", (), {**about, "index": index}) for index in range(servers)})
        self._attached[store] = rights

    def create(self, shards: Sequence[Shard], value: np.ndarray) -> None:
        """Creates a variable with `value`, whose rows are divided into `shards`."""
        self._put("create", shards, value)

    def assign(self, shards: Sequence[Shard], value: np.ndarray) -> None:
        """Replaces the value of a variable."""
        self._put("assign", shards, value)

    def _put(self, kind: str, shards: Sequence[Shard], value: np.ndarray) -> None:
        requests: dict[int, Request] = {}
        for server, own in by_server(shards).items():
            keys = [shard.key for shard in own]
            requests[server] = (
                kind,
                [part_of(value, shard, shards) for shard in own],
                {"keys": keys, "are_kept": True},
            )
        self.ask(requests)

    def read(self, variables: Sequence[Sequence[Shard]]) -> list[np.ndarray]:
        """Returns the values of variables, given by their shards; one request per server."""
        pieces = by_server([shard for shards in variables for shard in shards])
        answers = self.ask(
            {
                server: ("read", (), {"keys": [shard.key for shard in own]})
                for server, own in pieces.items()
            }
        )
        of_key = {
            shard.key: array
            for server, own in pieces.items()
            for shard, array in zip(own, answers[server].arrays, strict=True)
        }
        return [whole([of_key[shard.key] for shard in shards]) for shards in variables]

    def pull(self, wanted: Wanted) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns whole variables, and rows of others; one request per server."""
        requests: dict[int, Request] = {
            server: ("pull", arrays, fields) for server, (arrays, fields) in wanted.parts().items()
        }
        return wanted.found(self.ask(requests))

    def push(
        self, pushes: Mapping[int, Request], then: Wanted | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """Pushes, and returns the values to read afterwards, with the same requests.

        Args:
            pushes: The pushes, by server.
            then: The values to read. None: nothing.
        """
        if then is None:
            self.ask(pushes)
            return None
        pulls = then.parts()
        requests: dict[int, Request] = {}
        for server in sorted({*pushes, *pulls}):
            arrays, fields = pulls.get(server, ((), {}))
            if server in pushes:
                kind, pushed, about = pushes[server]
                requests[server] = (kind, [*pushed, *arrays], {**about, **fields})
            else:
                requests[server] = ("pull", arrays, fields)
        return then.found(self.ask(requests))

    def forget(self, shards: Sequence[Shard]) -> None:
        """Frees a variable's memory."""
        self.ask(
            {
                server: ("forget", (), {"keys": [shard.key for shard in own]})
                for server, own in by_server(shards).items()
            }
        )


def by_server(shards: Sequence[Shard]) -> dict[int, list[Shard]]:
    """Groups shards by server."""
    found: dict[int, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.server, []).append(shard)
    return found


def part_of(value: np.ndarray, shard: Shard, shards: Sequence[Shard]) -> np.ndarray:
    """Returns the rows of `value` that are in `shard`, one of `shards`."""
    return value if len(shards) == 1 else value[shard.start : shard.stop]


def whole(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the value whose shards are `pieces`."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _own(ids: np.ndarray, shard: Shard) -> np.ndarray:
    """Returns those of sorted `ids` that are in a shard."""
    first, end = np.searchsorted(ids, (shard.start, shard.stop))
    return ids[first:end]
