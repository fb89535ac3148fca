"""TFRecord files: records of any length, each with checksums.

A record is its length (8 bytes), the length's checksum (4), the data, and the data's checksum (4).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import stat
import struct
import threading
import zlib
from typing import Any

from unison.data.files.checksums import MASK_DELTA, crc32c, headers_in, masked, masked_of_length
from unison.data.files.compression import (
    ZLIB_FORMATS,
    check_compression,
    check_record_size,
    open_inflated,
)
from unison.data.files.paths import open_file
from unison.data.files.records import CHUNK, Chunk, FileRecords
from unison.data.plan import Plan
from unison.errors import DataLossError, FailedPreconditionError

logger = logging.getLogger("unison")

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_AROUND = _HEADER.size + _FOOTER.size

#: After corrupt bytes, longer records are not searched for.
_MOST_SOUGHT = 1 << 28


class SkippedRecords:
    """The number of corrupt places that were skipped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The number of corrupt places found so far.
        self.count = 0

    def note(self, error: DataLossError) -> None:
        """Counts a corrupt record; the first one is logged."""
        with self._lock:
            self.count += 1
            is_first = self.count == 1
        if is_first:
            logger.warning(
                "Corrupt records are skipped and counted. The first one: %s", error.message
            )


class TFRecords(FileRecords):
    """The records of TFRecord files, as `bytes`.

    Args:
        source: The plan of the files' names.
        compression: "", "GZIP" or "ZLIB".
        cycle_length: The number of files that are read at a time.
        chunk_size: The number of bytes of a file that are read at a time.
        skipped: Counts corrupt records, which are then skipped; None: they are errors.

    Raises:
        InvalidArgumentError: Unknown compression.
    """

    def __init__(
        self,
        source: Plan,
        compression: str | None = None,
        cycle_length: int = 1,
        chunk_size: int = CHUNK,
        skipped: SkippedRecords | None = None,
    ):
        reader = functools.partial(
            _TFRecordReader,
            compression=check_compression(compression),
            chunk_size=chunk_size,
            skipped=skipped,
        )
        super().__init__(source, reader, cycle_length)


class _TFRecordReader:
    """Splits a TFRecord file into records, and verifies their checksums.

    Records before a corrupt one are returned first; then the error is raised.
    """

    def __init__(
        self,
        path: str,
        offset: int,
        compression: str,
        chunk_size: int,
        skipped: SkippedRecords | None,
    ):
        self._path = path
        self._begin = offset
        self._chunk_size = chunk_size
        self._skipped = skipped
        self._crc = crc32c()
        self._file = open_inflated(path, compression)
        self._is_plain = not compression
        if offset:
            self._file.seek(offset)
        #: The bytes that have been read and not split yet, and their position in the file.
        self._data = b""
        self._offset = offset
        #: The number of bytes that are needed to continue.
        self._wanted = 0
        self._has_ended = False
        self._number = 0

    def next(self) -> Chunk | None:
        while self._fill():
            chunk = Chunk(self._offset, self._cut())
            if chunk.records:
                return chunk
            damage = self._damage()
            if damage is not None:
                error = DataLossError(message=damage)
                if self._skipped is None:
                    raise error
                self._skipped.note(error)
                self._pass_over_damage()
        return None

    def close(self) -> None:
        self._file.close()

    def _fill(self) -> bool:
        """Reads more bytes; returns whether there are any to split."""
        pieces = [self._data]
        size = len(self._data)
        wanted = max(self._chunk_size, self._wanted)
        while size < wanted and not self._has_ended:
            pieces.append(self._file.read(self._chunk_size))
            size += len(pieces[-1])
            check_record_size(self._file, size)
            self._has_ended = not pieces[-1]
        self._data = b"".join(pieces)
        return bool(self._data)

    def _cut(self) -> list[bytes]:
        """Returns the records that have been read completely, up to a corrupt one."""
        data, crc, crc_of_length = self._data, self._crc, masked_of_length
        header, footer = _HEADER.unpack_from, _FOOTER.unpack_from
        records: list[bytes] = []
        position = 0
        last = len(data) - _AROUND
        while position <= last:
            length, stored = header(data, position)
            begin = position + 12
            end = begin + length
            if stored != crc_of_length(length) or position + length > last:
                break
            record = data[begin:end]
            # The masked checksum, inlined: this line runs for every record.
            value = crc(record)
            rotated = (value >> 15) | (value << 17)
            if footer(data, end)[0] != (rotated + MASK_DELTA) & 0xFFFFFFFF:
                break
            records.append(record)
            position = end + 4
        self._pass(position)
        self._number += len(records)
        return records

    def _damage(self) -> str | None:
        """Returns the error of the first record; None if more of it must be read."""
        size = len(self._data)
        self._wanted = _HEADER.size
        length = 0
        if size >= _HEADER.size:
            length, stored = _HEADER.unpack_from(self._data)
            if stored != masked_of_length(length):
                return self._described("the checksum of its length is wrong")
            self._wanted = length + _AROUND
        if size >= self._wanted > _HEADER.size:
            return self._described("the checksum of its data is wrong")
        if self._has_ended or self._wanted > self._most_left():
            found = size if self._has_ended else self._most_left()
            return self._described(
                f"the file ends within it: expected {self._wanted} bytes, found {found}"
            )
        return None

    def _most_left(self) -> float:
        """Returns the maximum number of bytes from the first record on, if it is known."""
        if self._is_plain:
            with contextlib.suppress(OSError):  # io.UnsupportedOperation: it is remote
                about = os.fstat(self._file.fileno())
                if stat.S_ISREG(about.st_mode):
                    return about.st_size - self._offset
        return math.inf

    def _described(self, what: str) -> str:
        counted = f" (counted from byte {self._begin} on)" if self._begin else ""
        return (
            f"Corrupt record in {self._path}: record {self._number}{counted}, at byte "
            f"{self._offset}: {what}. To skip corrupt records, read the file with "
            'unison.data.TFRecordDataset(..., on_corrupt="skip").'
        )

    def _pass_over_damage(self) -> None:
        """Skips to the next record: after this one's length, or the next that looks valid."""
        self._number += 1
        length, stored = 0, -1
        if len(self._data) >= _HEADER.size:
            length, stored = _HEADER.unpack_from(self._data)
        if stored == masked_of_length(length) and length + _AROUND <= self._most_left():
            self._pass(min(length + _AROUND, len(self._data)))
            return
        self._pass(1)
        while self._fill():
            for position in headers_in(self._data).tolist():
                if self._is_record(position):
                    self._pass(position)
                    return
            is_last = self._has_ended
            self._pass(len(self._data) if is_last else max(len(self._data) - _HEADER.size + 1, 0))

    def _is_record(self, position: int) -> bool:
        """Whether a record begins where one seems to: data of 8 bytes looks the same."""
        length, _ = _HEADER.unpack_from(self._data, position)
        if length > min(_MOST_SOUGHT, self._most_left() - position):
            return False
        begin = position + _HEADER.size
        self._wanted = begin + length + _FOOTER.size
        self._fill()
        if len(self._data) < self._wanted:
            return False
        (stored,) = _FOOTER.unpack_from(self._data, begin + length)
        return stored == masked(self._crc(self._data[begin : begin + length]))

    def _pass(self, count: int) -> None:
        self._data = self._data[count:]
        self._offset += count
        self._wanted = 0


@dataclasses.dataclass(frozen=True)
class TFRecordOptions:
    """Options for writing a TFRecord file.

    Attributes:
        compression_type: "", "GZIP" or "ZLIB".
        compression_level: From 0 (none) to 9 (best); -1 for zlib's default.

    TF: `tf.io.TFRecordOptions`.
    """

    compression_type: str | None = ""
    compression_level: int = -1


class TFRecordWriter:
    """Writes a TFRecord file.

    A local file grows as it is written; `close` completes it. In object stores, it appears then.

    Args:
        path: Its path; an existing file is replaced.
        options: `TFRecordOptions`, or the name of a compression.

    Examples:
        >>> with TFRecordWriter("memory://two.tfrecord") as writer:
        ...     writer.write(b"first")
        ...     writer.write(b"second")
        >>> from unison.data import TFRecordDataset
        >>> list(TFRecordDataset("memory://two.tfrecord"))
        [b'first', b'second']

    TF: `tf.io.TFRecordWriter`.
    """

    def __init__(self, path: Any, options: TFRecordOptions | str | None = None):
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        compression = check_compression(options.compression_type)
        self._crc = crc32c()
        self._path = path.decode() if isinstance(path, bytes) else os.fspath(path)
        self._compressor = compression and zlib.compressobj(
            options.compression_level, wbits=ZLIB_FORMATS[compression]
        )
        self._file: Any = open_file(self._path, "wb")

    def write(self, record: bytes) -> None:
        """Adds a record.

        Raises:
            TypeError: It is not `bytes`.
            FailedPreconditionError: The file is closed.
        """
        if not isinstance(record, bytes):
            raise TypeError(f"Expected a record as bytes. Received: {record!r}")
        header = _HEADER.pack(len(record), masked_of_length(len(record)))
        footer = _FOOTER.pack(masked(self._crc(record)))
        self._write(b"".join((header, record, footer)))

    def flush(self) -> None:
        """Flushes this process's buffers to the file."""
        if self._compressor:
            self._write(b"", zlib.Z_SYNC_FLUSH)
        self._opened().flush()

    def close(self) -> None:
        """Completes the file; may be called again."""
        if self._file is not None:
            if self._compressor:
                self._write(b"", zlib.Z_FINISH)
            self._file.close()
            self._file = None

    def _write(self, data: bytes, flush: int = zlib.Z_NO_FLUSH) -> None:
        file = self._opened()
        if self._compressor:
            data = self._compressor.compress(data)
            if flush != zlib.Z_NO_FLUSH:
                data += self._compressor.flush(flush)
        file.write(data)

    def _opened(self) -> Any:
        if self._file is None:
            raise FailedPreconditionError(message=f"The writer of {self._path} is closed.")
        return self._file

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()
