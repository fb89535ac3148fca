"""Where the copies of a value live: the replicas' devices as a one-axis mesh.

A strategy owns one `Placement`; variables, programs and input all place their arrays by it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from unison.runtime import devices

REPLICA_AXIS = "replica"

_scope = threading.local()


class Placement:
    """The devices of the replicas, in order, and the two ways an array can lie on them.

    * mirrored: every device holds the whole array;
    * per-replica: the array has a leading axis of size `num_replicas`, one slice a device.

    Placements of the same devices are equal.

    Args:
        replica_devices: One device a replica, without repetition.
    """

    def __init__(self, replica_devices: Sequence[jax.Device]):
        self.devices = tuple(replica_devices)
        self.num_replicas = len(self.devices)
        self._device_set = set(self.devices)
        # Auto axes: inside `shard_map` they are manual anyway, and outside ordinary jnp
        # operations on mirrored arrays then need no sharding annotations.
        self.mesh = Mesh(np.array(self.devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.per_replica = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
        several_cpus = self.num_replicas > 1 and self.devices[0].platform == "cpu"
        #: Held while a program with collectives is launched; see `unison.runtime.devices`.
        self.launch_lock: AbstractContextManager[Any] = (
            devices.LAUNCH_LOCK if several_cpus else contextlib.nullcontext()
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.devices == other.devices

    def __hash__(self) -> int:
        return hash(self.devices)

    def __repr__(self) -> str:
        return f"Placement({', '.join(str(device) for device in self.devices)})"

    def mirror(self, value: Any) -> jax.Array:
        """Returns `value` with a whole copy on every device.

        The copies are the placement's own: the result never shares a buffer with `value`, so a
        program may donate it.
        """
        if isinstance(value, jax.Array):
            value = jnp.copy(value)
        return jax.device_put(value, self.mirrored)

    def holds(self, array: jax.Array) -> bool:
        """Whether a program on this placement can take `array` as it lies: it is here, or it is
        on no device by anybody's wish, so that the call may move it.
        """
        sharding = array.sharding
        if not array.committed:
            return True
        if self.num_replicas == 1:
            return sharding.device_set == self._device_set
        return sharding == self.mirrored

    def spread(self, stacked: Any) -> jax.Array:
        """Returns `stacked`, of shape `(num_replicas, ...)`, with slice r on device r."""
        return jax.device_put(stacked, self.per_replica)

    def repeat(self, value: Any) -> jax.Array:
        """Returns a per-replica array whose every slice is `value`."""
        value = jnp.asarray(value)
        return self.spread(jnp.broadcast_to(value, (self.num_replicas, *value.shape)))

    def slices(self, stacked: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the per-replica values of an array placed by `spread`, each on its device."""
        return tuple(shard[0] for shard in shards_in_order(stacked))


def shards_in_order(array: jax.Array) -> list[jax.Array]:
    """Returns the local single-device pieces of `array`, ordered by their leading index."""

    def start(shard: Any) -> int:
        return shard.index[0].start or 0 if shard.index else 0

    return [shard.data for shard in sorted(array.addressable_shards, key=start)]


@contextlib.contextmanager
def scoped_placement(placement: Placement) -> Iterator[None]:
    """Makes `placement` the one that the thread's new variables live on."""
    previous = getattr(_scope, "placement", None)
    _scope.placement = placement
    try:
        yield
    finally:
        _scope.placement = previous


def placement_in_scope() -> Placement:
    """Returns the placement of the innermost scope; outside any, the default device's."""
    placement = getattr(_scope, "placement", None)
    return _default_placement() if placement is None else placement


@functools.cache
def _default_placement() -> Placement:
    return Placement(devices.local_devices()[:1])
