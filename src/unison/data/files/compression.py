"""Files that are compressed as a whole, under TensorFlow's names: "GZIP", "ZLIB"."""

from __future__ import annotations

import io
import zlib
from typing import IO, Any, cast

from unison.data.files.paths import open_file
from unison.errors import DataLossError, InvalidArgumentError
from unison.storage.inflating import likely_inflated

#: The values by which zlib knows the format.
ZLIB_FORMATS = {"GZIP": 31, "ZLIB": 15}

#: The number of bytes that are read at a time, and that are inflated at a time.
_BYTES_AT_ONCE = 1 << 18
_INFLATED_AT_ONCE = 1 << 20


def check_compression(compression: str | None) -> str:
    """Returns the name of a compression; "" for None.

    Raises:
        InvalidArgumentError: Unknown compression.
    """
    if not compression:
        return ""
    if compression not in ZLIB_FORMATS:
        raise InvalidArgumentError(
            message=f"Expected a compression of {['', *ZLIB_FORMATS]}. Received: {compression!r}"
        )
    return compression


def open_inflated(path: str, compression: str) -> IO[bytes]:
    """Opens a file for reading its decompressed content.

    Args:
        path: Its path.
        compression: "", "GZIP" or "ZLIB".
    """
    file = open_file(path)
    if not compression:
        return file
    return cast(IO[bytes], _InflatedFile(_Inflated(file, path, compression)))


def inflated_streams(data: bytes, compression: str) -> bytes:
    """Returns the decompressed content of bytes, in several streams or one.

    Args:
        data: The bytes.
        compression: "GZIP" or "ZLIB".

    Raises:
        DataLossError: They are corrupt, or are considered a decompression bomb.
    """
    file = _Inflated(io.BytesIO(data), "What is to be decompressed", compression)
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(_INFLATED_AT_ONCE):
        pieces.append(piece)
        size += len(piece)
        file.check_record_size(size)
    return b"".join(pieces)


def check_record_size(file: IO[bytes], size: int) -> None:
    """Checks that a record of this size may be read into memory.

    Args:
        file: The result of `open_inflated`. Records of an uncompressed file may be as
            large as the file.
        size: The number of bytes of the record so far.

    Raises:
        DataLossError: The file is too small for them: it is considered a decompression bomb.
    """
    if isinstance(file, _InflatedFile):
        file.inflated.check_record_size(size)


class _InflatedFile(io.BufferedReader):
    """The content of a compressed file, with the same limit for lines as for records."""

    def __init__(self, inflated: _Inflated):
        super().__init__(inflated, _BYTES_AT_ONCE)
        self.inflated = inflated

    def readline(self, size: int | None = -1, /) -> bytes:
        if size is not None and size >= 0:
            return super().readline(size)
        pieces: list[bytes] = []
        total = 0
        while piece := super().readline(_BYTES_AT_ONCE):
            pieces.append(piece)
            total += len(piece)
            self.inflated.check_record_size(total)
            if piece.endswith(b"\n"):
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        if hint is None or hint <= 0:
            return super().readlines()
        data = self.read(hint)
        if not data.endswith(b"\n"):
            data += self.readline()
        *whole, last = data.split(b"\n")
        lines = [line + b"\n" for line in whole]
        return [*lines, last] if last else lines


class _Inflated(io.RawIOBase):
    """The content of a compressed file; several concatenated streams are read as one.

    Seeking backwards restarts at the beginning.
    """

    def __init__(self, file: IO[bytes], path: str, compression: str):
        self._file = file
        self._path = path
        self._compression = compression
        self._begin()

    def _begin(self) -> None:
        self._inflater: Any = None
        self._compressed = b""
        self._num_read = 0
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

    def check_record_size(self, size: int) -> None:
        """See `check_record_size`."""
        most = likely_inflated(self._num_read)
        if size > most:
            raise DataLossError(
                message=f"{self._path} has a record of more than {most} bytes within its first "
                f"{self._num_read} bytes of {self._compression}: it is taken for a decompression "
                "bomb. If you trust its source, decompress it and read the result."
            )

    def _pass(self, count: int) -> None:
        self._inflated = self._inflated[count:]
        self._position += count

    def _has_more(self) -> bool:
        """Inflates the next bytes if none are buffered; returns whether there are any."""
        while not self._inflated:
            if not self._compressed:
                self._compressed = self._file.read(_BYTES_AT_ONCE)
                self._num_read += len(self._compressed)
            if not self._compressed:
                if self._inflater is not None and self._has_rest():
                    return True
                if self._inflater is not None:
                    raise DataLossError(
                        message=f"{self._path} ends within its {self._compression} stream, after "
                        f"{self._position} bytes of what was compressed"
                    )
                return False
            self._inflate()
        return True

    def _has_rest(self) -> bool:
        """Inflates what the inflater has buffered, after the end of the file."""
        self._inflate()
        return bool(self._inflated)

    def _inflate(self) -> None:
        if self._inflater is None:
            self._inflater = zlib.decompressobj(ZLIB_FORMATS[self._compression])
        try:
            inflated = self._inflater.decompress(self._compressed, _INFLATED_AT_ONCE)
        except zlib.error as error:
            raise DataLossError(
                message=f"{self._path} is not a {self._compression} file, or is corrupt, after "
                f"{self._position} bytes of what was compressed: {error}"
            ) from error
        self._inflated = memoryview(inflated)
        self._compressed = self._inflater.unconsumed_tail
        if self._inflater.eof:
            self._compressed = self._inflater.unused_data
            self._inflater = None

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
