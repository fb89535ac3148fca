"""The bytes that a JAX process holds on its devices."""

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


def peak_bytes() -> dict[str, int]:
    """Returns, as a fact, the most bytes that were in use on a device; {} on CPUs, which tell none.

    Those of arrays and of what programs need besides, without what JAX has reserved only.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()]
    known = [peak for peak in peaks if peak is not None]
    return {"device_peak_bytes": max(known)} if known else {}
