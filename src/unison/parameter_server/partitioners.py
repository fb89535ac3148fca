"""Partitioners: the number of shards into which a variable is divided, along its first axis."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


class Partitioner(abc.ABC):
    """Determines how a variable is divided between parameter servers.

    TF: `tf.distribute.experimental.partitioners.Partitioner`.
    """

    @abc.abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along every axis; only that of `axis` may exceed 1."""


class FixedShardsPartitioner(Partitioner):
    """Divides every variable into a fixed number of shards, or as many as it has rows.

    Examples:
        >>> FixedShardsPartitioner(num_shards=2)([10, 3], "float32")
        [2, 1]

    TF: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    def __init__(self, num_shards: int):
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        del dtype
        return _along(axis, shape, self._num_shards)


class MinSizePartitioner(Partitioner):
    """Divides a variable into shards of a minimum size, up to a maximum number.

    Args:
        min_shard_bytes: The minimum size of a shard.
        max_shards: The maximum number of shards.
        bytes_per_string: Accepted for compatibility with TensorFlow: there are no string variables.

    Examples:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)([6, 1], "float32")
        [2, 1]

    TF: `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ):
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        # As in TensorFlow, the last shard may be smaller.
        count = math.ceil(_size(shape, dtype) / self._min_shard_bytes)
        return _along(axis, shape, min(self._max_shards, count))


class MaxSizePartitioner(Partitioner):
    """Divides a variable into as few shards of a maximum size as possible, up to a maximum number.

    Args:
        max_shard_bytes: The maximum size of a shard.
        max_shards: The maximum number of shards, which may then be larger. Default: no limit.
        bytes_per_string: Accepted for compatibility with TensorFlow: there are no string variables.

    Examples:
        >>> MaxSizePartitioner(max_shard_bytes=8)([6, 1], "float32")
        [3, 1]

    TF: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ):
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows = shape[axis] if shape else 1
        row_bytes = max(1, _size(shape, dtype) // max(1, rows))
        # A shard holds as many whole rows as fit, at least one.
        count = math.ceil(rows / max(1, self._max_shard_bytes // row_bytes))
        if self._max_shards is not None:
            count = min(count, self._max_shards)
        return _along(axis, shape, max(1, count))


def _along(axis: int, shape: Sequence[int], count: int) -> list[int]:
    counts = [1] * len(shape)
    if counts:
        counts[axis] = max(1, min(count, shape[axis]))
    return counts


def _size(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"Expected at least 1 for {name}. Received: {number}")
    return number
