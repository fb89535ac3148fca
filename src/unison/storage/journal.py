"""A journal: records that are appended to a file, each of which is on the disk before it counts.

A record is JSON and bytes, with a checksum. A record that was not written completely, as by a
process that was killed, is the last one and does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from unison.errors import FailedPreconditionError
from unison.storage.decoding import corrupt, parsed_json
from unison.storage.locks import lock

#: The checksum of a record, and the lengths of its JSON and its bytes.
_HEAD = struct.Struct("<IIQ")


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
        self._path = path
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(number, "r+b")
        try:
            if not lock(self._file):
                raise FailedPreconditionError(
                    message=f"Another process writes {path}. Give each process a folder of its own."
                )
            content = self._file.read()
            #: The records of earlier processes.
            self.records = list(self._read(content))
            end = sum(_HEAD.size + size for size in self._sizes)
            self._file.truncate(end)
            self._file.seek(end)
            if not content:
                _sync_folder(path)
        except BaseException:
            self._file.close()
            raise

    def _read(self, content: bytes) -> Iterator[tuple[Any, bytes]]:
        self._sizes: list[int] = []
        begin = 0
        while begin + _HEAD.size <= len(content):
            checksum, text_size, data_size = _HEAD.unpack_from(content, begin)
            begin += _HEAD.size
            body = content[begin : begin + text_size + data_size]
            if len(body) < text_size + data_size:
                return  # the process was killed while it wrote
            begin += len(body)
            if zlib.crc32(body) != checksum:
                if begin == len(content):
                    return
                raise corrupt(self._path, "checksum mismatch", f"Remove {self._path}.")
            self._sizes.append(len(body))
            yield parsed_json(body[:text_size]), body[text_size:]

    def append(self, record: Any, data: bytes = b"") -> None:
        """Appends a record; when it returns, the record is on the disk.

        Args:
            record: JSON.
            data: Bytes that belong to it.
        """
        text = json.dumps(record).encode()
        body = text + data
        begin = self._file.tell()
        try:
            self._file.write(_HEAD.pack(zlib.crc32(body), len(text), len(data)) + body)
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # the disk is full: nothing of it may stay
                self._file.seek(begin)
                self._file.truncate(begin)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _sync_folder(path: str) -> None:
    folder = os.open(pathlib.Path(path).resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
