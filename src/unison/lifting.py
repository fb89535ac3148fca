"""Lifting: variables that a replica program uses become its inputs and outputs.

While a program is traced, its `Lift` stands between the variables and their cells: a read returns a
tracer, a write is recorded, and the stored arrays do not change until the compiled program returns.
`unison.Variable` uses `current_lift()`; Keras variables are lifted through a subclass of Keras'
`StatelessScope` (`unison.keras.variables.LiftingScope`). Keras' own steps have no lift: they pass
the state as arguments (`unison.keras.step_tracing`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec

from unison.cells import Cell, Layout, VariableAggregation
from unison.collectives import broadcast, sum_over_replicas
from unison.eager_fallback import needs_python
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.private_jax import TraceLevel
from unison.thread_local import ThreadLocal

#: Odd, so that distinct replicas get distinct seeds modulo 2**32 (the golden ratio's digits).
_STREAM_STRIDE = 0x9E3779B1

_active: ThreadLocal[Lift | None] = ThreadLocal(None)


def current_lift() -> Lift | None:
    """Returns the lift of the replica program that is being traced in this thread."""
    return _active.value


@contextlib.contextmanager
def outside_the_program() -> Iterator[None]:
    """Context manager in which this thread computes eagerly, on the variables outside the trace."""
    if current_lift() is None:
        yield
        return
    with _active.bound_to(None), jax.ensure_compile_time_eval():
        yield


class _Writer(enum.Enum):
    """The relation between a program's writes to variables and the replicas."""

    #: Every replica writes its own value; the cell's aggregation combines them.
    EACH_REPLICA = enum.auto()
    #: Every replica writes the same value; there is nothing to combine.
    ALL_ALIKE = enum.auto()
    #: One write from outside the replicas (`merge_call`), where reading combines the copies, too.
    OUTSIDE = enum.auto()
    #: Each copy is updated separately (`strategy.extended.update`).
    EACH_COPY = enum.auto()


@dataclasses.dataclass
class _PendingUpdate:
    """An update whose all-reduce is pending: `base + combine(delta)`, or `combine(delta)`."""

    base: jax.Array | None
    delta: jax.Array


class Lift:
    """The values of the cells inside one trace of a replica program.

    Combining writes (`ON_WRITE` with an aggregation) are not reduced one by one: they are deferred
    until one of them is read or the trace ends, and are then reduced together.

    Args:
        placement: The devices of the strategy that runs the program.
        values: The cells that the program may use, with their values on this replica.
        takes_new_cells: Whether cells may be created during the trace. The function must then be
            traced again, with the new cells among `values`.
        replica_id: The replica's index, if the program is traced for one replica only.
    """

    def __init__(
        self,
        placement: Placement,
        values: dict[Cell, jax.Array],
        takes_new_cells: bool = False,
        replica_id: int | None = None,
    ):
        self.placement = placement
        self.replica_id = replica_id
        self._values = dict(values)
        self._cells_by_input = {id(value): cell for cell, value in values.items()}
        self.takes_new_cells = takes_new_cells
        self._trace = get_opaque_trace_state(convention="unison")
        self._level = TraceLevel()
        self._pending: dict[Cell, _PendingUpdate] = {}
        self._writer = _Writer.EACH_REPLICA
        self._copies_get_equal_values = True
        #: The cells created during the trace, kept alive until the trace is gone.
        self.created: list[Cell] = []
        #: The cells written so far, in order (a dict used as an ordered set).
        self.written: dict[Cell, None] = {}
        #: The mirrored cells whose copies may differ after this program.
        self.diverging: dict[Cell, None] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[Lift]:
        """Makes this the current lift of the thread."""
        with _active.bound_to(self):
            yield self

    def value_before(self, tracer: jax.Array) -> jax.Array | None:
        """Returns the value that a cell has before the program, if `tracer` is the program's input
        for it and all copies are equal.
        """
        cell = self._cells_by_input.get(id(tracer))
        if cell is None or cell.layout is Layout.LOCAL:
            return None
        return jnp.asarray(cell.numpy(), dtype=cell.aval.dtype)

    def read(self, cell: Cell) -> jax.Array:
        """Returns the cell's value on this replica; inside `cross_replica`, its value outside the
        replicas.

        Raises:
            ValueError: The cell has no value.
            RuntimeError: The cell belongs to another strategy.
        """
        value = self.own_copy(cell)
        if not self.copies_differ(cell):
            return value
        if self._writer is _Writer.OUTSIDE:
            return seen_from_outside(cell, value)
        # In `extended.update`: a write from here on may depend on a copy that differs.
        self._copies_get_equal_values = False
        return value

    @property
    def is_traced_now(self) -> bool:
        """Whether nothing within the program is being traced, such as the body of a loop."""
        return bool(get_opaque_trace_state(convention="unison") == self._trace)

    @property
    def has_values(self) -> bool:
        """Whether the program has the value of any cell."""
        return bool(self._values)

    def holds(self, cell: Cell) -> bool:
        """Whether the program has a value of the cell, wherever its stored arrays are."""
        return cell in self._values or cell in self._pending

    def copies_differ(self, cell: Cell) -> bool:
        """Whether the replicas may have different copies."""
        return cell.layout is Layout.LOCAL or cell in self.diverging

    def own_copy(self, cell: Cell) -> jax.Array:
        """Returns this replica's copy.

        Raises:
            ValueError: The cell has no value.
            RuntimeError: The cell belongs to another strategy.
        """
        if cell in self._pending:
            if not self.is_traced_now:
                # For example in the body of a scan: values computed here must not leave it.
                return self._reduced()[cell]
            self._combine_pending()
        if cell not in self._values:
            if cell.placement != self.placement and cell.placement.num_replicas > 1:
                needs_python(f"Reading variable {cell.name!r} of another strategy")
                raise RuntimeError(
                    f"Variable {cell.name!r} belongs to another strategy: it lives on "
                    f"{cell.placement}, and this program runs on {self.placement}. Create the "
                    "variable inside the scope of the strategy that uses it."
                )
            if self.takes_new_cells and cell.array is not None:
                return self._value_of_new(cell)
            raise ValueError(
                f"Variable {cell.name!r} has no value yet, or was created while this program is "
                "traced. Create and initialize it before, inside `with strategy.scope():`."
            )
        return self._values[cell]

    def _value_of_new(self, cell: Cell) -> jax.Array:
        """Returns a stand-in for the input that a new cell will be in the next trace.

        It is a single traced value, even if a loop's body reads it first, so that a tape recognizes
        it.
        """
        value = jnp.asarray(cell.copies()[0], dtype=cell.aval.dtype)
        self._values[cell] = self._level.copied(value)
        return self._values[cell]

    def assign(self, cell: Cell, value: jax.Array) -> None:
        """Assigns this replica's value or, inside `outside`, one value for all copies."""
        self._check_writable(cell)
        if self.combines_now(cell):
            self.written[cell] = None
            self._pending[cell] = _PendingUpdate(None, value)
            return
        if self._writer is _Writer.OUTSIDE:
            value = cell.value_of_each_copy(value).astype(value.dtype)
        self._write(cell, value)

    def add(self, cell: Cell, delta: jax.Array) -> None:
        """Adds this replica's delta or, inside `outside`, one delta to every copy."""
        self._check_writable(cell)
        if self._writer is _Writer.OUTSIDE:
            cell.require_addable()
        if not self.combines_now(cell):
            self._write(cell, self.own_copy(cell) + delta)
        elif cell in self._pending:
            # Combining is linear: two updates without a read in between are one.
            self._pending[cell].delta = self._pending[cell].delta + delta
        else:
            self._pending[cell] = _PendingUpdate(self.own_copy(cell), delta)
            self.written[cell] = None

    def update(self, cell: Cell, function: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces every copy by the result of `function` on it, without combining anything."""
        self._check_writable(cell)
        self._write(cell, function(self.own_copy(cell)))

    def combines_now(self, cell: Cell) -> bool:
        """Whether the replicas' writes to `cell` are combined at this point."""
        return cell.combines_writes and self._writer is _Writer.EACH_REPLICA

    def _write(self, cell: Cell, value: jax.Array) -> None:
        if self._diverges(cell):
            self.diverging[cell] = None
        self.written[cell] = None
        self._pending.pop(cell, None)
        self._values[cell] = value

    def results(self) -> dict[Cell, jax.Array]:
        """Returns the cells that were written, with their final values on this replica."""
        self._combine_pending()
        return {cell: self._values[cell] for cell in self.written}

    @contextlib.contextmanager
    def equal_writes(self) -> Iterator[None]:
        """Context manager in which all replicas write equal values (such as an optimizer after
        summing the gradients), so that nothing needs to be combined.
        """
        with self._written_by(_Writer.ALL_ALIKE):
            yield

    @contextlib.contextmanager
    def cross_replica(self) -> Iterator[None]:
        """Context manager in which variables are read and assigned as outside the replicas
        (`merge_call`).
        """
        with self._written_by(_Writer.OUTSIDE):
            yield

    @contextlib.contextmanager
    def updating_copies(self, differently: bool) -> Iterator[None]:
        """Context manager in which each copy is updated separately (`strategy.extended.update`).

        Args:
            differently: Whether the copies are given different values.
        """
        outer, self._copies_get_equal_values = self._copies_get_equal_values, not differently
        try:
            with self._written_by(_Writer.EACH_COPY):
                yield
        finally:
            self._copies_get_equal_values = outer

    @contextlib.contextmanager
    def _written_by(self, writer: _Writer) -> Iterator[None]:
        outer, self._writer = self._writer, writer
        try:
            yield
        finally:
            self._writer = outer

    def _check_writable(self, cell: Cell) -> None:
        if cell.placement != self.placement:
            needs_python(f"Assigning variable {cell.name!r} of another strategy")
            mixes_strategies = cell.placement.num_replicas > 1
            raise (RuntimeError if mixes_strategies else ValueError)(
                f"Variable {cell.name!r} was not created in the scope of the strategy that runs "
                f"this program: it lives on {cell.placement}, the program runs on "
                f"{self.placement}. Create it inside `with strategy.scope():`."
            )

    def _diverges(self, cell: Cell) -> bool:
        """Whether a write that is not combined may make equal copies differ."""
        if cell.layout not in (Layout.MIRRORED, Layout.SHARDED) or cell.is_alone:
            return False
        if self._writer is _Writer.EACH_COPY:
            return not self._copies_get_equal_values
        return self._writer is _Writer.EACH_REPLICA

    def _combine_pending(self) -> None:
        self._values.update(self._reduced())
        self._pending = {}

    def _reduced(self) -> dict[Cell, jax.Array]:
        """Reduces the pending updates over the replicas, those of one dtype together."""
        deltas = [update.delta for update in self._pending.values()]
        totals = combine_writes(list(self._pending), deltas)
        return {
            cell: total if update.base is None else update.base + total
            for (cell, update), total in zip(self._pending.items(), totals, strict=True)
        }


def combine_writes(cells: Sequence[Cell], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Combines this replica's `values` for `cells` with the other replicas', by aggregation.

    Values of one dtype are reduced together.
    """
    if not cells or cells[0].is_alone:
        return list(values)
    is_first = lax.axis_index(REPLICA_AXIS) == 0
    contributions = [
        jnp.where(is_first, value, jnp.zeros_like(value))
        if cell.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        else value
        for cell, value in zip(cells, values, strict=True)
    ]
    totals = sum_over_replicas(contributions)
    return [
        (total / cell.placement.num_replicas).astype(value.dtype)
        if cell.aggregation is VariableAggregation.MEAN
        else total.astype(value.dtype)  # Booleans are counted
        for cell, value, total in zip(cells, values, totals, strict=True)
    ]


def seen_from_outside(cell: Cell, value: jax.Array) -> jax.Array:
    """Returns, inside a program, the value that differing copies have outside the replicas; see
    `Cell.combine`.
    """
    if cell.is_alone:
        return value
    cell.require_common_value()
    if cell.reading_aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return broadcast(value)
    is_half = jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits < 32
    (total,) = sum_over_replicas([value.astype(jnp.float32) if is_half else value])
    if cell.reading_aggregation is VariableAggregation.MEAN:
        total = total / cell.placement.num_replicas
    return total.astype(value.dtype)


def enter_replica(cell: Cell, stored: jax.Array) -> jax.Array:
    """Returns the value that a replica sees, given its piece of the cell's stored array."""
    if cell.layout is Layout.LOCAL:
        return stored[0]
    if cell.layout is Layout.SHARDED:
        return all_parts(stored, cell.division)
    return stored + _stream_offset(stored) if cell.layout is Layout.STREAM else stored


def leave_replica(cell: Cell, value: jax.Array) -> jax.Array:
    """The inverse of `enter_replica`: the piece to store for a replica's final value."""
    if cell.layout is Layout.LOCAL:
        return value[None]
    if cell.layout is Layout.SHARDED:
        return own_part(value, cell.division)
    return value - _stream_offset(value) if cell.layout is Layout.STREAM else value


def own_part(value: jax.Array, division: PartitionSpec) -> jax.Array:
    """Returns this replica's part of `value`, which is partitioned by `division`."""
    axis = division.index(REPLICA_AXIS)
    size = value.shape[axis] // lax.axis_size(REPLICA_AXIS)
    return lax.dynamic_slice_in_dim(value, lax.axis_index(REPLICA_AXIS) * size, size, axis)


def all_parts(part: jax.Array, division: PartitionSpec) -> jax.Array:
    """Returns the complete value that is partitioned by `division`, from the replicas' parts."""
    axis = division.index(REPLICA_AXIS)

    def gather(part: jax.Array) -> jax.Array:
        return lax.all_gather(part, REPLICA_AXIS, axis=axis, tiled=True)

    return _on_each_core(gather, division)(part)


def part_of_sum(value: jax.Array, division: PartitionSpec) -> jax.Array:
    """Returns this replica's part of the sum of `value` over the replicas."""
    axis = division.index(REPLICA_AXIS)

    def scatter(value: jax.Array) -> jax.Array:
        return lax.psum_scatter(value, REPLICA_AXIS, scatter_dimension=axis, tiled=True)

    return _on_each_core(scatter, division)(value)


def _on_each_core(
    function: Callable[[jax.Array], jax.Array], division: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Returns `function`, computed by each core of a replica on its own part under `division`.

    Otherwise XLA would gather the parts of all cores first: for a collective over the replicas
    other than a sum, it does not know that each core can perform it separately.
    """
    of_cores = PartitionSpec(*(None if entry == REPLICA_AXIS else entry for entry in division))
    axes = {name for entry in of_cores if entry for name in jax.tree.leaves(entry)}
    if not axes:
        return function
    return jax.shard_map(
        function, in_specs=of_cores, out_specs=of_cores, axis_names=axes, check_vma=False
    )


def _stream_offset(state: jax.Array) -> jax.Array:
    """Returns the offset of the seed that distinguishes this replica's random stream.

    `state` is `(seed, counter)`. All replicas draw the same number of times, so subtracting the
    offset again leaves equal states, without communication.
    """
    index = lax.axis_index(REPLICA_AXIS).astype(jnp.uint32)
    offset = jnp.stack([index * jnp.uint32(_STREAM_STRIDE), jnp.uint32(0)])
    return offset.astype(state.dtype)
