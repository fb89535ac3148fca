"""Compares the rows of a Parquet file, as they are read, with the statistics in its footer.

Pages have a CRC-32 if their writer has added one (pyarrow: `write_page_checksum=True`), and pyarrow
verifies it. Without it, the number of rows of a row group and the range of numbers are compared
with the footer; other corruption of a value is not detected.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np

from unison.data.sources.parquet_footer import Group


class GroupChecks:
    """Checks the rows of a row group.

    Args:
        group: Its description in the footer.
        number: Its number, for messages.
    """

    def __init__(self, group: Group, number: int):
        self._number = number
        self._rows = group.rows
        self._seen = 0
        paths = collections.Counter(column.path for column in group.columns)
        # A column with a dot in its name may have the same path as a nested one.
        self._columns = {each.path: each for each in group.columns if paths[each.path] == 1}
        #: The minimum and the maximum of each column, computed when first used.
        self._ranges: dict[str, tuple[Any, Any] | None] = {}

    def check(self, batch: Any) -> None:
        """Checks the next rows.

        Args:
            batch: pyarrow's batch of them.

        Raises:
            ValueError: There are too many rows, or values outside of the range of their column.
        """
        import pyarrow.compute as pc

        self._seen += len(batch)
        if self._seen > self._rows:
            raise ValueError(f"row group {self._number} has more than its {self._rows} rows")
        for name in batch.schema.names:
            if name not in self._ranges:
                self._ranges[name] = self._range_of(name, batch.schema.field(name).type)
            known = self._ranges[name]
            if known is None:
                continue
            found = pc.min_max(batch.column(name)).as_py()
            low, high = found["min"], found["max"]
            # None if all values are missing. Values that are not numbers have no order here.
            if low is not None and (low < known[0] or high > known[1]):
                raise ValueError(
                    f"the column {name!r} goes from {low} to {high} in row group {self._number}, "
                    f"and its statistics from {known[0]} to {known[1]}"
                )

    def end(self) -> None:
        """Checks that all rows have been read.

        Raises:
            ValueError: There are too few.
        """
        if self._seen != self._rows:
            raise ValueError(
                f"row group {self._number} has {self._seen} rows, and the footer says {self._rows}"
            )

    def _range_of(self, name: str, kind: Any) -> tuple[Any, Any] | None:
        """Returns the range of a column; None if it is unknown."""
        stored = _stored_as().get(kind)
        column = self._columns.get(name)
        if stored is None or column is None or None in (column.least, column.most):
            return None
        if {len(column.least or b""), len(column.most or b"")} != {stored.itemsize}:
            raise ValueError(f"the statistics of the column {name!r} are of another type")
        least, most = (np.frombuffer(end, stored)[0].item() for end in column[-2:] if end)
        return least, most


@functools.cache
def _stored_as() -> dict[Any, np.dtype]:
    """Returns the storage format of statistics, for the types whose order is known."""
    import pyarrow as pa

    small = dict.fromkeys((pa.int8(), pa.int16(), pa.int32()), "<i4")
    small |= dict.fromkeys((pa.uint8(), pa.uint16(), pa.uint32()), "<u4")
    large = {pa.int64(): "<i8", pa.uint64(): "<u8", pa.float32(): "<f4", pa.float64(): "<f8"}
    return {kind: np.dtype(name) for kind, name in (small | large).items()}
