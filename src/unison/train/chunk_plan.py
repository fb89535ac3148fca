"""The assignment of the parts of arrays to the processes that write them.

Arrays are cut into chunks, each of which is inside the part of one device. A chunk is written by
one of the processes that have it: that with the fewest bytes to write so far. All processes plan
the same, without communication.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from unison.errors import FailedPreconditionError
from unison.runtime.transfers import shards_of

#: The maximum bytes of a chunk, if the sizes of the array have such divisors.
CHUNK_BYTES = 16 << 20

#: The maximum ratio of the number of chunks to the number needed, for want of other divisors.
_MOST_SURPLUS = 8

#: A part of an array: the first index and the one after the last, for each axis.
Region = tuple[tuple[int, int], ...]


class Spread(NamedTuple):
    """The distribution of an array over processes.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        holders: The processes that have each region. The regions have one shape, and cover it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    holders: Mapping[Region, tuple[int, ...]]


class ChunkGrid(NamedTuple):
    """The chunks of an array, numbered with the last axis fastest.

    Attributes:
        shape: The array's shape.
        dtype: The array's dtype.
        chunk: The shape of a chunk; it divides the array's.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(
            size // part if part else 0 for size, part in zip(self.shape, self.chunk, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    def __len__(self) -> int:
        return math.prod(self.counts)

    def region(self, number: int) -> Region:
        """Returns the region of a chunk."""
        places = []
        for count in reversed(self.counts):
            number, place = divmod(number, count)
            places.append(place)
        places.reverse()
        return tuple(
            (place * part, (place + 1) * part)
            for place, part in zip(places, self.chunk, strict=True)
        )

    def overlapping(self, region: Region) -> Iterator[int]:
        """Yields the numbers of the chunks that have elements in a region."""
        ranges = [
            range(begin // part, -(-end // part)) if part else range(0)
            for (begin, end), part in zip(region, self.chunk, strict=True)
        ]
        for places in itertools.product(*ranges):
            number = 0
            for place, count in zip(places, self.counts, strict=True):
                number = number * count + place
            yield number


class ChunkPlan:
    """Assigns chunks to the processes that write them, one array after another.

    Args:
        writers: The processes that write.

    Attributes:
        bytes_of: The bytes that each of them writes.
    """

    def __init__(self, writers: Sequence[int]):
        self.bytes_of = collections.Counter(dict.fromkeys(writers, 0))

    def add(self, spread: Spread) -> tuple[ChunkGrid, list[int]]:
        """Returns the chunks of a further array, and the process that writes each.

        Raises:
            FailedPreconditionError: None of the processes that write has some part of it.
        """
        grid = grid_of(spread)
        writers = [0] * len(grid)
        for region, holders in spread.holders.items():
            own = [process for process in holders if process in self.bytes_of]
            if not own:
                raise FailedPreconditionError(
                    message="All workers must save, and not all do: each has a part of the state. "
                    "Let every worker call save with the same path."
                )
            for number in grid.overlapping(region):
                writer = min(own, key=self.bytes_of.__getitem__)
                self.bytes_of[writer] += grid.chunk_bytes
                writers[number] = writer
        return grid, writers


def grid_of(spread: Spread) -> ChunkGrid:
    """Returns the chunks of an array."""
    part = tuple(end - begin for begin, end in next(iter(spread.holders)))
    return ChunkGrid(spread.shape, spread.dtype, chunk_shape(part, spread.dtype.itemsize))


def whole_region(shape: Sequence[int]) -> Region:
    """Returns the region that is a whole array."""
    return tuple((0, size) for size in shape)


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """Returns the region of an index of slices, as JAX has for the part of a device."""
    return tuple(
        part.indices(size)[:2]  # a part has the step 1
        for part, size in zip(index, shape, strict=True)
    )


def own_regions(array: jax.Array) -> dict[Region, jax.Array]:
    """Returns the parts of an array on this process's devices, in the order of the devices.

    Of parts that several devices have, there is one; see `own_parts`.
    """
    return {region_of(shard.index, array.shape): shard.data for shard in shards_of(array)}


def slices_of(region: Region) -> tuple[slice, ...]:
    """Returns the index of a region."""
    return tuple(slice(begin, end) for begin, end in region)


def spread_of(array: jax.Array) -> Spread:
    """Returns how an array lies on the processes of the job."""
    return spread_by(array.sharding, array.shape, array.dtype)


def spread_by(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: Any) -> Spread:
    """Returns how an array with a sharding lies on the processes of the job."""
    return Spread(shape, np.dtype(dtype), _holders_of(sharding, shape))


def spread_on(processes: Sequence[int], shape: Sequence[int], dtype: np.dtype) -> Spread:
    """Returns how an array lies of which each of some processes has all."""
    return Spread(tuple(shape), dtype, {whole_region(shape): tuple(processes)})


@functools.lru_cache(1024)
def _holders_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Mapping[Region, tuple[int, ...]]:
    holders: dict[Region, set[int]] = {}
    device: Any  # which has no types
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        holders.setdefault(region_of(index, shape), set()).add(device.process_index)
    return {region: tuple(sorted(found)) for region, found in sorted(holders.items())}


@functools.lru_cache(4096)
def chunk_shape(
    part: tuple[int, ...], itemsize: int, most_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Returns the shape of the chunks of a part of an array.

    It divides the part's shape; the first axes are divided first, so that a chunk has few pieces.

    Examples:
        >>> chunk_shape((8192, 8192), 4)
        (512, 8192)
        >>> chunk_shape((7, 8192), 4, 65_536)
        (1, 8192)
        >>> chunk_shape((1_000_003, 16), 4)  # the first is prime
        (1000003, 4)
    """
    chunk = list(part)
    for axis in range(len(chunk)):
        size = math.prod(chunk) * itemsize
        if size <= most_bytes:
            break
        least = -(-size // most_bytes)
        most = _MOST_SURPLUS * least
        divisors = (number for number in _divisors(chunk[axis]) if least <= number <= most)
        chunk[axis] //= next(divisors, chunk[axis] if chunk[axis] < least else 1)
    return tuple(chunk)


def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
