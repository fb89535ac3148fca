"""Arrays in NumPy's format, read within bounds: no memory is allocated beyond the file's content.

`numpy.load` and `numpy.lib.format.read_array` allocate the memory in an array's header
before they check whether the file has as many bytes.

Source: `numpy.lib.format`, versions 1.0 and 2.0.
"""

from __future__ import annotations

import zipfile
from typing import IO

import numpy as np

from unison.storage.decoding import bytes_of, dtype_named, shape_of
from unison.storage.inflating import likely_inflated

#: Numbers, text of fixed size, times, and bytes without a meaning.
KINDS = "biufcSUmMV"

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

#: The number of bytes that are read at a time.
_PIECE = 1 << 20


def read_npy(stream: IO[bytes], size: int) -> np.ndarray:
    """Returns the array in a stream of a given size. Nothing is unpickled.

    Args:
        stream: The stream, from its beginning.
        size: Its number of bytes.

    Raises:
        ValueError: It is not an array, or its size differs from that in its header.
        EOFError: It ends too early.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"expected an array of version 1.0 or 2.0, received {version}")
    shape, is_fortran, dtype = _HEADERS[version](stream)
    dtype, shape = dtype_named(dtype.str, KINDS), shape_of(shape)
    expected, rest = bytes_of(shape, dtype), size - stream.tell()
    if expected != rest or not dtype.itemsize:
        raise ValueError(
            f"an array of shape {shape} and dtype {dtype} has {expected} bytes, and the file {rest}"
        )
    content = np.empty(expected, np.uint8)
    for start in range(0, expected, _PIECE):
        piece = stream.read(min(_PIECE, expected - start))
        if len(piece) != min(_PIECE, expected - start):
            raise EOFError("it ends within an array")
        content[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    if stream.read(1):
        raise ValueError("bytes follow the array")
    flat = content.view(dtype)
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def opened_zip(file: IO[bytes], compresses: bool = False) -> zipfile.ZipFile:
    """Returns the ZIP archive in a file, if the file is large enough for its members.

    Args:
        file: The file.
        compresses: Whether its members may be compressed.

    Raises:
        ValueError: It is not: they overlap, or have wrong sizes.
        zipfile.BadZipFile: It is not a ZIP archive.
    """
    size = file.seek(0, 2)
    archive = zipfile.ZipFile(file)
    members = archive.infolist()
    if sum(member.compress_size for member in members) > size:
        raise ValueError(f"its members have more bytes together than the file, {size}")
    for member in members:
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored and not (compresses and member.compress_type == zipfile.ZIP_DEFLATED):
            raise ValueError(f"its member {member.filename!r} is compressed")
        most = member.compress_size if is_stored else likely_inflated(member.compress_size)
        if member.file_size > most:
            raise ValueError(
                f"its member {member.filename!r} claims {member.file_size} bytes, and has "
                f"{member.compress_size}"
            )
    return archive


def read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns the array in a member of an archive from `opened_zip`; its checksum is verified.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: It does not exist, or is corrupt.
    """
    with archive.open(name) as stream:
        return read_npy(stream, archive.getinfo(name).file_size)
