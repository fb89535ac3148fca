"""The records of CSV files (RFC 4180), which may span several lines."""

from __future__ import annotations

import functools
from typing import IO

from unison.data.files.compression import check_compression, check_record_size, open_inflated
from unison.data.files.records import CHUNK, Chunk, FileRecords
from unison.data.plan import Plan


class CsvRecords(FileRecords):
    """The records of CSV files, as `bytes` without line terminators.

    Args:
        source: The plan of the files' names.
        has_header: Whether the first record of every file is skipped.
        has_quotes: Whether quoted text may span several lines.
        compression: "", "GZIP" or "ZLIB".
        cycle_length: The number of files that are read at a time.

    Raises:
        InvalidArgumentError: Unknown compression.
    """

    def __init__(
        self,
        source: Plan,
        has_header: bool = False,
        has_quotes: bool = True,
        compression: str | None = None,
        cycle_length: int = 1,
    ):
        reader = functools.partial(
            _CsvReader,
            has_header=has_header,
            has_quotes=has_quotes,
            compression=check_compression(compression),
        )
        super().__init__(source, reader, cycle_length)


class _CsvReader:
    def __init__(
        self, path: str, offset: int, has_header: bool, has_quotes: bool, compression: str
    ):
        self._file = open_inflated(path, compression)
        self._has_quotes = has_quotes
        self._passes_over = has_header and not offset
        self._offset = offset
        if offset:
            self._file.seek(offset)

    def next(self) -> Chunk | None:
        if self._passes_over:
            self._passes_over = False
            self._offset += sum(map(len, self._read(self._file.readlines(1))))
        lines = self._read(self._file.readlines(CHUNK))
        if not lines:
            return None
        offset = self._offset
        self._offset += sum(map(len, lines))
        return Chunk(offset, [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines])

    def _read(self, lines: list[bytes]) -> list[bytes]:
        return _whole_records(lines, self._file) if self._has_quotes else lines

    def close(self) -> None:
        self._file.close()


def _whole_records(lines: list[bytes], file: IO[bytes]) -> list[bytes]:
    """Returns lines, joined where a quotation continues on the next line."""
    records = []
    parts: list[bytes] = []
    is_open = False
    position = size = 0
    while position < len(lines) or is_open:
        line = lines[position] if position < len(lines) else file.readline()
        position += 1
        if not line:  # a quotation that is never closed
            break
        size = size + len(line) if parts else len(line)
        check_record_size(file, size)
        parts.append(line)
        is_open ^= line.count(b'"') % 2 == 1
        if not is_open:
            records.append(parts[0] if len(parts) == 1 else b"".join(parts))
            parts = []
    return [*records, b"".join(parts)] if parts else records
