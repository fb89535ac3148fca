"""Inflating zlib data to a known size, or a maximum one, in bounded memory."""

from __future__ import annotations

import zlib
from typing import Any

#: The format of GZIP files, as in `zlib.decompressobj`.
GZIP = 16 + zlib.MAX_WBITS

#: The format's maximum ratio of inflated to deflated bytes, and the maximum for no bytes.
_MOST_A_BYTE = 1032
_MOST_OF_NOTHING = 1 << 10

_LIKELY_A_BYTE = 16
_SMALL = 1 << 25


def most_inflated(deflated: int) -> int:
    """Returns the maximum number of bytes in a number of deflated ones.

    Source: the two limits of the format, RFC 1951: 258 bytes in two bits.
    """
    return _MOST_A_BYTE * deflated + _MOST_OF_NOTHING


def likely_inflated(deflated: int) -> int:
    """Returns the number of bytes that are allocated for deflated ones without checks.

    A megabyte can inflate to a gigabyte. A larger claim than this is considered a decompression
    bomb: 32 MiB, and 16 bytes for each deflated one.
    """
    return _SMALL + _LIKELY_A_BYTE * deflated


def inflated(data: Any, size: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Returns the inflated bytes.

    Args:
        data: The deflated bytes, all of one stream.
        size: Their expected number. No more are computed, and no memory is allocated for missing
            ones.
        wbits: The format, as in `zlib.decompressobj`.

    Raises:
        ValueError: Their number differs, or the data is corrupt.

    Examples:
        >>> inflated(zlib.compress(b"text"), 4)
        b'text'
        >>> inflated(zlib.compress(bytes(1 << 24)), 4)
        Traceback (most recent call last):
        ValueError: expected 4 bytes in ... deflated ones, which hold more
    """
    deflated = len(memoryview(data).cast("B"))
    if size > most_inflated(deflated):
        raise ValueError(f"{deflated} deflated bytes cannot hold {size}")
    result, is_whole = _begun(data, size + 1, wbits)
    if len(result) != size or not is_whole:
        found = "more" if len(result) > size else f"{len(result)}"
        raise ValueError(f"expected {size} bytes in {deflated} deflated ones, which hold {found}")
    return result


def inflated_within(data: Any, most: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Returns the inflated bytes, whose number is not known.

    Args:
        data: The deflated bytes, all of one stream.
        most: Their maximum number. No more are computed.
        wbits: The format, as in `zlib.decompressobj`.

    Raises:
        ValueError: There are more, or the data is corrupt.

    Examples:
        >>> inflated_within(zlib.compress(b"text"), 9)
        b'text'
        >>> inflated_within(zlib.compress(bytes(1 << 24)), 9)
        Traceback (most recent call last):
        ValueError: expected at most 9 bytes in ... deflated ones, which hold more: ...
    """
    deflated = len(memoryview(data).cast("B"))
    result, is_whole = _begun(data, most + 1, wbits)
    if len(result) > most:
        raise ValueError(
            f"expected at most {most} bytes in {deflated} deflated ones, which hold more: they are "
            "taken for a decompression bomb"
        )
    if not is_whole:
        raise ValueError(f"expected one stream of {deflated} deflated bytes, which is incomplete")
    return result


def _begun(data: Any, most: int, wbits: int) -> tuple[bytes, bool]:
    """Returns the first inflated bytes, and whether they are those of all of the data."""
    inflater = zlib.decompressobj(wbits)
    try:
        result = inflater.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"deflated bytes are corrupt: {error}") from error
    return result, inflater.eof and not inflater.unused_data
