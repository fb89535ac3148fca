"""Memory that XLA takes as it is: on CPUs, arrays that begin elsewhere are copied for a program."""

from __future__ import annotations

import math

import numpy as np

#: The multiple of bytes at which XLA's CPU buffers begin.
ALIGNMENT = 64


def aligned(size: int) -> int:
    """Returns the first multiple of `ALIGNMENT` from `size` on.

    Examples:
        >>> aligned(1), aligned(64)
        (64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns a new array at an aligned address, whose values are undefined.

    Examples:
        >>> aligned_empty((3,), np.dtype(np.float32)).ctypes.data % ALIGNMENT
        0
    """
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
