"""Bytes that each process of a job has for each other one, exchanged by a collective."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unison.runtime.launches import LAUNCH_LOCK
from unison.runtime.private_jax import shard_map

_AXIS = "process"

#: Lengths are rounded up to have so many significant bits, so that few programs are compiled.
_SIGNIFICANT_BITS = 4


def all_to_all(pieces: Sequence[np.ndarray], longest: int) -> list[np.ndarray]:
    """Returns what every process has for this one; all processes must call it.

    The bytes go through the first device of each process.

    Args:
        pieces: What this process has for each, uint8[up to `longest`].
        longest: The most bytes that any process has for another one. All must say the same.

    Returns:
        Those of each process for this one, uint8[at least `longest`], with anything behind them.
    """
    length = _rounded(longest)
    own = np.zeros((1, len(pieces), length), np.uint8)
    for row, piece in zip(own[0], pieces, strict=True):
        row[: piece.size] = piece
    program, sharding = _program(len(pieces), length)
    device = sharding.addressable_devices.copy().pop()
    shape = (len(pieces), *own.shape[1:])
    with LAUNCH_LOCK:
        given = jax.make_array_from_single_device_arrays(
            shape, sharding, [jax.device_put(own, device)]
        )
        received = program(given)
    (shard,) = received.addressable_shards
    return list(np.asarray(shard.data)[:, 0])


def _rounded(length: int) -> int:
    """Returns a length that is at most an eighth longer.

    Examples:
        >>> [_rounded(length) for length in (0, 3, 1000, 1025)]
        [1, 3, 1024, 1152]
    """
    unit = 1 << max(length.bit_length() - _SIGNIFICANT_BITS, 0)
    return max(-(-length // unit) * unit, 1)


@functools.lru_cache(maxsize=64)
def _program(processes: int, length: int) -> tuple[Any, NamedSharding]:
    """Returns the program for a length, and the sharding of its argument."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[index] for index in range(processes)]), (_AXIS,))

    def exchange(own: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(own, _AXIS, split_axis=1, concat_axis=0, tiled=True)

    exchanged = shard_map(
        exchange,
        mesh=mesh,
        in_specs=PartitionSpec(_AXIS),
        out_specs=PartitionSpec(None, _AXIS),
    )
    return jax.jit(exchanged), NamedSharding(mesh, PartitionSpec(_AXIS))
