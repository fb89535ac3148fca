"""The columns of CSV records: numbers and text from lines, whole blocks of records at a time."""

from __future__ import annotations

import collections
import csv
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.data.files.csv_records import CsvRecords
from unison.data.files.records import as_column, names_of_files
from unison.data.plan import Plan, Stream, Transformation
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import Leaves, Structure
from unison.errors import InvalidArgumentError

#: The dtypes of numbers that are tried for a column, from the narrowest.
_NUMBERS = tuple(map(np.dtype, ("int32", "int64", "float32", "float64")))

_TEXT = np.dtype(object)

#: The most characters of a record that a message shows.
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of CSV records.

    Attributes:
        place: The index of the field in a record.
        dtype: The dtype of its values; `object` for text.
        default: The value of an empty field; None if a field must not be empty.
    """

    place: int
    dtype: np.dtype
    default: Any = None


class Fields(NamedTuple):
    """The division of records into fields.

    Attributes:
        delimiter: The delimiter between two fields.
        has_quotes: Whether quoted fields may contain delimiters.
        missing: The text of a field that counts as empty.
    """

    delimiter: str = ","
    has_quotes: bool = True
    missing: str = ""

    def of(self, record: bytes) -> list[str]:
        """Returns the fields of a record; an empty record has none."""
        text = record.decode(errors="surrogateescape")
        if not (self.has_quotes and '"' in text):
            return text.split(self.delimiter) if text else []
        return next(csv.reader([text], delimiter=self.delimiter, strict=True))


class CsvColumns(Transformation):
    """The values of some columns of CSV records.

    Args:
        source: The records.
        columns: The columns, in the order of the leaves of `structure`.
        structure: The structure of an element.
        fields: The division of records into fields.
        num_fields: The required number of fields of a record; None for at least those of the
            columns.
    """

    def __init__(
        self,
        source: Plan,
        columns: Sequence[Column],
        structure: Structure,
        fields: Fields,
        num_fields: int | None = None,
    ):
        super().__init__(source)
        self._columns = columns
        self._fields = fields
        self._num_fields = num_fields
        specs = tuple(ArraySpec((), column.dtype) for column in columns)
        self._signature = Signature(structure, specs)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        del inputs
        return self._signature

    @property
    def structure(self) -> Structure:
        return self._signature.structure

    def _stream(self) -> Stream:
        return _CsvStream(self, self._input.stream())

    def parsed(self, records: Sequence[bytes], start: int) -> Leaves:
        """Returns the columns of consecutive records; the first has the number `start`.

        Raises:
            InvalidArgumentError: A record has a wrong number of fields.
        """
        rows = [self._row(record, index) for index, record in enumerate(records, start)]
        columns = zip(*rows, strict=True)
        pairs = zip(columns, self._columns, strict=True)
        return tuple(_converted(texts, column, self._fields, start) for texts, column in pairs)

    def _row(self, record: bytes, index: int) -> list[str]:
        try:
            fields = self._fields.of(record)
        except csv.Error as error:
            raise InvalidArgumentError(
                message=f"Record {index} of the dataset is not valid CSV: {error}. Received: "
                f"{_shown(record)}"
            ) from error
        least = 1 + max((column.place for column in self._columns), default=-1)
        expected = least if self._num_fields is None else self._num_fields
        if len(fields) < expected or (self._num_fields is not None and len(fields) > expected):
            raise InvalidArgumentError(
                message=f"Expected {expected} fields in record {index} of the dataset. Received "
                f"{len(fields)}: {_shown(record)}"
            )
        return [fields[column.place] for column in self._columns]


def _shown(text: str | bytes) -> str:
    """Returns a record or a field for a message, which a corrupt file may have made long."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN]) + "..." * (len(text) > _SHOWN)


def _converted(texts: Sequence[str], column: Column, fields: Fields, start: int) -> np.ndarray:
    try:
        values = [_value(text, column, fields) for text in texts]
        return as_column(values) if column.dtype == _TEXT else np.array(values, column.dtype)
    except (ValueError, OverflowError):
        for index, text in enumerate(texts, start):
            _check(text, column, fields, index)
        raise


def _value(text: str, column: Column, fields: Fields) -> Any:
    if text in ("", fields.missing):
        if column.default is None:
            raise ValueError("A field is empty.")
        return column.default
    if column.dtype == _TEXT:
        return text.encode(errors="surrogateescape")
    return float(text) if column.dtype.kind == "f" else int(text)


def _check(text: str, column: Column, fields: Fields, index: int) -> None:
    """Raises the error of a field that is invalid for its column."""
    try:
        np.array(_value(text, column, fields), column.dtype)
    except (ValueError, OverflowError) as error:
        what = _shown(text) if text else "an empty field. Give the column a default"
        raise InvalidArgumentError(
            message=f"Field {column.place} of record {index} of the dataset is to be "
            f"{column.dtype}. Received: {what}"
        ) from error


class _CsvStream(Stream):
    moving = ("_stream", "_position")

    def __init__(self, plan: CsvColumns, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._position = 0

    def next(self) -> Leaves | None:
        block = self.next_block(1)
        return None if block is None else tuple(leaf[0] for leaf in block)

    def next_block(self, count: int) -> Leaves | None:
        block = self._stream.next_block(count)
        if block is None:
            return None
        (records,) = block
        start = self._position
        self._position += len(records)
        return self._plan.parsed(records, start)

    def skip(self, count: int) -> int:
        skipped = self._stream.skip(count)
        self._position += skipped
        return skipped


# -- inferred from the files -------------------------------------------------------------------


def names_of_columns(files: Sequence[bytes], fields: Fields, compression: str) -> list[str]:
    """Returns the names in the first record of CSV files.

    Raises:
        ValueError: A file has no names, or differs from the first file.
    """
    found: list[str] = []
    for file in files:
        stream = CsvRecords(names_of_files(file), False, fields.has_quotes, compression).stream()
        first = stream.next()
        if first is None:
            raise ValueError(f"The file {file.decode()} has no header: it is empty.")
        names = fields.of(first[0])
        if found and names != found:
            raise ValueError(
                f"The files of one dataset must have the same columns. Expected: {found}. "
                f"Received: {names} in {file.decode()}"
            )
        found = names
    return found


def columns_in(
    records: Plan, places: Sequence[int], num_fields: int, fields: Fields, most: int | None
) -> list[Column]:
    """Returns columns of the narrowest dtypes that fit the first records.

    An empty field is 0, or empty text.

    Args:
        records: The records.
        places: The indices of the requested fields.
        num_fields: The number of fields of a record.
        fields: The division of records into fields.
        most: The maximum number of records to read; None for all.

    Raises:
        ValueError: A record has another number of fields.
    """
    kinds = dict.fromkeys(places, 0)
    is_known = dict.fromkeys(places, False)
    for index, record in enumerate(itertools.islice(_records(records), most)):
        texts = fields.of(record)
        if len(texts) != num_fields:
            raise ValueError(
                f"The dtypes of the columns cannot be found: record {index} has {len(texts)} "
                f"fields. Expected: {num_fields}"
            )
        for place in places:
            if texts[place] not in ("", fields.missing):
                is_known[place] = True
                kinds[place] = _kind_of(texts[place], kinds[place])
    dtypes = {place: (*_NUMBERS, _TEXT)[kinds[place]] for place in places}
    return [
        Column(place, dtypes[place], b"" if dtypes[place] == _TEXT else 0)
        if is_known[place]
        else Column(place, _TEXT, b"")
        for place in places
    ]


def _records(plan: Plan) -> Iterator[bytes]:
    stream = plan.stream()
    while (element := stream.next()) is not None:
        yield element[0]


def _kind_of(text: str, least: int) -> int:
    """Returns the index of the first dtype, starting at `least`, that fits a text."""
    for kind in range(least, len(_NUMBERS)):
        if _holds(_NUMBERS[kind], text):
            return kind
    return len(_NUMBERS)


def _holds(dtype: np.dtype, text: str) -> bool:
    try:
        if dtype.kind == "f":
            return float(text) <= float(np.finfo(dtype).max)
        return bool(np.iinfo(dtype).min <= int(text) <= np.iinfo(dtype).max)
    except ValueError:
        return False


def by_name(
    names: Sequence[str], columns: Sequence[Column], label: str | None = None
) -> Mapping[str, Column] | tuple[Mapping[str, Column], Column]:
    """Returns columns by name; separately, the column of the label, if there is one.

    Raises:
        ValueError: There is no column `label`.
    """
    named = collections.OrderedDict(zip(names, columns, strict=True))
    if label is None:
        return named
    if label not in named:
        raise ValueError(
            f"Expected label_name to be one of the columns {list(names)}. Received: {label!r}"
        )
    return named, named.pop(label)
