"""Remote files: they are read ahead, and transient errors are retried."""

from __future__ import annotations

import io
import os
from typing import IO, Any, cast

from unison.data.transformations.prefetching import ReadAhead
from unison.interrupts import is_of_a_signal_handler
from unison.storage.patience import attempted

#: The number of bytes that are requested at a time, and the number of such pieces that are
#: buffered.
_PIECE = 1 << 20
_PIECES_AHEAD = 4


def open_remote(system: Any, inside: str, path: str) -> IO[bytes]:
    """Opens a file of one of fsspec's file systems for reading.

    Args:
        system: The file system.
        inside: The path in the file system.
        path: The path with its protocol, for messages.
    """
    return cast(IO[bytes], io.BufferedReader(RemoteFile(_Source(system, inside, path)), _PIECE))


class RemoteFile(io.RawIOBase):
    """A file that is read in pieces; after the second consecutive one, ahead in a thread.

    Transient errors are retried, from the same byte; see `attempted`. The thread
    ends when the file is closed or dropped.

    Args:
        source: What reads at any place of the file.
    """

    def __init__(self, source: _Source):
        self._source = source
        self._position = 0
        self._piece = memoryview(b"")
        self._ahead: ReadAhead[bytes] | None = None
        self._expected = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self._source.size()
        if offset != self._position:
            self._position = offset
            self._piece = memoryview(b"")
            self._ahead = None
        return offset

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._piece = memoryview(self._next_piece(len(buffer)))
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        self._position += count
        return count

    def _next_piece(self, count: int) -> bytes:
        if self._ahead is None and self._position != self._expected:
            piece = self._source.read(self._position, max(count, _PIECE))
            self._expected = self._position + len(piece)
            return piece
        if self._ahead is None:
            self._ahead = ReadAhead(_Pieces(self._source, self._position).next, _PIECES_AHEAD)
        return self._ahead.get() or b""

    def close(self) -> None:
        if not self.closed:
            self._ahead = None
            self._source.close()
        super().close()


class _Pieces:
    """The pieces of a file, in order."""

    def __init__(self, source: _Source, position: int):
        self._source = source
        self._position = position

    def next(self) -> bytes | None:
        """Returns the next piece; None at the end."""
        piece = self._source.read(self._position, _PIECE)
        self._position += len(piece)
        return piece or None


class _Source:
    """A file of fsspec's that is opened again after a failed read."""

    def __init__(self, system: Any, inside: str, path: str):
        self._system = system
        self._inside = inside
        self._path = path
        self._file: Any = None
        self._position = 0
        self._has_parts = True
        attempted(path, self._open)

    def read(self, position: int, count: int) -> bytes:
        """Returns `count` bytes from `position`, fewer at the end of the file."""

        def read() -> bytes:
            try:
                return self._read(position, count)
            except ValueError:
                if not self._has_parts:
                    raise
                # A web server without range requests.
                self._has_parts = False
                return self._read(position, count)

        return attempted(self._path, read)

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return attempted(self._path, lambda: int(self._system.info(self._inside)["size"]))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise

    def _open(self) -> None:
        # fsspec's own buffer is of the same size as a piece here; with size 0, it reads a stream.
        size = _PIECE if self._has_parts else 0
        self._file, self._position = self._system.open(self._inside, "rb", block_size=size), 0

    def _read(self, position: int, count: int) -> bytes:
        if self._file is None or (position < self._position and not self._has_parts):
            self._open()
        # After an error or a timeout, the file is opened again.
        file, self._file = self._file, None
        if position != self._position:
            if self._has_parts:
                file.seek(position)
            else:
                _read_over(file, position - self._position)
        data = _read_fully(file, count)
        self._file, self._position = file, position + len(data)
        return data


def _read_fully(file: Any, count: int) -> bytes:
    """Returns `count` bytes, fewer only at the end; a file's `read` may return fewer."""
    pieces = []
    while count and (piece := file.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_over(file: Any, count: int) -> None:
    while count and (piece := file.read(min(count, _PIECE))):
        count -= len(piece)
