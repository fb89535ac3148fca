"""The placement of a value's copies: the replicas' devices as a mesh.

A strategy owns one `Placement`; variables, programs and input all place their arrays by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from unison.interrupts import signals_held
from unison.runtime import devices, launches
from unison.runtime.liveness import watched
from unison.runtime.private_jax import shard_map
from unison.runtime.replica_function import PlacedProgram, ReplicaFunction, with_ticket
from unison.runtime.shared_memory import are_in_this_process, between_buffers, shared_memory_of
from unison.runtime.transfers import copied, host_view, placed, shards_in_order, shards_of
from unison.thread_local import ThreadLocal

REPLICA_AXIS = "replica"

#: The ZeRO stages from which on the replicas divide the optimizer's state, and the weights.
OPTIMIZER, WEIGHTS = 1, 3

#: Replicas do not divide arrays with fewer elements: gathering costs more than it saves.
_SMALLEST_DIVIDED = 2**10

#: The spec of an array with a whole copy on every device.
WHOLE = PartitionSpec()


_in_scope: ThreadLocal[Placement | None] = ThreadLocal(None)


class PartitionRules(Protocol):
    """Rules for how the cores of a replica divide variables; see `unison.partitioning`."""

    def division_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the mesh axes along which the axes of a variable are divided."""

    def warn_of_unmatched(self) -> None:
        """Warns once about rules that no variable has matched so far."""


class Placement:
    """The devices of the replicas, in order, and the ways to place an array on them.

    * mirrored: every device holds the whole array;
    * per-replica: the array has a leading axis of size `num_replicas`, one slice per device;
    * divided: the devices of a replica hold parts of the array (`division_of`).

    Between programs, a mirrored value may be stored as one copy at `home` instead (central
    storage): `from_home` copies it to the devices for a program, and `to_home` moves it back.

    Placements of the same devices and home are equal. The devices may belong to several processes:
    then each process provides and sees the parts of its own replicas, and all processes must make
    the same calls.

    Args:
        replica_devices: The devices in the order of the replicas, without repetition: one per
            replica, or as many as `core_axes` has. The devices of a process are contiguous.
        home: Where the single copy of a mirrored value is kept. Default: every device keeps one.
        core_axes: The sizes, by name, of the mesh of devices that compute a replica together. XLA
            divides a replica's computation between them according to the division of the variables
            (`division_of`) and the program's own constraints (`lax.with_sharding_constraint`). If
            they are those of several processes, each of these provides the same input.
    """

    #: The class of the variables' cells, if this placement needs a special one.
    cell_kind: type | None = None

    def __init__(
        self,
        replica_devices: Sequence[jax.Device],
        home: SingleDeviceSharding | None = None,
        core_axes: Mapping[str, int] | None = None,
    ):
        core_axes = dict(core_axes or {})
        cores_per_replica = math.prod(core_axes.values())
        #: The replicas' devices: for a replica of several cores, the first.
        self.devices = tuple(replica_devices[::cores_per_replica])
        #: Their platform in JAX's terms: `"cpu"`, `"gpu"`, `"tpu"`.
        self.platform = self.devices[0].platform
        #: Whether the devices are the host's own cores, and compute in its memory.
        self.is_host = self.platform == "cpu"
        self.home = home
        self.num_replicas = len(self.devices)
        self.cores_per_replica = cores_per_replica
        #: All devices of the replicas; those of one replica are contiguous.
        self.cores = tuple(replica_devices)
        self._device_set = set(self.cores)
        cores = self._cores_of_process(jax.process_index())
        #: The indices of the replicas on this process's devices.
        self.local_replicas = tuple(cores)
        #: This process's devices; those of one replica are contiguous.
        self.local_cores = tuple(itertools.chain.from_iterable(cores.values()))
        #: The number of a replica's devices that are this process's.
        self.local_cores_per_replica = len(self.local_cores) // max(1, len(cores))
        #: Whether the devices of a replica belong to several processes.
        self.replicas_span_processes = 0 < self.local_cores_per_replica < cores_per_replica
        #: Whether replicas update parts of large weights, as `unison.keras.sharded_update` does;
        #: None: only where it was measured to be faster.
        self.shards_update: bool | None = None
        #: The ZeRO stage, which parts of a model's state the replicas divide: see
        #: `ModelParallelStrategy`.
        self.zero = 0
        #: The sharding of a variable over the cores of a replica, by its name and shape. Default:
        #: each has a copy.
        self.rules: PartitionRules | None = None
        #: This process's devices: for a replica of several cores, the first of its own.
        self.local_devices = tuple(own[0] for own in cores.values())
        #: Whether devices belong to other processes as well.
        self.spans_processes = len(self.local_cores) < len(self.cores)
        self.mesh = _mesh_of(self.cores, core_axes)
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.per_replica = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
        self._gatherings: dict[PartitionSpec, Callable[[jax.Array], jax.Array]] = {}
        #: Whether the result of `first_copy` shares its buffer with the kept array.
        self.shares_first_copy = home is None or home == memory_of(self.devices[0])
        needs_lock = len(self.local_cores) > 1 or self.spans_processes
        self._bounds_launches = self.is_host and len(self.local_cores) > 1
        #: Held while a program with collectives is launched; see `unison.runtime.launches`.
        self.launch_lock: AbstractContextManager[Any] = (
            launches.LAUNCH_LOCK if needs_lock else contextlib.nullcontext()
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.cores == other.cores
            and self.mesh.shape_tuple == other.mesh.shape_tuple
            and self.home == other.home
        )

    def __hash__(self) -> int:
        return hash(self.devices)

    def __repr__(self) -> str:
        home = "" if self.home is None else f", home={self.home}"
        return f"Placement({', '.join(str(device) for device in self.devices)}{home})"

    @functools.cached_property
    def exchanges_buffers(self) -> bool:
        """Whether the replicas' collective operations are between their buffers in this process."""
        return self.cores_per_replica == 1 and are_in_this_process(self.devices)

    @property
    def is_elastic(self) -> bool:
        """Whether the replicas belong to a group of workers that may change."""
        return False

    def division_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec by which the cores of a replica divide the variable `name`.

        Raises:
            ValueError: They cannot divide it.
        """
        return WHOLE if self.rules is None else self.rules.division_of(name, shape)

    def division_at(self, stage: int, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec by which all devices divide the weight `name`, or its slots.

        Args:
            stage: The ZeRO stage from which on the replicas divide it: `OPTIMIZER`, `WEIGHTS`.
            name: The weight's.
            shape: Its shape.
        """
        division = self.division_of(name, shape)
        is_small = math.prod(shape) < _SMALLEST_DIVIDED
        axis = self.axis_for_replicas(name, shape)
        if self.zero < stage or is_small or axis is None or self.num_replicas == 1:
            return division
        return with_replicas_at(axis, division)

    def axis_for_replicas(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Returns the first axis of a variable that the replicas can divide, None if none.

        The cores of a replica do not divide that axis already. For divided weights with more than
        two axes, the first axis is tried last: layers may be stacked along it, to be gathered one
        by one.
        """
        division = self.division_of(name, shape)
        entries = (*division, *(None,) * (len(shape) - len(division)))
        axes = list(range(len(shape)))
        if self.zero >= WEIGHTS and len(shape) > 2:
            axes = [*axes[1:], 0]
        for axis in axes:
            if entries[axis] is None and shape[axis] and shape[axis] % self.num_replicas == 0:
                return axis
        return None

    def mirror(self, value: Any, division: PartitionSpec = WHOLE) -> jax.Array:
        """Returns `value` with a whole copy on every device, or with a single copy at home.

        The copies are the placement's own: the result never shares a buffer with `value`, so a
        program may donate it.

        Args:
            value: An array; with several processes, the same on each.
            division: How the devices divide the value instead, if they do.
        """
        if isinstance(value, jax.Array):
            value = copied(value)
        if any(division):
            return self._divided(value, NamedSharding(self.mesh, division))
        return self.bring(value) if self.home is None else jax.device_put(value, self.home)

    def _divided(self, value: Any, sharding: NamedSharding) -> jax.Array:
        if not self.spans_processes:
            return self._placed(value, sharding)
        whole = np.asarray(value)
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    def from_home(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays for a program: those stored at home get a copy on every device.

        If the home is one of the devices, its copy is the stored array.
        """
        arrays = list(stored)
        if self.home is None:
            return arrays
        at_home = [place for place, array in enumerate(stored) if array.sharding == self.home]
        copies = jax.device_put([stored[place] for place in at_home], self.mirrored)
        for place, array in zip(at_home, copies, strict=True):
            arrays[place] = array
        return arrays

    def to_home(self, mirrored: jax.Array) -> jax.Array:
        """Returns a mirrored result of a program as it is stored between programs."""
        if self.home is None:
            return mirrored
        return jax.device_put(mirrored.addressable_data(0), self.home)

    def first_copy(self, kept: jax.Array) -> jax.Array:
        """Returns an array of `mirror` or `to_home`, on the first of this process's devices."""
        if self.home is None:
            return kept.addressable_data(0)
        with jax.ensure_compile_time_eval():  # also inside a function that the caller traces
            return jax.device_put(kept, memory_of(self.devices[0]))

    def bring(self, value: Any) -> jax.Array:
        """Returns `value` on every device; it is not copied to devices that already have it.

        Args:
            value: An array; with several processes, the same on each.
        """
        if not self.spans_processes:
            return self._placed(value, self.mirrored)
        if isinstance(value, jax.Array) and value.sharding == self.mirrored:
            return value
        copies = [placed(value, core) for core in self.local_cores]
        return jax.make_array_from_single_device_arrays(copies[0].shape, self.mirrored, copies)

    def _placed(self, values: Any, sharding: NamedSharding) -> Any:
        """Returns a tree of arrays on the devices; see `placed`."""
        return (launches.moved if self._bounds_launches else placed)(values, sharding)

    def _cores_of_process(self, process: int) -> dict[int, list[jax.Device]]:
        """Returns the devices of a process, by replica."""
        found: dict[int, list[jax.Device]] = {}
        for place, core in enumerate(self.cores):
            if core.process_index == process:
                found.setdefault(place // self.cores_per_replica, []).append(core)
        return found

    def _on_all_cores(self, pieces: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the pieces of this process's replicas, each on all of its cores of a replica."""
        count = self.local_cores_per_replica
        if count == 1:
            return pieces
        return [
            jax.device_put(pieces[place // count], core)
            for place, core in enumerate(self.local_cores)
        ]

    def holds(self, array: jax.Array) -> bool:
        """Returns whether a program on this placement accepts `array` where it is: it is on these
        devices, or it is not committed to any device, so that the call may move it.
        """
        sharding = array.sharding
        if not array.committed:
            return True
        if self.num_replicas == 1:
            return sharding.device_set == self._device_set
        return sharding == self.mirrored

    def spread(self, stacked: Any) -> Any:
        """Returns an array of shape `(num_replicas, ...)` with slice r on device r.

        Args:
            stacked: The slices of this process's replicas; with a single process, all. An array
                that is already placed like this is returned as is. Or a tree of such arrays.
        """
        if not self.spans_processes:
            return self._placed(stacked, self.per_replica)
        return jax.tree.map(self._spread_own, stacked)

    def _spread_own(self, stacked: Any) -> jax.Array:
        if isinstance(stacked, jax.Array) and stacked.sharding.is_equivalent_to(
            self.per_replica, stacked.ndim
        ):
            return stacked
        return self.assemble(
            [
                placed(stacked[place : place + 1], device)
                for place, device in enumerate(self.local_devices)
            ]
        )

    def assemble(self, slices: Sequence[jax.Array]) -> jax.Array:
        """Returns the array of the replicas' slices.

        Args:
            slices: The slices of this process's replicas, each of shape `(1, ...)` and on its
                device.
        """
        shape = (self.num_replicas, *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, self.per_replica, self._on_all_cores(slices)
        )

    def repeat(self, value: Any) -> jax.Array:
        """Returns a per-replica array whose every slice is `value`."""
        value = jnp.asarray(value)
        shape = (len(self.local_replicas), *value.shape)
        if (view := host_view(value)) is not None:
            return self.spread(np.broadcast_to(view, shape))  # without a program for each shape
        return self.spread(jnp.broadcast_to(value, shape))

    def divide(self, whole: Any) -> Any:
        """Returns an array whose rows are divided evenly among the replicas, in order.

        Args:
            whole: All rows, a multiple of the number of replicas; with several processes, the same
                on each. Or a tree of such arrays. An array that is already divided like this is
                returned as is.
        """
        if not self.spans_processes:
            return self._placed(whole, self.per_replica)
        return jax.tree.map(self._divide_own, whole)

    def _divide_own(self, whole: Any) -> jax.Array:
        if isinstance(whole, jax.Array) and whole.sharding.is_equivalent_to(
            self.per_replica, whole.ndim
        ):
            return whole
        rows = whole.shape[0] // self.num_replicas
        return self.join_rows(
            [whole[replica * rows : (replica + 1) * rows] for replica in self.local_replicas]
        )

    def join_rows(self, parts: Sequence[Any]) -> jax.Array:
        """Returns the array of all replicas' rows, as `divide` does.

        Args:
            parts: The rows of each of this process's replicas; all replicas have the same number.
        """
        rows, *others = parts[0].shape
        pieces = [
            placed(part, device) for part, device in zip(parts, self.local_devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            (rows * self.num_replicas, *others), self.per_replica, self._on_all_cores(pieces)
        )

    def slices(self, stacked: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the slices of this process's replicas, each on its device, of an array placed by
        `spread`.
        """
        return tuple(shard[0] for shard in shards_in_order(stacked, self.local_cores_per_replica))

    def whole(self, divided: jax.Array) -> np.ndarray:
        """Returns all slices, or rows, of an array placed by `spread` or `divide`.

        With several processes, they are gathered: each process must call this.
        """
        return self.whole_of(lambda: divided)

    def whole_of(self, divided: Callable[[], jax.Array]) -> np.ndarray:
        """Returns the whole array of `divided`, which may be called again; see `whole`."""
        array = divided()
        if not self.spans_processes:
            with signals_held:  # see `shards_of`
                return np.asarray(array)
        assert isinstance(array.sharding, NamedSharding)
        division = array.sharding.spec
        if self.replicas_span_processes and not array.is_fully_replicated:
            with jax.ensure_compile_time_eval(), self.launch_lock:
                array = self._gathering_of_all(array)
                self.launched(array, are_kept=True)
        elif REPLICA_AXIS in division:
            # Evaluated eagerly, also inside a function that the caller traces.
            with jax.ensure_compile_time_eval():
                array = self._gathering(division)(array)
        return _of_local_parts(array)

    @functools.cached_property
    def _gathering_of_all(self) -> Callable[[jax.Array], jax.Array]:
        """A program that gathers over all devices, since cores are those of several processes."""
        gathering = jax.jit(lambda array: array, out_shardings=self.mirrored)
        return watched(gathering, "a gathering of all devices' values")

    def _gathering(self, division: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
        """Returns a program that gathers over the replicas, and not over their cores."""
        if division not in self._gatherings:
            axis = division.index(REPLICA_AXIS)
            whole = PartitionSpec(*(None if entry == REPLICA_AXIS else entry for entry in division))
            self._gatherings[division] = self._launching(
                ReplicaFunction(
                    lambda part: jax.lax.all_gather(part, REPLICA_AXIS, axis=axis, tiled=True),
                    division,
                    whole,
                    name="a gathering of all replicas' values",
                )
            )
        return self._gatherings[division]

    def program(self, part: ReplicaFunction) -> PlacedProgram:
        """Returns a function that computes one replica's part as one program for all replicas."""
        if self.rules is not None:
            self.rules.warn_of_unmatched()
        return self._launching(part)

    def _launching(self, part: ReplicaFunction) -> PlacedProgram:
        memory = shared_memory_of(self.devices)
        if memory is not None:
            part = with_ticket(part, memory.program(part.function), PartitionSpec(REPLICA_AXIS))
        elif self.exchanges_buffers:
            replicas = self.num_replicas
            function = between_buffers(part.function, replicas, REPLICA_AXIS, part.number)
            part = dataclasses.replace(part, function=function)
        jitted = self.jitted(part)
        compiled = watched(jitted, part.name) if self.spans_processes else jitted

        def launch(*args: Any) -> Any:
            with self.launch_lock:
                if memory is None:
                    results = compiled(*args)
                else:
                    ticket, results = compiled(memory.ticket, *args)
                    if not isinstance(ticket, jax.core.Tracer):  # else the caller raises an error
                        memory.ticket = ticket
                self.launched(results)
                return results

        def lower(*args: Any) -> None:
            jitted.lower(*([] if memory is None else [memory.ticket]), *args)

        is_a_call = memory is None and not self.spans_processes
        return PlacedProgram(launch, jitted if is_a_call else None, lower)

    def launched(self, results: Any, are_kept: bool = False) -> None:
        """Notes a program that was launched on these devices; see `launches.launched`."""
        if self._bounds_launches:
            launches.launched(results, are_kept)

    def jitted(self, part: ReplicaFunction) -> jax.stages.Wrapped:
        """Returns the jitted function that `program` runs."""
        mapped = shard_map(
            part.function,
            mesh=self.mesh,
            in_specs=jax.tree.map(_over_replicas, part.in_specs),
            out_specs=jax.tree.map(_over_replicas, part.out_specs),
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )
        # Given explicitly, so that arrays that are not on the mesh yet do not need a separate
        # program.
        shardings = jax.tree.map(functools.partial(NamedSharding, self.mesh), part.in_specs)
        out_shardings = None
        if self.cores_per_replica > 1:
            # The results are placed as specified, however XLA divided them inside the program.
            out_shardings = jax.tree.map(
                functools.partial(NamedSharding, self.mesh), part.out_specs
            )
        return jax.jit(
            mapped,
            in_shardings=shardings,
            out_shardings=out_shardings,
            donate_argnums=tuple(part.donate),
            compiler_options=None if part.compiler_options is None else dict(part.compiler_options),
        )

    def tracing(self) -> AbstractContextManager[Any]:
        """Lets a function traced inside state how the cores of a replica divide a value."""
        if self.mesh.axis_names == (REPLICA_AXIS,):
            return contextlib.nullcontext()
        of_replica = self.mesh.abstract_mesh.update_axis_types({REPLICA_AXIS: AxisType.Manual})
        return jax.sharding.use_abstract_mesh(of_replica)

    def of_first_process(self, value: Any) -> Any:
        """Returns the first process's `value`, an array of one shape and dtype on all of them.

        Most values are equal on all processes, as a digest shows: it is the same small program for
        all shapes, whereas a value is gathered from all processes.
        """
        if not self.spans_processes:
            return value
        with jax.ensure_compile_time_eval():  # also if a variable is created in a traced program
            digests = self._of_all_processes(_digest(value))
            if np.array_equal(digests, np.broadcast_to(digests[0], digests.shape)):
                return jnp.asarray(value)
            return jnp.asarray(self._of_all_processes(value)[0], dtype=value.dtype)

    def _of_all_processes(self, value: Any) -> np.ndarray:
        """Returns the values of all processes, the first one's first."""
        if not self.replicas_span_processes:
            return self.whole(self.repeat(value))
        own = np.asarray(value)[None]
        by_core = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        rows = jax.make_array_from_single_device_arrays(
            (len(self.cores), *own.shape[1:]),
            by_core,
            [placed(own, core) for core in self.local_cores],
        )
        return self.whole(rows)


def _digest(value: Any) -> np.ndarray:
    """Returns the checksum and the sum of an array's bytes, computed at the speed of memory."""
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = content[: content.size // 8 * 8].view(np.uint64)
    total = int(np.add.reduce(words))  # modulo 2**64
    return np.array([zlib.crc32(content.data), total % 2**32, total >> 32], np.uint32)


def _mesh_of(cores: Sequence[jax.Device], core_axes: Mapping[str, int]) -> Mesh:
    """Returns the devices as a mesh: an axis of replicas, and the axes of a replica's cores.

    The axes are automatic: inside `shard_map`, the axis of the replicas is manual anyway, and
    outside, ordinary jnp operations on mirrored arrays then need no sharding annotations.
    """
    names = (REPLICA_AXIS, *core_axes)
    grid = np.array(cores).reshape(-1, *core_axes.values())
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _over_replicas(spec: PartitionSpec) -> PartitionSpec:
    """Returns the part of `spec` that concerns the replicas, without the axes of their cores."""
    return PartitionSpec(*(REPLICA_AXIS if entry == REPLICA_AXIS else None for entry in spec))


def with_replicas_at(axis: int, division: PartitionSpec) -> PartitionSpec:
    """Returns `division` with the replicas dividing an axis that is not divided otherwise.

    Examples:
        >>> with_replicas_at(1, PartitionSpec("model"))
        P('model', 'replica')
    """
    entries = [*division, *(None,) * (axis + 1 - len(division))]
    entries[axis] = REPLICA_AXIS
    return PartitionSpec(*entries)


def _of_local_parts(divided: jax.Array) -> np.ndarray:
    """Returns the whole of an array that only a replica's cores may divide: all parts are local."""
    if divided.is_fully_replicated:
        return np.asarray(divided.addressable_data(0))
    whole = np.empty(divided.shape, divided.dtype)
    for shard in shards_of(divided):
        whole[shard.index] = np.asarray(shard.data)
    return whole


def memory_of(device: jax.Device) -> SingleDeviceSharding:
    """Returns the sharding of an array in the device's own memory."""
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind)


@contextlib.contextmanager
def scoped_placement(placement: Placement) -> Iterator[None]:
    """Places the thread's new variables on `placement` inside the context."""
    with _in_scope.bound_to(placement):
        yield


def placement_in_scope() -> Placement:
    """Returns the placement of the innermost scope; outside any, the default device's."""
    placement = _in_scope.value
    return _default_placement() if placement is None else placement


@functools.cache
def _default_placement() -> Placement:
    return Placement(devices.local_devices()[:1])
