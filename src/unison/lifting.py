"""Lifting: variables that a replica program touches become its inputs and outputs.

While a program is traced, its `Lift` stands between the variables and their cells: a read gives
a tracer, a write is kept, and nothing reaches the stored arrays before the compiled program
returns. `unison.Variable` asks `current_lift()`; Keras variables come here through Keras' own
`StatelessScope` (see `unison.keras.variables`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

from unison.cells import Cell, Layout, VariableAggregation
from unison.collectives import all_reduce_packed
from unison.runtime.placement import REPLICA_AXIS, Placement

#: Odd, so that distinct replicas get distinct seeds modulo 2**32 (the golden ratio's digits).
_STREAM_STRIDE = 0x9E3779B1

_active = threading.local()


def current_lift() -> Lift | None:
    """Returns the lift of the replica program that is being traced in this thread."""
    return getattr(_active, "lift", None)


@dataclasses.dataclass
class _PendingUpdate:
    """An update that waits for its all-reduce: `base + combine(delta)`, or `combine(delta)`."""

    base: jax.Array | None
    delta: jax.Array


class Lift:
    """The values of the cells inside one trace of a replica program.

    Combining writes (`ON_WRITE` with an aggregation) are not reduced one by one: they wait until
    one of them is read or the trace ends, and then travel together.

    Args:
        placement: The devices of the strategy that runs the program.
        values: The cells that the program can touch, with their values on this replica.
        takes_new_cells: Whether a cell may be created meanwhile. What is traced then is to be
            traced again, with that cell among `values`.
    """

    def __init__(
        self, placement: Placement, values: dict[Cell, jax.Array], takes_new_cells: bool = False
    ):
        self.placement = placement
        self._values = dict(values)
        self._takes_new_cells = takes_new_cells
        self._trace = get_opaque_trace_state(convention="unison")
        self._pending: dict[Cell, _PendingUpdate] = {}
        self._writes_are_equal = False
        #: The cells written so far, in order (a dict used as an ordered set).
        self.written: dict[Cell, None] = {}
        #: The mirrored cells whose copies may differ after this program.
        self.diverging: dict[Cell, None] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[Lift]:
        """Makes this the lift of the thread."""
        previous = current_lift()
        _active.lift = self
        try:
            yield self
        finally:
            _active.lift = previous

    def read(self, cell: Cell) -> jax.Array:
        """Returns the cell's value on this replica."""
        if cell in self._pending:
            if get_opaque_trace_state(convention="unison") != self._trace:
                # In the body of a scan, say: what is computed here must not leave it.
                return self._combined()[cell]
            self._combine_pending()
        if cell not in self._values:
            if cell.placement != self.placement and cell.placement.num_replicas > 1:
                raise ValueError(
                    f"Variable {cell.name!r} belongs to another strategy: it lives on "
                    f"{cell.placement}, and this program runs on {self.placement}. Create the "
                    "variable inside the scope of the strategy that uses it."
                )
            if self._takes_new_cells and cell.array is not None:
                return jnp.asarray(cell.numpy())
            raise ValueError(
                f"Variable {cell.name!r} has no value yet, or was created while this program is "
                "traced. Create and initialize it before, inside `with strategy.scope():`."
            )
        return self._values[cell]

    def assign(self, cell: Cell, value: jax.Array) -> None:
        """Assigns this replica's value."""
        self._check_writable(cell)
        self.written[cell] = None
        if self._combines(cell):
            self._pending[cell] = _PendingUpdate(None, value)
            return
        if self._diverges(cell):
            self.diverging[cell] = None
        self._pending.pop(cell, None)
        self._values[cell] = value

    def add(self, cell: Cell, delta: jax.Array) -> None:
        """Adds this replica's delta."""
        self._check_writable(cell)
        if not self._combines(cell):
            self.assign(cell, self.read(cell) + delta)
        elif cell in self._pending:
            # Combining is linear: two updates that nobody looked between are one.
            self._pending[cell].delta = self._pending[cell].delta + delta
        else:
            self._pending[cell] = _PendingUpdate(self.read(cell), delta)
            self.written[cell] = None

    def results(self) -> dict[Cell, jax.Array]:
        """Returns the cells that were written, with their final values on this replica."""
        self._combine_pending()
        return {cell: self._values[cell] for cell in self.written}

    @contextlib.contextmanager
    def equal_writes(self) -> Iterator[None]:
        """Inside, all replicas write equal values (an optimizer, after the gradients' sum), so
        that nothing needs to be combined.
        """
        previous, self._writes_are_equal = self._writes_are_equal, True
        try:
            yield
        finally:
            self._writes_are_equal = previous

    def _check_writable(self, cell: Cell) -> None:
        if cell.placement != self.placement:
            raise ValueError(
                f"Variable {cell.name!r} was not created in the scope of the strategy that runs "
                f"this program: it lives on {cell.placement}, the program runs on "
                f"{self.placement}. Create it inside `with strategy.scope():`."
            )

    def _combines(self, cell: Cell) -> bool:
        return combines_writes(cell) and not self._writes_are_equal

    def _diverges(self, cell: Cell) -> bool:
        is_alone = cell.placement.num_replicas == 1
        return cell.layout is Layout.MIRRORED and not self._writes_are_equal and not is_alone

    def _combine_pending(self) -> None:
        self._values.update(self._combined())
        self._pending = {}

    def _combined(self) -> dict[Cell, jax.Array]:
        """Reduces the waiting updates over the replicas, all of one dtype together."""
        deltas = [update.delta for update in self._pending.values()]
        totals = combine_writes(list(self._pending), deltas)
        return {
            cell: total if update.base is None else update.base + total
            for (cell, update), total in zip(self._pending.items(), totals, strict=True)
        }


def combines_writes(cell: Cell) -> bool:
    """Whether what the replicas write to `cell` is combined, so that its copies stay equal."""
    return cell.layout is Layout.MIRRORED and cell.aggregation is not VariableAggregation.NONE


def combine_writes(cells: Sequence[Cell], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Combines this replica's `values` for `cells` with the other replicas', by aggregation.

    All of one dtype travel together.
    """
    if not cells or cells[0].placement.num_replicas == 1:
        return list(values)
    is_first = lax.axis_index(REPLICA_AXIS) == 0
    contributions = [
        jnp.where(is_first, value, jnp.zeros_like(value))
        if cell.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        else value
        for cell, value in zip(cells, values, strict=True)
    ]
    totals = all_reduce_packed(contributions)
    return [
        (total / cell.placement.num_replicas).astype(value.dtype)
        if cell.aggregation is VariableAggregation.MEAN
        else total.astype(value.dtype)  # truth values are counted
        for cell, value, total in zip(cells, values, totals, strict=True)
    ]


def enter_replica(cell: Cell, stored: jax.Array) -> jax.Array:
    """Returns what a replica sees of its piece of the cell's stored array."""
    if cell.layout is Layout.LOCAL:
        return stored[0]
    if cell.layout is Layout.SHARDED:
        return lax.all_gather(stored, REPLICA_AXIS, tiled=True)
    return stored + _stream_offset(stored) if cell.layout is Layout.STREAM else stored


def leave_replica(cell: Cell, value: jax.Array) -> jax.Array:
    """The inverse of `enter_replica`: the piece to store for a replica's final value."""
    if cell.layout is Layout.LOCAL:
        return value[None]
    if cell.layout is Layout.SHARDED:
        return own_rows(value)
    return value - _stream_offset(value) if cell.layout is Layout.STREAM else value


def own_rows(value: jax.Array) -> jax.Array:
    """Returns this replica's part of `value`, whose rows are divided between the replicas."""
    rows = value.shape[0] // lax.axis_size(REPLICA_AXIS)
    return lax.dynamic_slice_in_dim(value, lax.axis_index(REPLICA_AXIS) * rows, rows)


def _stream_offset(state: jax.Array) -> jax.Array:
    """Returns what distinguishes this replica's random stream: an offset of the seed.

    `state` is `(seed, counter)`. All replicas draw equally often, so taking the offset off again
    leaves equal states, without communication.
    """
    index = lax.axis_index(REPLICA_AXIS).astype(jnp.uint32)
    offset = jnp.stack([index * jnp.uint32(_STREAM_STRIDE), jnp.uint32(0)])
    return offset.astype(state.dtype)
