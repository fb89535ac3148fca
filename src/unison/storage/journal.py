"""A journal: records that are appended to a file, each of which is on the disk before it counts.

A record is JSON and bytes, with checksums of its lengths and of these. A record that was not
written completely, as by a process that was killed, is the last one and does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from unison.errors import FailedPreconditionError
from unison.storage.atomic import sync_folder
from unison.storage.decoding import corrupt, parsed_json
from unison.storage.locks import lock

#: The checksum of a record's JSON and bytes, and their lengths.
_FIELDS = struct.Struct("<IIQ")
#: The checksum of these.
_CHECKSUM = struct.Struct("<I")
_HEAD_SIZE = _CHECKSUM.size + _FIELDS.size


class Journal:
    """A journal that this process appends to.

    Args:
        path: The file, in an existing folder; it is created if necessary.

    Raises:
        FailedPreconditionError: Another process has opened it.
        DataLossError: It is corrupt.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with contextlib.closing(Journal(f"{folder.name}/journal")) as journal:
        ...     journal.append({"event": "begun"}, b"data")
        >>> with contextlib.closing(Journal(f"{folder.name}/journal")) as journal:
        ...     list(journal.records)
        [({'event': 'begun'}, b'data')]
        >>> folder.cleanup()
    """

    def __init__(self, path: str):
        #: The file.
        self.path = path
        self._has_failed = False
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Unbuffered: nothing of a record that could not be written is written later.
        self._file = os.fdopen(number, "r+b", buffering=0)
        try:
            if not lock(self._file):
                raise FailedPreconditionError(
                    message=f"Another process writes {path}. Give each process a folder of its own."
                )
            content = self._file.read()
            #: The records of earlier processes.
            self.records = list(self._read(content))
            self._file.truncate(self._end)
            if not content:
                sync_folder(os.path.dirname(os.path.abspath(path)))
        except BaseException:
            self._file.close()
            raise

    def _read(self, content: bytes) -> Iterator[tuple[Any, bytes]]:
        #: The end of the last record. What follows it was not written completely.
        self._end = 0
        remedy = f"Remove {self.path}."
        while self._end + _HEAD_SIZE <= len(content):
            begin = self._end + _HEAD_SIZE
            (own_checksum,) = _CHECKSUM.unpack_from(content, self._end)
            fields = content[self._end + _CHECKSUM.size : begin]
            if zlib.crc32(fields) != own_checksum:
                if not any(content[self._end :]):
                    return  # the file had grown, but its content was not written
                raise corrupt(self.path, f"checksum mismatch at byte {self._end}", remedy)
            checksum, text_size, data_size = _FIELDS.unpack(fields)
            end = begin + text_size + data_size
            if end > len(content):
                return  # the process was killed while it wrote
            body = content[begin:end]
            if zlib.crc32(body) != checksum:
                if not any(content[begin:]):
                    return
                raise corrupt(self.path, f"checksum mismatch at byte {begin}", remedy)
            if not text_size:
                raise corrupt(self.path, f"no record at byte {begin}", remedy)
            yield parsed_json(body[:text_size]), body[text_size:]
            self._end = end

    def append(self, record: Any, data: bytes = b"") -> None:
        """Appends a record; when it returns, the record is on the disk.

        Args:
            record: JSON.
            data: Bytes that belong to it.

        Raises:
            OSError: It could not be written, and does not count.
        """
        text = json.dumps(record).encode()
        body = text + data
        fields = _FIELDS.pack(zlib.crc32(body), len(text), len(data))
        left = memoryview(_CHECKSUM.pack(zlib.crc32(fields)) + fields + body)
        number = self._file.fileno()
        end = self._end + len(left)
        if self._has_failed:
            os.ftruncate(number, self._end)
            self._has_failed = False
        try:
            while left:
                left = left[os.pwrite(number, left, end - len(left)) :]
            os.fdatasync(number)
        except OSError:
            self._has_failed = True  # the disk is full: nothing of it may stay
            with contextlib.suppress(OSError):
                os.ftruncate(number, self._end)
                self._has_failed = False
            raise
        self._end = end

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
