"""The bytes of the arrays that a JAX process holds on its devices."""

from __future__ import annotations

import collections

import jax


def bytes_on_fullest_device() -> int:
    """Returns the bytes of all live arrays on the device that holds most; a buffer counts once."""
    buffers: dict[tuple[int, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffer = (shard.device.id, shard.data.unsafe_buffer_pointer())
            buffers[buffer] = max(shard.data.nbytes, buffers.get(buffer, 0))
    by_device: collections.Counter[int] = collections.Counter()
    for (device, _), size in buffers.items():
        by_device[device] += size
    return max(by_device.values(), default=0)
