"""`ClosureWorker`: runs scheduled functions on a worker's own batches.

For each call it takes the batches, pulls the values that the program reads from the servers, runs
it, and pushes the inputs of the servers' updates. It reports a call as done only when all servers
have applied its push; a call that is run again elsewhere has the same number, by which servers know
that they have already applied it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import queue
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from unison.errors import OutOfRangeError, UnavailableError
from unison.interrupts import is_of_a_signal_handler
from unison.net.array_messages import Connection, Message, NoRoomError
from unison.parameter_server.compressed import Encoding
from unison.parameter_server.messages import operand
from unison.parameter_server.programs import described
from unison.parameter_server.store import Request, ServerLostError, Shard, Store, Wanted
from unison.program.recently_used import RecentlyUsed
from unison.tracebacks import is_filtering, user_frames

#: The dtype of row indices.
_INDEX = np.dtype(np.int64)

#: The coordinator's requests to a worker; all its other messages are answers.
_ASKED = ("run", "dataset", "streamed dataset", "goodbye")


class _Program:
    """A program, ready to run; see `WorkerProgram`."""

    def __init__(self, message: Message):
        about = message["description"]
        self.number: int = message["program"]
        self.run = _loaded(message.arrays[0])
        self.lookups = _loaded(message.arrays[1]) if about["tables"] else None
        #: The number of batches that it takes from each of the call's iterators.
        self.batches: list[tuple[int, int]] = [(place, n) for place, n in about["batches"]]
        #: Whether the rows to look up depend on the values of variables.
        self.lookups_need_values: bool = about["lookups_need_values"]
        #: The number of outputs that are results or operands of host calls, and that of the
        #: operands.
        self.num_results: int = about["results"]
        self.num_host_operands: int = about["host_operands"]
        self.pulled = [_shards(shards) for shards in about["pulled"]]
        self.tables = [
            (_shards(table["shards"]), table["rows"], table["lookups"]) for table in about["tables"]
        ]
        self.updates = [(update, _shards(update["shards"])) for update in about["updates"]]
        #: The encodings of pulled values.
        self.encodings = {key: Encoding.of_message(own) for key, own in about["encodings"].items()}


class _Input:
    """The batches of an iterator, with as much lookahead as a function needs."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._ahead: collections.deque[tuple[str, list[np.ndarray]]] = collections.deque()
        self._failure: Exception | None = None

    def peek(self, count: int) -> list[tuple[str, list[np.ndarray]]]:
        """Returns the next batches without consuming them.

        Raises:
            StopIteration: Fewer batches are left.
        """
        while len(self._ahead) < count:
            if self._failure is not None:
                raise self._failure
            try:
                batch = next(self._batches)
            except Exception as error:
                self._failure = error  # lookahead may have hidden it
                raise
            if isinstance(batch, _Streamed):
                self._ahead.append((batch.structure, batch.leaves))
            else:
                structure, leaves = described(batch)
                self._ahead.append((json.dumps(structure), leaves))
        return [self._ahead[place] for place in range(count)]

    def drop(self, count: int) -> None:
        for _ in range(count):
            self._ahead.popleft()


class ClosureWorker:
    """Runs the functions that the coordinator schedules on this worker.

    Args:
        connection: The connection to the coordinator.
        store: The servers.
        index: The index of this worker.
        make_batches: Returns the batches of a pickled dataset function, whose signature has been
            verified.
    """

    def __init__(self, connection: Connection, store: Store, index: int, make_batches: Any):
        self._connection = connection
        self._store = store
        self._index = index
        self._make_batches = make_batches
        self._inputs: dict[int, _Input] = {}
        self._programs: RecentlyUsed[str, _Program] = RecentlyUsed()
        self._asked: queue.Queue[Message | Exception] = queue.Queue()
        self._answers: queue.Queue[Message | Exception] = queue.Queue()
        #: The next call, if its values were returned with the answer to the last push.
        self._ready: _Call | None = None
        #: The number of batches that a function takes from each of its iterators, as far as is
        #: known.
        self._takes: dict[int, dict[int, int]] = {}

    def serve(self) -> None:
        """Serves the coordinator's requests until it sends a goodbye or disconnects.

        Raises:
            UnavailableError: It has disconnected without a goodbye.
        """
        threading.Thread(target=self._listen, name="unison-listener", daemon=True).start()
        while True:
            message = self._asked.get()
            if isinstance(message, NoRoomError):
                self._fail(message)
                continue
            if isinstance(message, Exception):
                raise message
            if message.kind == "goodbye":
                return
            try:
                self._handle(message)
            except ServerLostError as error:
                self._ready = None
                self._on_lost_server(error)
            except StopIteration:
                self._fail(OutOfRangeError(message="The worker's dataset has no further batch."))
            except UnavailableError:
                raise
            except Exception as error:
                self._fail(error)

    def _listen(self) -> None:
        """Sorts messages into requests, and answers to this worker's requests."""
        while True:
            try:
                message = self._connection.receive()
            except NoRoomError as error:
                (self._asked if error.kind in _ASKED else self._answers).put(error)
                continue
            except UnavailableError as error:
                self._asked.put(error)
                self._answers.put(error)
                return
            (self._asked if message.kind in _ASKED else self._answers).put(message)

    def _ask(self, kind: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Message:
        """Sends a request to the coordinator, and returns the answer."""
        self._connection.send(kind, arrays, **fields)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        if answer.kind == "error":
            raise RuntimeError(answer["text"])
        return answer

    def _on_lost_server(self, error: ServerLostError) -> None:
        """Reports a lost server to the coordinator, after waiting for a possible restart."""
        with contextlib.suppress(ServerLostError):
            self._store.reconnect(error.server, error.why)
        self._connection.send("server lost", server=error.server, why=error.why)

    def _fail(self, error: Exception) -> None:
        code = getattr(error, "error_code", None)
        text = f"{type(error).__name__}: {error}"
        self._connection.send(
            "failed",
            text=text,
            code=code,
            kind_of_error=type(error).__name__,
            traceback=_shown(error),
        )

    def _handle(self, message: Message) -> None:
        if message.kind == "run":
            self._run(message)
        elif message.kind == "dataset":
            batches = self._make_batches(self._connection.verified(message.arrays[0]))
            self._inputs[message["iterator"]] = _Input(batches)
            self._connection.send("done")
        elif message.kind == "streamed dataset":
            self._inputs[message["iterator"]] = _Input(self._streamed(message["iterator"]))
            self._connection.send("done")
        else:
            raise ValueError(f"A worker knows no message {message.kind!r}.")

    def _streamed(self, iterator: int) -> Iterator[Any]:
        """Yields the batches of a dataset that the coordinator iterates over."""
        while True:
            answer = self._ask("next", iterator=iterator)
            if answer.kind == "end":
                return
            yield _Streamed(answer["structure"], answer.arrays)

    # -- running --------------------------------------------------------------------------------

    def _run(self, message: Message) -> None:
        for iterator in message["unused"]:
            self._inputs.pop(iterator, None)
        call, self._ready = self._ready, None
        waited = self._store.waited_seconds
        if call is None or call.message is not message:
            call = self._call(message)
            self._see(call)
        program = call.program
        running = program.run(call.arrays, call.dense, call.rows, call.places)
        for place, count in program.batches:
            self._inputs[message["iterators"][place]].drop(count)
        is_step = message["is_step"]
        following = None if is_step else self._following(message)  # while the program runs
        outputs = _on_host(running)
        end = program.num_results - program.num_host_operands
        if program.num_host_operands:
            self._call_host(program, outputs[end : program.num_results])
        if following is None and not is_step:
            following = self._following(message)  # it may have arrived in the meantime
        call.forget()
        pushes = self._pushes(call, outputs[program.num_results :])
        wanted = None if following is None else following.wanted
        found = self._store.push(pushes, wanted) if pushes or wanted is not None else None
        if following is not None and found is not None:
            following.take(found)
            self._ready = following
        self._connection.send(
            "done",
            outputs[:end],
            program=program.number,
            servers=sorted(pushes),
            waited=self._store.waited_seconds - waited,
        )

    def _call_host(self, program: _Program, operands: Sequence[np.ndarray]) -> None:
        """Makes the coordinator call host functions; if one raises, nothing has been pushed."""
        answer = self._ask("host", operands, program=program.number)
        if answer.kind == "cancel":
            raise RuntimeError("A host function of this call has failed.")

    def _call(self, message: Message) -> _Call:
        """Returns a call with its batches, and the rows that it looks up, if they are known."""
        program, leaves = self._program_for(message["function"], message["iterators"])
        arrays = self._operands(message, leaves)
        call = _Call(message, program, arrays)
        if not program.lookups_need_values:
            call.look_up([])
        return call

    def _see(self, call: _Call) -> None:
        """Pulls the values that a call reads."""
        if call.program.lookups_need_values:
            dense, _ = self._store.pull(
                Wanted(call.program.pulled, encodings=call.program.encodings)
            )
            call.look_up([operand(array) for array in dense])
        call.take(self._store.pull(call.wanted))

    def _following(self, message: Message) -> _Call | None:
        """Returns the next call, if it has arrived and can use the values after this one's push."""
        if not self._asked.queue:
            return None
        following = self._asked.queue[0]
        is_like = isinstance(following, Message) and following.kind == "run"
        if not is_like or following["function"] != message["function"]:
            return None
        try:
            specs, leaves, _ = self._upcoming(following["function"], following["iterators"])
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            return None  # any other will be raised again when the call runs
        program = self._programs.get(specs)
        if program is None or program.lookups_need_values:
            return None
        arrays = self._operands(following, leaves)
        call = _Call(following, program, arrays)
        call.look_up([])
        return call

    def _operands(self, message: Message, leaves: list[np.ndarray]) -> list[Any]:
        """Returns a program's operands: arguments, this worker's index, batches."""
        return [operand(a) for a in (*message.arrays, np.asarray(self._index, np.int32), *leaves)]

    def _upcoming(
        self, function: int, iterators: Sequence[int]
    ) -> tuple[str, list[np.ndarray], list[Any]]:
        """Returns the program's key for the next batches, their leaves, and their specs."""
        takes = self._takes.setdefault(function, dict.fromkeys(range(len(iterators)), 1))
        specs = []
        leaves: list[np.ndarray] = []
        for place, count in takes.items():
            for structure, own in self._inputs[iterators[place]].peek(count):
                specs.append([place, structure, [[leaf.dtype.name, leaf.shape] for leaf in own]])
                leaves += own
        return json.dumps([function, specs]), leaves, specs

    def _program_for(
        self, function: int, iterators: Sequence[int]
    ) -> tuple[_Program, list[np.ndarray]]:
        """Returns the program for the next batches, and their leaves."""
        while True:
            key, leaves, specs = self._upcoming(function, iterators)
            program = self._programs.get(key)
            if program is not None:
                return program, leaves
            answer = self._ask("program", function=function, batches=specs)
            if answer.kind == "take more":
                counts = {int(place): count for place, count in answer["counts"].items()}
                self._takes[function].update(counts)
            elif answer.kind == "cancel":
                raise RuntimeError("The coordinator could not make a program for this call.")
            else:
                self._programs.keep(key, _Program(answer))

    def _pushes(self, call: _Call, crossing: Sequence[np.ndarray]) -> dict[int, Request]:
        """Returns the push to each server."""
        left = iter(crossing)
        about: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
        arrays: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        for update, shards in call.program.updates:
            has_rows, table = update["rows"], update["table"]
            own = [next(left) for _ in has_rows]
            for part, shard in enumerate(shards):
                about[shard.server].append(
                    {
                        "program": update["program"],
                        "shard": part,
                        "has_rows": table is not None,
                        "pushed_rows": has_rows,
                        "encodings": update["encodings"],
                        "sums": update["sums"],
                        "writing": update["writing"],
                    }
                )
                pushed = arrays[shard.server]
                if table is None:
                    taken = slice(shard.start, shard.stop)
                else:
                    ids = call.touched[table]
                    first, end = np.searchsorted(ids, (shard.start, shard.stop))
                    taken = slice(first, end)
                    pushed.append(ids[taken] - shard.start)
                is_whole = table is None and len(shards) == 1
                pushed += [
                    array[taken] if rows and not is_whole else array
                    for array, rows in zip(own, has_rows, strict=True)
                ]
        fields = {"closure": call.message["closure"], "settled": call.message["settled"]}
        kind = "push"
        if call.message["is_step"]:
            kind = "hold"
            fields |= {"worker": self._index, "are_kept": True}
        return {
            server: (kind, arrays[server], {**fields, "updates": updates})
            for server, updates in about.items()
        }


class _Call:
    """A call, and the values that it reads.

    Args:
        message: The coordinator's request.
        program: Its program.
        arrays: Its arguments and batches.
    """

    def __init__(self, message: Message, program: _Program, arrays: list[Any]):
        self.message = message
        self.program = program
        self.arrays = arrays
        #: For every table, the rows that it uses, in order.
        self.touched: list[np.ndarray] = []
        #: For every lookup, the positions of its rows among these.
        self.places: list[Any] = []
        self.dense: list[Any] = []
        self.rows: list[np.ndarray] = []

    @property
    def wanted(self) -> Wanted:
        """The variables and rows to pull."""
        program = self.program
        tables = zip(program.tables, self.touched, strict=True)
        return Wanted(
            [] if self.dense else program.pulled,
            [(shards, ids) for (shards, _, _), ids in tables],
            program.encodings,
        )

    def look_up(self, dense: list[Any]) -> None:
        """Computes the rows that it looks up.

        Args:
            dense: The values of the variables that are not tables, if the rows depend on them.
        """
        program = self.program
        if program.lookups is None:
            return
        self.dense = dense
        found = iter([np.asarray(array) for array in program.lookups(self.arrays, dense)])
        for shards, _, shapes in program.tables:
            unique, where = _unique([next(found) for _ in shapes], shards[-1].stop)
            self.touched.append(unique)
            self.places += [operand(place) for place in where]

    def forget(self) -> None:
        """Drops the values that it read, so that their shared memory can be reused."""
        self.dense, self.rows = [], []

    def take(self, found: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
        """Stores the pulled values."""
        dense, looked_up = found
        self.dense = self.dense or [operand(array) for array in dense]
        for (_, count, _), held in zip(self.program.tables, looked_up, strict=True):
            padded = np.zeros((count, *held.shape[1:]), held.dtype)
            padded[: len(held)] = held
            self.rows.append(padded)


@dataclasses.dataclass
class _Streamed:
    """A batch from the coordinator; see `described`."""

    structure: str
    leaves: list[np.ndarray]


def _unique(indices: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the distinct rows that are looked up, and each lookup's positions among them.

    Out-of-bounds indices get out-of-bounds positions: the program's lookups handle them.
    """
    flat = np.concatenate([array.reshape(-1) for array in indices]).astype(_INDEX)
    inside = (flat >= 0) & (flat < rows)
    ids, where = np.unique(flat[inside], return_inverse=True)
    places = np.full(flat.shape, len(flat), np.int32)
    places[inside] = where
    found = []
    start = 0
    for array in indices:
        found.append(places[start : start + array.size].reshape(array.shape).astype(array.dtype))
        start += array.size
    return ids, found


def _shards(described_shards: Sequence[Sequence[Any]]) -> list[Shard]:
    return [Shard(*shard) for shard in described_shards]


def _on_host(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    if jax.default_backend() == "cpu":
        return [np.asarray(array) for array in arrays]  # without a copy, in a tenth of the calls
    fetched: list[np.ndarray] = jax.device_get(arrays)
    return fetched


def _loaded(data: np.ndarray) -> Any:
    return jax.jit(export.deserialize(bytearray(data.tobytes())).call)


def _shown(error: BaseException) -> str:
    """Returns the traceback of an error that is raised in another process, as text.

    It has the user's frames only, and no heading: the process that raises it prints one.
    """
    if not is_filtering():
        return "".join(traceback.format_exception(error))
    frames = traceback.format_list(user_frames(error))
    return "".join([*frames, *traceback.format_exception_only(error)])
