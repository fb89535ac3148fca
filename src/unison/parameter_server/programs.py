"""A scheduled function as programs: what a worker runs, and the updates that servers run.

The coordinator traces a function once for each shape of what it gets, as `strategy.run` does, and
divides it (see `splitting`). What travels is compiled code (StableHLO, by `jax.export`) with a
description in numbers and text: no Python, nothing that is unpickled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from unison.cells import Cell, Layout, VariableAggregation
from unison.jaxprs import evaluate
from unison.lifting import Lift
from unison.parameter_server.cells import RemoteCell, RemotePlacement
from unison.parameter_server.compressed import Encoding, encoded, encoding_for
from unison.parameter_server.splitting import (
    SplitProgram,
    Splitter,
    Table,
    Update,
    Writing,
    equations_for,
    evaluated,
    rows_within,
    without_host_calls,
)
from unison.parameter_server.store import Shard
from unison.program.control_flow import converted_if_needed
from unison.program.tracing import CellTrace, called_on, trace_over_cells
from unison.runtime.precision import array_type, device_dtype
from unison.thread_local import ThreadLocal

logger = logging.getLogger("unison")

_numbers = itertools.count()

#: Odd, so that distinct workers get distinct seeds modulo 2**32.
_STREAM_STRIDE = 0x85EBCA6B

#: The shape and dtype of an array in a batch, as a message has them.
Kind = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The next element of an iterator on a worker.

    Attributes:
        structure: The structure, as `described` gives it.
        kinds: The shape and dtype of every leaf.
    """

    structure: str
    kinds: tuple[Kind, ...]


class WantsBatchError(Exception):
    """A function takes more batches of iterators than it was known to take.

    Attributes:
        counts: How many it takes, by the iterators' numbers among those that it is called with.
    """

    def __init__(self, counts: dict[int, int]):
        super().__init__(counts)
        self.counts = counts


class _Batches:
    """The batches that a function being traced takes, as tracers.

    To see how many there will be, the trace goes on where there are more: with the last one again.
    """

    def __init__(self, batches: dict[int, list[Any]]):
        self._batches = batches
        self._taken: collections.Counter[int] = collections.Counter()

    def take(self, iterator: int) -> Any:
        place = self._taken[iterator]
        self._taken[iterator] += 1
        known = self._batches.get(iterator)
        if not known:
            raise self.wanted()
        return known[min(place, len(known) - 1)]

    def wanted(self) -> WantsBatchError:
        counts = {iterator: len(own) for iterator, own in self._batches.items()}
        return WantsBatchError({**counts, **self._taken})

    def check(self) -> None:
        """Raises the error if there were more than was known."""
        if any(n > len(self._batches.get(iterator, ())) for iterator, n in self._taken.items()):
            raise self.wanted()


#: Of the scheduled function that a thread traces: its batches, and the worker's index.
_batches: ThreadLocal[_Batches | None] = ThreadLocal(None)
_worker: ThreadLocal[Any] = ThreadLocal(None)


def next_batch(iterator: int) -> Any:
    """Returns what stands for the next batch of an iterator, in a scheduled function.

    Args:
        iterator: Its number among those that the function is called with.

    Raises:
        RuntimeError: No scheduled function is being traced.
    """
    batches = _batches.value
    if batches is None:
        raise on_workers_only()
    return batches.take(iterator)


def on_workers_only() -> RuntimeError:
    """Returns the error about an iterator that is asked for a batch by the coordinator."""
    return RuntimeError(
        "The iterator of a per-worker dataset gives batches on the workers only. Pass it to "
        "coordinator.schedule(fn, args=(iterator,)), and call next(iterator) in fn."
    )


def is_tracing() -> bool:
    """Whether this thread traces a scheduled function."""
    return _batches.value is not None


@dataclasses.dataclass
class ServerProgram:
    """An update as the servers get it.

    Attributes:
        number: The program's number.
        data: What `jax.export` wrote.
        inputs: For every shard, the keys of what it looks at.
        outputs: For every shard, the keys of what it writes.
        whole_inputs: Which inputs have no rows.
        shards: The shards.
    """

    number: int
    data: bytes
    inputs: list[list[str]]
    outputs: list[list[str]]
    whole_inputs: list[int]
    shards: Sequence[Shard]


@dataclasses.dataclass
class WorkerProgram:
    """A scheduled function as a worker gets it.

    Attributes:
        number: The program's number.
        data: The main program, as `jax.export` wrote it.
        lookups: The program that computes the rows to look up; empty if there are no tables.
        description: All else that the worker must know.
        structure: The structure of the function's result.
        host_calls: Calls of host functions, whose operands the worker sends to the coordinator
            before it pushes.
    """

    number: int
    data: bytes
    lookups: bytes
    description: dict[str, Any]
    structure: Any
    host_calls: list[Any] = dataclasses.field(default_factory=list)

    def call_host(self, operands: Sequence[np.ndarray]) -> None:
        """Calls the host functions, in order; passes on what they raise."""
        left = iter(operands)
        for call in self.host_calls:
            own = [jnp.asarray(next(left), atom.aval.dtype) for atom in call.invars]
            if call.primitive.name == "io_callback":
                call.params["callback"](*own)  # evaluated, it raises an error of XLA about it
            else:
                evaluate(call, own)


@dataclasses.dataclass
class _Trace(CellTrace):
    """A trace whose calls of host functions are left to the coordinator."""

    host_calls: list[Any] = dataclasses.field(default_factory=list)


class Tracer:
    """Makes programs of functions.

    Args:
        placement: Where the variables are.
        in_scope: Makes the context in which functions are traced.
        install: Brings an update to the servers.
    """

    def __init__(
        self,
        placement: RemotePlacement,
        in_scope: Callable[[], Any],
        install: Callable[[ServerProgram], None],
    ):
        self._placement = placement
        self._in_scope = in_scope
        self._install = install
        #: The number of programs so far; it is constant in a steady state.
        self.trace_count = 0

    def make(
        self,
        call: Callable[[list[Any]], Any],
        arguments: Sequence[Any],
        batches: dict[int, list[BatchSpec]],
    ) -> WorkerProgram:
        """Makes the program of a function.

        Args:
            call: Calls it, given an array for every argument that is one.
            arguments: Shapes and dtypes of these arrays.
            batches: What the iterators that it takes give: as many batches as it takes.

        Raises:
            WantsBatchError: It takes more of them.
            ValueError: It touches a variable that is not on the servers.
            TypeError: It returns something that is no array.
        """
        whole = self._trace(call, arguments, batches, may_create=True)
        in_sync = self._placement.in_sync
        if in_sync > 1:
            # What was missing has been made; now as one of several workers.
            whole = self._trace(call, arguments, batches, may_create=False, num_replicas=in_sync)
        self.trace_count += 1
        jaxpr, calls = without_host_calls(whole.jaxpr, in_sync, whole.structure.num_leaves)
        trace = _Trace(jaxpr, whole.cells, whole.structure, whole.written, calls)
        splitter = Splitter(
            trace.jaxpr,
            [_bounds(cell) for cell in trace.cells],
            [trace.cells.index(cell) for cell in trace.written],
            [cell.name for cell in trace.cells],
            None if in_sync == 1 else [_writing(cell) for cell in trace.cells],
            in_sync,
        )
        split = splitter.split()
        self._check_owned(trace, split)
        for cell in split.dense_lookups:
            logger.warning(
                "Rows are looked up in variable %r, but the function or its optimizer needs all "
                "of it: whole tables travel. Keep norms and other uses of whole tables out of the "
                "step, or take an optimizer that updates every element for itself.",
                trace.cells[cell].name,
            )
        return self._exported(splitter, split, trace, len(arguments), batches)

    # -- tracing --------------------------------------------------------------------------------

    def _trace(
        self,
        call: Callable[[list[Any]], Any],
        arguments: Sequence[Any],
        batches: dict[int, list[BatchSpec]],
        may_create: bool,
        num_replicas: int = 1,
    ) -> CellTrace:
        def on_one_replica(
            values: dict[Cell, Any], may_create: bool, arrays: list[Any], leaves: list[Any]
        ) -> tuple[Any, dict[Cell, jax.Array]]:
            *own_arrays, worker = arrays
            # Every worker draws from a random stream of its own.
            shifts = {
                cell: _stream_shift(worker, cell.aval)
                for cell in values
                if cell.layout is Layout.STREAM and isinstance(cell, RemoteCell)
            }
            lift = Lift(
                self._placement,
                values | {cell: values[cell] + shift for cell, shift in shifts.items()},
                takes_new_cells=may_create,
                replica_id=0 if num_replicas == 1 else None,
            )
            left = iter(leaves)
            taken = {
                iterator: [
                    restored(spec.structure, [next(left) for _ in spec.kinds]) for spec in own
                ]
                for iterator, own in batches.items()
            }
            given = _Batches(taken)

            def call_with_batches() -> Any:
                result = call(own_arrays)
                given.check()
                return result

            with _tracing(given, worker):
                result, new = called_on(lift, call_with_batches, self._in_scope(), _as_result)
            return result, {
                cell: value - shifts[cell] if cell in shifts else value
                for cell, value in new.items()
            }

        worker = array_type((), np.dtype(np.int32))
        kinds = [_aval(kind) for own in batches.values() for spec in own for kind in spec.kinds]
        inputs = [[*arguments, worker], kinds]
        with self._placement.as_if_of(num_replicas):
            return converted_if_needed(
                lambda: trace_over_cells(
                    self._placement, on_one_replica, inputs, num_replicas, may_create
                )
            )

    def _check_owned(self, trace: _Trace, split: SplitProgram) -> None:
        touched = {*split.pulled, *(cell for u in split.updates for cell in u.cells)}
        cells = [*(trace.cells[index] for index in touched), *trace.written]
        for cell in cells:
            if not isinstance(cell, RemoteCell) or cell.remote is not self._placement:
                raise ValueError(
                    f"Variable {cell.name!r} was not created in the scope of the strategy that "
                    "schedules this function: the workers cannot reach it. Create it (its layer, "
                    "metric or optimizer) inside `with strategy.scope():`."
                )

    # -- exporting ------------------------------------------------------------------------------

    def _exported(
        self,
        splitter: Splitter,
        split: SplitProgram,
        trace: _Trace,
        num_arguments: int,
        batches: dict[int, list[BatchSpec]],
    ) -> WorkerProgram:
        jaxpr = split.jaxpr.jaxpr
        consts = dict(zip(jaxpr.constvars, split.jaxpr.consts, strict=True))
        pulled = [jaxpr.invars[cell] for cell in split.pulled]
        inputs = jaxpr.invars[len(trace.cells) :]
        updates = [self._server_program(update, trace, split) for update in split.updates]
        for program in updates:
            self._install(program)
        equations, _ = splitter.worker_equations(split.remaining, split.updates)
        results = [jaxpr.outvars[output] for output in split.remaining]
        wanted = [*results, *(v for update in split.updates for v in update.pushed)]
        encodings_of = [self._encodings(update, trace, split) for update in split.updates]
        encodings = [*(None for _ in results), *itertools.chain.from_iterable(encodings_of)]
        compression = self._placement.compression
        is_stochastic = compression is not None and compression.stochastic
        # A table's values have the rows that are looked up, one for each lookup at most.
        rows_of = [splitter.row_values(table, equations) or set() for table in split.tables]

        def values_for(arrays: Sequence[Any], whole: Sequence[Any]) -> dict[Any, Any]:
            return {
                **consts,
                **dict(zip(pulled, whole, strict=True)),
                **dict(zip(inputs, arrays, strict=True)),
            }

        def main(arrays: list, whole: list, rows: list, places: list) -> list:
            values = values_for(arrays, whole)
            has_rows: dict[Any, int] = {}
            found = iter(places)
            for table, own, held in zip(split.tables, rows_of, rows, strict=True):
                values[jaxpr.invars[table.cell]] = held
                has_rows.update(dict.fromkeys(own, table.count))
                for variable in table.lookups:
                    values[variable] = next(found)
            outputs = _evaluated_with_rows(equations, values, wanted, has_rows, set(values))
            return [
                value if own is None else encoded(value, own, is_stochastic)
                for value, own in zip(outputs, encodings, strict=True)
            ]

        indices = [variable for table in split.tables for variable in table.lookups]
        need_values = not equations_for(jaxpr.eqns, indices)[1].isdisjoint(pulled)

        def lookups(arrays: list, whole: list) -> list:
            values = {**consts, **dict(zip(inputs, arrays, strict=True))}
            values.update(zip(pulled if need_values else (), whole, strict=True))
            needed, _ = equations_for(jaxpr.eqns, indices)
            found = evaluated(needed, values, indices)
            return _clipped(split.tables, found, jaxpr)

        array_avals = [variable.aval for variable in inputs]
        whole_avals = [variable.aval for variable in pulled]
        row_avals = []
        place_avals = []
        for table in split.tables:
            aval: Any = jaxpr.invars[table.cell].aval
            row_avals.append(array_type((table.count, *aval.shape[1:]), aval.dtype))
            place_avals += [_like(variable.aval) for variable in table.lookups]
        data = _serialized(main, _likes(array_avals), _likes(whole_avals), row_avals, place_avals)
        find = b""
        if split.tables:
            seen = whole_avals if need_values else []
            find = _serialized(lookups, _likes(array_avals), _likes(seen))
        description = {
            "lookups_need_values": need_values,
            "arguments": num_arguments,
            "batches": [[iterator, len(own)] for iterator, own in batches.items()],
            "results": len(results),
            "host_operands": sum(len(call.invars) for call in trace.host_calls),
            "pulled": [_described(trace.cells[cell]) for cell in split.pulled],
            "encodings": self._encodings_of_pulls(trace, split),
            "tables": [
                {
                    "shards": _described(trace.cells[table.cell]),
                    "rows": table.count,
                    "lookups": [list(variable.aval.shape) for variable in table.lookups],
                }
                for table in split.tables
            ],
            "updates": [
                {
                    "program": program.number,
                    "shards": [dataclasses.astuple(shard) for shard in program.shards],
                    "rows": update.rows,
                    "encodings": own,
                    "sums": update.sums,
                    "writing": update.writing.name,
                    "table": None if update.table is None else split.tables.index(update.table),
                }
                for update, program, own in zip(split.updates, updates, encodings_of, strict=True)
            ],
        }
        return WorkerProgram(
            next(_numbers), data, find, description, trace.structure, trace.host_calls
        )

    def _encodings(
        self, update: Update, trace: _Trace, split: SplitProgram
    ) -> list[Encoding | None]:
        """Returns how what is pushed for an update travels."""
        first = len(split.jaxpr.jaxpr.outvars) - len(trace.written)
        name = trace.written[update.outputs[0] - first].name
        return [
            encoding_for(self._placement.compression, name, variable.aval, by_rows)
            for variable, by_rows in zip(update.crossing, update.rows, strict=True)
        ]

    def _encodings_of_pulls(self, trace: _Trace, split: SplitProgram) -> dict[str, Encoding]:
        """Returns how what is pulled travels, by the shards' keys."""
        found: dict[str, Encoding] = {}
        tables = [table.cell for table in split.tables]
        for index in (*split.pulled, *tables):
            cell = trace.cells[index]
            assert isinstance(cell, RemoteCell)
            by_rows = index in tables or len(cell.shards) > 1
            own = encoding_for(self._placement.compression, cell.name, cell.aval, by_rows)
            if own is not None:
                found |= dict.fromkeys((shard.key for shard in cell.shards), own)
        return found

    def _server_program(self, update: Update, trace: _Trace, split: SplitProgram) -> ServerProgram:
        jaxpr = split.jaxpr.jaxpr
        consts = dict(zip(jaxpr.constvars, split.jaxpr.consts, strict=True))
        outputs = [jaxpr.outvars[output] for output in update.outputs]
        homes = [jaxpr.invars[cell] for cell in update.cells]
        first = len(jaxpr.outvars) - len(trace.written)
        written = [trace.written[output - first] for output in update.outputs]
        owner = written[0]
        assert isinstance(owner, RemoteCell)
        is_by_rows = update.table is not None or len(owner.shards) > 1
        has_rows: set[Any] = set()
        if is_by_rows:
            has_rows = rows_within(update.equations, outputs) | set(homes)

        def run(pushed: list, values: list) -> list:
            known = {
                **consts,
                **dict(zip(update.crossing, pushed, strict=True)),
                **dict(zip(homes, values, strict=True)),
            }
            rows = next(
                (known[v].shape[0] for v in [*update.crossing, *homes] if v in has_rows), None
            )
            new = evaluated(update.equations, known, outputs, has_rows, rows)
            return [
                value
                if not is_by_rows or (value.ndim and value.shape[0] == rows)
                # The same for all rows: a constant, or what was pushed once.
                else jnp.broadcast_to(value[:1] if value.ndim else value, (rows, *value.shape[1:]))
                for value in new
            ]

        size: Any = export.symbolic_shape("rows")[0] if is_by_rows else None

        def aval(variable: Any) -> Any:
            if variable not in has_rows:
                return _like(variable.aval)
            return array_type((size, *variable.aval.shape[1:]), variable.aval.dtype)

        data = _serialized(run, [aval(v) for v in update.crossing], [aval(v) for v in homes])
        looked_at = [trace.cells[cell] for cell in update.cells]
        shards = range(len(owner.shards))
        return ServerProgram(
            next(_numbers),
            data,
            [[cell.shards[part].key for cell in looked_at] for part in shards],  # type: ignore[attr-defined]
            [[cell.shards[part].key for cell in written] for part in shards],  # type: ignore[attr-defined]
            [place for place, home in enumerate(homes) if home not in has_rows],
            owner.shards,
        )


def _evaluated_with_rows(
    equations: Sequence[Any],
    values: dict[Any, Any],
    wanted: Sequence[Any],
    has_rows: dict[Any, int],
    given: set[Any],
) -> list[Any]:
    """Returns `wanted`, where values in `has_rows` have that many rows, and `given` are known."""
    for equation in equations:
        output = next(iter(equation.outvars), None)  # a branch may only have effects
        if output in given:
            continue
        if output is not None and output in has_rows and equation.primitive.name == "scatter-add":
            # The zeros that rows are added to may be those of several tables.
            zeros = jnp.zeros((has_rows[output], *output.aval.shape[1:]), output.aval.dtype)
            added = [zeros, *(values[atom] for atom in equation.invars[1:])]
            values[output] = evaluate(equation, added)[0]
        else:
            evaluated([equation], values, ())
    return evaluated((), values, wanted)


def _clipped(tables: Sequence[Table], found: Sequence[Any], jaxpr: Any) -> list[Any]:
    left = iter(found)
    indices = []
    for table in tables:
        last = jaxpr.invars[table.cell].aval.shape[0] - 1
        for clips in table.clips:
            index = next(left)
            indices.append(jnp.clip(index, 0, last) if clips else index)
    return indices


@contextlib.contextmanager
def _tracing(batches: _Batches, worker: Any) -> Iterator[None]:
    with _batches.bound_to(batches), _worker.bound_to(worker):
        yield


def traced_worker_index() -> Any:
    """Returns what stands for the worker's index in a scheduled function; None outside."""
    return _worker.value


def _stream_shift(worker: Any, aval: Any) -> Any:
    """Returns what distinguishes a worker's random stream: an offset of the seed."""
    seed = (worker.astype(jnp.uint32) * jnp.uint32(_STREAM_STRIDE)).astype(aval.dtype)
    return jnp.stack([seed, jnp.zeros_like(seed)])


def _serialized(function: Callable[..., Any], *avals: Any) -> bytes:
    try:
        exported = export.export(jax.jit(function, keep_unused=True))(*avals)
        return bytes(exported.serialize())
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            "A scheduled function runs in other processes, as a compiled program. This one cannot "
            f"be sent: {error}. Leave out calls of host functions that return a result "
            "(jax.pure_callback, tf.numpy_function), and those in loops and branches; what returns "
            "nothing (jax.debug.print, assertions) runs in the coordinator."
        ) from error


def _as_result(leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "A scheduled function must return arrays, numbers and variables, in any nesting: they "
            f"come from another process. Received: {leaf!r} of type {type(leaf).__name__}."
        ) from error


def _writing(cell: Cell) -> Writing:
    if cell.is_on_read:
        return Writing.EACH
    if cell.layout is Layout.STREAM:
        return Writing.FIRST
    is_of_first = cell.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    return Writing.FIRST if is_of_first else Writing.TOGETHER


def _bounds(cell: Cell) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(cell, RemoteCell):
        return ((-1, 0, 1),)
    return tuple((shard.server, shard.start, shard.stop) for shard in cell.shards)


def _described(cell: Cell) -> list[tuple]:
    assert isinstance(cell, RemoteCell)
    return [dataclasses.astuple(shard) for shard in cell.shards]


def _like(aval: Any) -> Any:
    return array_type(aval.shape, aval.dtype)


def _likes(avals: Sequence[Any]) -> list[Any]:
    return [_like(aval) for aval in avals]


def _aval(kind: Kind) -> Any:
    dtype, shape = kind
    return array_type(shape, device_dtype(dtype))


# -- structures -----------------------------------------------------------------------------


def described(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Returns the structure of a batch in lists and text, and its leaves.

    Raises:
        TypeError: A leaf is no array of numbers, or the structure has other nodes than
            dictionaries, lists, tuples and None.
    """
    leaves: list[np.ndarray] = []

    def describe(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, dict):
            return {"dict": [[key, describe(node[key])] for key in sorted(node)]}
        if isinstance(node, list | tuple):
            kind = "list" if isinstance(node, list) else "tuple"
            return {kind: [describe(child) for child in node]}
        array = np.asarray(node)
        if array.dtype.kind in "OSU":
            raise TypeError(
                "A batch for a scheduled function must be of numbers; text has no place in a "
                "compiled program. Turn it into numbers in the dataset (`map` with StringLookup, "
                f"say). Received: an array of dtype {array.dtype}."
            )
        leaves.append(array)
        return "leaf"

    return describe(tree), leaves


def restored(structure: Any, leaves: Sequence[Any]) -> Any:
    """Returns the tree of `structure`, a text, with `leaves`."""
    left = iter(leaves)

    def restore(node: Any) -> Any:
        if node is None:
            return None
        if node == "leaf":
            return next(left)
        ((kind, children),) = node.items()
        if kind == "dict":
            return {key: restore(child) for key, child in children}
        restored_children = [restore(child) for child in children]
        return restored_children if kind == "list" else tuple(restored_children)

    return restore(json.loads(structure))
