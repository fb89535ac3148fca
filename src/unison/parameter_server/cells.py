"""`RemoteCell`: a variable whose value is on parameter servers.

To higher layers it is a cell of one replica, whose stored array has to be fetched. Programs in the
coordinator's own process fetch the value before they run and write it back afterwards; scheduled
functions run on workers, which pull and push by themselves (see `programs`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Borrower, Cell, Layout, VariableAggregation, VariableSynchronization
from unison.compression.quantized import Quantized
from unison.interrupts import signals_held
from unison.parameter_server.partitioners import Partitioner
from unison.parameter_server.shared import current_store
from unison.parameter_server.store import Shard, Store
from unison.runtime.placement import Placement
from unison.runtime.precision import array_type
from unison.runtime.replica_function import PlacedProgram, ReplicaFunction
from unison.thread_local import ThreadLocal


class RunningLoop(Protocol):
    """A loop that schedules calls; see `unison.parameter_server.loops`."""

    def settle(self) -> None:
        """Waits until the loop has no further effect, if it was left by an exception."""
        ...


class RemotePlacement(Placement):
    """The placement of a strategy's variables: on servers, or, in a local program, on the device.

    Args:
        device: The coordinator's device.
        store: The servers.
        partitioner: Returns the number of shards of a variable. Default: variables are not divided.
        in_sync: The number of workers whose gradients are combined into an update.
        compression: How the values that workers push and pull are encoded. Default: not at all.
    """

    def __init__(
        self,
        device: jax.Device,
        store: Store,
        partitioner: Partitioner | None,
        in_sync: int = 1,
        compression: Quantized | None = None,
    ):
        super().__init__([device])
        self._store = store
        #: The loops whose calls may change variables: running ones, and those that were interrupted
        #: while workers ran their calls.
        self.loops: list[RunningLoop] = []
        self.in_sync = in_sync
        self.compression = compression
        self._partitioner = partitioner
        self._bytes = [0] * len(store.addresses)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: The shards of deleted cells, which the servers may still hold.
        self.dropped: collections.deque[tuple[Shard, ...]] = collections.deque()
        #: All cells that have a value.
        self.cells: weakref.WeakSet[RemoteCell] = weakref.WeakSet()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @property
    def store(self) -> Store:
        """The servers, once no interrupted loop changes variables any more."""
        for loop in tuple(self.loops):
            loop.settle()
        return self._store

    def program(self, part: ReplicaFunction) -> PlacedProgram:
        """See `Placement.program`.

        The caller must do more than call the jitted function: the variables are written back to the
        servers, either all or none of them.
        """
        return PlacedProgram(super().program(part).launch)

    @contextlib.contextmanager
    def as_if_of(self, num_replicas: int) -> Iterator[None]:
        """Makes this thread trace the program of one of `num_replicas` replicas."""
        with self._seeming_replicas.bound_to(num_replicas):
            yield

    @property
    def num_replicas(self) -> int:
        return self._seeming_replicas.value

    @num_replicas.setter
    def num_replicas(self, count: int) -> None:
        assert count == 1  # outside of `as_if_of`
        self._seeming_replicas = ThreadLocal(1)

    @property
    def is_elastic(self) -> bool:
        """Whether the replicas are in other processes, and their number is not that of this mesh.

        Each tensor is then summed separately, instead of in a buffer with others: the server that
        holds a variable's rows computes their sums.
        """
        return self.num_replicas > 1

    @property
    def spans_processes(self) -> bool:
        return self.num_replicas > 1

    @spans_processes.setter
    def spans_processes(self, value: bool) -> None:
        """Does nothing: the value follows from the number of replicas."""

    def shards_for(
        self, name: str, shape: tuple[int, ...], dtype: Any, is_whole: bool = False
    ) -> tuple[Shard, ...]:
        """Returns the shards of a new variable; one if it is whole.

        It is colocated with a variable of the same shape whose name is part of its own name (an
        optimizer's slot with its variable), and is otherwise placed on the servers that hold the
        fewest bytes.
        """
        with self._lock:
            number = next(self._numbers)
        shards = tuple(
            Shard(server, f"{number}/{part}", start, stop)
            for part, (server, start, stop) in enumerate(
                self.bounds_for(name, shape, dtype, is_whole)
            )
        )
        self.note(shards, shape, dtype)
        return shards

    def bounds_for(
        self, name: str, shape: tuple[int, ...], dtype: Any, is_whole: bool = False
    ) -> list[tuple[int, int, int]]:
        """Returns the server, the first row, and the end row (exclusive) of each shard.

        The state of a random stream is whole: no part of it is updated without the others.
        """
        with self._lock:
            beside = None if is_whole else self._related(name, shape)
            if beside is not None:
                return [(shard.server, shard.start, shard.stop) for shard in beside.shards]
            return self._bounds(name, shape, dtype, is_whole)

    def note(self, shards: Sequence[Shard], shape: tuple[int, ...], dtype: Any) -> None:
        """Adds the size of a new variable to its servers' totals."""
        row_bytes = int(np.prod(shape[1:])) * jnp.dtype(dtype).itemsize
        with self._lock:
            for shard in shards:
                self._bytes[shard.server] += max(1, shard.rows) * row_bytes

    def forget_dropped(self) -> None:
        """Makes the servers free the memory of deleted cells."""
        while self.dropped:
            with signals_held:
                self.store.forget(self.dropped.popleft())

    def _related(self, name: str, shape: tuple[int, ...]) -> RemoteCell | None:
        wanted = _plain(name)
        found = [
            cell
            for cell in self.cells
            if cell.aval.shape == shape and shape and _plain(cell.name) in wanted
        ]
        return max(found, key=lambda cell: len(cell.name), default=None)

    def _bounds(
        self, name: str, shape: tuple[int, ...], dtype: Any, is_whole: bool
    ) -> list[tuple[int, int, int]]:
        rows = shape[0] if shape else 1
        count = 1
        if self._partitioner is not None and shape and not is_whole:
            counts = list(self._partitioner(shape, dtype, 0))
            if len(counts) != len(shape) or any(number != 1 for number in counts[1:]):
                raise ValueError(
                    "A variable_partitioner divides variables along their first axis. Received: "
                    f"{counts} for variable {name!r} of shape {shape}"
                )
            count = max(1, min(counts[0], rows))
        servers = sorted(range(len(self._bytes)), key=lambda server: self._bytes[server])
        # As in TensorFlow, the first shards have one row more.
        small, larger = divmod(rows, count)
        bounds = []
        start = 0
        for part in range(count):
            stop = start + small + (part < larger)
            bounds.append((servers[part % len(servers)], start, stop))
            start = stop
        return bounds


def _plain(name: str) -> str:
    return name.partition(":")[0].replace("/", "_")


class RemoteCell(Cell):
    """A variable whose single copy is on the servers; see `Cell`."""

    __slots__ = ("_dtype", "_remote", "_shape", "_taken", "shards")

    def __init__(self, placement: Placement, value: Any, **annotations: Any):
        #: The shards of the rows; empty until there is a value.
        self.shards: tuple[Shard, ...] = ()
        self._remote = placement
        self._shape: tuple[int, ...] = ()
        self._dtype: Any = None
        #: Refers to the value that was taken last.
        self._taken: Callable[[], jax.Array | None] = lambda: None
        super().__init__(placement, value, **annotations)
        if self.layout is Layout.LOCAL:
            self.layout = Layout.MIRRORED
        if self._divergent_aggregation is not None and self.remote.in_sync > 1:
            self.aggregation = self._divergent_aggregation

    @property
    def remote(self) -> RemotePlacement:
        """The servers' placement."""
        assert isinstance(self._remote, RemotePlacement)
        return self._remote

    @property
    def store(self) -> Store:
        """The servers, once they have what a loop of this process has changed."""
        if self.borrower is not None:
            self.borrower.give_back()
        return self.remote.store

    def _place(self, value: Any) -> Any:
        """Sends `value` to the servers; only its description is kept locally."""
        array = np.asarray(value)
        if not self.shards:
            self._shape, self._dtype = array.shape, array.dtype
            self.remote.forget_dropped()
            shared = current_store()
            is_whole = self.layout is Layout.STREAM
            if shared is not None:
                self.shards = shared.shards(self.remote, self.name, array, is_whole)
                self.remote.note(self.shards, array.shape, array.dtype)
            else:
                shards = self.remote.shards_for(self.name, array.shape, array.dtype, is_whole)
                # The garbage collector may run anywhere, also during a request to the servers, so
                # no message is sent now. An interrupted creation is dropped as well.
                weakref.finalize(self, self.remote.dropped.append, shards).atexit = False
                self.remote.store.create(shards, array)
                self.shards = shards
            self.remote.cells.add(self)
            self._describe()
            return self._array
        if array.shape != self._shape:
            raise ValueError(
                f"Variable {self.name!r} on parameter servers keeps its shape {self._shape}. "
                f"Received: shape {array.shape}"
            )
        self.store.assign(self.shards, array.astype(self._dtype, copy=False))
        self.borrower = None
        return self._array

    def _describe(self) -> None:
        self._array = jax.ShapeDtypeStruct(self._shape, self._dtype)  # type: ignore[assignment]

    @property
    def aval(self) -> Any:
        return array_type(self._shape, self._dtype)

    def clone(self) -> Cell:
        return type(self)(
            self.placement,
            self.numpy(),
            synchronization=self.synchronization,
            aggregation=self.aggregation,
            name=self.name,
        )

    @property
    def combines_writes(self) -> bool:
        adds = self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        return adds and not (self.is_alone or self.is_on_read)

    def stored(self) -> jax.Array:
        if self._array is None:
            return super().stored()
        with jax.ensure_compile_time_eval():  # also inside a function that the caller traces
            return jnp.asarray(self._fetched(), dtype=self._dtype)

    def take(self) -> jax.Array:
        array = self.stored()
        self._taken = weakref.ref(array)
        return array

    def copy_later(self, copy: Callable[[], None]) -> None:
        """Calls `copy` immediately: workers may change the value at any time."""
        copy()

    def lend(self, borrower: Borrower) -> None:
        """Notes who returns a newer value, perhaps. The servers keep theirs, which workers use."""
        self.borrower = borrower

    def take_back(self, borrower: Borrower, array: jax.Array) -> None:
        """Writes what `borrower` has changed, unless the cell has been assigned in the meantime.

        What it has only read, workers may have changed.
        """
        if self.borrower is borrower:
            self.borrower = None
            if array is not self._taken():
                self.put(array)

    def put(self, array: jax.Array | None) -> None:
        self.borrower = None
        if not isinstance(array, jax.ShapeDtypeStruct):
            self._place(array)

    def to_home(self, array: jax.Array) -> jax.Array:
        return array

    def value_outside(self) -> jax.Array | None:
        return None if self._array is None else self._concrete(self.stored())

    def _whole(self) -> jax.Array:
        return self.stored()

    def _fetched(self) -> np.ndarray:
        return self.store.read([self.shards])[0]

    def numpy(self) -> np.ndarray:
        if self._array is None:
            super().stored()
        return np.array(self._fetched())

    def combine(self, stored: jax.Array) -> np.ndarray:
        return np.asarray(stored)

    def copies(self) -> list[np.ndarray]:
        return [self.numpy()]

    def _assign(self, value: Any) -> None:
        self._is_initialized = True
        self._place(value)

    def _update(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self._place(function(self.stored()))

    def _update_each(
        self, values: Sequence[jax.Array], function: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> None:
        (value,) = values
        self._place(function(self.stored(), value))

    def shard(self, axis: int = 0) -> None:
        """Does nothing: the partitioner decides how variables are divided."""

    def localize(self) -> None:
        """Does nothing: there is only one copy."""

    @property
    def is_on_read(self) -> bool:
        return self.synchronization is VariableSynchronization.ON_READ


RemotePlacement.cell_kind = RemoteCell
