"""The description of row groups in the footer of a Parquet file, read without pyarrow.

A footer has no checksum, but contains most facts twice; those that are used must agree.
pyarrow ends the process if a column's type in its row group differs from that in the schema
(26.0: `RowGroupMetaData.column`); so neither is read through pyarrow.

Sources: the Parquet format's `parquet.thrift`; Thrift's compact protocol.
"""

from __future__ import annotations

import os
import struct
from typing import IO, Any, NamedTuple

_MAGIC = b"PAR1"

#: The maximum depth of nested structures.
_DEEPEST = 32

#: The types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)

#: A struct: its fields by number.
_Fields = dict[int, Any]


class Column(NamedTuple):
    """A column of a row group.

    Attributes:
        path: Its name; for a nested column, after the names of the outer ones.
        num_values: The number of its values, including missing ones.
        size: The number of its bytes, decompressed.
        least: Its minimum as it is stored; None if it is not given.
        most: Its maximum.
    """

    path: str
    num_values: int
    size: int
    least: bytes | None
    most: bytes | None


class Group(NamedTuple):
    """A row group.

    Attributes:
        rows: The number of its rows.
        columns: Its columns, in the schema's order.
    """

    rows: int
    columns: list[Column]


def read_groups(file: IO[bytes]) -> list[Group]:
    """Returns the row groups of a Parquet file.

    Args:
        file: The file.

    Raises:
        ValueError, LookupError, TypeError: Its footer is corrupt.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read(8)
    if len(end) < 8 or end[4:] != _MAGIC:
        raise ValueError("it does not end as Parquet files do")
    (length,) = struct.unpack("<I", end[:4])
    if length > size - 12:
        raise ValueError(f"its footer should have {length} bytes, and it has {size}")
    file.seek(size - 8 - length)
    fields = _Reader(file.read(length)).struct(0)
    groups = [_group_of(group) for group in fields.get(4, [])]
    rows = sum(group.rows for group in groups)
    if rows != fields[3]:
        raise ValueError(f"its row groups have {rows} rows, and it has {fields[3]}")
    return groups


def check_paths(groups: list[Group], paths: list[str], flat: list[bool]) -> None:
    """Compares the types of columns in the row groups with the schema.

    Args:
        groups: The row groups.
        paths: The columns' paths in the schema.
        flat: Whether each column has one value per row.

    Raises:
        ValueError: They disagree.
    """
    for number, group in enumerate(groups):
        found = [column.path for column in group.columns]
        if found != paths:
            raise ValueError(f"the columns {paths} are {found} in row group {number}")
        for column, is_flat in zip(group.columns, flat, strict=True):
            if is_flat and column.num_values != group.rows:
                raise ValueError(
                    f"the column {column.path!r} has {column.num_values} values in row group "
                    f"{number} of {group.rows} rows"
                )


def _group_of(fields: _Fields) -> Group:
    rows = fields[3]
    if type(rows) is not int or rows < 0:
        raise ValueError(f"a row group has {rows!r} rows")
    return Group(rows, [_column_of(chunk[3]) for chunk in fields[1]])


def _column_of(fields: _Fields) -> Column:
    statistics = fields.get(12, {})
    path = b".".join(fields[3]).decode()
    return Column(path, fields[5], fields[6], statistics.get(6), statistics.get(5))


class _Reader:
    """Reads Thrift's compact protocol."""

    def __init__(self, content: bytes):
        self._content = content
        self._position = 0

    def struct(self, depth: int) -> _Fields:
        """Returns the fields of a struct."""
        if depth > _DEEPEST:
            raise ValueError("structures in its footer are nested too deeply")
        fields: _Fields = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._signed()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTEGERS:
            return self._signed()
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BYTE:
            return self._byte()
        if kind == _MAP:
            return self._map(depth + 1)
        raise ValueError(f"its footer has a value of the unknown type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        count = self._unsigned() if count == 15 else count
        self._require(count)  # each item has at least one byte
        if kind in (_TRUE, _FALSE):
            return [self._byte() == _TRUE for _ in range(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _map(self, depth: int) -> None:
        count = self._unsigned()
        if not count:
            return
        self._require(count)
        kinds = self._byte()
        for _ in range(count):  # which is skipped
            self._value(kinds >> 4, depth)
            self._value(kinds & 15, depth)

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number in its footer has more than 64 bits")

    def _byte(self) -> int:
        self._position += 1
        return self._content[self._position - 1]

    def _bytes(self, count: int) -> bytes:
        self._require(count)
        self._position += count
        return self._content[self._position - count : self._position]

    def _require(self, count: int) -> None:
        if count > len(self._content) - self._position:
            raise ValueError("its footer ends early")
