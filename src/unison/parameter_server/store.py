"""`Store`: the variables on all servers, as a worker or the coordinator sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unison.errors import OpError, UnavailableError
from unison.parameter_server.messages import Connection, Message, connect


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows of a variable on one server.

    Attributes:
        server: The server's index.
        key: By what the server knows them.
        start: The first row.
        stop: The row behind the last one.
    """

    server: int
    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


#: What one server is asked: the kind of a message, its arrays and its fields.
Request = tuple[str, Sequence[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What somebody wants to see of the variables.

    Attributes:
        variables: The shards of variables, all of whose rows are wanted.
        tables: The shards of others, with the numbers of the rows that are wanted, in order.
    """

    variables: Sequence[Sequence[Shard]]
    tables: Sequence[tuple[Sequence[Shard], np.ndarray]] = ()

    def parts(self) -> dict[int, tuple[list[np.ndarray], dict[str, Any]]]:
        """Returns what each server is asked for: the numbers of rows, and the keys."""
        keys: dict[int, list[str]] = {}
        rows: dict[int, list[tuple[str, np.ndarray]]] = {}
        for shards in self.variables:
            for shard in shards:
                keys.setdefault(shard.server, []).append(shard.key)
        for shards, ids in self.tables:
            for shard in shards:
                own = (shard.key, _own(ids, shard) - shard.start)
                rows.setdefault(shard.server, []).append(own)
        return {
            server: (
                [numbers for _, numbers in rows.get(server, [])],
                {"keys": keys.get(server, []), "rows": [key for key, _ in rows.get(server, [])]},
            )
            for server in sorted({*keys, *rows})
        }

    def found(self, answers: Mapping[int, Message]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the variables and the rows that are in the servers' answers."""
        left = {server: iter(message.arrays) for server, message in answers.items()}
        dense = [whole([next(left[s.server]) for s in shards]) for shards in self.variables]
        # The rows' numbers are in order, and so are the shards.
        rows = [whole([next(left[s.server]) for s in shards]) for shards, _ in self.tables]
        return dense, rows


class ServerLostError(UnavailableError):
    """A parameter server does not answer any more.

    Attributes:
        server: Its index.
        address: Where it was.
        why: What it was noticed by.
    """

    def __init__(self, server: int, address: str, why: object):
        super().__init__(
            message=f"Parameter server {server} ({address}) is lost, and the variables on it: "
            f"{why}. Start the job again from its last checkpoint; with `unison run "
            "--ps-checkpoints FOLDER` a server comes back by itself."
        )
        self.server = server
        self.address = address
        self.why = str(why)

    def __reduce__(self) -> Any:
        return ServerLostError, (self.server, self.address, self.why)


class Store:
    """Connections to all servers.

    A server that is lost may come back with what it had at its last snapshot. Whoever has asked it
    gets an error all the same, and asks again.

    Args:
        addresses: Where the servers listen, by index.
        within: Seconds for them to come, also when they come back.
        role: Who asks: "coordinator", which begins the job, or "worker".
        job: The job's name.

    Raises:
        DeadlineExceededError: A server does not come.
    """

    def __init__(self, addresses: Sequence[str], within: float, role: str, job: str):
        self.addresses = list(addresses)
        self.job = job
        self._within = within
        self._role = role
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._returns: list[bool] = []
        #: How many pushes each server had applied when it began, or came back.
        self.restored: list[int] = []
        with contextlib.ExitStack() as undoing:
            for server in range(len(self.addresses)):
                connection, begun = self._connected(server, role == "coordinator")
                undoing.callback(connection.close)
                self._connections.append(connection)
                self._returns.append(begun["keeps_snapshots"])
                self.restored.append(begun["restored"])
            undoing.pop_all()

    def _connected(self, server: int, is_new: bool) -> tuple[Connection, Message]:
        address = self.addresses[server]
        what = f"Parameter server {server}"
        connection = connect(address, self._within, what, role=self._role)
        begun = connection.ask("begin", job=self.job, is_new=is_new)
        if not is_new and not begun["has_state"]:
            connection.close()
            raise ServerLostError(server, address, "it has come back without a snapshot")
        return connection, begun

    def reconnect(self, server: int) -> None:
        """Waits for a lost server to come back from its snapshot.

        Raises:
            ServerLostError: It keeps none, or does not come.
        """
        self._connections[server].close()
        if not self._returns[server]:
            raise ServerLostError(server, self.addresses[server], "it has gone")
        try:
            with self._lock:
                self._connections[server], begun = self._connected(server, is_new=False)
        except (OpError, RuntimeError) as error:
            if isinstance(error, ServerLostError):
                raise
            raise ServerLostError(server, self.addresses[server], error) from error
        self.restored[server] = begun["restored"]

    def is_alive(self, server: int) -> bool:
        """Whether the server answers."""
        try:
            self.ask({server: ("status", (), {})})
        except ServerLostError:
            return False
        return True

    def farewell(self) -> None:
        """Lets the servers end."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(UnavailableError):
                    connection.send("goodbye")
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._connections:
            connection.close()

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Message]:
        """Asks several servers at once, and returns their answers.

        Raises:
            ServerLostError: One of them has gone.
            RuntimeError: One of them answers with an error.
        """
        answers = {}
        lost: list[ServerLostError] = []
        with self._lock:
            asked = []
            for server, (kind, arrays, fields) in requests.items():
                with self._noting(server, lost):
                    self._connections[server].send(kind, arrays, **fields)
                    asked.append(server)
            # All are heard, also if one is lost: an answer left behind would be the next one's.
            for server in asked:
                with self._noting(server, lost):
                    answers[server] = self._connections[server].receive()
        if lost:
            raise lost[0]
        for server, answer in answers.items():
            if answer.kind == "error":
                raise RuntimeError(f"Parameter server {server}: {answer['text']}")
        return answers

    @contextlib.contextmanager
    def _noting(self, server: int, lost: list[ServerLostError]) -> Any:
        """Adds a server that is lost meanwhile to `lost`."""
        try:
            yield
        except UnavailableError as error:
            lost.append(ServerLostError(server, self.addresses[server], error))

    def ask_all(self, kind: str, **fields: Any) -> dict[int, Message]:
        """Asks all servers the same."""
        return self.ask(dict.fromkeys(range(len(self.addresses)), (kind, (), fields)))

    def create(self, shards: Sequence[Shard], value: np.ndarray) -> None:
        """Makes a variable of `value`, whose rows are divided into `shards`."""
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
                {"keys": keys},
            )
        self.ask(requests)

    def read(self, variables: Sequence[Sequence[Shard]]) -> list[np.ndarray]:
        """Returns the values of variables, each given by its shards; one request a server."""
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
        """Returns whole variables, and rows of others; one request a server."""
        requests: dict[int, Request] = {
            server: ("pull", arrays, fields) for server, (arrays, fields) in wanted.parts().items()
        }
        return wanted.found(self.ask(requests))

    def push(
        self, pushes: Mapping[int, Request], then: Wanted | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """Pushes, and returns what is wanted after it, by the same requests.

        Args:
            pushes: The pushes, by server.
            then: What is wanted. None: nothing.
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
        """Frees what a variable takes."""
        self.ask(
            {
                server: ("forget", (), {"keys": [shard.key for shard in own]})
                for server, own in by_server(shards).items()
            }
        )


def by_server(shards: Sequence[Shard]) -> dict[int, list[Shard]]:
    """Returns the shards that each server has."""
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
