"""A cell: the copies of one variable on the replicas of one strategy.

`unison.Variable` and Keras' variables both keep their value in a `Cell`, so that the layers above
(lifting, programs, the Keras trainer) handle only one kind of state.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from unison.captured import note_captured
from unison.interrupts import signals_held
from unison.runtime.launches import LAUNCH_LOCK
from unison.runtime.placement import (
    REPLICA_AXIS,
    WHOLE,
    Placement,
    with_replicas_at,
)
from unison.runtime.precision import array_type, device_array, placeable
from unison.runtime.transfers import copied, is_on_cpu, shards_in_order, shards_of
from unison.thread_local import ThreadLocal

logger = logging.getLogger("unison")

#: The partition spec of a value whose rows are divided among the replicas.
_BY_ROWS = PartitionSpec(REPLICA_AXIS)

_live: weakref.WeakSet[Cell] = weakref.WeakSet()
_live_lock = threading.Lock()

_reads_own_copies = ThreadLocal(False)
_serial_numbers = itertools.count()

#: The program that has begun a step and not finished it, if it was interrupted there. Reading a
#: cell first makes it give back the arrays that it has taken.
unfinished_steps: list[Borrower] = []


def live_cells(placement: Placement) -> list[Cell]:
    """Returns the cells with a value that a program on `placement` can read, oldest first.

    These are the cells of an equal placement, and the cells with a single copy.
    """
    with _live_lock:
        cells = list(_live)
    readable = [
        cell
        for cell in cells
        if cell.has_value and (cell.placement.num_replicas == 1 or cell.placement == placement)
    ]
    return sorted(readable, key=lambda cell: cell.serial_number)


@contextlib.contextmanager
def own_copies() -> Iterator[None]:
    """Context manager in which this thread reads only local copies, where copies differ.

    Such reads need no communication with other processes.
    """
    with _reads_own_copies.bound_to(True):
        yield


class VariableSynchronization(enum.Enum):
    """The synchronization of a variable's copies (`tf.VariableSynchronization`).

    Attributes:
        AUTO: `ON_WRITE` under a mirrored strategy.
        NONE: One copy, owned locally; an error under a mirrored strategy.
        ON_WRITE: Updates are combined by the aggregation when they are written, and all copies stay
            equal; with the aggregation `NONE`, each replica updates its own copy.
        ON_READ: Replicas update their own copy; reading outside the replicas combines them.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """The aggregation of replicas' updates or copies (`tf.VariableAggregation`).

    Attributes:
        NONE: They are not combined: each replica updates its own copy.
        SUM: The sum over the replicas.
        MEAN: The mean over the replicas.
        ONLY_FIRST_REPLICA: The first replica's value.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"
    ONLY_FIRST_TOWER = "only_first_replica"


class Layout(enum.Enum):
    """The storage of a cell's copies."""

    #: One array with a complete, equal copy on every device, or one copy at the placement's `home`.
    MIRRORED = "mirrored"
    #: One array with a leading replica axis: the copies may differ.
    LOCAL = "local"
    #: One array, sharded along one axis over the replicas: each has only its part.
    SHARDED = "sharded"
    #: Mirrored random-stream state: each replica sees it offset by its index (`enter_replica`).
    STREAM = "stream"


class StoredForm(NamedTuple):
    """The form of a cell's stored array.

    Attributes:
        layout: The storage of the copies.
        division: The partitioning of a mirrored or sharded copy over the devices.
        extreme: See `Cell.extreme`.
    """

    layout: Layout
    division: PartitionSpec
    extreme: str | None


class Borrower(Protocol):
    """A running loop or program that holds cells' stored arrays and will return newer ones."""

    def give_back(self) -> None:
        """Puts the arrays of the last complete step into the cells, if that is possible now."""


class Cell:
    """The stored copies of a variable.

    Args:
        placement: The replicas' devices.
        value: The initial value; every copy starts with it.
        synchronization: Decides the layout: `ON_READ` copies are `Layout.LOCAL`.
        aggregation: How copies are combined when read, and updates when written.
        name: The variable's name, for messages.
        stream: Whether the value is the state of a random stream, `(seed, counter)`.
        divergent_aggregation: How copies are combined when read, once replicas have written
            different values to a cell without aggregation. Default: the first copy is read, and a
            warning is logged.
        placed_as: The name that the placement's partition rules match. Default: `name`.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_copy_first",
        "_divergent_aggregation",
        "_exposed",
        "_is_initialized",
        "aggregation",
        "borrower",
        "division",
        "extreme",
        "layout",
        "name",
        "placed_as",
        "placement",
        "serial_number",
        "synchronization",
    )

    #: The number of changes of any cell's form. A program that was compiled at a different
    #: count must check whether its own cells have changed.
    form_changes: ClassVar[int] = 0

    def __new__(cls, placement: Placement, *args: Any, **kwargs: Any) -> Cell:
        """Returns a cell of the class that the placement uses; parameter servers have their own."""
        return super().__new__(placement.cell_kind or cls)

    def __init__(
        self,
        placement: Placement,
        value: Any,
        *,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        name: str,
        stream: bool = False,
        divergent_aggregation: VariableAggregation | None = None,
        placed_as: str | None = None,
    ):
        self.placement = placement
        self.placed_as = name if placed_as is None else placed_as
        #: The partitioning of a mirrored or sharded copy over the devices.
        self.division = WHOLE
        self.synchronization = synchronization
        self.aggregation = aggregation
        self.name = name
        self.serial_number = next(_serial_numbers)
        self._divergent_aggregation = divergent_aggregation
        #: "MAX" or "MIN" if programs keep the copies of an `ON_READ` cell equal by that reduction.
        self.extreme: str | None = None
        self.layout = Layout.STREAM if stream else Layout.MIRRORED
        self._array: jax.Array | None = None
        #: The holder of the stored array while the cell does not have it.
        self.borrower: Borrower | None = None
        self._exposed = False
        #: A function to call before the stored array may be overwritten.
        self._copy_first: Callable[[], None] | None = None
        if synchronization is VariableSynchronization.ON_READ:
            self.layout = Layout.LOCAL
        self._is_initialized = False
        if value is not None:
            self._array = self._place(self._initial(value))
        with _live_lock:
            _live.add(self)

    def clone(self) -> Cell:
        """Returns a cell with the same annotations and its own copies."""
        cell = Cell(
            self.placement,
            None,
            synchronization=self.synchronization,
            aggregation=self.aggregation,
            name=self.name,
            divergent_aggregation=self._divergent_aggregation,
            placed_as=self.placed_as,
        )
        with LAUNCH_LOCK:
            cell._is_initialized = True
            cell.layout = self.layout
            cell.division = self.division
            cell.extreme = self.extreme
            cell._array = self._concrete(copied(self.stored()))
        return cell

    @property
    def is_on_read(self) -> bool:
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def is_divided(self) -> bool:
        """Whether each device has only a part of the value."""
        return self.layout is not Layout.LOCAL and any(self.division)

    @property
    def needs_all_processes(self) -> bool:
        """Whether the value can only be read by all processes together, as each has a part."""
        if not self.placement.spans_processes:
            return False
        has_parts = self.is_divided and self.placement.replicas_span_processes
        return has_parts or self.layout in (Layout.LOCAL, Layout.SHARDED)

    @property
    def divided_axis(self) -> int:
        """The axis that is divided among the replicas."""
        return self.division.index(REPLICA_AXIS)

    def shard_at(self, stage: int, shape: tuple[int, ...]) -> None:
        """Shards a new cell over the replicas if the placement's ZeRO stage is at least `stage` and
        the shape permits it.
        """
        division = self.placement.division_at(stage, self.placed_as, shape)
        if REPLICA_AXIS in division:
            self.division = self.placement.division_of(self.placed_as, shape)
            self.shard(division.index(REPLICA_AXIS))

    @property
    def is_alone(self) -> bool:
        """Whether there is only one copy, so that the annotations have no effect."""
        return self.placement.num_replicas == 1

    @property
    def reading_aggregation(self) -> VariableAggregation:
        """The combination of differing copies that are read outside of replicas."""
        if self.extreme is not None:
            return VariableAggregation.ONLY_FIRST_REPLICA
        if self.is_on_read:
            return self.aggregation
        return self._divergent_aggregation or VariableAggregation.ONLY_FIRST_REPLICA

    @property
    def _is_sum_of_copies(self) -> bool:
        return self.reading_aggregation is VariableAggregation.SUM and not self.is_alone

    @property
    def combines_writes(self) -> bool:
        """Whether the replicas' writes are combined, so that equal copies stay equal."""
        if self.is_on_read or self.aggregation is VariableAggregation.NONE:
            return False
        # Keras variables have a divergent aggregation: once their copies differ, as those of
        # statistics do, each replica updates its own.
        may_diverge = self._divergent_aggregation is not None
        return self.layout in (Layout.MIRRORED, Layout.SHARDED) or (
            self.layout is Layout.LOCAL and not may_diverge
        )

    @property
    def form(self) -> tuple[Layout, str | None, tuple[int, ...] | None]:
        """The properties on which compiled programs depend; `form_changes` counts changes."""
        return self.layout, self.extreme, None if self._array is None else self._array.shape

    @property
    def array(self) -> jax.Array | None:
        """The stored array in its layout; None while a borrower has it (`lend`)."""
        return self._array

    @property
    def aval(self) -> Any:
        """Shape and dtype of one copy."""
        assert self._array is not None
        shape = self._array.shape[1:] if self.layout is Layout.LOCAL else self._array.shape
        return array_type(shape, self._array.dtype)

    @property
    def has_value(self) -> bool:
        """Whether the cell has a value: stored, or held by a borrower that can give it back."""
        if self._array is None and self.borrower is not None:
            self.borrower.give_back()
        return self._array is not None

    def stored(self) -> jax.Array:
        """Returns the stored array for a program that only reads it.

        Raises:
            RuntimeError: The cell has no stored array.
        """
        if unfinished_steps:
            unfinished_steps[-1].give_back()
        return self.stored_for_step()

    def stored_for_step(self) -> jax.Array:
        """Returns the stored array for the step that is in `unfinished_steps`.

        Raises:
            RuntimeError: The cell has no stored array.
        """
        if self._array is None and self.borrower is not None:
            self.borrower.give_back()
        if self._array is None or self._array.is_deleted():
            raise RuntimeError(
                f"The value of variable {self.name!r} is not here: a program that failed, or that "
                "is still running, took it. Assign the variable, or restore a checkpoint."
            )
        return self._array

    def take(self) -> jax.Array:
        """Returns the stored array for a program that may donate it.

        If a reader may still hold the buffer or a part of it, the program gets a copy: an array
        that was read is never overwritten or deleted.

        Raises:
            RuntimeError: The cell has no stored array.
        """
        array = self._array
        if array is None or array.is_deleted():
            array = self.stored()
        if self._exposed:
            array = self._array = self._concrete(copied(array))
            self._exposed = False
        elif self._copy_first is not None:
            self._copy_first()
        self._copy_first = None
        return array

    def lend(self, borrower: Borrower) -> None:
        """Drops the stored array, which `borrower` has taken, so that the state exists only once.

        A read of the cell before an array is put back requests it from the borrower.
        """
        self._array = None
        self.borrower = borrower

    def take_back(self, borrower: Borrower, array: jax.Array) -> None:
        """Stores an array of `borrower`, unless the cell has been assigned while that had it."""
        if self.borrower is borrower:
            self.put(array)

    def copy_later(self, copy: Callable[[], None]) -> None:
        """Registers `copy`, which reads the stored array, to be called before it may be
        overwritten.

        A function registered earlier is called now, unless it is `copy` itself.
        """
        if self._copy_first is not None and self._copy_first is not copy:
            self._copy_first()
        self._copy_first = copy

    def put(self, array: jax.Array | None) -> None:
        """Stores `array`, which has the cell's layout."""
        self._array = array
        self._exposed = False
        self._copy_first = None
        self.borrower = None

    def exchange(self, taken: jax.Array, array: jax.Array) -> None:
        """Stores `array`, unless something else than `taken` has been stored in the meantime.

        No signal handler runs between the comparison and the end: nothing is called, and there is
        no loop.
        """
        if self._array is taken:
            self._array = array
            self._exposed = False
            self._copy_first = None
            self.borrower = None

    def discard(self) -> None:
        """Drops the value for good; programs that were compiled with it are traced again."""
        self.put(None)
        Cell.form_changes += 1

    def to_home(self, array: jax.Array) -> jax.Array:
        """Returns `array`, a program's output in the cell's layout, in the form the cell stores."""
        is_whole = self.layout in (Layout.MIRRORED, Layout.STREAM)
        return self.placement.to_home(array) if is_whole else array

    def read(self) -> jax.Array | None:
        """Returns the value outside the replicas: any copy, or the copies combined.

        Raises:
            ValueError: The copies are `ON_READ` and have no aggregation.
            RuntimeError: A program that failed took the value.
        """
        if note_captured(self.name) and self.has_value and self.layout is Layout.LOCAL:
            return device_array(self.copies()[0])  # nobody asks for its value
        return self.value_outside()

    def value_outside(self) -> jax.Array | None:
        """Returns what `read` does, not for a function that may be being traced."""
        with LAUNCH_LOCK:
            if not self.has_value:
                return None
            if self.layout is Layout.LOCAL:
                return device_array(self._combined(self.stored))
            return self._whole()

    def _whole(self) -> jax.Array:
        """Returns the value of equal copies, or of one copy that is divided over the devices."""
        array = self.stored()
        if self.is_divided:
            return device_array(self.placement.whole(array))
        self._exposed = self.placement.shares_first_copy
        return self.placement.first_copy(array)

    def numpy(self) -> np.ndarray:
        """Returns the value outside the replicas as an array that the caller owns.

        Raises:
            ValueError: The copies are `ON_READ` and have no aggregation.
            RuntimeError: A program that failed, or is still running, took the value.
        """
        with LAUNCH_LOCK:
            return np.array(self._combined(self.stored))

    def combine(self, stored: jax.Array) -> np.ndarray:
        """Returns the copies in `stored`, an array of this cell's layout, as one value."""
        return self._combined(lambda: stored)

    def _combined(self, stored: Callable[[], jax.Array]) -> np.ndarray:
        """Returns the copies as one value; calls `stored` again if workers are lost meanwhile."""
        if self.is_divided:
            return self.placement.whole_of(stored)
        if self.layout is not Layout.LOCAL:
            return np.asarray(stored().addressable_data(0))
        self.require_common_value()
        if _reads_own_copies.value:
            copies = np.stack(_copies(stored(), self.placement.local_cores_per_replica))
        else:
            copies = self.placement.whole_of(stored)
        return self._united(copies)

    def _united(self, copies: np.ndarray) -> np.ndarray:
        """Returns the copies of all replicas, along the first axis, as one value."""
        wide = _accumulator(copies.dtype)
        if self.reading_aggregation is VariableAggregation.SUM:
            return np.sum(copies, axis=0, dtype=wide).astype(copies.dtype)
        if self.reading_aggregation is VariableAggregation.MEAN:
            return np.mean(copies, axis=0, dtype=wide).astype(copies.dtype)
        return copies[0]

    def copies(self) -> list[np.ndarray]:
        """Returns the copies of this process's replicas.

        Raises:
            RuntimeError: A program that failed, or is still running, took the value.
        """
        with LAUNCH_LOCK:
            array = self.stored()
            if self.layout is Layout.LOCAL:
                return _copies(array, self.placement.local_cores_per_replica)
            return [np.array(self.combine(array)) for _ in self.placement.local_devices]

    def require_common_value(self) -> None:
        """Raises a ValueError if the copies have no common value outside the replicas."""
        if self.is_on_read and self.aggregation is VariableAggregation.NONE and not self.is_alone:
            raise ValueError(
                f"Variable {self.name!r} is ON_READ without an aggregation: outside the replicas "
                "its copies have no common value. Create it with aggregation=SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or combine the copies with strategy.reduce(op, variable)."
            )

    def require_addable(self) -> None:
        """Raises a ValueError if adding outside the replicas would be ambiguous."""
        if self._is_sum_of_copies:
            raise ValueError(
                f"Outside the replicas, adding to the ON_READ SUM variable {self.name!r} has no "
                "one meaning. Assign the sum that you want (variable.assign(variable + delta)), "
                "or add inside strategy.run."
            )

    def value_of_each_copy(self, value: Any) -> Any:
        """Returns the part of a value assigned outside the replicas that every copy gets.

        The copies of an `ON_READ` `SUM` cell get equal parts, as in TF, so that reading returns the
        value (for integers, the truncated quotient times the number of replicas).
        """
        if not self._is_sum_of_copies:
            return value
        value = jnp.asarray(placeable(value))
        count = self.placement.num_replicas
        if jnp.issubdtype(value.dtype, jnp.integer):
            return lax.div(value, jnp.asarray(count, value.dtype))
        return value if value.dtype == jnp.bool_ else value / count

    def assign(self, value: Any) -> None:
        """Assigns from outside the replicas; see `value_of_each_copy`."""
        if not note_captured(self.name):
            self._assign(value)

    def _assign(self, value: Any) -> None:
        with LAUNCH_LOCK:
            self._replace(self._place(self.value_of_each_copy(self._initial(value))))

    def restore(self, value: Any) -> None:
        """Assigns from outside the replicas, so that reading returns `value`.

        If an integer value cannot be divided equally, the first copy also gets the remainder.
        """
        part = self.value_of_each_copy(value)
        if part is value or not jnp.issubdtype(part.dtype, jnp.integer):
            self._assign(value)
            return
        part = np.asarray(part)
        first = part + (np.asarray(value, part.dtype) - part * self.placement.num_replicas)
        copies = [part if replica else first for replica in self.placement.local_replicas]
        with LAUNCH_LOCK:
            self._is_initialized = True
            self._replace(self._concrete(self.placement.spread(placeable(np.stack(copies)))))

    @property
    def stored_form(self) -> StoredForm:
        """The form of the stored array; its parts are restored in it."""
        return StoredForm(self.layout, self.division, self.extreme)

    def restore_parts(
        self, form: StoredForm, parts: Sequence[np.ndarray], are_mapped: bool = False
    ) -> None:
        """Stores the array whose parts on this process's devices were these.

        Args:
            form: The form of that array; the cell has another one, for example, before its first
                step.
            parts: The result of `own_parts` of that array, on the same devices.
            are_mapped: Whether they are in memory that changes later: they may be read until the
                stored array is ready, and not after.

        Raises:
            ValueError: The parts are those of other devices or shapes, or have another dtype.
        """
        with LAUNCH_LOCK:
            self._take_form(form)
            array = self.stored()
            dtypes = {part.dtype for part in parts}
            if dtypes != {array.dtype}:
                raise ValueError(
                    f"Expected parts of dtype {array.dtype}. Received: "
                    f"{sorted(str(dtype) for dtype in dtypes)}."
                )
            if array.is_fully_replicated:
                (whole,) = parts
                if whole.shape != array.shape:
                    raise ValueError(
                        f"Expected a part of the shape {array.shape}. Received: {whole.shape}."
                    )
                part_at: Callable[[Any], np.ndarray] = whole.__getitem__
            else:
                indices = dict.fromkeys(str(shard.index) for shard in shards_of(array))
                by_index = dict(zip(indices, parts, strict=True))

                def part_at(index: Any) -> np.ndarray:
                    return by_index[str(index)]

            restored: jax.Array = jax.make_array_from_callback(array.shape, array.sharding, part_at)
            if are_mapped and is_on_cpu(array.sharding):
                restored = copied(restored)
            self._is_initialized = True
            self._replace(self._concrete(restored))

    def _take_form(self, form: StoredForm) -> None:
        if (form.layout, form.division) != (self.layout, self.division):
            self._change_layout(form.layout, form.division)
        self.extreme = form.extreme

    def restore_copies(self, form: StoredForm, copies: np.ndarray) -> None:
        """Stores the copies of another number of replicas, so that reading returns their value.

        A sum stays exact: each replica gets the sum of some copies, and further ones get zero.
        Copies without a common value are those of the first replicas; further ones get the first.

        Args:
            form: The form of the stored array.
            copies: The copies, along the first axis.
        """
        with LAUNCH_LOCK:
            self._take_form(form)
            count, own = self.placement.num_replicas, self.placement.local_replicas
            if self.reading_aggregation is VariableAggregation.SUM:
                parts = [self._united(copies[replica::count]) for replica in own]
            elif self.reading_aggregation is VariableAggregation.NONE:
                parts = [copies[replica if replica < len(copies) else 0] for replica in own]
            else:
                parts = [self._united(copies)] * len(own)
            self._is_initialized = True
            self._replace(self._concrete(self.placement.spread(placeable(np.stack(parts)))))

    def add(self, delta: jax.Array) -> None:
        """Adds to every copy, from outside the replicas; see `require_addable`."""
        if not note_captured(self.name):
            self.require_addable()
            self._update(lambda value: value + delta)

    def update(self, function: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces every copy by the result of `function` on it, from outside the replicas."""
        if not note_captured(self.name):
            self._update(function)

    def _update(self, function: Callable[[jax.Array], jax.Array]) -> None:
        with LAUNCH_LOCK:
            if self.layout is Layout.LOCAL:
                # One by one: `function` may use arrays that are on one device.
                nothing = [None] * len(self.placement.local_replicas)
                self._update_each(nothing, lambda copy, _: function(copy))
            else:
                self._replace(self._place(function(self._whole())))

    def update_each(
        self, values: Sequence[Any], function: Callable[[jax.Array, Any], jax.Array]
    ) -> None:
        """Replaces each copy by the result of `function` on it and its element of `values`.

        Raises:
            ValueError: The number of values differs from the number of copies.
        """
        count = len(self.placement.local_replicas)
        if len(values) != count:
            raise ValueError(
                f"Variable {self.name!r} has {count} copies here, each of which "
                f"needs a component of a PerReplica value. Received: {len(values)} components."
            )
        if not note_captured(self.name):
            self._update_each(values, function)

    def _update_each(
        self, values: Sequence[Any], function: Callable[[jax.Array, Any], jax.Array]
    ) -> None:
        with LAUNCH_LOCK:
            copies = [
                np.asarray(function(device_array(copy), value))
                for copy, value in zip(self.copies(), values, strict=True)
            ]
            spread = self.placement.spread(placeable(np.stack(copies)))
            if self.layout is not Layout.LOCAL:
                of_all = self.placement.whole(spread)
                if any(not np.array_equal(copy, of_all[0]) for copy in of_all):
                    self.localize()
            if self.layout is Layout.LOCAL:
                self._replace(spread)
            else:
                self._replace(self._place(copies[0]))

    def _initial(self, value: Any) -> Any:
        """Returns `value`, or the first process's value if this is the cell's first one.

        Each process draws its own initial values. Values assigned later are the same on all.
        """
        if self._is_initialized:
            return value
        self._is_initialized = True
        return self.placement.of_first_process(value)

    def _replace(self, array: jax.Array) -> None:
        if self._array is not None and self._array.shape != array.shape:
            Cell.form_changes += 1
        self.put(array)

    def _place(self, value: Any) -> jax.Array:
        """Returns copies of `value` in the cell's layout."""
        value = placeable(value)
        if self.layout is Layout.LOCAL:
            return self._concrete(self.placement.repeat(value))
        if self.layout is Layout.MIRRORED:
            self.division = self.placement.division_of(self.placed_as, np.shape(value))
        if self.division == _BY_ROWS:
            return self._concrete(self.placement.divide(copied(value)))
        return self._concrete(self.placement.mirror(value, self.division))

    def _concrete(self, array: jax.Array) -> jax.Array:
        if isinstance(array, jax.core.Tracer):
            raise RuntimeError(
                f"Variable {self.name!r} is used while JAX traces a function (jax.jit, jax.grad, "
                "jax.lax.scan, ...) outside strategy.run, where its value cannot change. Do it "
                "outside that function, or run the function with strategy.run."
            )
        return array

    def shard(self, axis: int = 0) -> None:
        """Shards a mirrored cell over the replicas along `axis`, whose size they must divide.

        The single copy of central storage is not sharded.
        """
        if self.layout is Layout.MIRRORED and self.placement.home is None:
            self._change_layout(Layout.SHARDED, with_replicas_at(axis, self.division))

    def keep_equal_by(self, extreme: str) -> None:
        """Marks the copies of an `ON_READ` cell as equal: programs keep them so from now on.

        Args:
            extreme: "MAX" or "MIN", the reduction with which programs combine the replicas' writes.
        """
        value = self.numpy()
        self.extreme = extreme
        Cell.form_changes += 1
        self.assign(value)

    def localize(self) -> None:
        """Gives each replica its own copy, because the replicas are about to write different values
        without aggregation.

        Raises:
            ValueError: The variable has one copy, in central storage.
        """
        if self.layout is Layout.LOCAL:
            return
        if self.placement.home is not None and self._divergent_aggregation is None:
            raise ValueError(
                f"Variable {self.name!r} has one copy, in central storage, and is written "
                f"by {self.placement.num_replicas} replicas without aggregation. Create it with "
                "aggregation=SUM, MEAN or ONLY_FIRST_REPLICA; or with synchronization=ON_READ, "
                "where each replica has its own copy."
            )
        if self._divergent_aggregation is not None:
            self.aggregation = self._divergent_aggregation
        elif self.aggregation is VariableAggregation.NONE and not self.is_alone:
            logger.warning(
                "Variable %r has no aggregation and is written by %d replicas: each replica now "
                "updates its own copy, and outside the replicas the first one is read. If the "
                "copies should stay equal, create it with aggregation=SUM, MEAN or "
                "ONLY_FIRST_REPLICA.",
                self.name,
                self.placement.num_replicas,
            )
        self._change_layout(Layout.LOCAL)

    def _change_layout(self, layout: Layout, division: PartitionSpec | None = None) -> None:
        with LAUNCH_LOCK, signals_held:
            value = None if self._array is None else self.numpy()
            self.layout = layout
            self.division = self.division if division is None else division
            self._array = None if value is None else self._place(value)
            self._exposed = False
            Cell.form_changes += 1


def own_parts(stored: jax.Array) -> list[jax.Array]:
    """Returns the parts of an array on this process's devices, in the order of the devices.

    Of parts that several devices have, there is one.
    """
    if stored.is_fully_replicated:
        return [stored.addressable_data(0)]
    return list({str(shard.index): shard.data for shard in shards_of(stored)}.values())


def has_cell(value: Any) -> bool:
    """Whether `value` is a variable: something that keeps its value in a cell."""
    return isinstance(getattr(value, "cell", None), Cell)


def _copies(stored: jax.Array, cores_per_replica: int) -> list[np.ndarray]:
    # With NumPy: a variable may be read while an unrelated function is being traced.
    return [np.array(shard)[0] for shard in shards_in_order(stored, cores_per_replica)]


def _accumulator(dtype: Any) -> Any:
    """Returns the dtype for sums of `dtype`: NumPy would add halves in half precision."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if is_half else dtype
