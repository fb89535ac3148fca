"""`VariableServer`: what a parameter server keeps and does.

It keeps shards of variables, and programs that compute an update: of what a worker pushes, and of
the variables here. An update of dense gradients gives new arrays, so that who reads gets a value
that nobody changes. One of some rows changes those rows where they are.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from unison.errors import AlreadyExistsError, DataLossError, NotFoundError
from unison.parameter_server import snapshots
from unison.parameter_server.messages import Connection, Message, operand

logger = logging.getLogger("unison")


@dataclasses.dataclass(frozen=True)
class Program:
    """An update.

    Attributes:
        run: Maps what is pushed and the values of `inputs` to those of `outputs`.
        inputs: For every shard, the keys of the variables that it looks at.
        outputs: For every shard, those of the variables that it writes.
        whole_inputs: Which of the inputs have no rows: every shard has all of them.
    """

    run: Any
    inputs: list[list[str]]
    outputs: list[list[str]]
    whole_inputs: frozenset[int]


#: What a server answers: the kind of the message, its arrays and its fields.
Answer = tuple[str, Sequence[Any], dict[str, Any]]


class VariableServer:
    """The variables and programs of one job on one server.

    Args:
        snapshot: The file that it writes, and comes back from. None: it writes nothing.
    """

    def __init__(self, snapshot: pathlib.Path | None = None):
        self._variables: dict[str, np.ndarray] = {}
        self._programs: dict[int, Program] = {}
        self._installed: dict[int, tuple[np.ndarray, dict[str, Any]]] = {}
        self._applied: set[int] = set()
        self._settled = 0
        self._job = ""
        self._lock = threading.Lock()
        #: Who has been answered.
        self.connections: list[Connection] = []
        #: How many pushes have been applied, and how many had been applied before.
        self.applied = self.repeated = 0
        self._restored = 0
        self._snapshot = snapshot
        self._changes = 0
        #: Set when a snapshot should be written soon.
        self.wants_snapshot = threading.Event()
        if snapshot is not None and snapshot.exists():
            self._restore(snapshot)

    def _on_begin(self, message: Message) -> Answer:
        """Begins a job, unless it goes on: what another one has left here is dropped."""
        with self._lock:
            has_state = self._job == message["job"]
            if message["is_new"]:
                self._variables, self._programs, self._installed = {}, {}, {}
                self._applied, self._settled, self.applied, self._restored = set(), 0, 0, 0
                self._job = message["job"]
            return (
                "begun",
                (),
                {
                    "has_state": has_state,
                    "keeps_snapshots": self._snapshot is not None,
                    "restored": self._restored,
                },
            )

    # -- snapshots ------------------------------------------------------------------------------

    @property
    def writes_snapshots(self) -> bool:
        """Whether it is to write snapshots."""
        return self._snapshot is not None

    def write_snapshot(self) -> None:
        """Writes what is needed to come back, if something has changed."""
        if self._snapshot is None or not self._job:
            return
        with self._lock:
            if self._changes == 0:
                return
            self._changes = 0
            # Rows of these are changed where they are.
            arrays = {
                f"variable {key}": np.array(value) if value.flags.writeable else value
                for key, value in self._variables.items()
            }
            arrays |= {f"program {n}": data for n, (data, _) in self._installed.items()}
            facts = {
                "job": self._job,
                "programs": {n: fields for n, (_, fields) in self._installed.items()},
                "done": sorted(self._applied),
                "settled": self._settled,
                "applied": self.applied,
            }
        snapshots.write(self._snapshot, facts, arrays)

    def _restore(self, path: pathlib.Path) -> None:
        try:
            facts, arrays = snapshots.read(path)
        except DataLossError as error:
            logger.warning("%s The server begins without it.", error)
            return
        for name, array in arrays.items():
            what, _, key = name.partition(" ")
            if what == "variable":
                self._variables[key] = array
            else:
                self._install(int(key), array, facts["programs"][key])
        self._job = facts["job"]
        self._applied, self._settled = set(facts["done"]), facts["settled"]
        self.applied = self._restored = facts["applied"]

    def answer(self, message: Message) -> Answer:
        """Does what a message asks for.

        Raises:
            NotFoundError: It names a variable or program that is not here.
        """
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            raise NotFoundError(message=f"A server knows no message {message.kind!r}.")
        answer: Answer = handler(message)
        return answer

    # -- variables ------------------------------------------------------------------------------

    def _on_create(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                if key in self._variables:
                    raise AlreadyExistsError(message=f"There is a variable {key!r} already.")
            self._variables.update(zip(message["keys"], message.arrays, strict=True))
            self._changes += 1
        return "done", (), {}

    def _on_assign(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                self._value(key)
            self._variables.update(zip(message["keys"], message.arrays, strict=True))
            self._changes += 1
        return "done", (), {}

    def _on_forget(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                self._variables.pop(key, None)
        return "done", (), {}

    def _on_read(self, message: Message) -> Answer:
        return "values", [self._value(key) for key in message["keys"]], {}

    def _on_pull(self, message: Message) -> Answer:
        """Answers with whole shards, and with rows of others."""
        return "values", self._pulled(message, message.arrays), {}

    def _pulled(self, message: Message, numbers: Iterable[np.ndarray]) -> list[np.ndarray]:
        values = [self._value(key) for key in message["keys"]]
        with self._lock:
            for key, rows in zip(message["rows"], numbers, strict=True):
                values.append(np.take(self._value(key), rows, axis=0))
        return values

    def _value(self, key: str) -> np.ndarray:
        try:
            return self._variables[key]
        except KeyError:
            raise NotFoundError(message=f"There is no variable {key!r} on this server.") from None

    # -- updates --------------------------------------------------------------------------------

    def _on_install(self, message: Message) -> Answer:
        with self._lock:
            self._install(message["program"], message.arrays[0], message.fields)
            self._changes += 1
        self.wants_snapshot.set()  # without its programs and variables, it could not come back
        return "done", (), {}

    def _install(self, number: int, data: np.ndarray, fields: dict[str, Any]) -> None:
        self._installed[number] = (data, fields)
        self._programs[number] = Program(
            jax.jit(export.deserialize(bytearray(data.tobytes())).call),
            fields["inputs"],
            fields["outputs"],
            frozenset(fields["whole_inputs"]),
        )

    def _on_push(self, message: Message) -> Answer:
        """Applies the updates of one scheduled call, unless they have been.

        It answers with what the worker's next call wants to see, if it says so.
        """
        closure = message["closure"]
        arrays = iter(message.arrays)
        updates = [
            (
                update,
                next(arrays) if update["has_rows"] else None,
                [next(arrays) for _ in update["pushed_rows"]],
            )
            for update in message["updates"]
        ]
        with self._lock:
            self._settle(message["settled"])
            is_repeated = closure < self._settled or closure in self._applied
            if is_repeated:
                self.repeated += 1
            else:
                for update in updates:
                    self._apply(*update)
                self._applied.add(closure)
                self.applied += 1
                self._changes += 1
        values = self._pulled(message, arrays) if "keys" in message.fields else ()
        return "values", values, {"is_repeated": is_repeated}

    def _settle(self, settled: int) -> None:
        """Forgets which calls were applied that nobody will send again."""
        if settled > self._settled:
            self._settled = settled
            self._applied = {closure for closure in self._applied if closure >= settled}

    def _apply(
        self, update: dict[str, Any], rows: np.ndarray | None, pushed: list[np.ndarray]
    ) -> None:
        program = self._programs.get(update["program"])
        if program is None:
            raise NotFoundError(message=f"There is no program {update['program']} on this server.")
        inputs = program.inputs[update["shard"]]
        outputs = program.outputs[update["shard"]]
        values = [self._value(key) for key in inputs]
        if rows is None:
            new = _run(program, pushed, values)
            self._variables.update(zip(outputs, map(np.asarray, new), strict=True))
            return
        if not len(rows):
            return
        # A program is compiled for some numbers of rows; what is filled up goes nowhere.
        size = 1 << (len(rows) - 1).bit_length()
        pushed = [
            _filled(array, size) if has_rows else array
            for array, has_rows in zip(pushed, update["pushed_rows"], strict=True)
        ]
        picked = [
            value if place in program.whole_inputs else _taken(value, rows, size)
            for place, value in enumerate(values)
        ]
        for key, new in zip(outputs, _run(program, pushed, picked), strict=True):
            value = self._variables[key]
            if not value.flags.writeable:
                value = self._variables[key] = np.array(value)
            value[rows] = np.asarray(new)[: len(rows)]

    def _on_status(self, message: Message) -> Answer:
        del message
        return (
            "status",
            (),
            {
                "applied": self.applied,
                "repeated": self.repeated,
                "variables": len(self._variables),
                "sent_bytes": sum(each.sent_bytes for each in self.connections),
                "received_bytes": sum(each.received_bytes for each in self.connections),
                "bytes": sum(value.nbytes for value in self._variables.values()),
            },
        )


def _run(program: Program, pushed: list[np.ndarray], values: list[np.ndarray]) -> Any:
    return program.run([operand(array) for array in pushed], [operand(array) for array in values])


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    """Returns `array` with rows of zeros after it, `size` rows in all."""
    if len(array) == size:
        return array
    filled = np.zeros((size, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled


def _taken(value: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    taken = np.zeros((size, *value.shape[1:]), value.dtype)
    # "clip" writes to the result at once; the rows are known to be there.
    np.take(value, rows, axis=0, out=taken[: len(rows)], mode="clip")
    return taken
