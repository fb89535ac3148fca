"""A placement on devices that are described but not present: it compiles programs, but runs none.

Everything up to the compiled program happens as on real devices: variables are created, a global
batch is divided, a step is traced and lowered for the replicas. The arrays on the devices are only
described (`PlannedArray`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from unison.runtime import devices
from unison.runtime.placement import WHOLE, Placement
from unison.runtime.precision import device_dtype
from unison.runtime.replica_function import PlacedProgram, ReplicaFunction, specs_of_each
from unison.runtime.tpu.slices import Described, description_of
from unison.thread_local import ThreadLocal

#: Arrays of at most this many bytes keep their values, so that a program can read its learning
#: rate; larger ones take no memory, and read as zeros.
_LARGEST_KEPT = 2**16

_is_planning = ThreadLocal(False)


class NotRunHereError(RuntimeError):
    """A program was called for devices that are not present."""


class PlannedProgram(NamedTuple):
    """A program that has been lowered for the devices of a `PlannedPlacement`.

    Attributes:
        name: Its name in messages.
        lowered: The lowered program, ready to be compiled.
        arguments: Its arguments: a tuple of trees of `jax.ShapeDtypeStruct`s with their shardings.
        target: The name of the devices.
        placement: The placement of the replicas on them.
    """

    name: str
    lowered: jax.stages.Lowered
    arguments: tuple[Any, ...]
    target: str
    placement: Placement

    @property
    def num_replicas(self) -> int:
        return self.placement.num_replicas


class ProgramPlanned(BaseException):  # not an error: `except Exception` does not catch it
    """Raised to leave a program where a step would run for the first time.

    Attributes:
        program: The program of that step.
        state: The bytes on each device that are kept between steps, by kind; empty if unknown.
        examples: The number of examples of the global batch; None if unknown.
    """

    def __init__(self, program: PlannedProgram):
        super().__init__(program.name)
        self.program = program
        self.state: dict[str, int] = {}
        self.examples: int | None = None


class PlannedArray:
    """An array as it would be placed on the devices.

    Args:
        value: Any array; its values are kept if it is small.
        sharding: Its sharding on the devices.
        shape: Its shape, if that differs from the value's; the value is then broadcast to it.
    """

    def __init__(self, value: Any, sharding: NamedSharding, shape: tuple[int, ...] | None = None):
        self.shape = tuple(np.shape(value)) if shape is None else shape
        self.dtype = device_dtype(jnp.result_type(value))
        self.sharding = sharding
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self._value = np.zeros((), self.dtype)
        if self.nbytes <= _LARGEST_KEPT:
            self._value = np.asarray(value, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.broadcast_to(self._value, self.shape)
        return whole.astype(dtype or self.dtype, copy=bool(copy))

    def __repr__(self) -> str:
        return f"PlannedArray({self.dtype}{list(self.shape)}, {self.sharding.spec})"

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def addressable_data(self, index: int) -> np.ndarray:
        """Returns the whole array, as for a mirrored array."""
        del index
        return np.asarray(self)

    @property
    def addressable_shards(self) -> Sequence[Any]:
        """Returns the slices, as for an array placed by `spread`."""
        whole = np.asarray(self)
        slices = [(slice(start, start + 1),) for start in range(len(whole))]
        return [_Shard(index, whole[index]) for index in slices]

    def is_deleted(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class _Shard:
    index: tuple[slice, ...]
    data: np.ndarray


class PlannedPlacement(Placement):
    """The placement of replicas on devices that are described but not present.

    This process keeps the values, for all replicas. Calling a program raises `NotRunHereError`;
    inside `planning`, the program is lowered and `ProgramPlanned` is raised.

    Args:
        replica_devices: As for `Placement`.
        described: The topology that they belong to.
        core_axes: As for `Placement`.
    """

    def __init__(
        self,
        replica_devices: Sequence[jax.Device],
        described: Described,
        core_axes: Mapping[str, int] | None = None,
    ):
        devices.prepare_backend()  # of the CPU, which traces
        super().__init__(replica_devices, core_axes=core_axes)
        self.platform = described.platform
        self.is_host = self.platform == "cpu"
        self.target = described.name
        self.local_replicas = tuple(range(self.num_replicas))
        host = jax.local_devices(backend="cpu")[0]
        self.local_devices = (host,) * self.num_replicas
        self.local_cores_per_replica = self.cores_per_replica
        self.replicas_span_processes = False
        self.spans_processes = len({device.process_index for device in self.devices}) > 1
        self.shares_first_copy = False
        self.shards_update = False
        self.launch_lock = contextlib.nullcontext()
        self._bounds_launches = False

    __hash__ = Placement.__hash__

    def mirror(self, value: Any, division: PartitionSpec = WHOLE) -> Any:
        return PlannedArray(value, NamedSharding(self.mesh, division))

    bring = mirror

    def first_copy(self, kept: Any) -> jax.Array:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(np.asarray(kept), dtype=kept.dtype)

    def holds(self, array: jax.Array) -> bool:
        del array
        return True  # arguments are only described

    def spread(self, stacked: Any) -> Any:
        return jax.tree.map(self._sharded, stacked)

    def divide(self, whole: Any) -> Any:
        return self.spread(whole)

    def _sharded(self, rows: Any) -> PlannedArray:
        if isinstance(rows, PlannedArray):
            return rows
        return PlannedArray(rows, self.per_replica)

    def assemble(self, slices: Sequence[Any]) -> Any:
        shape = (self.num_replicas, *slices[0].shape[1:])
        return PlannedArray(slices[0], self.per_replica, shape)

    def repeat(self, value: Any) -> Any:
        value = np.asarray(value)
        return PlannedArray(value, self.per_replica, (self.num_replicas, *value.shape))

    def slices(self, stacked: Any) -> tuple[Any, ...]:
        return tuple(jnp.asarray(shard.data[0]) for shard in stacked.addressable_shards)

    def whole_of(self, divided: Callable[[], Any]) -> np.ndarray:
        return np.asarray(divided())

    def of_first_process(self, value: Any) -> Any:
        return value

    def program(self, part: ReplicaFunction) -> PlacedProgram:
        compiled, name = self.jitted(part), part.name
        shardings = jax.tree.map(
            functools.partial(NamedSharding, self.mesh), specs_of_each(part.in_specs)
        )

        def launch(*args: Any) -> Any:
            if not _is_planning.value:
                raise NotRunHereError(
                    f"Expected the devices of {self.target} to run {name}. Received: a process "
                    "without them, whose strategy only compiles. Ask unison.planning.plan_fit or "
                    "plan_run (or the command `unison plan`) what the step will take there; to "
                    "run it, start this program on that machine with a strategy that is told no "
                    "topology; to run it here, use MirroredStrategy()."
                )
            described = tuple(
                jax.tree.map(_described, _of_each(sharding, arg), arg)
                for sharding, arg in zip(shardings, args, strict=True)
            )
            lowered = compiled.lower(*described)
            raise ProgramPlanned(PlannedProgram(name, lowered, described, self.target, self))

        return PlacedProgram(launch)


def _of_each(sharding: Any, tree: Any) -> Any:
    """Returns `sharding`, which may stand for a whole tree, for each leaf of `tree`."""
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, tree)
    return sharding


def _described(sharding: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, PlannedArray):
        return leaf.aval
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Makes a program that would run on a `PlannedPlacement` raise `ProgramPlanned`."""
    with _is_planning.bound_to(True):
        yield


def placement_on(
    replica_devices: Sequence[jax.Device],
    home: SingleDeviceSharding | None = None,
    core_axes: Mapping[str, int] | None = None,
) -> Placement:
    """Returns a placement on devices: a `PlannedPlacement` if they are only described.

    Args:
        replica_devices: As for `Placement`.
        home: Likewise.
        core_axes: Likewise.

    Raises:
        ValueError: Central storage is asked for on devices that are only described.
    """
    described = description_of(replica_devices[0])
    if described is None:
        return Placement(replica_devices, home, core_axes)
    if home is not None:
        raise ValueError(
            f"Expected a strategy whose variables are on the devices of {described.name}, for "
            f"which programs are only compiled. Received: variables in central storage, {home}. "
            "Use MirroredStrategy or TPUStrategy."
        )
    return PlannedPlacement(replica_devices, described, core_axes)
