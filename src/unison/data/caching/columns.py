"""One leaf of several elements, whose arrays may have different shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data.leaves import read_only, stack


class Column:
    """One leaf of several elements, the numbers or texts of all of them behind each other.

    Args:
        items: The numbers or texts, which slices can be taken of.
        rows: The number of elements.
        shape: The shape of each array; None where they differ.
        sizes: Their sizes, where they differ.
    """

    def __init__(
        self, items: Any, rows: int, shape: Sequence[int] | None, sizes: np.ndarray | None
    ):
        items = read_only(items)
        self._items = items
        self._rows = rows
        #: All arrays stacked, without copying them; None where they differ in shape.
        self.whole: np.ndarray | None = None
        if shape is not None and isinstance(items, np.ndarray):
            self.whole = items.reshape([rows, *shape])
        self._shape = shape
        self._sizes = sizes
        if sizes is not None:
            self._ends = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))]).tolist()

    @classmethod
    def joined(cls, columns: Sequence[Column]) -> Column:
        """Returns the leaf of the elements of several columns, one behind the other."""
        items = np.concatenate([column._items for column in columns])
        rows = sum(column._rows for column in columns)
        shapes = {None if column._shape is None else tuple(column._shape) for column in columns}
        if len(shapes) == 1 and None not in shapes:
            return cls(items, rows, columns[0]._shape, None)
        return cls(items, rows, None, np.concatenate([column._all_sizes for column in columns]))

    @property
    def _all_sizes(self) -> np.ndarray:
        if self._sizes is not None:
            return self._sizes
        assert self._shape is not None
        return np.tile(np.array(self._shape, np.int64), (self._rows, 1))

    def element(self, row: int) -> Any:
        """Returns the leaf of one element."""
        return self._array(row, row + 1, ())[()] if self.whole is None else self.whole[row]

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Returns the leaves of consecutive elements stacked."""
        if self.whole is not None:
            return self.whole[start:stop]
        if self._sizes is None:
            return self._array(start, stop, (stop - start,))
        return stack([(self.element(row),) for row in range(start, stop)])[0]

    def _array(self, start: int, stop: int, rows: tuple[int, ...]) -> np.ndarray:
        if self._sizes is not None:
            shape = self._sizes[start].tolist()
            items = self._items[self._ends[start] : self._ends[stop]]
        else:
            assert self._shape is not None
            shape = list(self._shape)
            size = math.prod(shape)
            items = self._items[start * size : stop * size]
        return items.reshape([*rows, *shape])
