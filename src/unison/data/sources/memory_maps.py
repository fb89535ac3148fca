"""Memory-mapped arrays, and how much of their files the kernel reads ahead."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Of rows that are larger the kernel's reading ahead fetches little that is not wanted.
_SMALL_ROW = 32 << 10


class MappedRows:
    """Tells the kernel in which order the rows of memory-mapped arrays are going to be read.

    The kernel reads 128 KiB where it finds a page missing: right for rows in order, but for
    shuffled rows of 1 kB a hundred times too much.

    Args:
        arrays: The arrays; those that are not mapped do not matter.
    """

    def __init__(self, arrays: Sequence[Any]):
        maps = (_map_of(a) for a in arrays if a.ndim and a[:1].nbytes < _SMALL_ROW)
        self._maps = [memory for memory in maps if memory is not None]
        self._is_random = False

    def expect(self, is_random: bool) -> None:
        """Takes note of whether the next rows are somewhere, or behind the last ones."""
        if is_random == self._is_random:
            return
        self._is_random = is_random
        for memory in self._maps:
            memory.madvise(mmap.MADV_RANDOM if is_random else mmap.MADV_NORMAL)


def _map_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory map of which an array is a view; None where there is none."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    return base
