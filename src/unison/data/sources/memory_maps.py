"""Memory-mapped arrays, and the kernel's readahead for their files."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

#: For larger rows, little of the kernel's readahead is wasted.
_SMALL_ROW = 32 << 10


class MappedRows:
    """Advises the kernel of the order in which the rows of memory-mapped arrays will be read.

    On a page fault, the kernel reads 128 KiB: right for rows in order, but for
    shuffled rows of 1 kB a hundred times too much.

    Args:
        arrays: The arrays; those that are not memory-mapped are ignored.
    """

    def __init__(self, arrays: Sequence[Any]):
        maps = (_map_of(a) for a in arrays if getattr(a, "ndim", 0) and a[:1].nbytes < _SMALL_ROW)
        self._maps = [memory for memory in maps if memory is not None]
        self._is_random = False

    def expect(self, is_random: bool) -> None:
        """Records whether the next rows are consecutive or random."""
        if is_random == self._is_random:
            return
        self._is_random = is_random
        for memory in self._maps:
            memory.madvise(mmap.MADV_RANDOM if is_random else mmap.MADV_NORMAL)


def _map_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory map of which an array is a view; None if there is none."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    return base
