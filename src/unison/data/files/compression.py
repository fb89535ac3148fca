"""Files that are compressed as a whole, under TensorFlow's names: "GZIP", "ZLIB"."""

from __future__ import annotations

import io
import zlib
from typing import IO, Any, cast

from unison.data.files.paths import open_file
from unison.errors import DataLossError, InvalidArgumentError

#: What tells zlib the format.
ZLIB_FORMATS = {"GZIP": 31, "ZLIB": 15}

#: How many bytes are read, before they are inflated, at once.
_BYTES_AT_ONCE = 1 << 18


def check_compression(compression: str | None) -> str:
    """Returns the name of a compression; "" for None.

    Raises:
        InvalidArgumentError: There is no such compression.
    """
    if not compression:
        return ""
    if compression not in ZLIB_FORMATS:
        raise InvalidArgumentError(
            message=f"Expected a compression of {['', *ZLIB_FORMATS]}. Received: {compression!r}"
        )
    return compression


def open_inflated(path: str, compression: str) -> IO[bytes]:
    """Opens a file for reading what it held before it was compressed.

    Args:
        path: Its path.
        compression: "", "GZIP" or "ZLIB".
    """
    file = open_file(path)
    if not compression:
        return file
    return cast(IO[bytes], io.BufferedReader(_Inflated(file, path, compression), _BYTES_AT_ONCE))


class _Inflated(io.RawIOBase):
    """What a compressed file holds; several compressed streams, one behind the other, are one.

    Going back begins anew.
    """

    def __init__(self, file: IO[bytes], path: str, compression: str):
        self._file = file
        self._path = path
        self._compression = compression
        self._begin()

    def _begin(self) -> None:
        self._inflater: Any = None
        self._compressed = b""
        self._inflated = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            offset = offset + self._position
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("The size of a compressed file is not known.")
        if offset < self._position:
            self._file.seek(0)
            self._begin()
        while self._position < offset and self._has_more():
            self._pass(min(offset - self._position, len(self._inflated)))
        return self._position

    def readinto(self, buffer: Any) -> int:
        if not self._has_more():
            return 0
        count = min(len(buffer), len(self._inflated))
        buffer[:count] = self._inflated[:count]
        self._pass(count)
        return count

    def _pass(self, count: int) -> None:
        self._inflated = self._inflated[count:]
        self._position += count

    def _has_more(self) -> bool:
        """Inflates the next bytes where none are waiting; returns whether there are any."""
        while not self._inflated:
            if not self._compressed:
                self._compressed = self._file.read(_BYTES_AT_ONCE)
            if not self._compressed:
                if self._inflater is not None:
                    raise DataLossError(
                        message=f"{self._path} ends within its {self._compression} stream, after "
                        f"{self._position} bytes of what was compressed"
                    )
                return False
            self._inflate()
        return True

    def _inflate(self) -> None:
        if self._inflater is None:
            self._inflater = zlib.decompressobj(ZLIB_FORMATS[self._compression])
        try:
            self._inflated = memoryview(self._inflater.decompress(self._compressed))
        except zlib.error as error:
            raise DataLossError(
                message=f"{self._path} is no {self._compression} file, or is damaged, after "
                f"{self._position} bytes of what was compressed: {error}"
            ) from error
        self._compressed = self._inflater.unused_data
        if self._inflater.eof:
            self._inflater = None

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
