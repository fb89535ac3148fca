"""Arrays of the host, copied to devices, and the parts that devices have of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from unison.interrupts import signals_held

#: JAX's options, which have no types.
_OPTIONS: Any = jax.config

#: The values of `jax_transfer_guard_host_to_device` with which all transfers are silent.
_UNGUARDED = (None, "allow")


def placed(values: Any, to: Sharding | jax.Device) -> Any:
    """Returns a tree of arrays on devices, as `jax.device_put` does.

    `jax.device_put` itself takes 1.6 to 2.9 times as long for an array of the host, and for one
    that is in place already as long as a small step, all of it in Python.

    Args:
        values: A tree of arrays and numbers.
        to: How the devices divide each of them; or the only device.
    """
    sharding = to if isinstance(to, Sharding) else SingleDeviceSharding(to)
    is_guarded = _OPTIONS.jax_transfer_guard_host_to_device not in _UNGUARDED
    divides = len(sharding.device_set) > 1 and not is_guarded

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, np.ndarray) and leaf.ndim and not is_guarded:
            return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if is_array and leaf.committed and leaf.sharding == sharding:
            return leaf
        if is_array and leaf.ndim and divides and (view := host_view(leaf)) is not None:
            # `jax.device_put` would compile a program for each new shape that slices it.
            return jax.make_array_from_callback(view.shape, sharding, view.__getitem__)
        return jax.device_put(leaf, sharding)  # which guards know as an explicit transfer

    return jax.tree.map(place, values)


def copied(array: Any) -> jax.Array:
    """Returns a copy of an array in other buffers, on the same devices.

    `jnp.copy` compiles a program for each shape and sharding, and over several devices it launches
    one (see `unison.runtime.launches`).
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return jnp.copy(array)
    if array.is_fully_addressable:
        return jax.device_put(array, array.sharding, may_alias=False)
    pieces = [
        jax.device_put(shard.data, shard.data.sharding, may_alias=False)
        for shard in shards_of(array)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def host_view(value: Any) -> np.ndarray | None:
    """Returns a NumPy array as it is, and the memory of a JAX array if the host can read it now.

    It can if the array is computed, and on one CPU device. Otherwise returns None; also for what a
    NumPy array would not be placed as: weak types, and 64 bits where they are not enabled.
    """
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    array: Any = value  # has methods that JAX's types do not list
    if jnp.issubdtype(array.dtype, jax.dtypes.extended) or array.weak_type:
        return None
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return None
    if not isinstance(array.sharding, SingleDeviceSharding) or not array.is_ready():
        return None
    return np.asarray(array) if is_on_cpu(array.sharding) else None


def is_on_cpu(sharding: Sharding) -> bool:
    """Whether its devices are the host's own, which take aligned arrays of the host as they are."""
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def shards_of(array: jax.Array) -> Sequence[jax.Shard]:
    """Returns the parts of an array on this process's devices.

    JAX divides an array once, and goes on with too few parts if a signal handler has raised
    meanwhile.
    """
    with signals_held:
        return array.addressable_shards


def shards_in_order(array: jax.Array, cores_per_replica: int = 1) -> list[jax.Array]:
    """Returns the local single-device pieces of `array`, ordered by their leading index.

    Only one of the equal pieces on this process's cores of a replica is returned.
    """

    def start(shard: Any) -> int:
        return shard.index[0].start or 0 if shard.index else 0

    pieces = sorted(shards_of(array), key=start)  # of an empty array, all start at 0
    return [piece.data for piece in pieces[::cores_per_replica]]
