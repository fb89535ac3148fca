"""Files of fixed-length records."""

from __future__ import annotations

import functools

from unison.data.files.compression import check_compression, open_inflated
from unison.data.files.records import CHUNK, Chunk, FileRecords
from unison.data.plan import Plan
from unison.errors import InvalidArgumentError


class FixedLengthRecords(FileRecords):
    """The records of files of fixed-length records, as `bytes`.

    Args:
        source: The plan of the files' names.
        record_bytes: The length of a record.
        header_bytes: The number of bytes before the first record.
        footer_bytes: The number of bytes after the last record.
        compression: "", "GZIP" or "ZLIB".
        cycle_length: The number of files that are read at a time.
        chunk_size: The number of bytes of a file that are read at a time.

    Raises:
        InvalidArgumentError: A number is out of range, or the compression is unknown.
    """

    def __init__(
        self,
        source: Plan,
        record_bytes: int,
        header_bytes: int = 0,
        footer_bytes: int = 0,
        compression: str | None = None,
        cycle_length: int = 1,
        chunk_size: int = CHUNK,
    ):
        if record_bytes < 1 or header_bytes < 0 or footer_bytes < 0:
            raise InvalidArgumentError(
                message="Expected a record_bytes of at least 1, and header_bytes and footer_bytes "
                f"of at least 0. Received: {record_bytes}, {header_bytes} and {footer_bytes}"
            )
        reader = functools.partial(
            _FixedLengthReader,
            record_bytes=record_bytes,
            header_bytes=header_bytes,
            footer_bytes=footer_bytes,
            compression=check_compression(compression),
            chunk_size=max(chunk_size - chunk_size % record_bytes, record_bytes),
        )
        super().__init__(source, reader, cycle_length)


class _FixedLengthReader:
    def __init__(
        self,
        path: str,
        offset: int,
        record_bytes: int,
        header_bytes: int,
        footer_bytes: int,
        compression: str,
        chunk_size: int,
    ):
        self._path = path
        self._length = record_bytes
        self._header_bytes = header_bytes
        self._footer_bytes = footer_bytes
        self._chunk_size = chunk_size
        self._file = open_inflated(path, compression)
        self._offset = max(offset, header_bytes)
        self._file.seek(self._offset)
        #: The bytes after the offset that have been read: they may be the footer.
        self._rest = b""

    def next(self) -> Chunk | None:
        read = self._file.read(self._chunk_size + self._footer_bytes - len(self._rest))
        data = self._rest + read
        usable = len(data) - self._footer_bytes
        if usable < self._length:
            self._check_end(usable)
            return None
        end = usable - usable % self._length
        chunk = Chunk(
            self._offset, [data[at : at + self._length] for at in range(0, end, self._length)]
        )
        self._offset += end
        self._rest = data[end:]
        return chunk

    def _check_end(self, rest: int) -> None:
        if rest:
            raise InvalidArgumentError(
                message=f"Between its header ({self._header_bytes} bytes) and its footer "
                f"({self._footer_bytes} bytes), {self._path} has "
                f"{self._offset + rest - self._header_bytes} bytes, which is not a multiple of "
                f"record_bytes, {self._length}."
            )

    def close(self) -> None:
        self._file.close()
