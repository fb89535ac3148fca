"""`VariableServer`: the state and the operations of a parameter server.

It keeps shards of variables, and programs that compute updates from the values that a worker pushes
and the local variables. An update by dense gradients creates new arrays, so that a reader's value
does not change. An update of some rows changes these rows in place.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.errors import AlreadyExistsError, NotFoundError
from unison.net.array_messages import Connection, Message
from unison.parameter_server.compressed import Encoding, received, sent
from unison.parameter_server.messages import operand
from unison.parameter_server.shared import JobVariables, SharedVariables, seen_whole, store_of
from unison.parameter_server.snapshots import Part
from unison.saving.exported import read_exported
from unison.saving.module_decoder import ModuleDecoder
from unison.storage.decoding import plain_dict, plain_list, plain_text, whole_number


@dataclasses.dataclass(frozen=True)
class Program:
    """An update.

    Attributes:
        run: Maps the pushed values and the values of `inputs` to those of `outputs`.
        inputs: For every shard, the keys of the variables that it reads.
        outputs: For every shard, the keys of the variables that it writes.
        whole_inputs: The indices of the inputs that are not divided by rows: every shard uses all
            of them.
    """

    run: Any
    inputs: list[list[str]]
    outputs: list[list[str]]
    whole_inputs: frozenset[int]


#: One worker's push for one update: its description, the indices of the shard's rows that it
#: updates, in order (None: all), and the arrays.
Push = tuple[dict[str, Any], np.ndarray | None, list[np.ndarray]]

#: A server's answer: the kind of the message, its arrays and its fields.
Answer = tuple[str, Sequence[Any], dict[str, Any]]


class VariableServer:
    """The variables and programs of one job on one server.

    Args:
        shared: The variables that jobs share on this server.
        keeps_snapshots: Whether the server writes and restores snapshots.
        wants_snapshot: Set when a snapshot should be written soon.
    """

    def __init__(
        self, shared: SharedVariables, keeps_snapshots: bool, wants_snapshot: threading.Event
    ):
        self._shared = shared
        self._variables = JobVariables(shared)
        self._programs: dict[int, Program] = {}
        self._installed: dict[int, tuple[np.ndarray, dict[str, Any]]] = {}
        #: Updates that are pushed together, as one program; see `_joined`.
        self._joined: dict[tuple[tuple[int, int], ...], tuple[Any, list[str], list[str]]] = {}
        self._applied: set[int] = set()
        #: The workers' pushes for unfinished steps, in synchronous mode.
        self._held: dict[int, dict[int, list[Push]]] = {}
        self._settled = 0
        #: The job's name; empty until it begins.
        self.job = ""
        self._lock = shared.lock
        #: The connections that have been served.
        self.connections: list[Connection] = []
        #: The number of applied pushes, and of repeated pushes that had been applied before.
        self.applied = self.repeated = 0
        #: The total time for answers, summed over concurrent workers.
        self.busy_seconds = 0.0
        self._restored = 0
        self._keeps_snapshots = keeps_snapshots
        self._wants_snapshot = wants_snapshot

    def _on_begin(self, message: Message) -> Answer:
        """Begins the job, unless it is continued."""
        with self._lock:
            has_state = self.job == message["job"]
            if message["is_new"]:
                self.job = message["job"]
            return (
                "begun",
                (),
                {
                    "has_state": has_state,
                    "keeps_snapshots": self._keeps_snapshots,
                    "restored": self._restored,
                },
            )

    # -- snapshots ------------------------------------------------------------------------------

    def part(self) -> Part:
        """Returns the job's state for a snapshot; the lock must be held."""
        arrays = {f"variable {key}": seen_whole(value) for key, value in self._variables.items()}
        arrays |= {f"program {n}": data for n, (data, _) in self._installed.items()}
        facts = {
            "rights": dict(self._variables.rights),
            "programs": {n: fields for n, (_, fields) in self._installed.items()},
            "done": sorted(self._applied),
            "settled": self._settled,
            "applied": self.applied,
        }
        return Part(facts, arrays)

    def restore(self, job: str, part: Part) -> None:
        """Restores a job's state from a snapshot.

        Raises:
            ValueError, KeyError, OpError: The snapshot's content is invalid.
        """
        self.job = job
        facts = part.facts
        with ModuleDecoder() as decoder:
            for name, array in part.arrays.items():
                what, _, key = name.partition(" ")
                if what == "variable":
                    self._variables[key] = array
                else:
                    self._install(int(key), array, plain_dict(facts["programs"][key]), decoder)
        rights = plain_dict(facts["rights"])
        self._variables.rights = {store: plain_text(right) for store, right in rights.items()}
        self._applied = {whole_number(done) for done in plain_list(facts["done"])}
        self._settled = whole_number(facts["settled"])
        self.applied = self._restored = whole_number(facts["applied"])

    def answer(self, message: Message) -> Answer:
        """Handles a message.

        Raises:
            NotFoundError: It names a variable or program that is not on this server.
        """
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            raise NotFoundError(message=f"A server knows no message {message.kind!r}.")
        begin = time.perf_counter()
        answer: Answer = handler(message)
        with self._lock:
            self.busy_seconds += time.perf_counter() - begin
        return answer

    # -- variables ------------------------------------------------------------------------------

    def _on_create(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                # A shared variable can exist already only if a job ended while creating it.
                if store_of(key) is None and key in self._variables:
                    raise AlreadyExistsError(message=f"There is a variable {key!r} already.")
            self._variables.update(zip(message["keys"], message.arrays, strict=True))
            self._shared.has_changed = True
        return "done", (), {}

    def _on_assign(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                self._value(key)
            self._variables.update(zip(message["keys"], message.arrays, strict=True))
            self._shared.has_changed = True
        return "done", (), {}

    def _on_forget(self, message: Message) -> Answer:
        with self._lock:
            for key in message["keys"]:
                self._variables.pop(key, None)
            self._shared.has_changed = True
        return "done", (), {}

    def _on_read(self, message: Message) -> Answer:
        with self._lock:
            return "values", [self._seen(key) for key in message["keys"]], {}

    def _on_pull(self, message: Message) -> Answer:
        """Returns whole shards, and rows of other ones."""
        return "values", self._pulled(message, message.arrays), {}

    def _pulled(self, message: Message, numbers: Iterable[np.ndarray]) -> list[np.ndarray]:
        with self._lock:
            values = [self._seen(key) for key in message["keys"]]
            for key, rows in zip(message["rows"], numbers, strict=True):
                values.append(np.take(self._value(key), rows, axis=0))
        encodings = message.fields.get("encodings", {})
        return [
            sent(value, Encoding.of_message(encodings[key])) if key in encodings else value
            for key, value in zip((*message["keys"], *message["rows"]), values, strict=True)
        ]

    def _value(self, key: str) -> np.ndarray:
        try:
            return self._variables[key]
        except KeyError:
            raise NotFoundError(message=f"There is no variable {key!r} on this server.") from None

    def _seen(self, key: str) -> np.ndarray:
        """Returns a value to send; a shared one only with complete updates."""
        value = self._value(key)
        return value if store_of(key) is None else seen_whole(value)

    # -- what jobs share ------------------------------------------------------------------------

    def _on_attach(self, message: Message) -> Answer:
        with self._lock:
            self._shared.attach(message["store"], (message["servers"], message["index"]))
            self._variables.rights[message["store"]] = message["rights"]
            self._shared.has_changed = True
        return "done", (), {}

    def _on_enter(self, message: Message) -> Answer:
        may_create = self._variables.rights.get(message["store"]) == "update"
        with self._lock:
            state, bounds = self._shared.enter(self.job, may_create, message.fields)
        return "entered", (), {"state": state, "bounds": bounds}

    def _on_created(self, message: Message) -> Answer:
        with self._lock:
            self._shared.note_created(message["store"], message["variable"])
        self._wants_snapshot.set()
        return "done", (), {}

    def _on_drop(self, message: Message) -> Answer:
        store = message["store"]
        with self._lock:
            self._variables.check_may_update(f"@{store}/*/0")
            self._shared.drop(store)
        return "done", (), {}

    # -- updates --------------------------------------------------------------------------------

    def _on_install(self, message: Message) -> Answer:
        with self._lock:
            for key in itertools.chain.from_iterable(message["outputs"]):
                self._variables.check_may_update(key)
            self._install(message["program"], message.arrays[0], message.fields)
            self._shared.has_changed = True
        self._wants_snapshot.set()  # without its programs and variables, it could not be restored
        return "done", (), {}

    def _install(
        self,
        number: int,
        data: np.ndarray,
        fields: dict[str, Any],
        decoder: ModuleDecoder | None = None,
    ) -> None:
        self._installed[number] = (data, fields)
        where = f"Update {number} of job {self.job!r}"
        self._programs[number] = Program(
            jax.jit(read_exported(data.tobytes(), where, decoder).call),
            fields["inputs"],
            fields["outputs"],
            frozenset(fields["whole_inputs"]),
        )

    def _program(self, number: int) -> Program:
        try:
            return self._programs[number]
        except KeyError:
            raise NotFoundError(message=f"There is no program {number} on this server.") from None

    def _on_push(self, message: Message) -> Answer:
        """Applies the updates of one scheduled call, unless they have been applied already.

        The answer contains the values that the worker's next call reads, if the message lists them.
        """
        closure = message["closure"]
        arrays = iter(message.arrays)
        pushes = _pushes(message, arrays)
        with self._lock:
            is_repeated = self._is_over(closure, message["settled"])
            if is_repeated:
                self.repeated += 1
            else:
                self._apply_all(closure, pushes)
        values = self._pulled(message, arrays) if "keys" in message.fields else ()
        return "values", values, {"is_repeated": is_repeated}

    def _on_hold(self, message: Message) -> Answer:
        """Keeps the push of one of several workers for a step, unless the step is over."""
        closure = message["closure"]
        pushes = _pushes(message, iter(message.arrays))
        with self._lock:
            is_over = self._is_over(closure, message["settled"])
            if is_over:
                self.repeated += 1
            else:
                self._held.setdefault(closure, {})[message["worker"]] = pushes
        return "held", (), {"is_repeated": is_over}

    def _on_commit(self, message: Message) -> Answer:
        """Ends a step: applies the pushes of some workers for it, combined, once.

        The answer lists the workers whose pushes are missing: if there are any, nothing is applied.

        Raises:
            ValueError: The workers have pushed for different programs.
        """
        closure = message["closure"]
        with self._lock:
            if self._is_over(closure, message["settled"]):
                return "committed", (), {"missing": []}
            held = self._held.get(closure, {})
            missing = [worker for worker in message["workers"] if worker not in held]
            if missing:
                return "committed", (), {"missing": missing}
            # Always in the same order, so that sums are bitwise reproducible.
            of_workers = [held[worker] for worker in sorted(message["workers"])]
            kinds = [[about for about, _, _ in pushes] for pushes in of_workers]
            if any(kind != kinds[0] for kind in kinds):
                raise ValueError(
                    "In synchronous mode, the workers' batches of one step must have one shape: "
                    "their programs differ. Batch with drop_remainder=True."
                )
            together = zip(*of_workers, strict=True)
            self._apply_all(closure, [push for pushes in together for push in _combined(pushes)])
            self._held = {step: of_step for step, of_step in self._held.items() if step > closure}
        return "committed", (), {"missing": []}

    def _is_over(self, closure: int, settled: int) -> bool:
        """Returns whether a call has been applied; discards records that are no longer needed."""
        if settled > self._settled:
            self._settled = settled
            self._applied = {closure for closure in self._applied if closure >= settled}
        return closure < self._settled or closure in self._applied

    def _apply_all(self, closure: int, pushes: Iterable[Push]) -> None:
        """Applies the pushes of a call."""
        whole: list[tuple[dict[str, Any], list[np.ndarray]]] = []
        for update, rows, pushed in pushes:
            if rows is None:
                whole.append((update, pushed))
            else:
                self._apply(whole)
                whole = []
                self._apply_to_rows(update, rows, pushed)
        self._apply(whole)
        self._applied.add(closure)
        self.applied += 1
        self._shared.has_changed = True

    def _apply(self, updates: list[tuple[dict[str, Any], list[np.ndarray]]]) -> None:
        """Applies updates of whole shards, in order, in one program."""
        if not updates:
            return
        which = tuple((update["program"], update["shard"]) for update, _ in updates)
        if which not in self._joined:
            self._joined[which] = _joined([(self._program(n), shard) for n, shard in which])
        run, inputs, outputs = self._joined[which]
        new = run(
            [[operand(array) for array in pushed] for _, pushed in updates],
            [operand(self._value(key)) for key in inputs],
        )
        self._variables.update(zip(outputs, map(np.asarray, new), strict=True))

    def _apply_to_rows(
        self, update: dict[str, Any], rows: np.ndarray, pushed: list[np.ndarray]
    ) -> None:
        """Applies an update of some rows, in place."""
        program = self._program(update["program"])
        inputs = program.inputs[update["shard"]]
        outputs = program.outputs[update["shard"]]
        values = [self._value(key) for key in inputs]
        if not len(rows):
            return
        # Programs are compiled only for powers of two of rows; the padding is discarded.
        size = 1 << (len(rows) - 1).bit_length()
        pushed = [
            _filled(array, size) if has_rows else array
            for array, has_rows in zip(pushed, update["pushed_rows"], strict=True)
        ]
        picked = [
            value if place in program.whole_inputs else _taken(value, rows, size)
            for place, value in enumerate(values)
        ]
        found = program.run(list(map(operand, pushed)), list(map(operand, picked)))
        for key, new in zip(outputs, found, strict=True):
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
                "busy_seconds": self.busy_seconds,
                "sent_bytes": sum(each.sent_bytes for each in self.connections),
                "received_bytes": sum(each.received_bytes for each in self.connections),
                "bytes": sum(value.nbytes for value in self._variables.values()),
            },
        )


def _pushes(message: Message, arrays: Iterator[np.ndarray]) -> list[Push]:
    """Returns a worker's pushes; further arrays of the message are left in `arrays`."""
    return [
        (
            update,
            next(arrays) if update["has_rows"] else None,
            [
                array if own is None else received(array, Encoding.of_message(own))
                for own, array in zip(update["encodings"], arrays, strict=False)
            ],
        )
        for update in message["updates"]
    ]


def _combined(pushes: Sequence[Push]) -> list[Push]:
    """Returns the pushes to apply for several workers' pushes for one update; see `Writing`."""
    about, first_rows, first = pushes[0]
    if about["writing"] == "FIRST":
        return [pushes[0]]
    rows = first_rows
    if first_rows is not None:
        rows = np.unique(np.concatenate([own for _, own, _ in pushes if own is not None]))
    totals: dict[int, np.ndarray] = {}
    for place, is_sum in enumerate(about["sums"]):
        if is_sum:
            by_rows = rows if about["pushed_rows"][place] else None
            totals[place] = _sum([(own, arrays[place]) for _, own, arrays in pushes], by_rows)
    if about["writing"] == "TOGETHER":
        return [(about, rows, [totals.get(place, own) for place, own in enumerate(first)])]
    return [
        (about, own_rows, [totals.get(place, own) for place, own in enumerate(arrays)])
        for _, own_rows, arrays in pushes
    ]


def _sum(
    pushed: Sequence[tuple[np.ndarray | None, np.ndarray]], rows: np.ndarray | None
) -> np.ndarray:
    """Returns the sum of the workers' arrays, added in their order.

    Args:
        pushed: Each worker's row indices and array.
        rows: The row indices of the result. None: all arrays have the same shape.
    """
    like = pushed[0][1]
    is_half = like.dtype.itemsize == 2 and like.dtype.kind not in "iu"
    shape = like.shape if rows is None else (len(rows), *like.shape[1:])
    total = np.zeros(shape, np.float32 if is_half else like.dtype)
    for own, array in pushed:
        # A worker has each row at most once.
        where = ... if rows is None or own is None else np.searchsorted(rows, own)
        total[where] += array
    return total.astype(like.dtype, copy=False)


def _joined(programs: Sequence[tuple[Program, int]]) -> tuple[Any, list[str], list[str]]:
    """Returns updates of shards as one program, with the keys that it reads and writes."""
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for program, shard in programs:
        inputs |= dict.fromkeys(key for key in program.inputs[shard] if key not in outputs)
        outputs |= dict.fromkeys(program.outputs[shard])

    def run(pushed: list[list[Any]], values: list[Any]) -> list[Any]:
        known = dict(zip(inputs, values, strict=True))
        for (program, shard), own in zip(programs, pushed, strict=True):
            new = program.run(own, [known[key] for key in program.inputs[shard]])
            known.update(zip(program.outputs[shard], new, strict=True))
        return [known[key] for key in outputs]

    return jax.jit(run), list(inputs), list(outputs)


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    """Returns `array` padded with rows of zeros to `size` rows."""
    if len(array) == size:
        return array
    filled = np.zeros((size, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled


def _taken(value: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    taken = np.zeros((size, *value.shape[1:]), value.dtype)
    # "clip" writes directly to the result; the rows are known to exist.
    np.take(value, rows, axis=0, out=taken[: len(rows)], mode="clip")
    return taken
