"""The lines of text files."""

from __future__ import annotations

import functools

from unison.data.files.compression import check_compression, open_inflated
from unison.data.files.records import CHUNK, Chunk, FileRecords
from unison.data.plan import Plan


class TextLines(FileRecords):
    """The lines of text files, as `bytes` without line terminators.

    Args:
        source: The plan of the files' names.
        compression: "", "GZIP" or "ZLIB".
        cycle_length: The number of files that are read at a time.
        chunk_size: The number of bytes of a file that are read at a time.

    Raises:
        InvalidArgumentError: Unknown compression.
    """

    def __init__(
        self,
        source: Plan,
        compression: str | None = None,
        cycle_length: int = 1,
        chunk_size: int = CHUNK,
    ):
        reader = functools.partial(
            _LineReader, compression=check_compression(compression), chunk_size=chunk_size
        )
        super().__init__(source, reader, cycle_length)


class _LineReader:
    def __init__(self, path: str, offset: int, compression: str, chunk_size: int):
        self._file = open_inflated(path, compression)
        self._chunk_size = chunk_size
        self._offset = offset
        if offset:
            self._file.seek(offset)

    def next(self) -> Chunk | None:
        lines = self._file.readlines(self._chunk_size)
        if not lines:
            return None
        offset = self._offset
        self._offset += sum(map(len, lines))
        return Chunk(offset, [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines])

    def close(self) -> None:
        self._file.close()
