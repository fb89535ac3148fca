r"""Files of a checksum, a JSON header and bytes, for data that is read and written as a whole.

    0a1b2c3d\n        the CRC-32 of the rest, as eight hexadecimal digits
    {...}\n           JSON, on one line
    ...               bytes that the header describes; none in some files

Snapshots of parameter servers, the state that elastic jobs leave and the index of a saved dataset
have this format. Nothing in it is unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import IO, Any

from unison.storage import files
from unison.storage.decoding import corrupt, decoding, parsed_json

_CHECKSUM = b"%08x\n"
_DIGITS = len(_CHECKSUM % 0)

#: The maximum length of a header, if only the header is read.
_LONGEST_HEADER = 1 << 16


def header_line(header: Any) -> bytes:
    """Returns a header as a line of JSON."""
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def write(file: IO[bytes], pieces: Iterable[Any]) -> None:
    """Writes a checksum, followed by bytes in several pieces, which are iterated over twice.

    Args:
        file: The file.
        pieces: The header's line, and the bytes after it.
    """
    pieces = list(pieces)
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    file.write(_CHECKSUM % checksum)
    for piece in pieces:
        file.write(piece)


def read(path: str, remedy: str = "") -> bytes:
    """Returns the content of a file after its checksum, which is verified.

    Args:
        path: The file.
        remedy: What the user can do if the file is corrupt, as a sentence.

    Raises:
        NotFoundError: The file does not exist.
        DataLossError: Checksum mismatch, or it has no checksum.
    """
    with files.open_to_read(path) as file:
        checksum, content = file.read(_DIGITS), file.read()
    _compare(path, checksum, zlib.crc32(content), remedy)
    return content


def read_headed(path: str, remedy: str = "") -> tuple[Any, bytes]:
    """Returns the header of a file, and the bytes after it; see `read`.

    Raises:
        DataLossError: The header is not valid JSON, too.
    """
    with files.open_to_read(path) as file:
        checksum, header, data = file.read(_DIGITS), file.readline(), file.read()
    _compare(path, checksum, zlib.crc32(data, zlib.crc32(header)), remedy)
    with decoding(path, remedy):
        return parsed_json(header), data


def _compare(path: str, stored: bytes, computed: int, remedy: str) -> None:
    if stored != _CHECKSUM % computed:
        raise corrupt(
            path,
            f"checksum mismatch: it begins with {stored!r}, and the CRC-32 of what follows is "
            f"{computed:08x}",
            remedy,
        )


def header_and_data(content: bytes) -> tuple[Any, bytes]:
    """Returns the header at the beginning of a file's or message's bytes, and the bytes after it.

    Raises:
        ValueError: It is not valid JSON.
    """
    header, _, data = content.partition(b"\n")
    return parsed_json(header), data


def peeked_header(path: str) -> Any:
    """Returns the header of a local file without verifying the checksum.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It has another format.
    """
    with open(path, "rb") as file:
        file.read(_DIGITS)
        return parsed_json(file.readline(_LONGEST_HEADER))
