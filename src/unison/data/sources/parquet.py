"""`from_parquet`: the rows of Parquet files."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from unison.data.caching.columns import Column
from unison.data.files import matching_files, open_file
from unison.data.leaves import concatenate, stack
from unison.data.plan import Plan, Rows, Stream
from unison.data.sources.arrow import columns_of, import_pyarrow, signature_of
from unison.data.sources.parquet_checks import GroupChecks
from unison.data.sources.parquet_footer import Group, check_paths, read_groups
from unison.data.specs import Signature
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError, OpError, ResourceExhaustedError
from unison.storage.decoding import decoding, whole_number

#: The limit for the total decompressed size of files that are stored in memory after they
#: have been read, and have access by index.
BYTES_IN_MEMORY = 256 << 20

#: The number of rows that are decoded at a time, if they are read in order.
_ROWS_AT_ONCE = 4096


class _RowGroup(NamedTuple):
    path: str
    number: int
    group: Group


class ParquetFiles(Plan):
    """The rows of Parquet files.

    Small files have access by index; large ones are read in order, group by group.

    Args:
        patterns: The names of the files, or patterns.
        columns: The columns to read; None for all.

    Raises:
        ImportError: pyarrow is not installed.
        InvalidArgumentError: No file matches, a column does not exist, a column's type has no
            corresponding array, or the files have different columns.
        DataLossError: A file is not in the Parquet format, or is corrupt.
    """

    identity = ("_length",)

    def __init__(self, patterns: Any, columns: Sequence[str] | None = None):
        import_pyarrow("from_parquet")
        self._columns = None if columns is None else [*columns]
        self._groups: list[_RowGroup] = []
        self._bytes = 0
        schemas = {}
        for path in (name.decode() for name in matching_files(patterns)):
            with _open_parquet(path) as (file, opened):
                groups = read_groups(opened)
                leaves = [file.schema.column(index) for index in range(len(file.schema.names))]
                flat = [leaf.max_repetition_level == 0 for leaf in leaves]
                check_paths(groups, [leaf.path for leaf in leaves], flat)
                schemas[path] = self._chosen(file.schema_arrow, path)
                for number, group in enumerate(groups):
                    self._groups.append(_RowGroup(path, number, group))
                    self._bytes += self._bytes_of(group)
        self._signature = _common_signature(schemas)
        rows = [each.group.rows for each in self._groups]
        self._length = whole_number(sum(rows))
        self._starts = np.cumsum([0, *rows])
        # Encoded, a constant column takes no bytes.
        self._bytes = max(self._bytes, self._length * _bytes_of_row(self._signature))

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return self._length

    @property
    def paths(self) -> list[str]:
        """The files, without those that have no rows."""
        return [*dict.fromkeys(group.path for group in self._groups)]

    def of_file(self, path: str) -> ParquetFiles:
        """Returns the plan of the rows of one file."""
        return ParquetFiles(path, self._columns)

    def rows(self) -> Rows | None:
        return self._rows if self._length and self._bytes <= BYTES_IN_MEMORY else None

    def batches_from(self, row: int) -> Iterator[tuple[int, list[Column]]]:
        """Yields the rows from that number on: their number, and their leaves."""
        while row < self._length:
            group = int(np.searchsorted(self._starts, row, "right")) - 1
            path, number, described = self._groups[group]
            with _open_parquet(path) as (file, _):
                start = int(self._starts[group])
                checks = GroupChecks(described, number)
                for batch in file.iter_batches(_ROWS_AT_ONCE, [number], self._columns):
                    checks.check(batch)
                    passed = min(row - start, len(batch))
                    start += len(batch)
                    if passed < len(batch):
                        rest = batch.slice(passed)
                        yield len(rest), columns_of(rest, row)
                        row = start
                checks.end()

    def _stream(self) -> Stream:
        return _ParquetStream(self)

    @functools.cached_property
    def _rows(self) -> Rows:
        return _ParquetRows(self)

    def _bytes_of(self, group: Group) -> int:
        return sum(
            column.size
            for column in group.columns
            if self._columns is None or column.path.split(".")[0] in self._columns
        )

    def _chosen(self, schema: Any, path: str) -> Any:
        import pyarrow as pa

        if self._columns is None:
            return schema
        missing = sorted({*self._columns} - {*schema.names})
        if missing:
            raise InvalidArgumentError(
                message=f"{path} has no columns {missing}. It has: {schema.names}"
            )
        return pa.schema([schema.field(name) for name in self._columns])


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[tuple[Any, IO[bytes]]]:
    """Opens a Parquet file with pyarrow, and names it in the errors of reading it.

    If its pages have checksums, they are verified.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with open_file(path) as file, decoding(f"The Parquet file {path}"):
            try:
                yield pa.parquet.ParquetFile(file, page_checksum_verification=True), file
            except pa.ArrowMemoryError as error:
                raise ResourceExhaustedError(
                    message=f"{path}: {error}. It has larger pages than there is memory, or is "
                    "corrupt."
                ) from error
            except OSError as error:  # which pyarrow raises, too
                if isinstance(error, OpError | PermissionError | ConnectionError):
                    raise
                raise ValueError(str(error)) from error
    except InvalidArgumentError as error:
        error.add_note(f"In the Parquet file {path}.")
        raise


def _bytes_of_row(signature: Signature) -> int:
    """Returns the minimum number of bytes of a row in memory."""
    sizes = (
        spec.dtype.itemsize * math.prod(size or 0 for size in spec.shape or ())
        for spec in signature.specs
    )
    return sum(sizes)


def _common_signature(schemas: dict[str, Any]) -> Signature:
    signatures = {path: signature_of(schema) for path, schema in schemas.items()}
    first, *others = signatures
    for path in others:
        if signatures[path] != signatures[first]:
            raise InvalidArgumentError(
                message=f"The files have different columns. {first}: "
                f"{signatures[first].element_spec}. {path}: {signatures[path].element_spec}. "
                "Choose those that all have (columns=[...])."
            )
    return signatures[first]


class _ParquetStream(Stream):
    """The rows in order, some thousand at a time."""

    moving = ("_position",)

    def __init__(self, plan: ParquetFiles):
        self._plan = plan
        self._position = 0
        # The columns of the current rows, the number of the rows, and of those that were returned.
        self._batches: Iterator[tuple[int, list[Column]]] | None = None
        self._columns: list[Column] = []
        self._length = 0
        self._taken = 0

    def restore(self, state: Any) -> None:
        super().restore(state)
        self._batches = None
        self._length = self._taken = 0

    def next(self) -> Leaves | None:
        if not self._has_row():
            return None
        leaves = tuple(column.element(self._taken) for column in self._columns)
        self._pass(1)
        return leaves

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and self._has_row():
            stop = min(self._taken + count, self._length)
            blocks.append(tuple(column.slice(self._taken, stop) for column in self._columns))
            count -= stop - self._taken
            self._pass(stop - self._taken)
        return concatenate(blocks) if blocks else None

    def skip(self, count: int) -> int:
        count = max(0, min(count, self._plan.cardinality() - self._position))
        if self._taken + count < self._length:
            self._pass(count)
        else:
            self.restore({"_position": self._position + count})
        return count

    def _has_row(self) -> bool:
        if self._taken < self._length:
            return True
        if self._batches is None:
            self._batches = self._plan.batches_from(self._position)
        self._length, self._columns = next(self._batches, (0, []))
        self._taken = 0
        return self._length > 0

    def _pass(self, count: int) -> None:
        self._taken += count
        self._position += count


class _ParquetRows(Rows):
    """The rows by index; all columns are read at the first access."""

    def __init__(self, plan: ParquetFiles):
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.cardinality()

    def take(self, indices: np.ndarray) -> Leaves:
        return tuple(
            np.take(column.whole, indices, axis=0)
            if column.whole is not None
            else stack([(column.element(index),) for index in indices.tolist()])[0]
            for column in self._columns
        )

    def slice(self, start: int, stop: int) -> Leaves:
        return tuple(column.slice(start, stop) for column in self._columns)

    def element(self, index: int) -> Leaves:
        return tuple(column.element(index) for column in self._columns)

    @functools.cached_property
    def _columns(self) -> list[Column]:
        parts = [columns for _, columns in self._plan.batches_from(0)]
        return [Column.joined(leaf) for leaf in zip(*parts, strict=True)]
