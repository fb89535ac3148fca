"""Batches of a pass, in sizes that may change during the pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np


class Rebatched(Iterator[Any]):
    """The rows of batches, in batches of sizes that change.

    Args:
        batches: Trees of arrays whose first axes are the examples.
        sizes: The batches at which the size changes, relative to the size of the first batch:
            pairs of a batch's number and the factor. Pairs may be added later.

    Examples:
        >>> batches = Rebatched(iter([np.arange(3), np.arange(3, 6)]), [(0, 4 / 3), (1, 1 / 3)])
        >>> [batch.tolist() for batch in batches]
        [[0, 1, 2, 3], [4], [5]]
    """

    def __init__(self, batches: Iterator[Any], sizes: Sequence[tuple[int, float]]):
        self._batches = batches
        self._sizes = sizes
        self._count = 0
        self._first: int | None = None
        self._structure: Any = None
        #: The leaves that have been read and not returned yet.
        self._rows: list[list[np.ndarray]] = []

    def __next__(self) -> Any:
        if self._first is None and not self._take():
            raise StopIteration
        assert self._first is not None
        factor = [factor for start, factor in self._sizes if start <= self._count][-1]
        size = max(round(self._first * factor), 1)
        while self._available < size and self._take():
            pass
        if not self._available:
            raise StopIteration
        self._count += 1
        if len(self._rows) == 1 and self._available == size:
            return jax.tree.unflatten(self._structure, self._rows.pop())
        leaves = [np.concatenate(parts) for parts in zip(*self._rows, strict=True)]
        rest = [leaf[size:] for leaf in leaves]
        self._rows = [rest] if len(rest[0]) else []
        return jax.tree.unflatten(self._structure, [leaf[:size] for leaf in leaves])

    @property
    def _available(self) -> int:
        return sum(len(leaves[0]) for leaves in self._rows)

    def _take(self) -> bool:
        for batch in self._batches:
            leaves, self._structure = jax.tree.flatten(batch)
            self._rows.append([np.asarray(leaf) for leaf in leaves])
            if self._first is None:
                self._first = len(leaves[0])
            return True
        return False
