r"""Files of a checksum, a JSON header and bytes, for what is read and written as a whole.

    0a1b2c3d\n        the CRC-32 of all that follows, as eight hexadecimal digits
    {...}\n           JSON, on one line
    ...               bytes that the header describes; none in some files

Snapshots of parameter servers, the state that elastic jobs leave and the index of a saved dataset
have this form. Nothing in it is unpickled.
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

#: The longest header that is looked for where only the header is read.
_LONGEST_HEADER = 1 << 16


def header_line(header: Any) -> bytes:
    """Returns a header as a line of JSON."""
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def write(file: IO[bytes], pieces: Iterable[Any]) -> None:
    """Writes a checksum, and behind it bytes in several pieces, which are gone through twice.

    Args:
        file: The file.
        pieces: The header's line, and what follows it.
    """
    pieces = list(pieces)
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    file.write(_CHECKSUM % checksum)
    for piece in pieces:
        file.write(piece)


def read(path: str, remedy: str = "") -> bytes:
    """Returns what is behind the checksum of a file, which is compared.

    Args:
        path: The file.
        remedy: What the user can do if the file is corrupt, as a sentence.

    Raises:
        NotFoundError: There is no such file.
        DataLossError: Its checksum is that of other bytes, or it has none.
    """
    with files.open_to_read(path) as file:
        checksum, content = file.read(_DIGITS), file.read()
    _compare(path, checksum, zlib.crc32(content), remedy)
    return content


def read_headed(path: str, remedy: str = "") -> tuple[Any, bytes]:
    """Returns the header of a file, and the bytes behind it; see `read`.

    Raises:
        DataLossError: The header is no JSON, too.
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
    """Returns the header that begins bytes of a file, or of a message, and what is behind it.

    Raises:
        ValueError: It is no JSON.
    """
    header, _, data = content.partition(b"\n")
    return parsed_json(header), data


def peeked_header(path: str) -> Any:
    """Returns the header of a local file without comparing the checksum.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It begins otherwise.
    """
    with open(path, "rb") as file:
        file.read(_DIGITS)
        return parsed_json(file.readline(_LONGEST_HEADER))
